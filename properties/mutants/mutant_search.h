// The search for a planted defect. It generates cases, biased by the catalogue, until one fails
// with the defect and agrees without it. Then it shrinks that case.
//
// Invariants
// (1) Seeds count up from the first one: the same limits find the same case on every machine.
// (2) A case that also fails without the defect shows something else. It is counted as flawed, and
//     the search continues.
// (3) Cases are judged in a child process, so a crash or a hang counts as a failure.
// (4) If the shrunk case has more than 3 requests, the search tries up to 20 more failing cases for
//     a smaller one.
//
// Times are informative; only a hanging case depends on them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "properties/generate/generator.h"
#include "properties/judge/failure.h"
#include "properties/judge/judge.h"
#include "properties/judge/transfer_judge.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {

// Every defect that can be planted, with the real defect that it represents, and where to search
// for it. The defects that a harness has found are the proof that it finds any.
//
// Invariants
// (1) An id is unique. It is the name in SavedCase::mutants, `--mutant` and
//     docs/reference/mutants.md.
// (2) A bias narrows the search to configurations in which the defect can show; seeds decide the
//     rest. No entry contains a failing case.
// (3) `caught_by` lists the checks that may find it first; any other check is reported as a
//     surprise.
//
// Not here: what a defect does (cuda_backend/defects/, and the switches of the scheduler, ranks,
// hidden states, pairs and connectors). The catalogue uses their names.

enum class MutantSite : std::uint8_t {
  scheduler,  // decisions: hashes, hits, frees, states, admission
  backend,    // tables, slots, kernels and views at work
  views,      // views and addresses of a memory plan, proved by bytes
  planner,    // figures about a plan: capacity, buffer rows, concurrent requests
  transfer,   // two engines with a network, and the set-up of connectors
};
std::string_view name_of(MutantSite site);

// One row of the catalogue. The texts appear on a page of the documentation.
struct Mutant {
  std::string_view id;
  std::string_view source;      // reports of the real defect: "vllm 37236"
  std::string_view mechanism;   // one line, without a full stop
  std::string_view exposed_by;  // configuration or event that it needs
  // Checks that may find it first, as in Outcome::check.
  std::vector<std::string_view> caught_by;

  // Configuration of the generated cases at sites scheduler and backend; PlanBias at sites views
  // and planner, TransferBias at site transfer.
  std::variant<GeneratorOptions, PlanBias, TransferBias> bias;
  // Changes a generated case where no feature of the generator does. May be null.
  void (*reshape)(SavedCase& saved) = nullptr;
  MutantSite site = MutantSite::scheduler;  // set by mutant_catalogue()

  // REQUIRES: site scheduler or backend.
  const GeneratorOptions& cases() const { return std::get<GeneratorOptions>(bias); }
};

// Returns all rows, ordered by site.
std::span<const Mutant> mutant_catalogue();
// Returns the row with this id; null: there is none.
const Mutant* find_mutant(std::string_view id);
// Returns docs/reference/mutants.md: the catalogue as a page.
std::string mutants_markdown();

// Another engine, whose decisions run above a backend with a defect.
struct MutantDecider {
  DecisionsFactory decisions;
  std::string engine;             // profile of its release
  FeatureSet never;               // features that it does not support
  std::function<void()> restart;  // called after a child that may have left it in mid-reply
};

// The modules under test. The caller passes them in, because this library does not link the
// backend.
struct MutantBench {
  BackendFactory backend;
  PlanSuspect plans;
  // Absent: the model decides. REQUIRES: one search at a time, since all children share the
  // engine's process; why_not_below() is empty.
  std::optional<MutantDecider> decider = {};
};

struct MutantSearchOptions {
  std::uint64_t first_seed = 1;
  // Limit of the search, flawed and refused cases included.
  std::int64_t cases_max = 5'000;
  std::int64_t shrink_evaluations_max = 3'000;  // limit per caught case; 0: no shrinking
  // Limit per case; beyond it the case hangs, which counts as a failure.
  std::chrono::milliseconds case_time_limit{10'000};
  // Sites scheduler and backend: layout of every case; absent: as generated.
  std::optional<CacheLayout> layout = {};
};

// What one search has judged, over all rounds.
struct MutantCounts {
  std::int64_t cases = 0;    // judged cases, the one that caught it included
  std::int64_t flawed = 0;   // of these: failed without the defect too
  std::int64_t refused = 0;  // of these: refused; `refusal` is the first reason
  std::string refusal = {};
  double seconds = 0;         // time until it was caught
  double shrink_seconds = 0;  // time of shrinking
};

// The result of one search.
struct MutantReport : MutantCounts {
  const Mutant* mutant = nullptr;
  bool caught = false;
  std::uint64_t seed = 0;    // of the case that caught it
  bool in_an_order = false;  // true if MutantSearchOptions::layout was set
  // Failure of the smallest case.
  Failure failure = {};
  // Sites scheduler and backend: the shrunk case, and its steps.
  std::optional<SavedCase> smallest = {};
  CaseSize size = {};
  // Steps of the smallest case, up to its failure.
  std::int64_t steps = 0;
  // True if no further shrinking step succeeds.
  bool is_minimal = false;
  std::string plan = {};  // sites views, planner, transfer: the case in words

  // Returns true if a check that the catalogue expects found it.
  bool as_expected() const;
  // Returns false if at least nine of ten cases were refused under the requested layout. The others
  // are plain cases, which every layout accepts, and prove nothing.
  bool applies() const { return caught || !in_an_order || refused < cases * 9 / 10; }
};

// Returns why the defect cannot be searched for below another engine's decisions; empty: it can.
std::string why_not_below(const MutantDecider& decider, const Mutant& mutant);

// Searches for the defect. Stops early if a stop signal arrives; `caught` is then false.
MutantReport search_mutant(const Mutant& mutant, const MutantBench& bench,
                           const MutantSearchOptions& options);
// Generates the case of a seed as the search does, with the defect planted.
SavedCase mutant_case(const Mutant& mutant, std::uint64_t seed,
                      const MutantDecider* decider = nullptr);

}  // namespace lockstep
