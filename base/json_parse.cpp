// From bytes to nodes: the part of json_reader.h that knows the JSON library.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json_reader.h"

namespace lockstep {
namespace {

// Feeds the parser and tells how far it has read, which its events do not.
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

  bool scalar(Kind kind, std::uint64_t magnitude, bool negative) {
    const auto index = static_cast<std::uint32_t>(reader_.nodes_.size());
    JsonReader::Node node;
    node.kind = kind;
    node.negative = negative;
    node.offset = offset();
    node.magnitude = magnitude;
    node.key = std::exchange(key_, {});
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
  // The parser takes a zero byte for the end of the input, and skips a byte-order mark.
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
