// Step-by-step explanations of cases that fail in known ways: arrivals, decisions, where it went
// wrong and why, in lines that fit a terminal.
#include "properties/explain/explain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "cuda_backend/backends.h"
#include "properties/explain/explain_text.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "tests/properties/large_case.h"

namespace lockstep {
namespace {

SavedCase told_regression(const std::string& name) {
  auto recording = read_recording(LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".jsonl");
  EXPECT_TRUE(recording) << recording.error().message;
  auto saved = case_of(name, std::move(*recording));
  EXPECT_TRUE(saved) << saved.error().message;
  return *saved;
}

// Two requests that can never both fit, and may not be preempted: one waits forever.
SavedCase starving_case() {
  SavedCase saved = large_case(1);
  saved.backend = "none";
  saved.cache.num_blocks = 4;
  for (KVCacheTensor& tensor : saved.cache.tensors) tensor.size_bytes = tensor.size_bytes / 40 * 4;
  return saved;
}

std::size_t longest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t longest = 0;
  for (std::string line; std::getline(lines, line);) longest = std::max(longest, line.size());
  return longest;
}

void expect_told(const std::string& text, std::initializer_list<std::string_view> parts) {
  std::size_t from = 0;
  for (const std::string_view part : parts) {
    const std::size_t at = text.find(part, from);
    EXPECT_NE(at, std::string::npos) << "missing, or not in its place: " << part << "\n" << text;
    if (at != std::string::npos) from = at;
  }
}

TEST(Explanation, OfAnAuditFindingNamesTheBlockAndEndsWithTheSentenceOfTheCheck) {
  const SavedCase saved = told_regression("vllm_0_22_1_state_hit_longer");
  const Explanation explanation = explain(saved, {});
  ASSERT_EQ(explanation.outcome.check, "audit.attention_read");
  ASSERT_FALSE(explanation.findings.empty());
  const std::string text = to_text(saved, explanation);
  expect_told(text, {"Step 0", "writer arrives", "writer is scheduled", "group 0  writer", "pool",
                     "reader arrives", "Here it fails: audit.attention_read (violation)",
                     "the rule", "where     request reader"});
  const std::string last = text.substr(text.rfind("\n\n") + 2);
  EXPECT_EQ(last, wrapped("", explanation.outcome.what));
  EXPECT_LE(longest_line(text), 100u);
}

TEST(Explanation, OfRequestsThatWaitForEverSaysWhatEachWouldNeed) {
  const SavedCase saved = starving_case();
  const Explanation explanation = explain(saved, {});
  ASSERT_EQ(explanation.outcome.kind, OutcomeKind::stuck) << explanation.outcome.what;
  expect_told(to_text(saved, explanation),
              {"request-0 arrives", "Nothing is scheduled.", "request-0 waits.",
               "Here it fails: liveness (stuck)", "request-0", "needs about", "it can never fit"});
}

TEST(Explanation, OfACaseThatAgreesSaysSo) {
  SavedCase saved = large_case(2);
  saved.backend = "none";
  const Explanation explanation = explain(saved, {});
  ASSERT_EQ(explanation.outcome.kind, OutcomeKind::agreed) << explanation.outcome.what;
  expect_told(to_text(saved, explanation), {"The case does not fail: it is agreed."});
}

TEST(Explanation, LeavesOutTheFirstStepsOfALongRunAndSaysHowMany) {
  SavedCase saved = large_case(8);
  saved.backend = "none";
  const Explanation explanation = explain(saved, {});
  ASSERT_GT(explanation.steps.size(), 5u);
  const std::string text = to_text(saved, explanation, {.steps_max = 3});
  EXPECT_EQ(text.find("\nStep 0\n"), std::string::npos);
  expect_told(text, {"... " + std::to_string(explanation.steps.size() - 3) + " steps before"});
  EXPECT_NE(to_text(saved, explanation, {.steps_max = 0}).find("\nStep 0\n"), std::string::npos);
}

// One request hits nothing here; the connector has its prompt, and the load of its second block
// fails.
TEST(Explanation, OfACaseWithAConnectorTellsWhatIsLoadedAndWhatIsLost) {
  auto saved = read_saved_case(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/block_behind_a_window_lost_by_another.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const Explanation explanation = explain(*saved, make_simt_backend);
  ASSERT_EQ(explanation.outcome.kind, OutcomeKind::agreed) << explanation.outcome.what;
  const std::string text = to_text(*saved, explanation);
  expect_told(text, {"with     a host tier of 1 block, transfers up to ", "27 % of the loads fail",
                     "Step 6", "The connector has 16 tokens of r1 after 0 computed here",
                     "r1 waits while they are loaded", "r1 waits for what it loads.",
                     "group 0  r1  [1: 0-15]", "A load has failed: block 1 is not filled.",
                     "r1: its load has completed.", "Step 7", "r1 is scheduled"});
  EXPECT_EQ(text.find("its client disconnected"), std::string::npos) << text;
  const auto json = nlohmann::json::parse(to_json(*saved, explanation));
  const auto& transfers = json.at("steps").at(6).at("transfers");
  EXPECT_EQ(transfers.at("answers").at(0).at("external"), 16);
  EXPECT_EQ(transfers.at("invalid_blocks").at(0), 1);
}

TEST(Explanation, AsJsonHasEveryStepWithItsTablesAndTheSameEnding) {
  const SavedCase saved = told_regression("vllm_0_22_1_state_hit_longer");
  const Explanation explanation = explain(saved, {});
  const auto json = nlohmann::json::parse(to_json(saved, explanation));
  EXPECT_EQ(json.at("check"), "audit.attention_read");
  EXPECT_EQ(json.at("what"), explanation.outcome.what);
  ASSERT_EQ(json.at("steps").size(), explanation.steps.size());
  EXPECT_FALSE(json.at("steps").at(0).at("tables").at("writer").at(0).empty());
  EXPECT_EQ(json.at("steps").at(0).at("pool").at(0).at("is"), "null");
}

TEST(Explanation, TwiceIsTheSameExplanation) {
  SavedCase saved = large_case(6);
  saved.backend = "none";
  EXPECT_EQ(to_text(saved, explain(saved, {}), {.steps_max = 0}),
            to_text(saved, explain(saved, {}), {.steps_max = 0}));
}

TEST(ExplanationPictures, ANameCannotBeginALine) {
  EXPECT_EQ(wrapped("  ", "r0\n::error::x\t waits"), "  r0\\n::error::x\\u0009 waits\n");
}

TEST(ExplanationPictures, ATableShowsWhichTokensLieInWhichBlock) {
  KVCacheSpec spec;
  spec.block_size = 4;
  const std::vector<BlockId> table = {kNullBlock, BlockId{7}, BlockId{3}, BlockId{9}};
  EXPECT_EQ(wrapped("", table_picture(table, spec, 10, {BlockId{3}, BlockId{9}})),
            "[-: 0-3] [7: 4-7] [3*: 8-9] [9*: empty]\n");
}

TEST(ExplanationPictures, APageShowsTheRowThatIsWrongAndFromWhichByte) {
  Divergence found;
  found.expected_page = {1, 2, 3, 4};
  found.found_page = {1, 2, 3, 9};
  found.spans = {{0, 2, "slot 0"}, {2, 2, "slot 1"}};
  const std::string picture = page_picture(found);
  EXPECT_NE(picture.find("slot 0"), std::string::npos);
  EXPECT_NE(picture.find("WRONG from byte 3"), std::string::npos) << picture;
  EXPECT_LT(picture.find("right"), picture.find("WRONG"));
}

TEST(ExplanationPictures, EveryCheckThatACaseCanFailHasItsRuleInASentence) {
  for (int phase = 0; phase <= static_cast<int>(Phase::page_final); ++phase)
    EXPECT_FALSE(reason_of_check(name_of(static_cast<Phase>(phase))).empty()) << phase;
  for (int rule = 0; rule <= static_cast<int>(AuditRule::recording); ++rule)
    EXPECT_FALSE(
        reason_of_check("audit." + std::string(name_of(static_cast<AuditRule>(rule)))).empty())
        << rule;
  EXPECT_FALSE(reason_of_check("liveness").empty());
  EXPECT_TRUE(reason_of_check("no such check").empty());
}

}  // namespace
}  // namespace lockstep
