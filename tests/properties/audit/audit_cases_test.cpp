// Cases from the field: recordings that an audit once passed, or accused of something else.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

const std::string kCases = LOCKSTEP_SOURCE_DIR "/tests/properties/audit/cases/";

Recording recording_of_case(const std::string& name) {
  auto recording = read_recording(kCases + name + ".jsonl");
  EXPECT_TRUE(recording) << recording.error().message;
  return recording ? *recording : Recording{};
}

std::vector<AuditFinding> findings_of_case(const std::string& name) {
  return audit(recording_of_case(name), AuditScope::whole_recording);
}

void expect_only(const std::vector<AuditFinding>& findings, const std::string& line) {
  ASSERT_EQ(findings.size(), 1u) << line;
  EXPECT_EQ(line_of(findings[0]), line);
}

TEST(AuditCases, ARunningRequestThatStartsOverIsOneFinding) {
  for (const std::string name : {"again", "again_with_tables"}) {
    const auto findings = findings_of_case(name);
    expect_only(findings,
                "audit.computed_again step 1 request r0: computes tokens [0, 4) again: it had 4 "
                "computed after step 0, and no preemption, reset, rejected draft or lost block "
                "sent it back");
    EXPECT_EQ(findings[0].count, 6);
  }
}

TEST(AuditCases, ABlockMoreThanTheTokensNeedIsFound) {
  Recording recording = recording_of_case("again");
  recording.steps.resize(3);
  for (std::size_t i = 0; i < 3; ++i)
    recording.steps[i].scheduled[0].computed = static_cast<std::int32_t>(4 * i);
  recording.end.steps = 3;
  EXPECT_TRUE(audit(recording, AuditScope::whole_recording).empty());
  (*recording.steps[1].scheduled[0].blocks)[0].push_back(BlockId{4});
  const auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, AuditRule::excess_blocks);
  EXPECT_EQ(findings[0].step, 1);
  EXPECT_NE(
      findings[0].what.find("the table has 3 blocks, and 8 tokens with 0 slots for drafts need 2"),
      std::string::npos)
      << findings[0].what;
}

TEST(AuditCases, AnEventIsComparedWithTheBlockThatItDescribes) {
  EXPECT_TRUE(findings_of_case("right").empty());
  const std::string line =
      "audit.cache_events step 0 request r0 group 0 token 0 entry 0 block 1: the event says tokens "
      "2 3 4 5 of block 1, r0 has 1 2 3 4 there";
  expect_only(findings_of_case("late"), line);
  expect_only(findings_of_case("late_and_hit"), line);
  expect_only(findings_of_case("extra"),
              "audit.cache_events step 0 group 0: 2 hashes of blocks of 4 tokens are stored with 9 "
              "tokens");
}

// A change of an event of the recording of vLLM, and the sentence that names it.
struct WrongEvent {
  std::string name;
  std::string what;
  std::function<void(RecordedCacheEvent& event)> change;
};

class WrongEvents : public testing::TestWithParam<WrongEvent> {};

TEST_P(WrongEvents, AreNamedInTheStepThatHasThem) {
  const std::string path = LOCKSTEP_SOURCE_DIR "/tests/properties/audit/inputs/kv_events.jsonl";
  const auto good = read_recording(path);
  ASSERT_TRUE(good) << good.error().message;
  int num_changed = 0;
  for (std::size_t at = 0; at < good->steps.size(); ++at)
    for (std::size_t i = 0; i < good->steps[at].events.size(); ++i) {
      Recording bad = *good;
      RecordedCacheEvent& event = bad.steps[at].events[i];
      if (event.kind != RecordedCacheEvent::Kind::stored) continue;
      GetParam().change(event);
      if (event == good->steps[at].events[i]) continue;
      ++num_changed;
      const auto findings = audit(bad, AuditScope::whole_recording);
      ASSERT_FALSE(findings.empty()) << "step " << at << " event " << i;
      EXPECT_EQ(findings[0].rule, AuditRule::cache_events) << line_of(findings[0]);
      EXPECT_EQ(findings[0].step, bad.steps[at].step) << line_of(findings[0]);
      EXPECT_NE(findings[0].what.find(GetParam().what), std::string::npos) << findings[0].what;
    }
  EXPECT_GT(num_changed, 0);
}

std::vector<WrongEvent> wrong_events() {
  return {
      {"TokensAreOneLate", "the event says tokens ",
       [](RecordedCacheEvent& event) {
         const auto tokens = event.token_ids;
         std::rotate(event.token_ids.begin(), event.token_ids.begin() + 1, event.token_ids.end());
         event.token_ids.back() = 7;
         if (tokens[0] == tokens[1]) event.token_ids = tokens;  // a prompt of embeddings
       }},
      {"TheParentIsLeftOut", "follow no block",
       [](RecordedCacheEvent& event) {
         if (event.token_ids.back() != 0) event.parent.reset();
       }},
      {"TheAdapterIsAnother", "the event says ad7",
       [](RecordedCacheEvent& event) {
         if (event.lora_name.empty()) return;
         for (auto& keys : event.extra_keys) keys[0].value = "ad7";
       }},
      {"TheImageIsOneTokenLate", "of the block of block ",
       [](RecordedCacheEvent& event) {
         for (auto& keys : event.extra_keys)
           for (RecordedExtraKey& key : keys)
             if (key.place) ++*key.place;
       }},
      {"TheGroupIsTheOther", "is stored, and it was stored before", [](RecordedCacheEvent& event) {
         if (event.group == 1) event.group = 0;
       }}};
}

INSTANTIATE_TEST_SUITE_P(All, WrongEvents, testing::ValuesIn(wrong_events()),
                         [](const auto& one) { return one.param.name; });

TEST(AuditCases, RulesAboutPolicyAreLeftOutOnRequest) {
  Recording recording = recording_of_case("again");
  for (RecordedStep& step : recording.steps) step.scheduled[0].tokens = 4;
  recording.steps[0].running = {"r0", "a", "b"};
  const auto audited = [&](AuditedRules rules) {
    Auditor auditor(recording.header, AuditScope::whole_recording, rules);
    for (const RecordedStep& step : recording.steps) auditor.step(step);
    return auditor.take_findings();
  };
  const auto has_limits = [](const std::vector<AuditFinding>& findings) {
    return std::ranges::count(findings, AuditRule::limits, &AuditFinding::rule);
  };
  recording.header.options.given = {"max_num_seqs"};
  EXPECT_EQ(has_limits(audited(AuditedRules::all)), 1);
  EXPECT_EQ(has_limits(audited(AuditedRules::memory)), 0);
  EXPECT_EQ(audited(AuditedRules::all).size(), audited(AuditedRules::memory).size() + 1);
  recording.header.engine = {"mine", "1.0"};
  EXPECT_EQ(has_limits(audited(AuditedRules::all)), 1) << "an engine without a profile has limits";
  recording.header.options.given = {"num_spec_tokens"};
  recording.steps[0].scheduled[0].spec = {7};
  EXPECT_EQ(has_limits(audited(AuditedRules::all)), 1);
  recording.header.options.config.num_spec_tokens = 1;
  EXPECT_EQ(has_limits(audited(AuditedRules::all)), 0);
}

}  // namespace
}  // namespace lockstep
