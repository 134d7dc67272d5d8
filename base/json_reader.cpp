#include "base/json_reader.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <numeric>

#include "base/json_writer.h"
#include "base/number_text.h"

namespace lockstep {

std::string printable_excerpt(std::string_view text, std::size_t bytes_max) {
  std::string out;
  for (std::size_t i = 0; i < text.size() && i < bytes_max; ++i) {
    const char c = text[i];
    if (c >= 0x20 && c < 0x7f)
      out.push_back(c);
    else
      out.append(fmt::format("\\x{:02x}", static_cast<unsigned char>(c)));
  }
  if (text.size() > bytes_max) out.append("...");
  return out;
}

bool carries_input(std::string_view name) {
  static constexpr std::string_view kWords[] = {"length", "lengths",  "tokens", "toks",
                                                "hash",   "hashes",   "ids",    "arrival",
                                                "delay",  "timestamp"};
  std::string words = " ";  // lower case, one space on each side of a word
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool is_upper = name[i] >= 'A' && name[i] <= 'Z';
    const bool is_lower = name[i] >= 'a' && name[i] <= 'z';
    if (is_upper && words.back() != ' ' && name[i - 1] >= 'a') words += ' ';
    words += is_upper || is_lower ? static_cast<char>(name[i] | 0x20) : ' ';
  }
  words += ' ';
  return std::ranges::any_of(kWords, [&](std::string_view word) {
    return words.find(fmt::format(" {} ", word)) != std::string::npos;
  });
}

// True if at most two edits turn one word into the other: a letter more, less or different. A swap
// of two letters counts as two. One row of the edit distance table is kept.
static bool is_misspelled(std::string_view found, std::string_view known) {
  constexpr std::size_t kEdits = 2;
  constexpr std::size_t kShortest = 5;  // shorter keys are close to anything
  if (known.size() < kShortest || found.size() + kEdits < known.size() ||
      known.size() + kEdits < found.size())
    return false;
  std::vector<std::size_t> row(known.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= found.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= known.size(); ++j) {
      const std::size_t replaced = diagonal + (found[i - 1] == known[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back() <= kEdits;
}

JsonReader::JsonReader(std::string file) : file_(std::move(file)) {}
JsonReader::~JsonReader() = default;
JsonReader::JsonReader(JsonReader&&) noexcept = default;
JsonReader& JsonReader::operator=(JsonReader&&) noexcept = default;

JsonValue JsonReader::root() {
  LS_CHECK(failed_ || !nodes_.empty(), "root() without a document");
  return nodes_.empty() ? JsonValue() : JsonValue(this, 0);
}

void JsonReader::fail_line(std::int64_t line, std::string_view reason) {
  if (failed_) return;
  failed_ = true;
  error_.message = fmt::format("{}:{}: {}", file_, line, reason);
}

void JsonReader::fail_with(const Error& error) {
  if (failed_) return;
  failed_ = true;
  error_ = error;
}

// A document may span several lines: the error names the line of the node, not of the document.
void JsonReader::fail_at(std::uint32_t node, std::string_view sentence) {
  if (failed_) return;
  // The offset of a number is one past it, after the newline that may end it.
  const std::size_t offset = nodes_[node].offset;
  const std::string_view before = text_.substr(0, offset == 0 ? 0 : offset - 1);
  const auto line = line_ + std::count(before.begin(), before.end(), '\n');
  const std::string path = path_of(node);
  fail_line(line,
            path.empty() ? std::string(sentence) : fmt::format("field `{}`: {}", path, sentence));
}

// "a.b[3]": keys and positions from the root, which has no part of its own.
std::string JsonReader::path_of(std::uint32_t node) const {
  std::string path;
  while (node != 0) {
    const std::uint32_t parent = nodes_[node].parent;
    const char* dot = path.empty() || path.front() == '[' ? "" : ".";
    if (nodes_[parent].kind == Kind::array) {
      std::size_t position = 0;
      for (auto i = nodes_[parent].first; i != node; i = nodes_[i].next) ++position;
      path = fmt::format("[{}]{}{}", position, dot, path);
    } else {
      path = fmt::format("{}{}{}", printable_excerpt(nodes_[node].key), dot, path);
    }
    node = parent;
  }
  return path;
}

std::string JsonReader::number_text(std::uint32_t index) const {
  const Node& node = nodes_[index];
  if (node.kind == Kind::decimal) return std::string(node.text);
  return fmt::format("{}{}", node.negative ? "-" : "", node.magnitude);
}

std::string JsonReader::found_text(std::uint32_t index) const {
  const Node& node = nodes_[index];
  switch (node.kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return node.magnitude != 0 ? "true" : "false";
    case Kind::integer:
      return fmt::format("{}{}", node.negative ? "-" : "", node.magnitude);
    case Kind::decimal:
      return printable_excerpt(node.text);
    case Kind::string:
      return fmt::format("\"{}\"", printable_excerpt(node.text));
    case Kind::array:
      return fmt::format("an array of {} element{}", node.count, node.count == 1 ? "" : "s");
    case Kind::object:
      return "an object";
  }
  return {};
}

bool JsonValue::is_null() const { return reader_ && reader_->is(index_, JsonReader::Kind::null); }
bool JsonValue::is_object() const {
  return reader_ && reader_->is(index_, JsonReader::Kind::object);
}
bool JsonValue::is_array() const { return reader_ && reader_->is(index_, JsonReader::Kind::array); }
bool JsonValue::is_string() const {
  return reader_ && reader_->is(index_, JsonReader::Kind::string);
}
bool JsonValue::is_number() const {
  return reader_ && (reader_->is(index_, JsonReader::Kind::integer) ||
                     reader_->is(index_, JsonReader::Kind::decimal));
}

std::string JsonValue::text() {
  JsonWriter out;
  const auto write = [&out](auto& self, JsonValue value) -> void {
    if (value.is_object()) {
      out.begin_object();
      for (auto& [key, entry] : value.object().entries()) {
        out.key(key);
        self(self, entry);
      }
      out.end_object();
    } else if (value.is_array()) {
      out.begin_array();
      for (JsonValue element : value.array()) self(self, element);
      out.end_array();
    } else if (value.is_string()) {
      out.string(value.string());
    } else if (value.is_null()) {
      out.null();
    } else if (value.is_number()) {
      out.raw(value.reader_->number_text(value.index_));
    } else {
      out.boolean(value.boolean());
    }
  };
  if (reader_ != nullptr) write(write, *this);
  std::string text = out.take_line();
  text.pop_back();  // the newline
  return text;
}

void JsonValue::refuse(std::string_view expected) {
  if (reader_ == nullptr) return;
  reader_->fail_at(index_,
                   fmt::format("found {}; expected {}", reader_->found_text(index_), expected));
}

void JsonValue::refuse_because(std::string_view reason) {
  if (reader_ != nullptr) reader_->fail_at(index_, reason);
}

bool JsonValue::boolean() {
  if (reader_ == nullptr) return false;
  if (!reader_->is(index_, JsonReader::Kind::boolean)) refuse("true or false");
  return reader_->ok() && reader_->nodes_[index_].magnitude != 0;
}

std::string_view JsonValue::string() {
  if (reader_ == nullptr) return {};
  if (!reader_->is(index_, JsonReader::Kind::string)) refuse("a string");
  return reader_->ok() ? reader_->nodes_[index_].text : std::string_view{};
}

std::string_view JsonValue::nonempty_string() {
  const std::string_view text = string();
  if (reader_ != nullptr && reader_->ok() && text.empty()) refuse("a string that is not empty");
  return text;
}

// Compares magnitudes, because -2^63 has one that no int64_t holds.
std::int64_t JsonValue::integer_between(std::int64_t min, std::int64_t max) {
  if (reader_ == nullptr) return 0;
  const JsonReader::Node& node = reader_->nodes_[index_];
  if (node.kind == JsonReader::Kind::integer) {
    const std::uint64_t magnitude_max =
        static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) +
        (node.negative ? 1 : 0);
    if (node.magnitude <= magnitude_max) {
      const auto value =
          static_cast<std::int64_t>(node.negative ? 0 - node.magnitude : node.magnitude);
      if (value >= min && value <= max) return value;
    }
  }
  refuse(min == max ? fmt::format("the integer {}", min)
                    : fmt::format("an integer from {} to {}", min, max));
  return 0;
}

std::uint64_t JsonValue::uint64() {
  if (reader_ == nullptr) return 0;
  const JsonReader::Node& node = reader_->nodes_[index_];
  if (node.kind == JsonReader::Kind::integer && !node.negative) return node.magnitude;
  refuse("an integer from 0 to 18446744073709551615");
  return 0;
}

std::int64_t JsonValue::scaled_decimal(int digits) {
  if (reader_ == nullptr) return 0;
  const JsonReader::Node& node = reader_->nodes_[index_];
  if (node.kind == JsonReader::Kind::integer || node.kind == JsonReader::Kind::decimal) {
    const std::string text = reader_->number_text(index_);
    if (const auto value = scaled_decimal_of(text, digits)) return *value;
  }
  refuse(
      fmt::format("a number with at most {} digits after the point, no exponent, and at most {} "
                  "when multiplied by 10^{}",
                  digits, std::numeric_limits<std::int64_t>::max(), digits));
  return 0;
}

double JsonValue::binary64() {
  if (reader_ == nullptr) return 0;
  if (!is_number()) refuse("a number");
  if (!reader_->ok()) return 0;
  // Parsed from the digits and not from nlohmann's double, so that an integer above 2^53 is rounded
  // once.
  const std::string text = reader_->number_text(index_);
  double value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size()) refuse("a number");
  return value;
}

JsonArray JsonValue::array() {
  JsonArray array;
  if (reader_ == nullptr) return array;
  if (!is_array()) refuse("an array");
  if (!reader_->ok()) return array;
  array.reader_ = reader_;
  array.first_ = reader_->nodes_[index_].first;
  array.size_ = reader_->nodes_[index_].count;
  return array;
}

JsonObject JsonValue::object() {
  JsonObject object;
  if (reader_ == nullptr) return object;
  if (!is_object()) refuse("an object");
  if (!reader_->ok()) return object;
  object.reader_ = reader_;
  object.index_ = index_;
  object.first_ = object.hint_ = reader_->nodes_[index_].first;
  object.size_ = reader_->nodes_[index_].count;
  return object;
}

JsonValue JsonArray::operator[](std::size_t i) const {
  LS_CHECK(i < size_, "element {} of {}", i, size_);
  std::uint32_t index = first_;
  for (; i > 0; --i) index = reader_->nodes_[index].next;
  return {reader_, index};
}

// O(1) for keys in file order. 0, the root, is never an entry, so it stands for "none".
std::uint32_t JsonObject::find(std::string_view key) const {
  if (first_ == 0) return 0;
  // Two rounds: from where the last key was found to the end, then from the start to there.
  for (std::uint32_t i = hint_; i != 0; i = reader_->nodes_[i].next)
    if (reader_->nodes_[i].key == key) return hint_ = i;
  for (std::uint32_t i = first_; i != hint_; i = reader_->nodes_[i].next)
    if (reader_->nodes_[i].key == key) return hint_ = i;
  return 0;
}

bool JsonObject::has(std::string_view key) const { return find(key) != 0; }

JsonValue JsonObject::optional(std::string_view key) {
  const std::uint32_t found = find(key);
  // Known but absent keys are the candidates of which an unknown key may be a misspelling.
  if (found == 0 && reader_ != nullptr && reader_->skipped_ != nullptr)
    reader_->absent_.push_back(key);
  if (found == 0) return {};
  reader_->nodes_[found].asked_for = true;
  return {reader_, found};
}

JsonValue JsonObject::required(std::string_view key) {
  const JsonValue value = optional(key);
  if (!value && reader_ != nullptr)
    refuse_because(fmt::format("found no key \"{}\"; expected it", key));
  return value;
}

void JsonObject::finish() {
  if (reader_ == nullptr) return;
  for (std::uint32_t i = first_; i != 0; i = reader_->nodes_[i].next) {
    const JsonReader::Node& node = reader_->nodes_[i];
    if (!node.asked_for && !node.key.starts_with("x_")) reader_->refuse_or_skip(i);
  }
}

void JsonReader::refuse_or_skip(std::uint32_t node) {
  const std::string_view key = nodes_[node].key;
  const auto meant = std::ranges::find_if(
      absent_, [&](std::string_view known) { return is_misspelled(key, known); });
  if (skipped_ != nullptr && meant == absent_.end() && !carries_input(key)) {
    ++(*skipped_)[std::string(key)];
    return;
  }
  fail_at(node,
          fmt::format("found an unknown key; expected {}, or one that starts with x_",
                      meant == absent_.end() ? "a known key" : fmt::format("\"{}\"", *meant)));
}

std::vector<JsonEntry> JsonObject::entries() {
  std::vector<JsonEntry> entries;
  entries.reserve(size_);
  for (std::uint32_t i = first_; i != 0; i = reader_->nodes_[i].next) {
    reader_->nodes_[i].asked_for = true;
    entries.push_back({reader_->nodes_[i].key, JsonValue(reader_, i)});
  }
  return entries;
}

void JsonObject::refuse_because(std::string_view reason) {
  if (reader_ != nullptr) reader_->fail_at(index_, reason);
}

// From bytes to nodes: the part of json_reader.h that knows the JSON library.

namespace {

// Feeds the parser and stores how far it has read, which its events do not report.
struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  const char** reached;

  const char& operator*() const { return *at; }
  CountingIterator& operator++() {
    *reached = ++at;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at == other.at; }
  bool operator!=(const CountingIterator& other) const { return at != other.at; }
};

}  // namespace

// Turns the parser's events into the reader's nodes.
class JsonBuilder {
 public:
  JsonBuilder(JsonReader& reader, const char** reached) : reader_(reader), reached_(reached) {}

  bool null() { return scalar(JsonReader::Kind::null, 0, false); }
  bool boolean(bool value) { return scalar(JsonReader::Kind::boolean, value ? 1 : 0, false); }
  bool number_integer(std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    return scalar(JsonReader::Kind::integer, value < 0 ? 0 - bits : bits, value < 0);
  }
  bool number_unsigned(std::uint64_t value) {
    return scalar(JsonReader::Kind::integer, value, false);
  }
  bool number_float(double, const std::string& digits) {
    scalar(JsonReader::Kind::decimal, 0, false);
    reader_.nodes_.back().text = keep(digits);
    return true;
  }
  bool string(std::string& value) {
    scalar(JsonReader::Kind::string, 0, false);
    reader_.nodes_.back().text = keep(value);
    return true;
  }
  bool binary(std::vector<std::uint8_t>&) { return false; }
  bool start_object(std::size_t) { return open(JsonReader::Kind::object); }
  bool start_array(std::size_t) { return open(JsonReader::Kind::array); }
  bool key(std::string& name) {
    key_ = keep(name);
    return true;
  }
  bool end_array() { return close(); }
  bool end_object() { return keys_are_unique(stack_.back()) && close(); }

  template <class Exception>
  bool parse_error(std::size_t position, const std::string&, const Exception& exception) {
    // "[json.exception...] parse error at line 1, column 9: REASON; last read: ..."
    std::string_view reason = exception.what();
    if (const auto at = reason.find("column"); at != reason.npos) {
      if (const auto colon = reason.find(": ", at); colon != reason.npos)
        reason.remove_prefix(colon + 2);
    } else if (const auto bracket = reason.find("] "); bracket != reason.npos) {
      reason.remove_prefix(bracket + 2);
    }
    reason = reason.substr(0, reason.find("; last read"));
    position_ = std::min(position, reader_.text_.size());
    at_end_ = position >= reader_.text_.size();
    // The last bytes before the error: enough to find it in a line of megabytes.
    constexpr std::size_t kShown = 24;
    const std::size_t from = position_ - std::min(position_, kShown);
    reason_ = fmt::format("found `{}`; expected JSON ({})",
                          printable_excerpt(reader_.text_.substr(from, position_ - from)),
                          printable_excerpt(reason, 200));
    return false;
  }

  std::size_t position() const { return position_; }
  bool at_end() const { return at_end_; }
  const std::string& reason() const { return reason_; }
  std::optional<std::uint32_t> object_with_key_twice() const { return object_with_key_twice_; }

 private:
  using Kind = JsonReader::Kind;

  std::string_view keep(const std::string& bytes) {
    // Unescaped text is never longer than its source, for which strings_ has room: no reallocation.
    LS_CHECK(reader_.strings_.size() + bytes.size() <= reader_.strings_.capacity());
    const std::size_t at = reader_.strings_.size();
    reader_.strings_.insert(reader_.strings_.end(), bytes.begin(), bytes.end());
    return {reader_.strings_.data() + at, bytes.size()};
  }

  std::uint32_t offset() const {
    return static_cast<std::uint32_t>(*reached_ - reader_.text_.data());
  }

  // Appends a node and links it to its parent and its previous sibling. key_ is consumed: it
  // belongs to the next value only, and an element of an array has none.
  bool scalar(Kind kind, std::uint64_t magnitude, bool negative) {
    const auto index = static_cast<std::uint32_t>(reader_.nodes_.size());
    JsonReader::Node node{.kind = kind,
                          .negative = negative,
                          .offset = offset(),
                          .magnitude = magnitude,
                          .key = std::exchange(key_, {})};
    if (!stack_.empty()) {
      Open& parent = stack_.back();
      node.parent = parent.node;
      (parent.last == 0 ? reader_.nodes_[parent.node].first : reader_.nodes_[parent.last].next) =
          index;
      parent.last = index;
      ++reader_.nodes_[parent.node].count;
    }
    reader_.nodes_.push_back(node);
    return true;
  }

  bool open(Kind kind) {
    if (stack_.size() == kJsonDepthMax) {
      reason_ =
          fmt::format("found values nested deeper than {}; expected fewer levels", kJsonDepthMax);
      position_ = offset();
      return false;
    }
    scalar(kind, 0, false);
    stack_.push_back({static_cast<std::uint32_t>(reader_.nodes_.size() - 1), 0});
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  struct Open {
    std::uint32_t node;
    std::uint32_t last;  // its last child so far
  };

  // Sorts the keys, so that an object with many is checked in O(n log n) time.
  bool keys_are_unique(const Open& object) {
    keys_.clear();
    for (auto i = reader_.nodes_[object.node].first; i != 0; i = reader_.nodes_[i].next)
      keys_.push_back(reader_.nodes_[i].key);
    std::sort(keys_.begin(), keys_.end());
    const auto twice = std::adjacent_find(keys_.begin(), keys_.end());
    if (twice == keys_.end()) return true;
    object_with_key_twice_ = object.node;
    reason_ =
        fmt::format("found the key \"{}\" twice; expected it once", printable_excerpt(*twice));
    return false;
  }

  JsonReader& reader_;
  const char** reached_;
  std::string_view key_;
  std::vector<Open> stack_;
  std::vector<std::string_view> keys_;
  std::size_t position_ = 0;
  bool at_end_ = false;
  std::optional<std::uint32_t> object_with_key_twice_;
  std::string reason_;
};

bool JsonReader::parse(std::string_view text, std::int64_t line, bool cut_off) {
  line_ = line;
  text_ = text;
  cut_off_ = false;
  nodes_.clear();
  strings_.clear();
  absent_.clear();
  strings_.reserve(text.size());
  if (text.size() > kJsonTextBytesMax) {
    fail_line(line, fmt::format("found {} bytes; expected at most {} in one record", text.size(),
                                kJsonTextBytesMax));
    return false;
  }
  // The parser treats a zero byte as the end of the input, and skips a byte-order mark.
  if (const auto zero = text.find('\0'); zero != text.npos) {
    fail_line(line, fmt::format("column {}: found a zero byte; expected JSON text", zero + 1));
    return false;
  }
  if (text.starts_with("\xef\xbb\xbf")) {
    fail_line(line, "found a byte-order mark; expected UTF-8 without one");
    return false;
  }
  const char* reached = text.data();
  JsonBuilder builder(*this, &reached);
  const bool parsed =
      nlohmann::json::sax_parse(CountingIterator{text.data(), &reached},
                                CountingIterator{text.data() + text.size(), &reached}, &builder);
  if (parsed) return !failed_;
  if (const auto object = builder.object_with_key_twice()) {
    fail_at(*object, builder.reason());
    return false;
  }
  // A syntax error: its position counts bytes of the text, which may span lines.
  const std::size_t position = std::min(builder.position(), text.size());
  const std::string_view before = text.substr(0, position == 0 ? 0 : position - 1);
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const std::size_t line_start = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
  cut_off_ = cut_off && builder.at_end();
  fail_line(line + lines,
            fmt::format("column {}: {}{}", std::max<std::size_t>(position, 1) - line_start,
                        builder.reason(), cut_off_ ? "; the file is cut off here" : ""));
  return false;
}

}  // namespace lockstep
