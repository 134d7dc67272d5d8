// What the catalogue's defects of the device side share: the checks that find them and the cases in
// which they are looked for. They are planted in cuda_backend/defects/.
#pragma once

#include <string>

#include "properties/generate/generator.h"
#include "properties/mutants/mutant_catalogue.h"

namespace lockstep {

inline constexpr auto kBackend = MutantSite::backend;
inline constexpr auto kWritten = "page_written";
inline constexpr auto kDigest = "attention_digest";
inline constexpr auto kOutput = "attention_output";
inline constexpr auto kStateOutput = "state_output";
inline constexpr auto kExtraction = "extraction";
inline constexpr auto kMemory = "memory_check";
inline constexpr auto kTable = "block_table";
inline constexpr auto kSlots = "slot_mapping";

// Cases that run on the CPU executor: dozens a second. Steps with drafts in flight have no program.
inline GeneratorOptions on_device(FeatureSet always, FeatureSet never = {},
                                  std::string check = "fast") {
  never.add(Feature::async_scheduling);
  return {.engine = "vllm-0.33.0",
          .always = always,
          .never = never,
          .backend = "simt",
          .check = std::move(check),
          .requests_max = 6};
}

// The parts of mutants_of_backend() by file.
std::vector<Mutant> table_mutants();
std::vector<Mutant> view_mutants();
std::vector<Mutant> launch_mutants();

}  // namespace lockstep
