// A guided search: a changed case is a case, a run depends only on its seed and its corpus, and a
// minimal corpus reaches what its cases reached.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/output_file.h"
#include "properties/fuzz/corpus.h"
#include "properties/fuzz/fuzz.h"
#include "tests/support/temporary_folder.h"

namespace lockstep {
namespace {

const std::string kBundled = std::string(LOCKSTEP_SOURCE_DIR) + "/traces/samples/corpus.jsonl";

FuzzOptions guided(std::int64_t runs, std::uint64_t first_seed = 1) {
  FuzzOptions options;
  options.generator.backend = "none";
  options.first_seed = first_seed;
  options.runs = runs;
  options.guided = true;
  return options;
}

// The cases of a corpus, with what they reach.
std::vector<JudgedGenes> judged(std::span<const CaseGenes> corpus) {
  GeneratorOptions options;
  options.backend = "none";
  options.requests_max = kRequestsOfCorpus;
  std::vector<JudgedGenes> cases;
  for (const CaseGenes& genes : corpus) {
    JudgedGenes one{.genes = genes, .drawn = {}, .marks = {}};
    const SavedCase saved = generate_case(genes, options, &one.drawn);
    MarkCollector marks(saved);
    JudgeOptions judging;
    judging.marks = &marks;
    const Outcome outcome = judge(saved, judging);
    one.failed = outcome.failed();
    one.marks = marks.finish(outcome.tally, {});
    cases.push_back(std::move(one));
  }
  return cases;
}

std::set<Mark> marks_of(std::span<const JudgedGenes* const> cases) {
  std::set<Mark> marks;
  for (const JudgedGenes* one : cases) marks.insert(one->marks.begin(), one->marks.end());
  return marks;
}

std::vector<CaseGenes> bundled() {
  auto corpus = read_corpus(kBundled);
  EXPECT_TRUE(corpus) << corpus.error().message;
  return corpus ? *corpus : std::vector<CaseGenes>();
}

TEST(Genes, OfEveryChangeAreACaseThatIsAccepted) {
  GeneratorOptions options;
  options.backend = "none";
  SeededRandom random(5);
  std::vector<CaseGenes> pool = {{.base = 1, .parts = {}}, {.base = 2, .parts = {}}};
  std::set<std::string> texts;
  for (int i = 0; i < 400; ++i) {
    const CaseGenes& first = pool[static_cast<std::size_t>(random.below(std::ssize(pool)))];
    const CaseGenes& second = pool[static_cast<std::size_t>(random.below(std::ssize(pool)))];
    std::vector<DrawnChoice> of_first, of_second;
    generate_case(first, options, &of_first);
    generate_case(second, options, &of_second);
    const CaseGenes changed = changed_genes({&first, &of_first}, {&second, &of_second}, random);
    const SavedCase saved = generate_case(changed, options);
    EXPECT_EQ(generate_case(changed, options), saved);
    // A toggled feature is one that the case chose.
    const auto features = changed.parts.find(key_of(CasePart::features));
    const auto num_chosen = std::ranges::count(of_first, key_of(CasePart::features),
                                               &DrawnChoice::part);
    if (features != changed.parts.end() && !features->second.words.empty()) {
      EXPECT_LT(features->second.words.rbegin()->first, num_chosen);
    }
    EXPECT_NE(judge(saved).kind, OutcomeKind::refused) << genes_to_text(changed);
    const auto read = genes_from_text("genes", genes_to_text(changed), 1);
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(*read, changed);
    texts.insert(saved_case_to_text(saved));
    pool.push_back(changed);
  }
  EXPECT_GT(texts.size(), 300u);
}

TEST(Genes, OfOnePartLeaveTheOthersAsTheyWere) {
  GeneratorOptions options;
  options.backend = "none";
  options.never = {Feature::hisparse, Feature::rising_priorities, Feature::equal_requests};
  CaseGenes genes{.base = 3, .parts = {}};
  const SavedCase saved = generate_case(genes, options);
  ASSERT_GT(saved.trace.records.size(), 2u);
  genes.parts[key_of(CasePart::request, 0)] = {.seed = 9, .words = {}};
  const SavedCase changed = generate_case(genes, options);
  EXPECT_EQ(changed.cache, saved.cache);
  EXPECT_EQ(changed.engine, saved.engine);
  EXPECT_FALSE(changed.trace == saved.trace);
}

TEST(Genes, ThatNoCaseHasAreRefusedWithTheirLine) {
  const auto message = [](std::string_view text) {
    const auto read = genes_from_text("c.jsonl", text, 7);
    return read ? std::string() : read.error().message;
  };
  EXPECT_NE(message(R"({"base":1,"parts":{"9999":[1]}})").find("no part of a case has the number"),
            std::string::npos);
  EXPECT_NE(message(R"({"base":1,"parts":{"0":[1,2]}})").find("c.jsonl:7"), std::string::npos);
  EXPECT_EQ(message(R"({"base":1,"parts":{"0":[1,2,3]}})"), "");
}

TEST(Guided, ARunDependsOnItsSeedAndItsCorpusAlone) {
  FuzzOptions options = guided(250);
  const std::string report = fuzz_report_to_json(fuzz(options));
  options.jobs = 3;
  EXPECT_EQ(fuzz_report_to_json(fuzz(options)), report);
  options.corpus = bundled();
  options.corpus.resize(20);
  const std::string with_corpus = fuzz_report_to_json(fuzz(options));
  options.jobs = 1;
  EXPECT_EQ(fuzz_report_to_json(fuzz(options)), with_corpus);
  EXPECT_NE(with_corpus, report);
}

TEST(Guided, AReportIsReadBackAndShardsMergeInAnyOrder) {
  FuzzOptions options = guided(120);
  options.corpus = bundled();
  options.corpus.resize(15);
  options.shards = 2;
  std::vector<FuzzReport> parts;
  for (options.shard = 0; options.shard < 2; ++options.shard) parts.push_back(fuzz(options));
  const std::string path = tests::temporary_path("guided.json");
  ASSERT_TRUE(write_output(path, fuzz_report_to_json(parts[0])));
  const auto read = read_fuzz_report(path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, parts[0]);
  const auto merged = merge_fuzz_reports(parts);
  ASSERT_TRUE(merged) << merged.error().message;
  EXPECT_EQ(merged->cases, 120);
  EXPECT_GE(merged->corpus.size(), parts[0].corpus.size());
  std::ranges::reverse(parts);
  EXPECT_EQ(fuzz_report_to_json(*merge_fuzz_reports(parts)), fuzz_report_to_json(*merged));
}

TEST(Guided, AMinimalCorpusReachesAllMarksWhateverTheOrderOfItsCases) {
  std::vector<CaseGenes> corpus;
  for (std::uint64_t base = 1; base <= 120; ++base) corpus.push_back({.base = base, .parts = {}});
  const std::vector<JudgedGenes> cases = judged(corpus);
  std::vector<const JudgedGenes*> all;
  for (const JudgedGenes& one : cases) all.push_back(&one);
  const auto cover = minimal_cover(all);
  EXPECT_LT(cover.size(), all.size());
  EXPECT_EQ(marks_of(cover), marks_of(all));
  std::ranges::reverse(all);
  std::ranges::rotate(all, all.begin() + 40);
  EXPECT_EQ(minimal_cover(all), cover);
  const std::span<const CaseGenes> whole(corpus);
  EXPECT_EQ(merged_corpora(whole.first(80), whole.subspan(50)),
            merged_corpora(whole.subspan(50), whole.first(80)));
  EXPECT_EQ(merged_corpora(whole.first(80), whole.subspan(50)).size(), corpus.size());
}

TEST(Guided, TheBundledCorpusAgreesAndSeesEveryClass) {
  FuzzOptions options = guided(0);
  options.guided = false;
  options.corpus = bundled();
  options.runs = std::ssize(options.corpus);
  const FuzzReport report = fuzz(options);
  EXPECT_EQ(report.refused, 0) << report.first_refusal;
  for (const FuzzFailure& failure : report.failures)
    ADD_FAILURE() << "seed " << failure.seed << ", " << failure.check << ": " << failure.what;
  // Make it again when the generator changes (docs/fuzzing.md).
  for (const std::string_view name : report.tally.missing()) ADD_FAILURE() << name << ": never";
}

// Seeds from 1 show it first in case 527.
TEST(Guided, TheBundledCorpusFindsADefectThatFiveHundredSeedsMiss) {
  FuzzOptions options = guided(500);
  options.mutant = "hash-next-token";
  options.guided = false;
  EXPECT_TRUE(fuzz(options).failures.empty());
  options.corpus = bundled();
  options.runs = std::ssize(options.corpus);
  ASSERT_LT(options.runs, 500);
  const FuzzReport report = fuzz(options);
  ASSERT_FALSE(report.failures.empty());
  EXPECT_LT(report.failures.front().seed, 100u);
}

}  // namespace
}  // namespace lockstep
