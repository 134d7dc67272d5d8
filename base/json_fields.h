// Reads and writes the JSON of a struct from one list of its fields, so that a format's reader and
// writer cannot drift apart.
//
//   template <class Io>
//   void fields(Io& io, FieldsOf<Io, Grammar>& row) {
//     io.required("id", row.id);
//     io.optional("asked", row.asked, form::Between{0, 100});
//   }
//   write_fields(out, row), read_fields(value, row)
//
// The list is a template over FieldReader and FieldWriter. A form (form::Between, form::Word) is
// the third argument: how the member appears as JSON, and which values a reader accepts.
//
// Invariants
// (1) Keys are written in the order of the list, and read in any order.
// (2) An optional key is written unless its member is zero, false or empty; unless() names another
//     value. Where the key is absent, reading leaves the member unchanged.
// (3) A form reads back every value within its limits that it writes. Only reading checks limits.
//
// Not checked: that the values of a row are within the limits when it is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/json_reader.h"
#include "base/json_writer.h"

namespace lockstep {

// The row that a list of fields receives: const for a writer.
template <class Io, class T>
using FieldsOf = std::conditional_t<Io::kReads, T, const T>;

template <class T, class... Context>
void read_fields(JsonValue value, T& row, const Context&... context);
template <class T, class... Context>
void write_fields(JsonWriter& out, const T& row, const Context&... context);

// Forms: how a member appears as JSON. A form has read(JsonValue, member) and write(JsonWriter,
// member), and no state except its limits and words.
namespace form {

// An array with `element` as the form of each entry. Reading appends to the rows that are there.
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
    out.each(rows, [&](const auto& row) { element.write(out, row); });
  }
};

// The default form: a flag, a name (a string that is not empty), a struct with a list of fields, or
// an array of these. Numbers have no default form: each needs its limits.
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

// A string that may be empty.
struct AnyText {
  static void read(JsonValue value, std::string& text) { text = value.string(); }
  static void write(JsonWriter& out, const std::string& text) { out.string(text); }
};

// Hexadecimal digits in lower case, since equal hashes must be equal texts: num_digits of them, or,
// where that is 0, whole bytes, at least one.
struct Hexadecimal {
  std::size_t num_digits = 0;
  bool has(std::string_view text) const {
    return (num_digits == 0 ? !text.empty() && text.size() % 2 == 0 : text.size() == num_digits) &&
           text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  }
  void read(JsonValue value, std::string& text) const {
    text = value.string();
    if (!has(text))
      value.refuse(num_digits == 0 ? "a digest, hexadecimal"
                                   : std::to_string(num_digits) + " hexadecimal digits");
  }
  static void write(JsonWriter& out, const std::string& text) { out.string(text); }
};

// JSON of any kind, kept as text without spaces, for parts that this program passes on and does not
// interpret.
struct Raw {
  static void read(JsonValue value, std::string& json) { json = value.text(); }
  static void write(JsonWriter& out, const std::string& json) { out.raw(json); }
};

// An integer from min to max, both included. A member of a smaller type lowers the maximum to what
// that type holds; a minimum below the type's own is the caller's mistake.
struct Between {
  std::int64_t min = 0, max = 0;
  template <class T>
  void read(JsonValue value, T& number) const {
    number = value.integer<T>(min, std::min<std::int64_t>(max, std::numeric_limits<T>::max()));
  }
  static void write(JsonWriter& out, std::int64_t number) { out.integer(number); }
};

// An integer over all 64 unsigned bits: seeds, hashes.
struct Unsigned {
  static void read(JsonValue value, std::uint64_t& number) { number = value.uint64(); }
  static void write(JsonWriter& out, std::uint64_t number) { out.uint64(number); }
};

// One of a fixed set of words. Several words may have the same meaning when read; the first of them
// is written. REQUIRES: every value of a written member has a word.
template <class T>
struct Word {
  std::span<const JsonWord<T>> words;
  void read(JsonValue value, T& member) const { member = value.word<T>(words); }
  void write(JsonWriter& out, const T& member) const {
    for (const auto& [word, meaning] : words)
      if (meaning == member) return static_cast<void>(out.string(word));
    LS_CHECK(false, "none of {} words stands for the value", words.size());
  }
};

// An object whose keys are data: rows of a name and a content, in file order, or a map. Its keys
// are never unknown.
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
  template <class T>
  void read(JsonValue value, std::map<std::string, T>& rows) const {
    for (auto& [key, entry] : value.object().entries()) member.read(entry, rows[std::string(key)]);
  }
  template <class Rows>
  void write(JsonWriter& out, const Rows& rows) const {
    out.begin_object();
    for (const auto& [id, content] : rows) member.write(out.key(id), content);
    out.end_object();
  }
};

// A struct of two members as an array of two: [first, second]. `expected` describes both, for the
// error message of an array of another length.
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

// A word of an enum: `from_name` reads it, name_of() writes it. `expected` lists the words for the
// error message.
template <class T>
struct Named {
  std::optional<T> (*from_name)(std::string_view);
  std::string_view expected;
  void read(JsonValue value, T& member) const { member = read_word<T>(value, from_name, expected); }
  static void write(JsonWriter& out, const T& member) { out.string(name_of(member)); }
};

// A value that may also be null. Reading null leaves the member unchanged; writing never produces
// null, since FieldReader::nullable() covers members that may be absent.
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

// A struct whose list of fields depends on a second object, the context: fields(io, row, context).
// REQUIRES: the context outlives the form.
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

// A form made of two functions, read_from(JsonValue) and write_to(JsonWriter&, member), for a
// member that no other form fits.
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

// Runs a list of fields over a parsed object. Every method has its counterpart in FieldWriter, with
// the same arguments. The first error stays in the JsonReader; the list still runs to its end.
class FieldReader {
 public:
  static constexpr bool kReads = true;
  explicit FieldReader(JsonObject& from) : object(from) {}

  // A key that must be present.
  template <class T, class Form = form::Plain>
  void required(std::string_view key, T& member, const Form& as = {}) {
    as.read(object.required(key), member);
  }
  // A key that may be absent; the member then keeps its value.
  template <class T, class Form = form::Plain>
  void optional(std::string_view key, T& member, const Form& as = {}) {
    if (const JsonValue value = object.optional(key)) as.read(value, member);
  }
  // The same for an optional member, which is set only if the key is present.
  template <class T, class Form = form::Plain>
  void optional(std::string_view key, std::optional<T>& member, const Form& as = {}) {
    if (const JsonValue value = object.optional(key)) as.read(value, member.emplace());
  }
  // A key that may be absent when read and is always written: keys that older files of the format
  // lack.
  template <class T, class Form = form::Plain>
  void defaulted(std::string_view key, T& member, const Form& as = {}) {
    optional(key, member, as);
  }
  // An optional key that is written unless the member equals `usual`. Reading assigns nothing where
  // the key is absent, so the member must hold `usual` already.
  template <class T, class Form = form::Plain>
  void unless(const T& /*usual*/, std::string_view key, T& member, const Form& as = {}) {
    optional(key, member, as);
  }
  // A key that is required in some structs of the format and optional in others. It is written like
  // an optional one, so the limits of a required member must exclude zero.
  template <class T, class Form = form::Plain>
  void required_if(bool is_required, std::string_view key, T& member, const Form& as = {}) {
    is_required ? required(key, member, as) : optional(key, member, as);
  }
  // A key that is always present; null if the member is absent.
  template <class T, class Form = form::Plain>
  void nullable(std::string_view key, std::optional<T>& member, const Form& as = {}) {
    const JsonValue value = object.required(key);
    if (value && !value.is_null()) as.read(value, member.emplace());
  }
  // An object whose fields are members of the same struct: `list` receives this reader or writer.
  // Written if `is_there`; absent when read: its members keep their values.
  template <class List>
  void nested(std::string_view key, bool /*is_there*/, const List& list) {
    JsonValue value = object.optional(key);
    if (!value) return;
    JsonObject inner = value.object();
    FieldReader io(inner);
    list(io);
    inner.finish();
  }
  // A key with one possible value: a version number.
  void constant(std::string_view key, std::int64_t number) {
    object.required(key).integer(number, number);
  }
  // A key whose only value is true: it marks the kind of a record.
  void mark(std::string_view key) {
    JsonValue value = object.required(key);
    if (!value.boolean()) value.refuse("true");
  }

  JsonObject& object;
};

// Writes the same list of fields as an object. Reads no limits: see (3).
class FieldWriter {
 public:
  static constexpr bool kReads = false;
  explicit FieldWriter(JsonWriter& to) : out(to) {}

  template <class T, class Form = form::Plain>
  void required(std::string_view key, const T& member, const Form& as = {}) {
    as.write(out.key(key), member);
  }
  // Numbers are omitted if they are zero, strings and containers if they are empty. A flag's
  // default is false.
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

// Reads an object into `row`. Refuses keys that the list does not have (JsonObject::finish()).
template <class T, class... Context>
void read_fields(JsonValue value, T& row, const Context&... context) {
  JsonObject object = value.object();
  FieldReader io(object);
  fields(io, row, context...);
  object.finish();
}

// Returns the row that an object describes.
template <class T, class... Context>
T row_of_fields(JsonValue value, const Context&... context) {
  T row;
  read_fields(value, row, context...);
  return row;
}

template <class T, class... Context>
void write_fields(JsonWriter& out, const T& row, const Context&... context) {
  out.begin_object();
  FieldWriter io(out);
  fields(io, row, context...);
  out.end_object();
}

// Returns the row as a line of a JSON-lines file, newline included.
template <class T, class... Context>
std::string line_of_fields(const T& row, const Context&... context) {
  JsonWriter out;
  write_fields(out, row, context...);
  return out.take_line();
}

}  // namespace lockstep
