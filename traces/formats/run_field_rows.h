// How a row of the table of options is made from a member of RunSpec: reading, writing and words of
// its type. For traces/formats/run_fields.cpp alone.
#pragma once

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "traces/formats/run_fields.h"

namespace lockstep::run_rows {

// The words of an enum, in the order of its values.
template <class E>
constexpr int kWordsOf = 0;
template <>
constexpr std::array<std::string_view, 2> kWordsOf<SchedulingPolicy> = {"fcfs", "priority"};
template <>
constexpr std::array<std::string_view, 3> kWordsOf<MambaCacheMode> = {"none", "align", "all"};
template <>
constexpr std::array<std::string_view, 4> kWordsOf<SpecMethod> = {"none", "ngram", "draft_model",
                                                                  "eagle"};
template <>
constexpr std::array<std::string_view, 3> kWordsOf<HashAlgorithm> = {"content", "sha256_cbor",
                                                                     "xxhash_cbor"};
template <>
constexpr std::array<std::string_view, 8> kWordsOf<CacheLayout> = {
    "NHD", "HND", "LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"};
template <>
constexpr std::array<std::string_view, 7> kWordsOf<AttentionBackend> = {
    "flash_attn", "flashinfer", "triton_attn", "triton_mla", "flashmla", "cache_only", "any_size"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<LayoutRule> = {"isolated", "vllm_0_22_1"};
template <>
constexpr std::array<std::string_view, 3> kWordsOf<CheckMode> = {"fast", "check", "hunt"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<Decides> = {"model", "recording"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<Numbers> = {"words", "real"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<KVLoadFailurePolicy> = {"recompute", "fail"};

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

inline const RunSpec& defaults() {
  static const RunSpec run;
  return run;
}

template <auto... path>
constexpr auto& at(RunSpec& run) {
  return (run.*....*path);
}
template <auto... path>
constexpr const auto& at(const RunSpec& run) {
  return (run.*....*path);
}

using Names = std::vector<std::string>;
using Sizes = std::vector<std::int64_t>;
using Parts = std::vector<ConnectorKind>;
using Percent = std::optional<std::int32_t>;

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

template <class T>
bool set_text(T& member, std::string_view text) {
  if constexpr (std::is_enum_v<T>) {
    const auto found = std::ranges::find(kWordsOf<T>, text);
    if (found == kWordsOf<T>.end()) return false;
    member = static_cast<T>(found - kWordsOf<T>.begin());
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

// Older saved cases have numbers for switches, words and connectors: a digit for each part.
template <class T>
T read_old_number(JsonValue value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.integer(0, 1) != 0;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(value.integer(0, std::ssize(kWordsOf<T>) - 1));
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

template <class T>
T read_words(JsonValue value) {
  std::array<JsonWord<T>, kWordsOf<T>.size()> words;
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = {kWordsOf<T>[i], static_cast<T>(i)};
  return value.word<T>(words);
}

template <class T>
void read_member(const RunField& field, JsonValue value, T& member, const T& as_default) {
  constexpr bool has_old_number =
      std::is_same_v<T, bool> || std::is_enum_v<T> || std::is_same_v<T, Parts>;
  if constexpr (has_old_number) {
    if (field.saved_in == SavedIn::settings && value.is_number()) {
      member = read_old_number<T>(value);
      return;
    }
  }
  if constexpr (std::is_same_v<T, bool>) {
    member = value.boolean();
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    member = value.uint64();
  } else if constexpr (std::is_integral_v<T>) {
    member = value.integer<T>(std::min<std::int64_t>(field.at_least, as_default));
  } else if constexpr (std::is_same_v<T, Percent>) {
    const auto percent = value.integer<std::int32_t>(-1);  // -1, of older cases: absent
    member = percent < 0 ? Percent() : Percent(percent);
  } else if constexpr (std::is_enum_v<T>) {
    member = read_words<T>(value);
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
    out.string(kWordsOf<T>[static_cast<std::size_t>(member)]);
  else if constexpr (std::is_same_v<T, std::string>)
    out.string(member);
  else if constexpr (std::is_same_v<T, Parts>)
    out.string(connector_parts_text(member));
  else if constexpr (std::is_same_v<T, Names>)
    out.strings(member);
  else
    out.integers(member);
}

// A row for the member that `path` leads to from a RunSpec.
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
    field.words = kWordsOf<T>;
    if (field.choices.empty()) field.choices = kWordsOf<T>;
  }
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
template <auto member>
constexpr RunField engine_row(RunField field) {
  field.saved_in = SavedIn::engine;
  return row<&RunSpec::engine, member>(field);
}
template <auto... path>
constexpr RunField setting_row(RunField field) {
  field.saved_in = SavedIn::settings;
  return row<path...>(field);
}

}  // namespace lockstep::run_rows
