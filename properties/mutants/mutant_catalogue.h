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
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "properties/generate/generator.h"

namespace lockstep {

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

}  // namespace lockstep
