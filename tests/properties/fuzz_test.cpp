// Random cases agree, under both engines, with kernels and without; what they reach is counted; and
// a report does not depend on how the work was divided.
#include "properties/fuzz/fuzz.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/output_file.h"
#include "cuda_backend/backends.h"
#include "properties/judge/known_findings.h"
#include "tests/support/temporary_folder.h"

namespace lockstep {
namespace {

FuzzOptions fuzzing(std::string backend, std::int64_t runs, std::string engine = {}) {
  FuzzOptions options;
  options.generator.backend = std::move(backend);
  options.generator.engine = std::move(engine);
  options.runs = runs;
  options.backend = make_simt_backend;
  return options;
}

void expect_agreement(const FuzzReport& report) {
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "seed " << failure.seed << ", " << failure.check << " in step " << failure.step
                  << ": " << failure.what;
  std::int64_t known = 0;
  for (const auto& [finding, of_it] : report.known) known += of_it.cases;
  EXPECT_EQ(report.agreed + known, report.cases);
}

class RandomCases : public testing::TestWithParam<std::string> {};

TEST_P(RandomCases, AgreeInWhatIsDecided) {
  expect_agreement(fuzz(fuzzing("none", 5'000, GetParam())));
}

TEST_P(RandomCases, AgreeByteForByteWithTheKernels) {
  const FuzzReport report = fuzz(fuzzing("simt", 150, GetParam()));
  expect_agreement(report);
  EXPECT_GT(report.bytes_checked, std::int64_t{50} << 20);
}

INSTANTIATE_TEST_SUITE_P(Engines, RandomCases, testing::Values("vllm-0.22.1", "vllm-0.33.0"),
                         [](const auto& engine) {
                           return engine.param == "vllm-0.22.1" ? "vllm_0_22_1" : "vllm_0_33_0";
                         });

// Two groups of full attention, of which 0.22.1 cuts one hit only; the kernels read wrong rows in
// the step in which the audit sees a block written while shared.
TEST(Fuzz, ADivergenceThatTheDecisionsExplainIsAKnownFinding) {
  GeneratorOptions options;
  options.engine = "vllm-0.22.1";
  options.check = "fast";
  options.always = {Feature::several_groups, Feature::full_attention, Feature::mla,
                    Feature::prefix_caching, Feature::shared_prefixes};
  options.never = {Feature::drafts};  // finding 4
  std::int64_t num_diverged = 0;
  for (std::uint64_t seed = 1; seed <= 1'000 && num_diverged < 3; ++seed) {
    const SavedCase saved = generate_case(seed, options);
    if (!judge(saved).failed()) continue;
    const Outcome outcome = judge(saved, make_simt_backend);
    if (outcome.check != "attention_digest") continue;
    ++num_diverged;
    const KnownFinding* finding = known_finding(saved, outcome, make_simt_backend);
    ASSERT_NE(finding, nullptr) << seed << ": " << outcome.what;
    EXPECT_EQ(finding->number, 2) << seed;
  }
  EXPECT_GT(num_diverged, 0);
}

TEST(Fuzz, HandsOutTheFirstCaseOfEachKnownFinding) {
  FuzzOptions options = fuzzing("none", 600, "vllm-0.22.1");
  options.jobs = 2;
  std::map<std::string, std::string> first;  // of a number, the case
  FuzzCallbacks callbacks;
  callbacks.found = [&](const SavedCase& saved, const Outcome& outcome) {
    EXPECT_TRUE(outcome.failed());
    EXPECT_TRUE(first.emplace(std::to_string(outcome.finding), saved.name).second);
  };
  const FuzzReport report = fuzz(options, callbacks);
  EXPECT_GT(report.known.size(), 2u);
  ASSERT_EQ(first.size(), report.known.size());
  for (const auto& [name, of_it] : report.known)
    EXPECT_EQ(first[name.substr(0, name.find('.'))], "seed-" + std::to_string(of_it.first_seed));
}

TEST(Fuzz, TenThousandCasesSeeEveryClass) {
  FuzzOptions options = fuzzing("none", 10'000);
  options.first_seed = 100'000;
  const FuzzReport report = fuzz(options);
  expect_agreement(report);
  for (const std::string_view name : report.missing_classes()) ADD_FAILURE() << name << ": never";
}

TEST(FuzzSlow, TenThousandCasesWithKernelsSeeEveryClass) {
  const FuzzReport report = fuzz(fuzzing("simt", 10'000));
  expect_agreement(report);
  for (const std::string_view name : report.missing_classes()) ADD_FAILURE() << name << ": never";
}

// Compressed rows in blocks of 192 tokens, which their kernels cut into blocks of 64.
TEST(Fuzz, NoCaseHasPagesThatAreCutInsideARow) {
  FuzzOptions options = fuzzing("simt", 1);
  options.first_seed = 6139;
  options.generator.device_modes = true;
  expect_agreement(fuzz(options));
}

TEST(Fuzz, AClassThatStaysEmptyIsNamed) {
  FuzzOptions options = fuzzing("none", 10'000);
  options.generator.never = {Feature::resets};
  options.generator.requests_max = 2;
  const auto missing = fuzz(options).missing_classes();
  EXPECT_NE(std::ranges::find(missing, "reset_done"), missing.end());
  EXPECT_EQ(std::ranges::find(missing, "prefix_hit"), missing.end());
}

TEST(Fuzz, TheReportDoesNotDependOnJobsAndShardsMergeIntoIt) {
  const FuzzReport whole = fuzz(fuzzing("none", 200));
  FuzzOptions options = fuzzing("none", 200);
  options.jobs = 4;
  EXPECT_EQ(fuzz_report_to_json(fuzz(options)), fuzz_report_to_json(whole));
  std::vector<FuzzReport> parts;
  options.shards = 3;
  for (options.shard = 0; options.shard < 3; ++options.shard) parts.push_back(fuzz(options));
  std::ranges::reverse(parts);
  const auto merged = merge_fuzz_reports(parts);
  ASSERT_TRUE(merged) << merged.error().message;
  EXPECT_EQ(fuzz_report_to_json(*merged), fuzz_report_to_json(whole));
}

TEST(Fuzz, RunsOfConsecutiveSeedsMergeIntoTheWhole) {
  FuzzOptions options = fuzzing("none", 200);
  const FuzzReport whole = fuzz(options);
  std::vector<FuzzReport> parts;
  for (const std::int64_t runs : {90, 30, 80}) {
    options.runs = runs;
    parts.push_back(fuzz(options));
    options.first_seed += runs;
  }
  std::swap(parts[0], parts[2]);
  const auto merged = merge_fuzz_reports(parts);
  ASSERT_TRUE(merged) << merged.error().message;
  EXPECT_EQ(fuzz_report_to_json(*merged), fuzz_report_to_json(whole));
  parts.erase(parts.begin() + 1);
  EXPECT_EQ(merge_fuzz_reports(parts).error().message,
            "seeds between two reports are missing, before 121");
}

TEST(Fuzz, ReportsThatDoNotBelongTogetherAreRefused) {
  FuzzOptions options = fuzzing("none", 10);
  options.shards = 2;
  const FuzzReport first = fuzz(options);
  options.shard = 1;
  FuzzReport second = fuzz(options);
  const auto error = [](std::vector<FuzzReport> parts) {
    const auto merged = merge_fuzz_reports(parts);
    return merged ? std::string() : merged.error().message;
  };
  EXPECT_EQ(error({first, second}), "");
  EXPECT_EQ(error({}), "no reports to merge");
  EXPECT_EQ(error({first}), "shard 1/2 from seed 1 is missing");
  EXPECT_EQ(error({first, first}), "shard 0/2 from seed 1 occurs twice");
  EXPECT_EQ(error({first, second, second}), "shard 1/2 from seed 1 occurs twice");
  second.runs = 9;
  EXPECT_NE(error({first, second}).find("different runs"), std::string::npos);
  second = first;
  second.shard = 1;
  second.decided_by = "another scheduler";
  EXPECT_NE(error({first, second}).find("different runs"), std::string::npos);
  second = first;
  second.first_seed = 11;
  EXPECT_EQ(error({first, second}), "shard 1/2 from seed 1 is missing");
  second.first_seed = 1;
  second.shard = 1;
  second.mutant = "drop-slot";
  EXPECT_NE(error({first, second}).find("different runs"), std::string::npos);
}

TEST(Fuzz, APlantedDefectIsListedAndItsReportCanBeReadBack) {
  FuzzOptions options = fuzzing("simt", 8);
  options.mutant = "drop-slot";
  const FuzzReport report = fuzz(options);
  ASSERT_GT(report.failures.size(), 4u);
  EXPECT_EQ(report.failures[0].check, "page_written");
  const std::string path = tests::temporary_path("report.json");
  ASSERT_TRUE(write_output(path, fuzz_report_to_json(report)));
  const auto read = read_fuzz_report(path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, report);
}

// rapidcheck generates and shrinks the words: a failure is reported with the smallest list.
TEST(Fuzz, CasesOutOfAnyWordsAgree) {
  GeneratorOptions options;
  options.backend = "none";
  const auto agrees = [&](const std::vector<std::uint64_t>& words) {
    WordChoices choices(words);
    const SavedCase saved = generate_case(choices, options);
    const Outcome outcome = judge(saved);
    RC_ASSERT(outcome.kind != OutcomeKind::refused);
    if (outcome.failed() && known_finding(saved, outcome) == nullptr)
      RC_FAIL(outcome.check + ": " + outcome.what);
  };
  EXPECT_TRUE(rc::check("whatever the words, the case agrees", agrees));
}

}  // namespace
}  // namespace lockstep
