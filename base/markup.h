// Text in HTML and SVG.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// For an element's text and for an attribute in double quotes.
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
