// Every planted defect is found by a check that the catalogue names, in a case that agrees without
// it: what a check cannot find, it does not check.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "cli/mutant_bench.h"
#include "cuda_backend/defects/backend_mutants.h"
#include "properties/mutants/mutant_search.h"
#include "reference/defects/scheduler_defect.h"
#include "reference/profiles/releases.h"
#include "reference/types/view_types.h"
#include "sim/connectors/offload_connector.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/ranks/data_parallel.h"

namespace lockstep {
namespace {

std::vector<std::string> ids() {
  std::vector<std::string> all;
  for (const Mutant& mutant : mutant_catalogue()) all.emplace_back(mutant.id);
  return all;
}

std::string test_name(const testing::TestParamInfo<std::string>& id) {
  std::string name = id.param;
  std::ranges::replace(name, '-', '_');
  return name;
}

// Seeds are tried from 1 on: the same ones on every machine.
MutantReport search(const std::string& id, std::int64_t shrink_evaluations_max) {
  MutantSearchOptions options;
  options.cases_max = 500;
  options.shrink_evaluations_max = shrink_evaluations_max;
  return search_mutant(*find_mutant(id), mutant_bench(), options);
}

class Mutants : public testing::TestWithParam<std::string> {};

TEST_P(Mutants, IsFoundByACheckThatTheCatalogueNames) {
  const MutantReport report = search(GetParam(), 0);
  ASSERT_TRUE(report.caught) << "not in " << report.cases << " cases";
  EXPECT_TRUE(report.as_expected()) << report.failure.check << ": " << report.failure.what;
  if (!report.smallest) return;
  SavedCase healthy = *report.smallest;
  healthy.mutants.clear();
  const Outcome outcome = judge(healthy, mutant_bench().backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.check << ": " << outcome.what;
}

INSTANTIATE_TEST_SUITE_P(All, Mutants, testing::ValuesIn(ids()), test_name);

// Shrunk, a defect of decisions or of the device is a handful of requests.
class SmallestCasesSlow : public testing::TestWithParam<std::string> {};

TEST_P(SmallestCasesSlow, IsSmallAndFailsByTheSameCheck) {
  const MutantReport found = search(GetParam(), 0);
  const MutantReport small = search(GetParam(), 3'000);
  ASSERT_TRUE(small.caught);
  EXPECT_TRUE(small.failure.same_as(found.failure)) << small.failure.check;
  if (!small.smallest) return;
  EXPECT_LE(small.size.requests, 3);
  EXPECT_LE(small.size.tokens, found.size.tokens);
}

INSTANTIATE_TEST_SUITE_P(All, SmallestCasesSlow, testing::ValuesIn(ids()), test_name);

// Defects of the backend that are looked for in the memory of overlaid groups, which packs no
// layers into a page.
std::vector<std::string> ids_of_pages() {
  std::vector<std::string> all;
  for (const Mutant& mutant : mutant_catalogue())
    if (mutant.site == MutantSite::backend && mutant.cases().engine == releases().back().name &&
        mutant.id != "pack-stride" && mutant.id != "pack-offset")
      all.emplace_back(mutant.id);
  return all;
}

class InEveryOrderSlow : public testing::TestWithParam<std::string> {};

TEST_P(InEveryOrderSlow, ADefectIsCaughtInEveryOrderThatItsCasesTake) {
  int orders = 0;
  for (const CacheLayout order : kOverlaidLayouts) {
    MutantSearchOptions options;
    options.cases_max = 200;
    options.shrink_evaluations_max = 0;
    options.layout = order;
    const MutantReport report = search_mutant(*find_mutant(GetParam()), mutant_bench(), options);
    if (!report.applies()) continue;
    ++orders;
    EXPECT_TRUE(report.caught) << name_of(order) << ": " << report.cases << " cases, "
                               << report.refused << " refused";
    EXPECT_TRUE(!report.caught || report.as_expected())
        << name_of(order) << ": " << report.failure.check;
  }
  EXPECT_GT(orders, 0);
}

INSTANTIATE_TEST_SUITE_P(All, InEveryOrderSlow, testing::ValuesIn(ids_of_pages()), test_name);

TEST(Catalogue, ListsEverySwitchOnceAndNoOtherName) {
  std::set<std::string_view> switches = {"kernel-block-num-blocks", "pack-num-blocks",
                                         "state-spec-unhandled",
                                         "ambiguous-refused"};  // views alone
  for (const SchedulerDefect defect : kAllDefects<SchedulerDefect>)
    switches.insert(name_of(defect));
  for (const std::string_view name : backend_defect_names()) switches.insert(name);
  for (const DataParallelDefect defect : kAllDefects<DataParallelDefect>)
    switches.insert(name_of(defect));
  for (const CapacityDefect defect : kAllDefects<CapacityDefect>)
    switches.insert(lockstep::name_of(defect));
  for (const ConnectorDefect defect :
       {ConnectorDefect::transfer_failed_marked_ok, ConnectorDefect::free_send_in_flight})
    switches.insert(name_of(defect));
  for (const TransferDefect defect : kAllDefects<TransferDefect>) switches.insert(name_of(defect));
  switches.insert(name_of(HiddenStateDefect::hidden_save_race));
  // Two among connectors, and two that vllm-0.22.1 has of itself.
  switches.insert({"hma-any", "hma-before-config", "hold-head-of-line", "hold-partial-deadlock"});
  // No program edits a table (mutants_markdown says why); tests/cuda_backend/mutants_test.cpp
  // finds it.
  switches.erase("table-edit-lost");
  std::set<std::string_view> listed;
  for (const Mutant& mutant : mutant_catalogue()) {
    EXPECT_TRUE(listed.insert(mutant.id).second) << mutant.id << " is there twice";
    EXPECT_FALSE(mutant.source.empty() || mutant.mechanism.empty() || mutant.exposed_by.empty() ||
                 mutant.caught_by.empty())
        << mutant.id;
  }
  EXPECT_EQ(listed, switches);
  EXPECT_GE(listed.size(), 50u);
}

TEST(Catalogue, IsWhatThePageSays) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/docs/reference/mutants.md");
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), mutants_markdown())
      << "write it again: lockstep mutants --markdown docs/reference/mutants.md";
}

TEST(Search, FindsNothingWhereNothingIsPlanted) {
  Mutant harmless = *find_mutant("drop-slot");
  harmless.id = "";
  MutantSearchOptions options;
  options.cases_max = 20;
  const MutantBench bench = mutant_bench();
  const MutantReport report = search_mutant(harmless, bench, options);
  EXPECT_FALSE(report.caught) << report.failure.check << ": " << report.failure.what;
  EXPECT_EQ(report.cases, 20);
}

}  // namespace
}  // namespace lockstep
