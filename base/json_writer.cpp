#include "base/json_writer.h"

#include <fmt/format.h>

#include <iterator>
#include <utility>

namespace lockstep {

// Overlong forms, surrogates and code points above U+10FFFF are not characters: only the second
// byte tells them apart, and its range depends on the first byte.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [text](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned first = byte(0);
  std::size_t length = 0;
  // E0 80..9F is overlong, ED A0..BF a surrogate, F0 80..8F overlong, F4 90..BF above U+10FFFF.
  unsigned low = 0x80, high = 0xbf;  // of the second byte
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) length = 2;
  if (first >= 0xe0 && first <= 0xef) length = 3;
  if (first >= 0xf0 && first <= 0xf4) length = 4;
  if (first == 0xe0) low = 0xa0;
  if (first == 0xed) high = 0x9f;
  if (first == 0xf0) low = 0x90;
  if (first == 0xf4) high = 0x8f;
  for (std::size_t i = 1; i < length; ++i) {
    if (byte(i) < low || byte(i) > high) return 0;
    low = 0x80;
    high = 0xbf;
  }
  return length;
}

// Called before every value. A key clears needs_comma_ itself, since a colon separates it from its
// value.
void JsonWriter::separate() {
  if (needs_comma_) text_.push_back(',');
  needs_comma_ = true;
}

JsonWriter& JsonWriter::begin_object() {
  separate();
  text_.push_back('{');
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::end_object() {
  text_.push_back('}');
  needs_comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::begin_array() {
  separate();
  text_.push_back('[');
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::end_array() {
  text_.push_back(']');
  needs_comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  string(name);
  text_.push_back(':');
  needs_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::string(std::string_view text) {
  separate();
  text_.push_back('"');
  while (!text.empty()) {
    const char c = text.front();
    const std::size_t length = utf8_length(text);
    if (c == '"' || c == '\\') {
      text_.append({'\\', c});
    } else if (static_cast<unsigned char>(c) < 0x20) {
      fmt::format_to(std::back_inserter(text_), "\\u{:04x}", static_cast<unsigned>(c));
    } else if (length == 0) {
      // One replacement per byte: the characters after a broken one stay readable.
      text_.append("\\ufffd");
    } else {
      text_.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  text_.push_back('"');
  return *this;
}

JsonWriter& JsonWriter::integer(std::int64_t value) { return raw(fmt::format_int(value).c_str()); }
JsonWriter& JsonWriter::uint64(std::uint64_t value) { return raw(fmt::format_int(value).c_str()); }
JsonWriter& JsonWriter::boolean(bool value) { return raw(value ? "true" : "false"); }
JsonWriter& JsonWriter::null() { return raw("null"); }

JsonWriter& JsonWriter::raw(std::string_view json) {
  separate();
  text_.append(json);
  return *this;
}

std::string JsonWriter::take_line() {
  text_.push_back('\n');
  needs_comma_ = false;
  return std::exchange(text_, {});
}

}  // namespace lockstep
