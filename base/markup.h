// Escapes text for HTML, SVG, XML and Markdown tables.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// Returns the text with &, <, > and " escaped, for the content of an element and for an attribute
// in double quotes. Not for an attribute in single quotes. Control characters stay.
inline std::string escaped_for_markup(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

}  // namespace lockstep
