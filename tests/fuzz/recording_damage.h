// Recordings damaged at random, by their structure: numbers become 0, -1, huge or a neighbour's,
// names are swapped or unknown, lines and lists lose, repeat and exchange entries, keys are missing
// or from another step, types change. Most results are still a recording to the reader, with
// decisions that no engine ever made.
//
// For all of them: conform finds a mismatch, audit reports something, or the file is refused with
// one message that names file and line; replay refuses it or runs to its end. Nothing crashes the
// process.
#pragma once

#include <cstdint>
#include <string>

#include "properties/generate/choices.h"

namespace lockstep {

// The same choices give the same text. No choices at all: the beginning of a sound recording.
std::string damaged_recording(ChoiceSource& choices);

// The outcome of a damaged recording under each command.
struct DamageOutcome {
  bool is_read = false;  // its reader takes every line
  bool conforms = false;
  bool parts = false;       // a mismatch
  bool is_clean = false;    // the audit finds nothing
  bool is_faulted = false;  // ... or something
  bool is_replayed = false;
};
// Stops the process where one of the commands would, and where a refusal names no file and line.
DamageOutcome judge_damaged(const std::string& recording);

struct DamageCounts {
  std::int64_t runs = 0;
  std::int64_t read = 0, conforming = 0, parting = 0, clean = 0, faulted = 0, replayed = 0;
  void add(const DamageOutcome& outcome);
  void add(const DamageCounts& counts);
};
struct DamageRuns {
  DamageCounts counts;
  std::int64_t crashes = 0;
  std::string report;  // of the crashes, each kind once: seed, last words, the recording
};
// Seeds first, first + 1, ...: each judged in a child process, some hundred to a child.
DamageRuns run_damaged(std::uint64_t first_seed, std::int64_t runs);

}  // namespace lockstep
