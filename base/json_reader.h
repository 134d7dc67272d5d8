// Strict JSON: the reading code lists what a document may contain, and everything else is one error
// message, "FILE:LINE: field `a.b[3]`: found X; expected Y".
//
//   JsonReader json(path);
//   if (!json.parse(line, number)) return json.failure();
//   JsonObject object = json.root().object();
//   row.id = object.required("id").nonempty_string();
//   object.finish();
//   if (!json.ok()) return json.failure();
//
// Invariants
// (1) No input crashes the reader: size, depth and UTF-8 are bounded and checked while parsing.
// (2) A duplicate key is refused. So is a key that is never read, unless it starts with x_. A
//     reader that skips unknown keys still refuses one whose name carries an input
//     (carries_input()), and one that looks like a misspelled known key.
// (3) Integers are exact over all 64 bits. A number with a point or an exponent is never an
//     integer, and is kept as decimal text, never as a double.
// (4) The first error is kept, and every later read returns a default value. Code that reads a
//     record is therefore straight-line and checks ok() once, at its end.
//
// Built on the SAX interface of nlohmann::json (in the .cpp only): its document type silently drops
// the first of two equal keys, and loses the text of numbers and the line numbers.
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

// Limits of one document: 16 MiB bounds the memory of a record, 64 levels the stack of recursive
// code over its values.
inline constexpr std::size_t kJsonTextBytesMax = std::size_t{16} << 20;
inline constexpr std::size_t kJsonDepthMax = 64;

class JsonReader;
class JsonArray;
class JsonObject;

// A word of a format and its meaning.
template <class T>
using JsonWord = std::pair<std::string_view, T>;
// The words of an enum (base/names.h), in the order of its values.
template <class E>
inline constexpr auto kJsonWords = [] {
  std::array<JsonWord<E>, kWords<E>.size()> words;
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = {kWords<E>[i], static_cast<E>(i)};
  return words;
}();

// A value of the reader's current document. The next parse() invalidates it. A default-constructed
// value stands for an absent key, and reading it returns a default without an error: required() has
// already reported the absence.
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
  std::string_view string();  // valid until the next parse()
  std::string_view nonempty_string();
  // Refuses a value outside [min, max] and a number with a point or an exponent, even 3.0.
  template <class T = std::int64_t>
  requires std::is_integral_v<T> T integer(std::int64_t min = std::numeric_limits<T>::min(),
                                           std::int64_t max = std::numeric_limits<T>::max()) {
    return static_cast<T>(integer_between(min, max));
  }
  std::uint64_t uint64();
  // Returns a decimal number times 10^digits, exactly: 0.25 with 9 digits is 250000000. Refuses an
  // exponent, a digit that the scale cuts off (a zero may be), and a result above 2^63 - 1.
  std::int64_t scaled_decimal(int digits);
  // Returns the double nearest to the number's text, for figures that an engine computed in
  // doubles. Other numbers have scaled_decimal(), which does not round.
  double binary64();
  // Returns the meaning of one of `words`; after an error, that of the first. REQUIRES: words is
  // not empty.
  template <class T>
  T word(std::span<const JsonWord<T>> words);
  JsonArray array();
  JsonObject object();
  // Returns the value as JSON without spaces, for parts that are stored and not interpreted. Counts
  // as reading every key in it.
  std::string text();

  // Reports "field ...: found <value>; expected <expected>", unless there is an earlier error.
  void refuse(std::string_view expected);
  // Reports "field ...: <reason>".
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

// The elements of an array, in order; empty after an error.
class JsonArray {
 public:
  class iterator;
  iterator begin() const;
  iterator end() const;
  std::size_t size() const { return size_; }
  // Returns element i in O(i) time, for pairs and triples. REQUIRES: i < size().
  JsonValue operator[](std::size_t i) const;

 private:
  friend class JsonValue;
  JsonReader* reader_ = nullptr;
  std::uint32_t first_ = 0;
  std::size_t size_ = 0;
};

// A key of an object and its value; the key is valid until the next parse().
struct JsonEntry {
  std::string_view key;
  JsonValue value;
};

// An object whose keys are read by name. Lookups in file order take O(1) time each.
class JsonObject {
 public:
  // Returns the value of a key; its absence is an error.
  JsonValue required(std::string_view key);
  // Returns the value of a key, or a JsonValue that converts to false if the key is absent.
  JsonValue optional(std::string_view key);
  bool has(std::string_view key) const;
  // Refuses every key that neither required(), optional() nor entries() has returned, unless it
  // starts with x_. Called once, after the last key.
  void finish();
  // Returns all entries in file order, for an object whose keys are data. All of them count as
  // read.
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
  mutable std::uint32_t hint_ = 0;  // node of the last key found: files keep an order
};

// Parses documents of one file, one after the other, and keeps the first error.
class JsonReader {
 public:
  // `file`: its name in error messages.
  explicit JsonReader(std::string file);
  ~JsonReader();
  JsonReader(JsonReader&&) noexcept;
  JsonReader& operator=(JsonReader&&) noexcept;

  // Parses a text that starts on line `line` of the file, and discards the previous document. An
  // earlier error stays, and the result is then false. `cut_off`: nothing follows the text, not
  // even a newline, so a syntax error at its end most likely means a truncated file.
  bool parse(std::string_view text, std::int64_t line = 1, bool cut_off = false);
  // True if the last parse() failed at the end of a text that nothing follows.
  bool is_cut_off() const { return cut_off_; }
  // REQUIRES: a successful parse(), or an earlier error, after which the value may be absent.
  JsonValue root();

  bool ok() const { return !failed_; }
  const Error& error() const { return error_; }
  tl::unexpected<Error> failure() const { return tl::unexpected<Error>(error_); }
  const std::string& file() const { return file_; }
  // Reports an error of a line that belongs to none of its fields.
  void fail_line(std::int64_t line, std::string_view reason);
  // Reports an error that was found outside of the reader.
  void fail_with(const Error& error);
  // Names the file of the documents that follow.
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
  // A value of the document. Nodes are stored in document order, so a parent precedes its children.
  // Links are indices, and 0, the root, means none: the root is not a child or sibling.
  struct Node {
    Kind kind = Kind::null;
    bool negative = false;   // integer
    bool asked_for = false;  // the key was read by name: finish() accepts it
    std::uint32_t parent = 0;
    std::uint32_t next = 0;       // the next element or entry of the parent; 0: the last
    std::uint32_t first = 0;      // array, object: the first child; 0: empty
    std::uint32_t count = 0;      // array, object: children
    std::uint32_t offset = 0;     // in the text, of the end of a scalar or the start of a container
    std::uint64_t magnitude = 0;  // integer: absolute value; boolean: 0 or 1
    std::string_view key;         // of an entry
    std::string_view text{};      // string, decimal; integers too large for 64 bits are decimals
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
      absent_;  // keys read but not found; recorded only if unknown keys are skipped
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

// True if a word of the name stands for a length, an arrival or ids, in snake_case or camelCase:
// "input_tokens", "hashIds". An importer that skips such a column would replay other requests.
bool carries_input(std::string_view name);

// Returns the first `bytes_max` bytes for an error message, with "..." if more follow. Bytes other
// than printable ASCII are escaped as \xNN.
std::string printable_excerpt(std::string_view text, std::size_t bytes_max = 60);

// Reads a word that `from_name` accepts. Otherwise reports that `expected` was expected and returns
// T{}.
template <class T>
T read_word(JsonValue value, std::optional<T> (*from_name)(std::string_view),
            std::string_view expected) {
  const auto found = from_name(value.string());
  if (!found) value.refuse(expected);
  return found.value_or(T{});
}

}  // namespace lockstep
