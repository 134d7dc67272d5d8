// The first place where two runs differ: two recordings, or two files of step hashes.
//
// Invariants
// (1) Within a step, a decision comes before a table, a table before a page, inputs come last.
// (2) Only what both files have is compared; `not_compared` lists the rest with the reason.
// (3) A file that was cut off or interrupted is compared up to its last whole step.
//
// Not compared: the engines' names and the arrival times of requests.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/recording/recorded_terms.h"

namespace lockstep {

enum class RunPart : std::uint8_t { decision, table, page, output, input, end };

struct RunDifference {
  std::int64_t step = 0;
  RunPart part = RunPart::decision;
  std::string what;       // "scheduled[2].blocks[0][1]", "tables.r1[0]"
  std::string left;       // of A; "absent"
  std::string right;      // of B
  std::string request{};  // empty: none is known
};

struct ComparedRun {
  std::string file;
  std::string engine;      // "vllm-0.33.0"
  std::string of;          // "recording", "step hashes, simt (CPU)"
  std::int64_t steps = 0;  // that were read
  std::string cut_off{};   // "cut off after step 41"; empty: the run is whole
};

struct SameRuns {
  std::array<ComparedRun, 2> runs;
  std::vector<FieldDifference> headers;
  std::optional<RunDifference> first;        // of decisions, tables, pages, outputs and the end
  std::optional<RunDifference> first_input;  // of recordings: up to `first`
  std::vector<std::string> not_compared;

  bool same() const { return headers.empty() && !first && !first_input; }
};

// Errors: damaged files, a file of another format, a recording with a file of hashes.
Result<SameRuns> compare_runs(const std::string& left, const std::string& right);

}  // namespace lockstep
