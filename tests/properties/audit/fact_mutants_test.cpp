// Defects of a worker, planted in what vLLM's worker said it did: each is accused by the rule that
// it breaks, without an engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

struct FactMutant {
  std::string name;
  AuditRule rule;
  // Changes the facts of a step; false: there is nothing to change.
  std::function<bool(RecordedStep& step, WorkerStepFacts& facts)> plant;
};

// A page in which tokens of the step have changed slots; null: there is none.
ChangedPage* page_with_slots(WorkerStepFacts& facts) {
  const auto page = std::ranges::find_if(facts.changed,
                                         [](const ChangedPage& one) { return !one.slots.empty(); });
  return page == facts.changed.end() ? nullptr : &*page;
}

std::vector<FactMutant> fact_mutants() {
  return {
      {"ARowIsLeftOutOfTheBatch", AuditRule::worker_batch,
       [](RecordedStep&, WorkerStepFacts& facts) {
         if (facts.rows.empty()) return false;
         facts.rows.back().id += "'";
         return true;
       }},
      {"TokensOfARowGoToTheNext", AuditRule::worker_batch,
       [](RecordedStep&, WorkerStepFacts& facts) {
         if (facts.rows.size() < 2 || facts.rows[0].tokens < 2) return false;
         --facts.rows[0].tokens;
         ++facts.rows[1].tokens;
         return true;
       }},
      {"PositionsAreOffByOne", AuditRule::worker_batch,
       [](RecordedStep&, WorkerStepFacts& facts) {
         for (std::int64_t& position : facts.positions) ++position;
         return !facts.positions.empty();
       }},
      {"ATableRowIsStale", AuditRule::worker_table,
       [](RecordedStep&, WorkerStepFacts& facts) {
         for (GroupFacts& group : facts.groups)
           for (std::vector<BlockId>& table : group.tables)
             if (!table.empty()) return table.pop_back(), true;
         return false;
       }},
      {"TheLastBlockIsAnothers", AuditRule::worker_table,
       [](RecordedStep&, WorkerStepFacts& facts) {
         for (GroupFacts& group : facts.groups)
           for (std::vector<BlockId>& table : group.tables)
             if (!table.empty()) {
               table.back() = BlockId{index_of(table.back()) == 1 ? 2 : 1};
               return true;
             }
         return false;
       }},
      {"SlotsAreOffByOne", AuditRule::worker_slot,
       [](RecordedStep&, WorkerStepFacts& facts) {
         if (facts.positions.empty()) return false;
         for (Slot& slot : facts.groups[0].slots) ++slot;
         return true;
       }},
      {"ATokenGetsNoSlot", AuditRule::worker_slot,
       [](RecordedStep&, WorkerStepFacts& facts) {
         if (facts.positions.empty()) return false;
         facts.groups.back().slots.back() = PAD_SLOT_ID;
         return true;
       }},
      {"ARowLiesInTheNextSlot", AuditRule::worker_page,
       [](RecordedStep&, WorkerStepFacts& facts) {
         ChangedPage* const page = page_with_slots(facts);
         if (page == nullptr) return false;
         ++page->slots.back();
         return true;
       }},
      {"ARowIsWrittenToAnotherBlock", AuditRule::worker_page,
       [](RecordedStep&, WorkerStepFacts& facts) {
         const ChangedPage* const page = page_with_slots(facts);
         if (page == nullptr) return false;
         ChangedPage other = *page;
         other.block = kNullBlock;
         facts.changed.push_back(std::move(other));
         return true;
       }},
      {"ARowIsNotWritten", AuditRule::worker_page,
       [](RecordedStep& step, WorkerStepFacts& facts) {
         if (step.step > 0 || page_with_slots(facts) == nullptr) return false;  // all is new there
         page_with_slots(facts)->slots.pop_back();
         return true;
       }},
      {"PaddingIsWritten", AuditRule::worker_page,
       [](RecordedStep&, WorkerStepFacts& facts) {
         if (facts.changed.empty()) return false;
         return facts.changed.front().beside = true;
       }},
      {"ABlockIsNotZeroed", AuditRule::worker_zeroing,
       [](RecordedStep& step, WorkerStepFacts&) {
         if (step.scheduled.empty() || !step.scheduled[0].is_new) return false;
         step.zero.push_back((*step.scheduled[0].blocks)[0].back());  // new to it: unread
         return true;
       }},
      {"ABlockIsZeroedUnasked", AuditRule::worker_zeroing,
       [](RecordedStep& step, WorkerStepFacts& facts) {
         if (step.scheduled.empty()) return false;
         facts.zeroed.push_back(BlockId{1});
         return std::ranges::find(step.zero, BlockId{1}) == step.zero.end();
       }},
  };
}

std::vector<Recording> samples() {
  std::vector<Recording> recordings;
  for (const auto& entry : std::filesystem::directory_iterator(
           std::string(LOCKSTEP_SOURCE_DIR) + "/traces/samples/recordings/worker_facts")) {
    Result<Recording> recording = read_recording(entry.path().string());
    EXPECT_TRUE(recording) << recording.error().message;
    if (recording) recordings.push_back(std::move(*recording));
  }
  return recordings;
}

class FactMutants : public testing::TestWithParam<FactMutant> {};

TEST_P(FactMutants, AreAccusedInTheirStep) {
  int num_planted = 0;
  for (const Recording& recording : samples()) {
    for (std::size_t at = 0; at < recording.steps.size() && num_planted < 6; ++at) {
      Recording changed = recording;
      WorkerStepFacts& facts = changed.steps[at].facts.value();
      if (!GetParam().plant(changed.steps[at], facts)) continue;
      const auto findings = audit(changed, AuditScope::whole_recording);
      const auto found = std::ranges::find(findings, GetParam().rule, &AuditFinding::rule);
      ASSERT_NE(found, findings.end()) << recording.header.family << " step " << at;
      EXPECT_EQ(found->step, changed.steps[at].step) << line_of(*found);
      ++num_planted;
    }
  }
  EXPECT_GT(num_planted, 0);
}

void PrintTo(const FactMutant& mutant, std::ostream* out) { *out << mutant.name; }

INSTANTIATE_TEST_SUITE_P(All, FactMutants, testing::ValuesIn(fact_mutants()),
                         [](const auto& mutant) { return mutant.param.name; });

TEST(WorkerFacts, OfVllmsOwnWorkerAreCleanAndAGapInThemIsTold) {
  const auto recordings = samples();
  ASSERT_FALSE(recordings.empty());
  for (const Recording& recording : recordings) {
    EXPECT_TRUE(recording.header.worker_facts);
    const auto findings = audit(recording, AuditScope::whole_recording);
    EXPECT_TRUE(findings.empty()) << recording.header.family << ": " << line_of(findings.front());
  }
  Recording gap = recordings.front();
  const auto ran = std::ranges::find_if(
      gap.steps, [](const RecordedStep& step) { return !step.scheduled.empty(); });
  ran->facts.reset();
  const auto findings = audit(gap, AuditScope::whole_recording);
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings[0].rule, AuditRule::worker_batch);
}

}  // namespace
}  // namespace lockstep
