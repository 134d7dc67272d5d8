// The options of a run, one row each: name in files and on the command line, member of RunSpec,
// range and source. The command line, saved cases, engine options, results, the shrinker and the
// summary all use these rows; a new option is one row and its use.
//
// Invariants
// (1) Names, flags and members are each in one row.
// (2) A saved case omits a setting that has its default.
// (3) The order of rows is the order of keys in files and of options in the help.
//
// Not checked here: combinations of options. In engine options of files only at_least applies:
// other engines have larger values than the command line.
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

// Part of a saved case that stores an option. nowhere: the case stores the option's result, as for
// RunRecipe.
enum class SavedIn : std::uint8_t { nowhere, engine, header, settings };

// How the shrinker simplifies an option, and whether the option counts as set in a case's summary.
enum class Shrinks : std::uint8_t {
  // To the value of simplest_run(); counts while the value differs.
  reset,
  // The same; where the case then no longer fails, down to `lowest`.
  lowered,
  // Reset; counts as a size of the case.
  size,
  // Lowered by a rule of its own; counts as a size of the case.
  limit,
  never,
};

// Inputs that already determine an option, so that the command line must not give it. Bits.
enum SaidBy : std::uint8_t { kByNobody = 0, kByModel = 1, kByRecording = 2, kBySavedCase = 4 };
// A saved case determines everything that a recording does.
inline constexpr std::uint8_t kByRecordings = kByRecording | kBySavedCase;
inline constexpr std::uint8_t kByModels = kByModel | kByRecordings;

// Type of a row's value, from the type of its member.
enum class FieldKind : std::uint8_t { flag, number, uint64, word, text };

// One option. Empty texts and null functions mean that the row has no such part: a row without a
// flag is not available on the command line.
struct RunField {
  std::string_view name{};  // in files and results
  // Name of the setting in older saved cases; read, never written.
  std::string_view old_name{};
  // Command line: group of the help, flags and their texts. For a switch, `flag` sets it and
  // `no_flag` resets it. {} in `help` stands for the default.
  std::string_view group{}, flag{}, help{}, no_flag{}, no_help{};
  // Placeholder of the value in the help; empty: by the kind.
  std::string_view value_name{};
  std::string_view default_text{};  // shown in the help
  // True if the flag without a value means default_text.
  bool value_is_optional = false;
  // For the refusal of a text: what it should have been.
  std::string_view expected{};
  // Range of a number.
  std::int64_t at_least = 0, at_most = INT32_MAX;
  // Words that the command line accepts; empty: every word of the type.
  std::span<const std::string_view> choices{};
  std::uint8_t said_by = kByNobody;
  SavedIn saved_in = SavedIn::nowhere;
  Shrinks shrinks = Shrinks::reset;
  std::int64_t lowest = 0;  // Shrinks::lowered
  // Text of the summary where the value is not the default, with {} for its number: ", {} drafts".
  std::string_view phrase{};

  // Access to the member, instantiated by row<path>() of run_field_rows.h.
  FieldKind kind = FieldKind::flag;
  std::span<const std::string_view> words{};
  void (*copy)(const RunSpec& from, RunSpec& to) = nullptr;
  bool (*is_equal)(const RunSpec& one, const RunSpec& other) = nullptr;
  // Flags count as 0 and 1. REQUIRES: kind is flag or number.
  std::int64_t (*number)(const RunSpec&) = nullptr;
  void (*set_number)(RunSpec&, std::int64_t) = nullptr;
  void (*set_uint64)(RunSpec&, std::uint64_t) = nullptr;
  // Returns false if the text is not a value of this field. REQUIRES: kind is word or text.
  bool (*set_text)(RunSpec&, std::string_view) = nullptr;
  void (*read)(const RunField&, JsonValue, RunSpec&) = nullptr;
  void (*write)(JsonWriter&, const RunSpec&) = nullptr;

  // Compares with a default-constructed RunSpec, not with simplest_run().
  bool is_default(const RunSpec& run) const;
};

// Returns the value as a file has it, a word or text without its quotes.
std::string value_text(const RunField& field, const RunSpec& run);

// In the order of files and of the help.
std::span<const RunField> run_fields();
// Finds a row by its name in files. Linear: there are about 70 rows.
const RunField* find_run_field(std::string_view name);  // null: none
// REQUIRES: a row of that name.
const RunField& run_field(std::string_view name);
// Every default, but with the plainest device: no backend and the fast check. The shrinker's goal.
const RunSpec& simplest_run();

// The options that a command line gave: some rows, with their values in `spec`. The other members
// of `spec` are defaults and must not be applied.
struct GivenRun {
  RunSpec spec;
  std::vector<const RunField*> given;
  std::string refused;  // the first value that a row refuses, as an error message

  bool has(std::string_view name) const;
  // Marks a row as given; repeated flags count once.
  void add(const RunField& field);
  // REQUIRES: a word or a text that the row takes.
  void set_text(std::string_view name, std::string_view text);
  // Unmarks a row; its value in `spec` stays but is no longer applied.
  void forget(std::string_view name);
  // Overwrites in `run` the options that were given.
  void apply_to(RunSpec& run) const;
  // Returns the flag of the first given row that `input` determines itself; empty: none, and the
  // command line may be applied.
  std::string first_said_by(SaidBy input) const;
};

}  // namespace lockstep
