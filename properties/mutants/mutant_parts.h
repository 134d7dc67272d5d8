// What the files of the catalogue share: names of the checks that find many defects, and the base
// configurations of the cases in which a defect is searched for.
//
// A bias names features that the defect needs (`always`) and features that hide or delay it
// (`never`). Everything else is left to the seeds: a bias that contained the failing case would
// prove nothing about the search.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "properties/mutants/mutant_search.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"

namespace lockstep {

// Phases of the comparison with the model, as in Outcome::check.
inline constexpr auto kWritten = "page_written";
inline constexpr auto kDigest = "attention_digest";
inline constexpr auto kOutput = "attention_output";
inline constexpr auto kStateOutput = "state_output";
inline constexpr auto kExtraction = "extraction";
inline constexpr auto kHost = "host_block";
inline constexpr auto kMemory = "memory_check";
inline constexpr auto kTable = "block_table";
inline constexpr auto kSlots = "slot_mapping";

// Features that cases of encoders, sinks and reference windows exclude: such caches cannot be
// combined with most of them, and a refused case costs as much as a judged one.
inline constexpr FeatureSet kApart{
    Feature::two_block_pool, Feature::states, Feature::sliding_window,
    Feature::chunked_local,  Feature::mla,    Feature::drafts};

// Returns the name of the newest modelled release, whose defects matter most.
inline std::string newest_release() { return std::string(engine_profiles().back().name); }

// Returns a bias for decisions only, with prefix caching. Thousands of cases per second, so events
// may be rare.
inline GeneratorOptions decisions(FeatureSet always, FeatureSet never = {}) {
  always.add(Feature::prefix_caching);
  return {.engine = newest_release(),
          .always = always,
          .never = never,
          .backend = "none",
          .check = "fast"};
}

// Returns a bias for cases on the CPU executor, with at most 6 requests. Dozens of cases per
// second, so the bias should make the defect likely. `check`: "check" if only a memory checker can
// see the defect.
inline GeneratorOptions on_executor(FeatureSet always, FeatureSet never = {},
                                    std::string check = "fast") {
  return {.engine = newest_release(),
          .always = always,
          .never = never,
          .backend = "simt",
          .check = std::move(check),
          .requests_max = 6};
}

// As on_executor(), with the newest release that has separate tensors per layer with the K/V
// dimension first. Views with that dimension exist only there.
inline GeneratorOptions on_older_pages(FeatureSet always, FeatureSet never = {}) {
  GeneratorOptions options = on_executor(always, never);
  for (const Release& release : releases())
    if (release.page_format == PageFormat::keys_first) options.engine = release.name;
  return options;
}

// Source of a defect that no report describes.
inline constexpr std::string_view kOwn = "this project";

// A row of the catalogue: its members in order, except the site.
inline Mutant row(std::string_view id, std::string_view source, std::string_view mechanism,
                  std::string_view exposed_by, std::vector<std::string_view> caught_by,
                  decltype(Mutant::bias) bias, decltype(Mutant::reshape) reshape = nullptr) {
  return {id, source, mechanism, exposed_by, std::move(caught_by), std::move(bias), reshape};
}

// Rows of the catalogue, one function per table. mutant_catalogue() assigns the site.
std::span<const Mutant> mutants_of_decisions();  // mutants_of_scheduler.cpp
std::span<const Mutant> mutants_of_host_tier();
std::span<const Mutant> mutants_of_transfers();
std::span<const Mutant> mutants_of_backend();
std::span<const Mutant> mutants_of_launches();
std::span<const Mutant> mutants_of_shares_and_pages();  // this and all below: mutants_of_plans.cpp
std::span<const Mutant> mutants_of_plans_at_work();
std::span<const Mutant> mutants_of_addresses();
std::span<const Mutant> mutants_of_figures();

}  // namespace lockstep
