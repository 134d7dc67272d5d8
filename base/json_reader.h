// Strict JSON: the reader lists what a file may contain; anything else is one error message,
// "FILE:LINE: field `a.b[3]`: found X; expected Y".
//
// Invariants
// (1) No input crashes it: size, depth and UTF-8 are bounded and checked while parsing.
// (2) A duplicate key is refused, and so is a key that is never read, unless it starts with x_, or
//     the reader skips unknown keys and this one carries no length, arrival or ids.
// (3) Integers are exact over all 64 bits; a number with a point or an exponent is never an
//     integer, and is read as decimal text, never through a double.
// (4) The first error is kept, and every later read gives a default value: code that reads a record
//     is straight-line and checks ok() once, at its end.
//
// Built on the SAX interface of nlohmann::json (in the .cpp only): its document type silently drops
// the first of two equal keys, and loses the text of numbers and line numbers.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/names.h"
#include "base/result.h"

namespace lockstep {

inline constexpr std::size_t kJsonTextBytesMax = std::size_t{16} << 20;
inline constexpr std::size_t kJsonDepthMax = 64;

class JsonReader;
class JsonArray;
class JsonObject;

// A word of a format and what it means.
template <class T>
using JsonWord = std::pair<std::string_view, T>;
// The words of an enum (base/names.h).
template <class E>
inline constexpr auto kJsonWords = [] {
  std::array<JsonWord<E>, kWords<E>.size()> words;
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = {kWords<E>[i], static_cast<E>(i)};
  return words;
}();

// A value of the document that its reader holds; dies with the next parse(). A default-constructed
// one stands for a key that is not there.
class JsonValue {
 public:
  JsonValue() = default;
  explicit operator bool() const { return reader_ != nullptr; }

  bool is_null() const;
  bool is_object() const;
  bool is_array() const;
  bool is_string() const;
  bool is_number() const;

  bool boolean();
  std::string_view string();  // stays until the next parse()
  std::string_view nonempty_string();
  template <class T = std::int64_t>
  requires std::is_integral_v<T> T integer(std::int64_t min = std::numeric_limits<T>::min(),
                                           std::int64_t max = std::numeric_limits<T>::max()) {
    return static_cast<T>(integer_between(min, max));
  }
  std::uint64_t uint64();
  // A decimal number times 10^digits, exactly: 0.25 with 9 digits is 250000000. Refuses what does
  // not come out as an integer of at most 63 bits, and exponents.
  std::int64_t scaled_decimal(int digits);
  // The IEEE double nearest to the number's text: for figures that an engine computed in doubles.
  double binary64();
  template <class T>
  T word(std::span<const JsonWord<T>> words);
  JsonArray array();
  JsonObject object();
  // The value as JSON without spaces, for what is kept and not read.
  std::string text();

  // Refuses the value: "field ...: found <text of it>; expected <expected>".
  void refuse(std::string_view expected);
  // Refuses it for a reason of the caller's own: "field ...: <reason>".
  void refuse_because(std::string_view reason);

 private:
  friend class JsonReader;
  friend class JsonArray;
  friend class JsonObject;
  JsonValue(JsonReader* reader, std::uint32_t index) : reader_(reader), index_(index) {}
  std::int64_t integer_between(std::int64_t min, std::int64_t max);

  JsonReader* reader_ = nullptr;
  std::uint32_t index_ = 0;
};

class JsonArray {
 public:
  class iterator;
  iterator begin() const;
  iterator end() const;
  std::size_t size() const { return size_; }
  // Element i; requires i < size(). Linear in i: meant for pairs and triples.
  JsonValue operator[](std::size_t i) const;

 private:
  friend class JsonValue;
  JsonReader* reader_ = nullptr;
  std::uint32_t first_ = 0;
  std::size_t size_ = 0;
};

struct JsonEntry {
  std::string_view key;
  JsonValue value;
};

class JsonObject {
 public:
  // A key that must be there. When it is not, that is the error.
  JsonValue required(std::string_view key);
  // A key that may be missing: a JsonValue that is false then.
  JsonValue optional(std::string_view key);
  bool has(std::string_view key) const;
  // Refuses every key that neither required() nor optional() has asked for and that is not x_...
  void finish();
  // All entries in file order, for an object whose keys are data. Counts as asking for all of them.
  std::vector<JsonEntry> entries();
  std::size_t size() const { return size_; }
  void refuse_because(std::string_view reason);

 private:
  friend class JsonValue;
  std::uint32_t find(std::string_view key) const;  // 0: not there
  JsonReader* reader_ = nullptr;
  std::uint32_t index_ = 0;
  std::uint32_t first_ = 0;
  std::size_t size_ = 0;
  mutable std::uint32_t hint_ = 0;  // where the last key was found: files keep an order
};

class JsonReader {
 public:
  // `file` is the name for messages.
  explicit JsonReader(std::string file);
  ~JsonReader();
  JsonReader(JsonReader&&) noexcept;
  JsonReader& operator=(JsonReader&&) noexcept;

  // Parses a text that starts on line `line` of the file. Forgets the document before. An error of
  // an earlier document stays. `cut_off`: nothing follows the text, not even a newline, so that a
  // syntax error at its end most likely means a file that was cut off.
  bool parse(std::string_view text, std::int64_t line = 1, bool cut_off = false);
  // True if the last parse() failed at the end of a text that nothing follows.
  bool is_cut_off() const { return cut_off_; }
  JsonValue root();  // requires a successful parse()

  bool ok() const { return !failed_; }
  const Error& error() const { return error_; }
  tl::unexpected<Error> failure() const { return tl::unexpected<Error>(error_); }
  const std::string& file() const { return file_; }
  // An error that belongs to the line and no field.
  void fail_line(std::int64_t line, std::string_view reason);
  // An error found outside the reader.
  void fail_with(const Error& error);
  // Documents that follow are of this file.
  void set_file(const std::string& file) {
    if (file != file_) file_ = file;
  }
  // Skips unknown keys and counts each by its name in `counts`, which must outlive the reader.
  void skip_unknown_keys(std::map<std::string, std::int64_t>& counts) { skipped_ = &counts; }

 private:
  friend class JsonValue;
  friend class JsonArray;
  friend class JsonObject;
  friend class JsonBuilder;

  enum class Kind : std::uint8_t { null, boolean, integer, decimal, string, array, object };
  struct Node {
    Kind kind = Kind::null;
    bool negative = false;   // integer
    bool asked_for = false;  // a key that the reader of the record knows
    std::uint32_t parent = 0;
    std::uint32_t next = 0;       // the next element or entry of the parent; 0: the last
    std::uint32_t first = 0;      // array, object: the first child; 0: empty
    std::uint32_t count = 0;      // array, object: children
    std::uint32_t offset = 0;     // in the text, of the end of a scalar or the start of a container
    std::uint64_t magnitude = 0;  // integer: absolute value; boolean: 0 or 1
    std::string_view key;         // of an entry
    std::string_view text;        // string, decimal; integers too large for 64 bits are decimals
  };

  void fail_at(std::uint32_t node, std::string_view sentence);
  std::string path_of(std::uint32_t node) const;
  void refuse_or_skip(std::uint32_t node);
  std::string found_text(std::uint32_t node) const;
  std::string number_text(std::uint32_t node) const;
  bool is(std::uint32_t node, Kind kind) const { return nodes_[node].kind == kind; }

  std::string file_;
  std::int64_t line_ = 1;
  std::string_view text_;
  std::vector<Node> nodes_;                                 // nodes_[0] is the document's root
  std::vector<char> strings_;                               // unescaped keys, strings and decimals
  std::map<std::string, std::int64_t>* skipped_ = nullptr;  // null: unknown keys are refused
  std::vector<std::string_view>
      absent_;  // keys that were asked for in vain, where some are skipped
  bool failed_ = false;
  bool cut_off_ = false;
  Error error_;
};

class JsonArray::iterator {
 public:
  using value_type = JsonValue;
  using difference_type = std::ptrdiff_t;
  JsonValue operator*() const { return JsonValue(reader_, index_); }
  iterator& operator++() {
    index_ = reader_->nodes_[index_].next;
    return *this;
  }
  bool operator==(const iterator& other) const { return index_ == other.index_; }

 private:
  friend class JsonArray;
  iterator(JsonReader* reader, std::uint32_t index) : reader_(reader), index_(index) {}
  JsonReader* reader_;
  std::uint32_t index_;
};

inline JsonArray::iterator JsonArray::begin() const { return {reader_, first_}; }
inline JsonArray::iterator JsonArray::end() const { return {reader_, 0}; }

template <class T>
T JsonValue::word(std::span<const JsonWord<T>> words) {
  const std::string_view found = string();
  if (reader_ == nullptr || !reader_->ok()) return words.front().second;
  std::string expected = "one of";
  for (const auto& [name, meaning] : words) {
    if (name == found) return meaning;
    expected.append(&name == &words.front().first ? " " : ", ")
        .append("\"")
        .append(name)
        .append("\"");
  }
  refuse(expected);
  return words.front().second;
}

// True for a name with a word that stands for a length, an arrival or ids: "input_tokens".
bool carries_input(std::string_view name);

// For a message: bytes other than printable ASCII are escaped, truncated after `bytes_max`.
std::string printable_excerpt(std::string_view text, std::size_t bytes_max = 60);

// A word that `from_name` knows, refused otherwise as not what was `expected`.
template <class T>
T read_word(JsonValue value, std::optional<T> (*from_name)(std::string_view),
            std::string_view expected) {
  const auto found = from_name(value.string());
  if (!found) value.refuse(expected);
  return found.value_or(T{});
}

}  // namespace lockstep
