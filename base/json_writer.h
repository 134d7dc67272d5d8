// Writes JSON text as the formats define it: no spaces, keys in the order of the calls, so that
// equal values give equal bytes.
//
// Invariants
// (1) needs_comma_ is true exactly after a value inside an object or array.
// (2) Every string that it writes is valid UTF-8, whatever the input.
//
// Not checked: that calls are balanced, that a key precedes each value of an object, that keys are
// unique, and that raw() receives JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

class JsonWriter {
 public:
  JsonWriter& begin_object();
  JsonWriter& end_object();
  JsonWriter& begin_array();
  JsonWriter& end_array();
  JsonWriter& key(std::string_view name);

  // Replaces each byte that is not UTF-8 by U+FFFD, so that the reader accepts every written
  // string. Engines report request ids and error messages as arbitrary bytes.
  JsonWriter& string(std::string_view text);
  JsonWriter& integer(std::int64_t value);
  JsonWriter& uint64(std::uint64_t value);
  JsonWriter& boolean(bool value);
  JsonWriter& null();
  JsonWriter& raw(std::string_view json);  // a JSON value, written unchanged

  JsonWriter& integer_or_null(std::optional<std::int64_t> value) {
    return value ? integer(*value) : null();
  }

  // The key and its value in one call.
  JsonWriter& string(std::string_view name, std::string_view text) {
    return key(name).string(text);
  }
  JsonWriter& integer(std::string_view name, std::int64_t value) {
    return key(name).integer(value);
  }
  JsonWriter& boolean(std::string_view name, bool value) { return key(name).boolean(value); }
  // An array; `write` adds the element of one value.
  template <class Values, class Write>
  JsonWriter& each(const Values& values, const Write& write) {
    begin_array();
    for (const auto& value : values) write(value);
    return end_array();
  }
  template <class Integers>
  JsonWriter& integers(const Integers& values) {
    return each(values, [&](const auto& value) { integer(static_cast<std::int64_t>(value)); });
  }
  template <class Strings>
  JsonWriter& strings(const Strings& values) {
    return each(values, [&](const auto& value) { string(value); });
  }

  // Returns the text so far with a newline, and clears the writer for the next line.
  std::string take_line();

 private:
  void separate();

  std::string text_;
  bool needs_comma_ = false;
};

// Returns the line of an object; `write` adds its keys to the writer that it receives.
template <class Write>
std::string object_line(const Write& write) {
  JsonWriter out;
  write(out.begin_object());
  return out.end_object().take_line();
}

// Returns the length of the UTF-8 character (RFC 3629) that `text` starts with; 0: none does.
std::size_t utf8_length(std::string_view text);

}  // namespace lockstep
