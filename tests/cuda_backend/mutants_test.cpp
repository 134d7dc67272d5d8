// Every planted defect of the backend upsets something that is compared, on a plan that exposes it,
// and leaves the evidence that it should.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "cuda_backend/defects/backend_mutants.h"
#include "tests/cuda_backend/toy_engine.h"

namespace lockstep {
namespace {

struct Exposure {
  std::string mutant;
  std::string plan;      // of toy_plans()
  std::string evidence;  // in one of the differences
  int num_streams = 1;
  int graphs = 0;  // max_cudagraph_capture_size
};

void PrintTo(const Exposure& one, std::ostream* out) { *out << one.mutant << " on " << one.plan; }

std::vector<Exposure> exposures() {
  const std::string pairs = "pairs in pages, NHD",
                    hybrid = "hybrid, FlashAttention, kernel blocks of 32";
  return {
      {"wrong-stride", "two blocks", "page of block 0"},
      {"drop-slot", pairs, "digests"},
      {"stale-table-entry", "MLA", "tables of group 0"},
      {"table-edit-lost", "full attention and two windows share tensors", "tables of group 1"},
      {"write-past-page", "MLA", "page of block"},
      {"uninitialised-read", pairs, "uninitialised read"},
      {"race", pairs, "race"},
      {"slot-wrong-block-size", "equal pages, other block sizes", "slots of group 0"},
      {"slot-wrong-block-size", hybrid, "slots of group 1"},
      {"slot-pad-rows", pairs, "slots of group 0"},
      {"slot-pad-rows", pairs, "page of block 0"},
      {"slot-pad-rows", pairs, "slots of group 0", 1, 8},
      {"slot-pad-rows", pairs, "page of block 0", 1, 8},
      {"graph-too-small", pairs, "slots of group 0", 1, 64},
      {"slot-stale-tail", pairs, "slots of group 0"},
      {"state-copy-lost", hybrid, "page of block"},
      {"state-pads-included", hybrid, "page of block"},
      {"kernel-block-unsplit", hybrid, "slots of group 1"},
      {"zero-lost", pairs, "page of block"},
      {"copy-unordered", hybrid, "unordered: copy_blocks", 4},
      // Over several streams operations say what they touch, and these touch something else.
      {"wrong-stride", pairs, "undeclared access", 2},
      {"layout-order-lost", pairs, "page of block"},
      {"hidden-slot-mapping", "hidden states in padded pages", "slots of group 1"},
      {"slot-past-row", "equal pages, other block sizes", "slots of group 1"},
      {"table-async-upload", pairs, "tables of group 0"},
      {"table-late-clear", "MLA", "tables of group 0"},
      {"state-update-race", hybrid, "race"},
      {"stale-nan", pairs, "output 0"},
      {"layout-two-blocks", "hidden states in padded pages", "digests"},
      {"layout-not-updated", hybrid, "digests"},
      {"layout-equal-page", "equal pages, other block sizes", "page of block"},
      {"layout-two-heads", pairs, "page of block"},
      {"state-stride-unpadded", hybrid, "page of block"},
      {"state-offset-wrong-itemsize", hybrid, "page of block"},
      {"pack-stride", "packed by two, FlashAttention", "page of block"},
      {"pack-offset", "packed by two, FlashInfer", "digests"},
  };
}

class MutantTest : public ::testing::TestWithParam<Exposure> {};

TEST_P(MutantTest, IsSeenInCheckMode) {
  const auto plans = toy_plans();
  const auto plan = std::ranges::find(plans, GetParam().plan, &ToyPlan::name);
  ASSERT_NE(plan, plans.end());
  ToyPlan planted = *plan;
  planted.config.check = CheckMode::check;
  planted.config.mutant = GetParam().mutant;
  planted.config.num_streams = GetParam().num_streams;
  planted.config.delay_streams = planted.config.num_streams > 1;
  planted.config.max_cudagraph_capture_size = GetParam().graphs;
  std::string all;
  for (const std::string& line : toy_differences(planted, 24)) all += line + "\n";
  EXPECT_NE(all.find(GetParam().evidence), std::string::npos) << all;
}

// Without the report of the missing order, pages show it, for some orders of the operations.
TEST(Mutants, CopyUnorderedLeavesWrongPagesWhenOperationsRunLate) {
  const auto plans = toy_plans();
  ToyPlan plan =
      *std::ranges::find(plans, "hybrid, FlashAttention, kernel blocks of 32", &ToyPlan::name);
  plan.config.mutant = "copy-unordered";
  plan.config.num_streams = 4;
  plan.config.delay_streams = true;
  int diverged = 0;
  for (plan.config.seed = 0; plan.config.seed < 60; ++plan.config.seed) {
    const auto lines = toy_differences(plan, 12);
    diverged += std::ranges::any_of(lines, [](const std::string& line) {
      return line.find("page of block") != std::string::npos;
    });
  }
  EXPECT_GE(diverged, 2);
}

INSTANTIATE_TEST_SUITE_P(Backend, MutantTest, ::testing::ValuesIn(exposures()),
                         [](const auto& one) {
                           std::string name = one.param.mutant + "_" + one.param.evidence +
                                              (one.param.graphs > 0 ? "_captured" : "");
                           for (char& c : name)
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           return name;
                         });

// A defect without an exposure above shows in larger cases: tests/mutants compares the catalogue
// with the switches and searches a case for each.
TEST(Mutants, EveryDefectHasItsOwnNameAndEveryExposureIsOfOne) {
  std::set<std::string_view> listed;
  for (const std::string_view name : backend_defect_names())
    EXPECT_TRUE(listed.insert(name).second) << name << " is there twice";
  for (const Exposure& exposure : exposures())
    EXPECT_TRUE(listed.contains(exposure.mutant)) << exposure.mutant;
}

}  // namespace
}  // namespace lockstep
