// What the files of the catalogue share: its parts, the checks that find many of the defects, and
// the cases in which they are looked for.
#pragma once

#include <span>
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

// What the cases of encoders, sinks and reference windows do without.
inline constexpr FeatureSet kApart{
    Feature::two_block_pool, Feature::states, Feature::sliding_window,
    Feature::chunked_local,  Feature::mla,    Feature::drafts};

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

// Rows of the catalogue.
std::span<const Mutant> mutants_of_decisions();  // mutants_of_scheduler.cpp
std::span<const Mutant> mutants_of_host_tier();
std::span<const Mutant> mutants_of_transfers();
std::span<const Mutant> mutants_of_backend();
std::span<const Mutant> mutants_of_launches();
std::span<const Mutant> mutants_of_shares_and_pages();  // mutants_of_plans.cpp, as those below
std::span<const Mutant> mutants_of_plans_at_work();
std::span<const Mutant> mutants_of_addresses();
std::span<const Mutant> mutants_of_figures();

}  // namespace lockstep
