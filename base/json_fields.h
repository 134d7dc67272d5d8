// One list of fields per struct of a format: JSON is read and written from the same list.
//
//   template <class Io>
//   void fields(Io& io, FieldsOf<Io, Grammar>& row) {
//     io.required("id", row.id);
//     io.optional("asked", row.asked, form::Between{0, 100});
//   }
//   write_fields(out, row), read_fields(value, row)
//
// Invariants
// (1) Keys are written in the order of the list, and read in any order.
// (2) An optional key is written unless its member has the default, which reading leaves there.
// (3) A form reads what it writes. Its limits refuse what is read, never what is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/json_reader.h"
#include "base/json_writer.h"

namespace lockstep {

template <class Io, class T>
using FieldsOf = std::conditional_t<Io::kReads, T, const T>;

template <class T, class... Context>
void read_fields(JsonValue value, T& row, const Context&... context);
template <class T, class... Context>
void write_fields(JsonWriter& out, const T& row, const Context&... context);

// How a member looks as JSON.
namespace form {

template <class Element>
struct Each {
  Element element{};
  template <class Rows>
  void read(JsonValue value, Rows& rows) const {
    const JsonArray array = value.array();
    rows.reserve(array.size());
    for (JsonValue one : array) element.read(one, rows.emplace_back());
  }
  template <class Rows>
  void write(JsonWriter& out, const Rows& rows) const {
    out.begin_array();
    for (const auto& row : rows) element.write(out, row);
    out.end_array();
  }
};

// A flag, a name (a text that is not empty), a struct with a list of fields, or an array of these.
struct Plain {
  template <class T>
  static void read(JsonValue value, T& member) {
    if constexpr (std::is_same_v<T, bool>)
      member = value.boolean();
    else if constexpr (std::is_same_v<T, std::string>)
      member = value.nonempty_string();
    else
      read_fields(value, member);
  }
  template <class T>
  static void read(JsonValue value, std::vector<T>& members) {
    Each<Plain>{}.read(value, members);
  }
  template <class T>
  static void write(JsonWriter& out, const T& member) {
    if constexpr (std::is_same_v<T, bool>)
      out.boolean(member);
    else if constexpr (std::is_same_v<T, std::string>)
      out.string(member);
    else
      write_fields(out, member);
  }
  template <class T>
  static void write(JsonWriter& out, const std::vector<T>& members) {
    Each<Plain>{}.write(out, members);
  }
};

struct AnyText {
  static void read(JsonValue value, std::string& text) { text = value.string(); }
  static void write(JsonWriter& out, const std::string& text) { out.string(text); }
};

// JSON of any kind that is kept as text.
struct Raw {
  static void read(JsonValue value, std::string& json) { json = value.text(); }
  static void write(JsonWriter& out, const std::string& json) { out.raw(json); }
};

struct Between {
  std::int64_t min = 0, max = 0;
  template <class T>
  void read(JsonValue value, T& number) const {
    number = value.integer<T>(min, std::min<std::int64_t>(max, std::numeric_limits<T>::max()));
  }
  static void write(JsonWriter& out, std::int64_t number) { out.integer(number); }
};

struct Unsigned {
  static void read(JsonValue value, std::uint64_t& number) { number = value.uint64(); }
  static void write(JsonWriter& out, std::uint64_t number) { out.uint64(number); }
};

// One of some words.
template <class T>
struct Word {
  std::span<const JsonWord<T>> words;
  void read(JsonValue value, T& member) const { member = value.word<T>(words); }
  void write(JsonWriter& out, const T& member) const {
    for (const auto& [word, meaning] : words)
      if (meaning == member) return static_cast<void>(out.string(word));
    LS_CHECK(false, "no word of {} for a value", words.size());
  }
};

// Rows of a name and a member, as an object with the names for keys.
template <class Member = Plain>
struct ById {
  Member member{};
  template <class Rows>
  void read(JsonValue value, Rows& rows) const {
    JsonObject object = value.object();
    rows.reserve(object.size());
    for (auto& [key, entry] : object.entries()) {
      auto& [id, content] = rows.emplace_back();
      id = key;
      member.read(entry, content);
    }
  }
  template <class Rows>
  void write(JsonWriter& out, const Rows& rows) const {
    out.begin_object();
    for (const auto& [id, content] : rows) member.write(out.key(id), content);
    out.end_object();
  }
};

// A struct of two members as an array of two; others are refused as not `expected`.
template <class First, class Second>
struct Pair {
  std::string_view expected;
  First first{};
  Second second{};
  template <class Row>
  void read(JsonValue value, Row& row) const {
    const JsonArray array = value.array();
    if (array.size() != 2) return value.refuse(expected);
    auto& [a, b] = row;
    first.read(array[0], a);
    second.read(array[1], b);
  }
  template <class Row>
  void write(JsonWriter& out, const Row& row) const {
    const auto& [a, b] = row;
    first.write(out.begin_array(), a);
    second.write(out, b);
    out.end_array();
  }
};

// A word that `from_name` knows and name_of() writes.
template <class T>
struct Named {
  std::optional<T> (*from_name)(std::string_view);
  std::string_view expected;
  void read(JsonValue value, T& member) const { member = read_word<T>(value, from_name, expected); }
  static void write(JsonWriter& out, const T& member) { out.string(name_of(member)); }
};

// A value that may also be null, which leaves the member as it is.
template <class Form>
struct OrNull {
  Form form;
  template <class T>
  void read(JsonValue value, T& member) const {
    if (!value.is_null()) form.read(value, member);
  }
  template <class T>
  void write(JsonWriter& out, const T& member) const {
    form.write(out, member);
  }
};

// A struct whose list of fields depends on something else.
template <class Context>
struct With {
  const Context& context;
  template <class T>
  void read(JsonValue value, T& row) const {
    read_fields(value, row, context);
  }
  template <class T>
  void write(JsonWriter& out, const T& row) const {
    write_fields(out, row, context);
  }
};

// A form out of two functions.
template <class Read, class Write>
struct Code {
  Read read_from;
  Write write_to;
  template <class T>
  void read(JsonValue value, T& member) const {
    member = read_from(value);
  }
  template <class T>
  void write(JsonWriter& out, const T& member) const {
    write_to(out, member);
  }
};
template <class Read, class Write>
Code(Read, Write) -> Code<Read, Write>;

}  // namespace form

class FieldReader {
 public:
  static constexpr bool kReads = true;
  explicit FieldReader(JsonObject& from) : object(from) {}

  template <class T, class Form = form::Plain>
  void required(std::string_view key, T& member, const Form& as = {}) {
    as.read(object.required(key), member);
  }
  template <class T, class Form = form::Plain>
  void optional(std::string_view key, T& member, const Form& as = {}) {
    if (const JsonValue value = object.optional(key)) as.read(value, member);
  }
  template <class T, class Form = form::Plain>
  void optional(std::string_view key, std::optional<T>& member, const Form& as = {}) {
    if (const JsonValue value = object.optional(key)) as.read(value, member.emplace());
  }
  // A key that may be missing and is always written.
  template <class T, class Form = form::Plain>
  void defaulted(std::string_view key, T& member, const Form& as = {}) {
    optional(key, member, as);
  }
  // An optional key whose default is `usual`.
  template <class T, class Form = form::Plain>
  void unless(const T& /*usual*/, std::string_view key, T& member, const Form& as = {}) {
    optional(key, member, as);
  }
  // A key that must be there in some structs, and is optional in others.
  template <class T, class Form = form::Plain>
  void required_if(bool is_required, std::string_view key, T& member, const Form& as = {}) {
    is_required ? required(key, member, as) : optional(key, member, as);
  }
  // The key is always there; null where the member is absent.
  template <class T, class Form = form::Plain>
  void nullable(std::string_view key, std::optional<T>& member, const Form& as = {}) {
    const JsonValue value = object.required(key);
    if (value && !value.is_null()) as.read(value, member.emplace());
  }
  // An object whose fields are members of the same struct; written where it `is_there`.
  template <class List>
  void nested(std::string_view key, bool /*is_there*/, const List& list) {
    JsonValue value = object.optional(key);
    if (!value) return;
    JsonObject inner = value.object();
    FieldReader io(inner);
    list(io);
    inner.finish();
  }
  // A key with one value.
  void constant(std::string_view key, std::int64_t number) {
    object.required(key).integer(number, number);
  }
  void mark(std::string_view key) {
    JsonValue value = object.required(key);
    if (!value.boolean()) value.refuse("true");
  }

  JsonObject& object;
};

class FieldWriter {
 public:
  static constexpr bool kReads = false;
  explicit FieldWriter(JsonWriter& to) : out(to) {}

  template <class T, class Form = form::Plain>
  void required(std::string_view key, const T& member, const Form& as = {}) {
    as.write(out.key(key), member);
  }
  template <class T, class Form = form::Plain>
  void optional(std::string_view key, const T& member, const Form& as = {}) {
    if constexpr (std::is_arithmetic_v<T>) {
      if (member != T{}) required(key, member, as);
    } else {
      if (!member.empty()) required(key, member, as);
    }
  }
  template <class T, class Form = form::Plain>
  void optional(std::string_view key, const std::optional<T>& member, const Form& as = {}) {
    if (member) required(key, *member, as);
  }
  template <class T, class Form = form::Plain>
  void defaulted(std::string_view key, const T& member, const Form& as = {}) {
    required(key, member, as);
  }
  template <class T, class Form = form::Plain>
  void unless(const T& usual, std::string_view key, const T& member, const Form& as = {}) {
    if (member != usual) required(key, member, as);
  }
  template <class T, class Form = form::Plain>
  void required_if(bool /*is_required*/, std::string_view key, const T& member,
                   const Form& as = {}) {
    optional(key, member, as);
  }
  template <class T, class Form = form::Plain>
  void nullable(std::string_view key, const std::optional<T>& member, const Form& as = {}) {
    if (member)
      required(key, *member, as);
    else
      out.key(key).null();
  }
  template <class List>
  void nested(std::string_view key, bool is_there, const List& list) {
    if (!is_there) return;
    out.key(key).begin_object();
    list(*this);
    out.end_object();
  }
  void constant(std::string_view key, std::int64_t number) { out.integer(key, number); }
  void mark(std::string_view key) { out.boolean(key, true); }

  JsonWriter& out;
};

template <class T, class... Context>
void read_fields(JsonValue value, T& row, const Context&... context) {
  JsonObject object = value.object();
  FieldReader io(object);
  fields(io, row, context...);
  object.finish();
}

template <class T, class... Context>
void write_fields(JsonWriter& out, const T& row, const Context&... context) {
  out.begin_object();
  FieldWriter io(out);
  fields(io, row, context...);
  out.end_object();
}

// The row as a line of a file.
template <class T, class... Context>
std::string line_of_fields(const T& row, const Context&... context) {
  JsonWriter out;
  write_fields(out, row, context...);
  return out.take_line();
}

}  // namespace lockstep
