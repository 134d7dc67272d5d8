// Writes JSON text as the formats define it: no spaces, keys in the order of the calls.
//
// Invariants
// (1) needs_comma_ is true exactly after a value inside an object or array.
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

  // Bytes that are not UTF-8 become U+FFFD: what is written can always be read.
  JsonWriter& string(std::string_view text);
  JsonWriter& integer(std::int64_t value);
  JsonWriter& uint64(std::uint64_t value);
  JsonWriter& boolean(bool value);
  JsonWriter& null();
  JsonWriter& raw(std::string_view json);  // text that is a JSON value already

  JsonWriter& integer_or_null(std::optional<std::int64_t> value) {
    return value ? integer(*value) : null();
  }

  // A key and its value.
  JsonWriter& string(std::string_view name, std::string_view text) {
    return key(name).string(text);
  }
  JsonWriter& integer(std::string_view name, std::int64_t value) {
    return key(name).integer(value);
  }
  JsonWriter& boolean(std::string_view name, bool value) { return key(name).boolean(value); }
  template <class Integers>
  JsonWriter& integers(const Integers& values) {
    begin_array();
    for (const auto& value : values) integer(static_cast<std::int64_t>(value));
    return end_array();
  }
  template <class Strings>
  JsonWriter& strings(const Strings& values) {
    begin_array();
    for (const auto& value : values) string(value);
    return end_array();
  }

  // The text so far, with a newline; clears the writer.
  std::string take_line();

 private:
  void separate();

  std::string text_;
  bool needs_comma_ = false;
};

}  // namespace lockstep
