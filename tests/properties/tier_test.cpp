// The property tier: generated cases with the kernels, in every mode of the executor and under both
// engines, as one test each so that they share out the processors. The fast slices, and all of
// TierSlow, count what they reached; a class that they never saw fails them.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "cuda_backend/backends.h"
#include "properties/fuzz/fuzz.h"

namespace lockstep {
namespace {

struct Slice {
  std::string_view engine;
  std::string_view check;
  std::int64_t runs;
  std::uint64_t first_seed;
  bool reaches_every_class = true;
};

// What the other release alone does.
std::set<std::string_view> beyond(std::string_view engine) {
  std::set<std::string_view> others;
  for (const FurtherClass& further : kFurtherClasses)
    if (!further.of(engine_profile(engine)))
      others.insert({name_of(further.cache), name_of(further.hit)});
  if (engine == "vllm-0.22.1") {
    others.insert({"engine_0_33_0",    "placeholder_draft",
                   "order_lbnhc",      "order_lbhnc",
                   "order_lhbnc",      "order_blnhc",
                   "order_blhnc",      "order_bhlnc",
                   "bounded_replay",   "ring",
                   "replayed_window",  "ring_gone_round",
                   "reference_window", "gap_behind_prompt",
                   "hisparse",         "hisparse_peers",
                   "hisparse_async",   "hisparse_drafts",
                   "page_spill",       "page_restore",
                   "lost_page",        "row_mirror",
                   "host_read",        "hot_region",
                   "adopted_page",     "end_with_copies",
                   "full_host_pool",   "match_unit",
                   "hit_inside_block", "copy_on_write"});
    return others;
  }
  others.insert({"engine_0_22_1", "mamba_all", "hit_mamba_all", "common_prefix", "dp_connector"});
  for (const Reached reached : classes_of_connectors()) others.insert(name_of(reached));
  return others;
}

void expect_agreement(const Slice& slice) {
  FuzzOptions options;
  options.generator.engine = slice.engine;
  options.generator.check = slice.check;
  options.backend = make_simt_backend;
  options.first_seed = slice.first_seed;
  options.runs = slice.runs;
  const FuzzReport report = fuzz(options);
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "lockstep fuzz --seed " << failure.seed << " --engine " << slice.engine
                  << " --check " << slice.check << ": " << failure.check << ": " << failure.what;
  EXPECT_EQ(report.cases, slice.runs);
  if (!slice.reaches_every_class) return;
  const auto others = beyond(slice.engine);
  for (const std::string_view name : report.tally.missing())
    EXPECT_TRUE(others.contains(name)) << name << ": never in " << report.cases << " cases";
}

std::string slice_name(const testing::TestParamInfo<Slice>& slice) {
  std::string name(slice.param.engine);
  std::ranges::replace(name, '-', '_');
  std::ranges::replace(name, '.', '_');
  return name + "_" + std::string(slice.param.check);
}

class Tier : public testing::TestWithParam<Slice> {};

TEST_P(Tier, GeneratedCasesAgree) { expect_agreement(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Slices, Tier,
                         testing::Values(Slice{"vllm-0.22.1", "fast", 1'200, 1'000'000},
                                         Slice{"vllm-0.33.0", "fast", 1'200, 2'000'000},
                                         Slice{"vllm-0.22.1", "check", 80, 3'000'000, false},
                                         Slice{"vllm-0.33.0", "check", 80, 4'000'000, false},
                                         Slice{"vllm-0.22.1", "hunt", 60, 5'000'000, false},
                                         Slice{"vllm-0.33.0", "hunt", 60, 6'000'000, false}),
                         slice_name);

class TierSlow : public testing::TestWithParam<Slice> {};

TEST_P(TierSlow, GeneratedCasesAgreeAndReachEveryClass) { expect_agreement(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Slices, TierSlow,
                         testing::Values(Slice{"vllm-0.22.1", "check", 1'200, 13'000'000},
                                         Slice{"vllm-0.33.0", "check", 1'200, 14'000'000},
                                         Slice{"vllm-0.22.1", "hunt", 1'200, 15'000'000},
                                         Slice{"vllm-0.33.0", "hunt", 1'200, 16'000'000}),
                         slice_name);

}  // namespace
}  // namespace lockstep
