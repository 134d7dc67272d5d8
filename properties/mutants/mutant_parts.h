// What the files of the catalogue share: its parts, the checks that find many of the defects, and
// the cases in which they are looked for.
#pragma once

#include <string>

#include "properties/mutants/mutant_search.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"

namespace lockstep {

inline constexpr auto kWritten = "page_written";
inline constexpr auto kDigest = "attention_digest";
inline constexpr auto kOutput = "attention_output";
inline constexpr auto kStateOutput = "state_output";
inline constexpr auto kExtraction = "extraction";
inline constexpr auto kHost = "host_block";
inline constexpr auto kMemory = "memory_check";
inline constexpr auto kTable = "block_table";
inline constexpr auto kSlots = "slot_mapping";

inline std::string newest_release() { return std::string(engine_profiles().back().name); }

// Cases of decisions only: thousands per second.
inline GeneratorOptions decisions(FeatureSet always, FeatureSet never = {}) {
  always.add(Feature::prefix_caching);
  return {.engine = newest_release(),
          .always = always,
          .never = never,
          .backend = "none",
          .check = "fast"};
}

// Cases that run on the CPU executor: dozens a second.
inline GeneratorOptions on_executor(FeatureSet always, FeatureSet never = {},
                                    std::string check = "fast") {
  return {.engine = newest_release(),
          .always = always,
          .never = never,
          .backend = "simt",
          .check = std::move(check),
          .requests_max = 6};
}

// The same with pages in tensors of their own for each layer, by the newest release with such.
inline GeneratorOptions on_older_pages(FeatureSet always, FeatureSet never = {}) {
  GeneratorOptions options = on_executor(always, never);
  for (const Release& release : releases())
    if (release.page_format == PageFormat::keys_first) options.engine = release.name;
  return options;
}

// mutants_of_scheduler.cpp
std::vector<Mutant> hash_mutants();
std::vector<Mutant> hit_mutants();
std::vector<Mutant> free_mutants();
std::vector<Mutant> state_mutants();
std::vector<Mutant> schedule_mutants();
std::vector<Mutant> fault_mutants();
std::vector<Mutant> encoder_mutants();
std::vector<Mutant> protocol_mutants();
std::vector<Mutant> staging_mutants();
std::vector<Mutant> holding_mutants();
std::vector<Mutant> connector_mutants();
std::vector<Mutant> host_tier_mutants();
// mutants_of_backend.cpp
std::vector<Mutant> row_mutants();
std::vector<Mutant> state_copy_mutants();
std::vector<Mutant> state_update_mutants();
std::vector<Mutant> further_cache_mutants();
std::vector<Mutant> rows_per_token_mutants();
std::vector<Mutant> encoder_and_sink_mutants();
std::vector<Mutant> rank_mutants();
// mutants_of_plans.cpp
std::vector<Mutant> drafter_mutants();
std::vector<Mutant> page_decision_mutants();
std::vector<Mutant> page_row_mutants();
std::vector<Mutant> share_mutants();
std::vector<Mutant> share_decision_mutants();
std::vector<Mutant> address_mutants();
std::vector<Mutant> figure_mutants();
std::vector<Mutant> view_mutants();
// mutants_of_launches.cpp
std::vector<Mutant> graph_mutants();
std::vector<Mutant> number_mutants();
std::vector<Mutant> state_number_mutants();
std::vector<Mutant> table_mutants();
std::vector<Mutant> slot_mutants();

}  // namespace lockstep
