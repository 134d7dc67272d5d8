// The options of a run, one row each: name in files and on the command line, member of RunSpec,
// range and source. The command line, saved cases, engine options, results, the shrinker and the
// summary all use these rows; a new option is one row and its use.
//
// Invariants
// (1) Names, flags and members are each in one row.
// (2) A saved case omits a setting that has its default.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

// Where a saved case stores an option. nowhere: it stores the option's result.
enum class SavedIn : std::uint8_t { nowhere, engine, header, settings };

// How the shrinker makes an option simpler, and whether it counts as one that is set.
enum class Shrinks : std::uint8_t {
  reset,    // to that of simplest_run(); counts while it is another
  lowered,  // the same; where that does not fail, down to `lowest`
  size,     // reset; counts as a size of the case
  limit,    // lowered by a rule of its own; counts as a size of the case
  never,
};

// Sources that already set an option, so that the command line may not. Bits.
enum SaidBy : std::uint8_t { kByNobody = 0, kByModel = 1, kByRecording = 2, kBySavedCase = 4 };
// A saved case says all that a recording says.
inline constexpr std::uint8_t kByRecordings = kByRecording | kBySavedCase;
inline constexpr std::uint8_t kByModels = kByModel | kByRecordings;

enum class FieldKind : std::uint8_t { flag, number, uint64, word, text };

struct RunField {
  std::string_view name{};      // in files and results
  std::string_view old_name{};  // of the same setting in older saved cases
  // The command line; an empty flag: not available there. For a switch, `flag` sets it, `no_flag`
  // resets it. {} in `help`: the default.
  std::string_view group{}, flag{}, help{}, no_flag{}, no_help{};
  std::string_view value_name{};                   // in the help; empty: as the kind has it
  std::string_view default_text{};                 // shown in the help
  bool value_is_optional = false;                  // the flag alone says default_text
  std::string_view expected{};                     // of a text that may be refused
  std::int64_t at_least = 0, at_most = INT32_MAX;  // number
  std::span<const std::string_view> choices{};     // word, text; empty: every word of the type
  std::uint8_t said_by = kByNobody;
  SavedIn saved_in = SavedIn::nowhere;
  Shrinks shrinks = Shrinks::reset;
  std::int64_t lowest = 0;    // Shrinks::lowered
  std::string_view phrase{};  // of the summary, where it is not the default; {}: its number

  // Of the member.
  FieldKind kind = FieldKind::flag;
  std::span<const std::string_view> words{};
  void (*copy)(const RunSpec& from, RunSpec& to) = nullptr;
  bool (*is_equal)(const RunSpec& one, const RunSpec& other) = nullptr;
  // Flags count 0 and 1. REQUIRES: a flag, a number.
  std::int64_t (*number)(const RunSpec&) = nullptr;
  void (*set_number)(RunSpec&, std::int64_t) = nullptr;
  void (*set_uint64)(RunSpec&, std::uint64_t) = nullptr;
  // False: not a value of this field. REQUIRES: a word, a text.
  bool (*set_text)(RunSpec&, std::string_view) = nullptr;
  void (*read)(const RunField&, JsonValue, RunSpec&) = nullptr;
  void (*write)(JsonWriter&, const RunSpec&) = nullptr;

  bool is_default(const RunSpec& run) const;
};

// As in a file, a word or text without its quotes.
std::string value_text(const RunField& field, const RunSpec& run);

// In the order of files and of the help.
std::span<const RunField> run_fields();
const RunField* find_run_field(std::string_view name);  // null: none
// REQUIRES: a row of that name.
const RunField& run_field(std::string_view name);
// Every default, and the plainest device.
const RunSpec& simplest_run();

// What a command line said: some rows, with their values in `spec`.
struct GivenRun {
  RunSpec spec;
  std::vector<const RunField*> given;
  std::string refused;  // the first value that a row refuses, as an error message

  bool has(std::string_view name) const;
  void add(const RunField& field);
  // REQUIRES: a word or a text that the row takes.
  void set_text(std::string_view name, std::string_view text);
  void forget(std::string_view name);
  // Overwrites in `run` what was given.
  void apply_to(RunSpec& run) const;
  // The flag of the first row given that `input` says for itself; empty: none.
  std::string first_said_by(SaidBy input) const;
};

}  // namespace lockstep
