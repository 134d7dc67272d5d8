// The search for a planted defect: generates cases, biased by the catalogue, until one fails with
// the defect and agrees without it. Then it shrinks the case.
//
// Invariants
// (1) Seeds count up from the first: the same limits find the same case on every machine.
// (2) A case that fails without the defect shows a different defect: it is counted, and the search
//     continues.
// (3) Cases are judged in a child process, so that a crash or a hang counts as a failure.
// (4) If the shrunk case has more than 3 requests, the search tries a few more cases for a smaller
//     one.
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
// (1) An id is the name that SavedCase::mutants, `--mutant` and docs/reference/mutants.md use; it
//     is unique.
// (2) A bias narrows the search to configurations in which the defect can show; seeds decide the
//     rest. No entry contains a failing case.
// (3) `caught_by` lists the checks that may find it first; any other check is reported as a
//     surprise.
//
// Not here: what a defect does (cuda_backend/defects/, and the switches of the scheduler, ranks,
// hidden states, pairs and connectors); the catalogue uses their names.

enum class MutantSite : std::uint8_t {
  scheduler,  // decisions: hashes, hits, frees, states, admission
  backend,    // tables, slots, kernels and views at work
  views,      // views and addresses of a memory plan, proved by bytes
  planner,    // figures about a plan: capacity, rows of buffers, requests at once
  transfer,   // two engines with a network in between, and connectors as they are set up
};
std::string_view name_of(MutantSite site);

struct Mutant {
  std::string_view id;
  MutantSite site = MutantSite::scheduler;   // of its part of the catalogue
  std::string_view source = "this project";  // "vllm 37236"; report of the real defect
  std::string_view mechanism;                // one line
  std::string_view exposed_by;  // the configuration or event without which it cannot show
  std::vector<std::string_view> caught_by = {};

  // Sites scheduler and backend: what the cases of the search are made of.
  GeneratorOptions bias = {};
  // Changes a generated case where the generator has no feature for it; may be null.
  void (*reshape)(SavedCase& saved) = nullptr;
  // Sites views and planner.
  PlanBias plan = {};
  // Site transfer.
  TransferBias transfer = {};
};

// By site, in the order of the sites.
std::span<const Mutant> mutant_catalogue();
// Null: there is none of this name.
const Mutant* find_mutant(std::string_view id);
// docs/reference/mutants.md: the catalogue as a page.
std::string mutants_markdown();

// Another engine that decides, above a backend with a defect.
struct MutantDecider {
  DecisionsFactory decisions;
  std::string engine;             // the profile of its release
  FeatureSet never;               // what it cannot be asked for
  std::function<void()> restart;  // after a child process that may have left it in mid-sentence
};

// The modules under test, passed in by the caller that links them.
struct MutantBench {
  BackendFactory backend;
  PlanSuspect plans;
  // Absent: the model. REQUIRES: one search at a time, and why_not_below() is empty.
  std::optional<MutantDecider> decider = {};
};

struct MutantSearchOptions {
  std::uint64_t first_seed = 1;
  std::int64_t cases_max = 5'000;
  std::int64_t shrink_evaluations_max = 3'000;  // 0: the case stays as it was found
  std::chrono::milliseconds case_time_limit{10'000};
  // Sites scheduler and backend: in this layout of the cache; absent: as generated.
  std::optional<CacheLayout> layout = {};
};

struct MutantReport {
  const Mutant* mutant = nullptr;
  bool caught = false;
  std::uint64_t seed = 0;    // of the case that caught it
  std::int64_t cases = 0;    // that were judged, that one included
  std::int64_t flawed = 0;   // of these, cases that failed without the defect too
  std::int64_t refused = 0;  // ... that were refused, and why the first one was
  std::string refusal = {};
  bool in_an_order = false;  // MutantSearchOptions::layout
  Failure failure = {};
  double seconds = 0;         // until it was caught
  double shrink_seconds = 0;  // and shrunk
  // Sites scheduler and backend: the shrunk case, and its steps.
  std::optional<SavedCase> smallest = {};
  CaseSize size = {};
  std::int64_t steps = 0;
  bool is_minimal = false;
  std::string plan = {};  // sites views, planner and transfer: the case in words

  // By a check that the catalogue expects.
  bool as_expected() const;
  // False: hardly a case took the order asked for; a few are plain ones, which take any.
  bool applies() const { return caught || !in_an_order || refused < cases * 9 / 10; }
};

// Why a defect is not searched for below the decisions of another engine; empty: it can be.
std::string why_not_below(const MutantDecider& decider, const Mutant& mutant);

MutantReport search_mutant(const Mutant& mutant, const MutantBench& bench,
                           const MutantSearchOptions& options);
// The case of a seed, as the search makes it, with the defect planted.
SavedCase mutant_case(const Mutant& mutant, std::uint64_t seed,
                      const MutantDecider* decider = nullptr);

}  // namespace lockstep
