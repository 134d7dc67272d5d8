// How a row of the table of options is made from a member of RunSpec: kind, reading, writing and
// words follow from the member's type at compile time, so that a row states only its texts and
// ranges. For traces/formats/run_fields.cpp only.
//
// Invariants
// (1) Every function pointer of a row refers to the same member path.
// (2) read_member() accepts what write_member() writes, and the numbers of older saved cases.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "traces/formats/run_fields.h"

namespace lockstep::run_rows {

// Words of options that are texts and have a fixed list; words of enums come from base/names.h.
constexpr std::string_view kAttentionChoices[] = {"full", "mla"};
constexpr std::string_view kDtypeChoices[] = {"bf16",
                                              "fp16",
                                              "fp32",
                                              "fp8_e4m3",
                                              "fp8_e5m2",
                                              "int8",
                                              "fp8_per_token_head",
                                              "int8_per_token_head",
                                              "int4_per_token_head",
                                              "nvfp4"};
constexpr std::string_view kBackendChoices[] = {"flash_attn", "flashinfer", "triton_attn",
                                                "any_size"};

// One object, since rows compare with it and read their lower bounds from it.
inline const RunSpec& defaults() {
  static const RunSpec run;
  return run;
}

// Follows a path of members: at<&RunSpec::engine, &EngineConfig::dcp>(run) is run.engine.dcp.
template <auto... path>
constexpr auto& at(RunSpec& run) {
  return (run.*....*path);
}
template <auto... path>
constexpr const auto& at(const RunSpec& run) {
  return (run.*....*path);
}

// Types of members that are texts in the table, and the optional number.
using Names = std::vector<std::string>;
using Sizes = std::vector<std::int64_t>;
using Parts = std::vector<ConnectorKind>;
using Percent = std::optional<std::int32_t>;

// bool is an integral type too, so its branch comes first; an absent percentage still counts as a
// number.
template <class T>
constexpr FieldKind kind_of() {
  if constexpr (std::is_same_v<T, bool>)
    return FieldKind::flag;
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    return FieldKind::uint64;
  else if constexpr (std::is_integral_v<T> || std::is_same_v<T, Percent>)
    return FieldKind::number;
  else if constexpr (std::is_enum_v<T>)
    return FieldKind::word;
  else
    return FieldKind::text;
}

// Parses a word or a text of the command line into the member; false: not a value. A list of names
// takes one name, as --mutant does. A recipe's texts are taken unchanged and checked where they are
// used.
template <class T>
bool set_text(T& member, std::string_view text) {
  if constexpr (std::is_enum_v<T>) {
    const auto found = from_name<T>(text);
    if (!found) return false;
    member = *found;
  } else if constexpr (std::is_same_v<T, Parts>) {
    auto parts = text == "none" ? Parts{} : connector_parts_from_text(text);
    if (!parts) return false;
    member = std::move(*parts);
  } else if constexpr (std::is_same_v<T, Names>) {
    member = {std::string(text)};
  } else {
    member = text;
  }
  return true;
}

// Reads the numbers that older saved cases have for switches (0, 1), words (their position) and
// connectors (a decimal digit per part: 12 is peers+host). Digits are taken from the right, hence
// the insertion at the front.
template <class T>
T read_old_number(JsonValue value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.integer(0, 1) != 0;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(value.integer(0, std::ssize(kWords<T>) - 1));
  } else {
    Parts parts;
    for (std::int64_t left = value.integer(0); left != 0; left /= 10) {
      if (left % 10 < 1 || left % 10 > 3 || parts.size() == kConnectorPartsMax) {
        value.refuse("up to 4 digits: 1 (peers), 2 (host) or 3 (one-group-peers)");
        return {};
      }
      parts.insert(parts.begin(), static_cast<ConnectorKind>(left % 10));
    }
    return parts;
  }
}

// Reads a member from a file. `as_default` widens the lower bound: a default such as -1, which the
// command line cannot give, must be readable.
template <class T>
void read_member(const RunField& field, JsonValue value, T& member, const T& as_default) {
  // Types whose form changed from numbers to words.
  constexpr bool has_old_number =
      std::is_same_v<T, bool> || std::is_enum_v<T> || std::is_same_v<T, Parts>;
  if constexpr (has_old_number) {
    if (field.saved_in == SavedIn::settings && value.is_number()) {
      member = read_old_number<T>(value);
      return;
    }
  }
  [[maybe_unused]] const std::int64_t at_most =
      field.saved_in == SavedIn::engine ? INT64_MAX : field.at_most;
  if constexpr (std::is_same_v<T, bool>) {
    member = value.boolean();
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    member = value.uint64();
  } else if constexpr (std::is_integral_v<T>) {
    member = value.integer<T>(std::min<std::int64_t>(field.at_least, as_default),
                              std::min<std::int64_t>(at_most, std::numeric_limits<T>::max()));
  } else if constexpr (std::is_same_v<T, Percent>) {
    // -1, of older cases: absent.
    const auto percent = value.integer<std::int32_t>(-1, at_most);
    member = percent < 0 ? Percent() : Percent(percent);
  } else if constexpr (std::is_enum_v<T>) {
    member = value.word<T>(kJsonWords<T>);
  } else if constexpr (std::is_same_v<T, std::string>) {
    member = value.nonempty_string();
  } else if constexpr (std::is_same_v<T, Parts>) {
    if (!set_text(member, value.string())) value.refuse(kPartsExpected);
  } else if constexpr (std::is_same_v<T, Names>) {
    member.clear();
    for (JsonValue name : value.array()) member.emplace_back(name.nonempty_string());
  } else {
    member.clear();
    for (JsonValue size : value.array()) member.push_back(size.integer(1, INT32_MAX));
  }
}

// Writes a member as files have it. An absent percentage is null; rows omit it then, since it is
// the default.
template <class T>
void write_member(JsonWriter& out, const T& member) {
  if constexpr (std::is_same_v<T, bool>)
    out.boolean(member);
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    out.uint64(member);
  else if constexpr (std::is_integral_v<T>)
    out.integer(member);
  else if constexpr (std::is_same_v<T, Percent>)
    member ? out.integer(*member) : out.null();
  else if constexpr (std::is_enum_v<T>)
    out.string(name_of(member));
  else if constexpr (std::is_same_v<T, std::string>)
    out.string(member);
  else if constexpr (std::is_same_v<T, Parts>)
    out.string(connector_parts_text(member));
  else if constexpr (std::is_same_v<T, Names>)
    out.strings(member);
  else
    out.integers(member);
}

// Completes `field` for the member that `path` leads to from a RunSpec. All lambdas are
// captureless, so that the table is constant-initialized.
template <auto... path>
constexpr RunField row(RunField field) {
  using T = std::remove_cvref_t<decltype(at<path...>(std::declval<RunSpec&>()))>;
  field.kind = kind_of<T>();
  field.copy = [](const RunSpec& from, RunSpec& to) { at<path...>(to) = at<path...>(from); };
  field.is_equal = [](const RunSpec& one, const RunSpec& other) {
    return at<path...>(one) == at<path...>(other);
  };
  if constexpr (std::is_same_v<T, Percent>)
    field.number = [](const RunSpec& run) -> std::int64_t { return at<path...>(run).value_or(0); };
  else if constexpr (std::is_integral_v<T>)
    field.number = [](const RunSpec& run) { return static_cast<std::int64_t>(at<path...>(run)); };
  if constexpr (std::is_same_v<T, Percent>)
    field.set_number = [](RunSpec& run, std::int64_t number) {
      at<path...>(run) = static_cast<std::int32_t>(number);
    };
  else if constexpr (std::is_integral_v<T>)
    field.set_number = [](RunSpec& run, std::int64_t number) {
      at<path...>(run) = static_cast<T>(number);
    };
  if constexpr (std::is_same_v<T, std::uint64_t>)
    field.set_uint64 = [](RunSpec& run, std::uint64_t number) { at<path...>(run) = number; };
  if constexpr (std::is_enum_v<T>) {
    field.words = kWords<T>;
    if (field.choices.empty()) field.choices = kWords<T>;
  }
  // A list of sizes has no form on the command line.
  if constexpr (kind_of<T>() == FieldKind::word ||
                (kind_of<T>() == FieldKind::text && !std::is_same_v<T, Sizes>))
    field.set_text = [](RunSpec& run, std::string_view text) {
      return set_text(at<path...>(run), text);
    };
  field.read = [](const RunField& of, JsonValue value, RunSpec& run) {
    read_member(of, value, at<path...>(run), at<path...>(defaults()));
  };
  field.write = [](JsonWriter& out, const RunSpec& run) { write_member(out, at<path...>(run)); };
  return field;
}
// A row for a member of EngineConfig: engine options of files contain it.
template <auto member>
constexpr RunField engine_row(RunField field) {
  field.saved_in = SavedIn::engine;
  return row<&RunSpec::engine, member>(field);
}
// A row for a setting of a saved case.
template <auto... path>
constexpr RunField setting_row(RunField field) {
  field.saved_in = SavedIn::settings;
  return row<path...>(field);
}

}  // namespace lockstep::run_rows
