// Defects of decisions, planted in recordings of vLLM that are right: whatever an engine's code
// looks like, this is how its defects show. Each is reported by the rule that it breaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

using Steps = std::vector<RecordedStep>;

struct DecisionMutant {
  std::string name;
  std::string family;  // of the sample recordings of 0.22.1
  AuditRule rule;
  // Changes what is decided in a step and what follows from it; false: there is nothing to change.
  std::function<bool(Steps& steps, std::size_t at)> plant;
};

// Only in mid-prefill: tokens of the prompt are left.
bool samples_nothing(const RecordedStep& step, const std::string& id) {
  return std::ranges::find(step.sampled, id, &RecordedTokens::id) == step.sampled.end();
}

// From the step on, `num` blocks less are free.
void lose_blocks(Steps& steps, std::size_t at, std::int64_t num) {
  for (; at < steps.size(); ++at) steps[at].free_blocks -= std::min(num, steps[at].free_blocks);
}

std::vector<DecisionMutant> mutants() {
  return {
      {"ABlockIsNotZeroed", "mamba_align", AuditRule::zeroing,
       [](Steps& steps, std::size_t at) {
         if (steps[at].zero.empty()) return false;
         steps[at].zero.pop_back();
         return true;
       }},
      {"ABlockInUseIsZeroed", "mamba_align", AuditRule::attention_read,
       [](Steps& steps, std::size_t at) {
         const auto& row = steps[at].scheduled;
         if (row.empty() || !row[0].is_new || at + 1 == steps.size()) return false;
         const std::vector<BlockId>& blocks = (*row[0].blocks)[0];
         const auto& next = steps[at + 1].scheduled;
         if (blocks.empty() || next.empty() || next[0].id != row[0].id || next[0].is_new)
           return false;
         steps[at + 1].zero.push_back(blocks[0]);
         return true;
       }},
      {"AChunkOfAPromptSamples", "long_prefill_threshold", AuditRule::sampled,
       [](Steps& steps, std::size_t at) {
         for (const RecordedScheduled& row : steps[at].scheduled)
           if (row.tokens > 1 && samples_nothing(steps[at], row.id)) {
             steps[at].sampled.push_back({row.id, {7}});
             return true;
           }
         return false;
       }},
      {"MoreIsSampledThanDrafted", "spec_decode_ngram", AuditRule::sampled,
       [](Steps& steps, std::size_t at) {
         for (RecordedTokens& sampled : steps[at].sampled) {
           const auto row =
               std::ranges::find(steps[at].scheduled, sampled.id, &RecordedScheduled::id);
           if (sampled.tokens.size() != row->spec.size() + 1) continue;
           sampled.tokens.push_back(7);
           return true;
         }
         return false;
       }},
      {"AnEndComesTooEarly", "full_attention", AuditRule::sampled,
       [](Steps& steps, std::size_t at) {
         if (steps[at].sampled.empty() || !steps[at].stopped.empty()) return false;
         steps[at].stopped = {{steps[at].sampled[0].id, "length"}};
         return true;
       }},
      {"AWaitingRequestIsForgotten", "tiny_pool", AuditRule::queues,
       [](Steps& steps, std::size_t at) {
         if (steps[at].waiting.empty()) return false;
         steps[at].waiting.pop_back();
         return true;
       }},
      {"APreemptedRequestStaysInTheBatch", "preemption", AuditRule::queues,
       [](Steps& steps, std::size_t at) {
         if (steps[at].preempted.empty()) return false;
         steps[at].running.push_back(steps[at].preempted[0]);
         return true;
       }},
      {"AMoreImportantRequestGivesWay", "priority", AuditRule::victim,
       [](Steps& steps, std::size_t at) {
         if (steps[at].preempted.empty() || steps[at].running.empty()) return false;
         const auto gave_way_before = [&](const RecordedStep& step) {
           return std::ranges::count(step.preempted, steps[at].preempted[0]) > 0;
         };
         if (std::any_of(steps.begin(), steps.begin() + at, gave_way_before)) return false;
         for (RecordedStep& step : steps)
           for (RecordedEvent& event : step.before)
             if (event.request.name == steps[at].preempted[0]) event.request.priority = -9;
         return std::ranges::find(steps[at].scheduled, true, &RecordedScheduled::is_new) ==
                steps[at].scheduled.end();
       }},
      {"DraftsGetNoSlots", "spec_decode_eagle", AuditRule::draft_slots,
       [](Steps& steps, std::size_t at) {
         for (RecordedScheduled& row : steps[at].scheduled) {
           const std::int32_t size = 16;
           if (row.is_new || !row.blocks || (*row.blocks)[0].empty()) continue;
           if ((row.computed + row.tokens - 1) / size == (row.computed + row.tokens + 2) / size)
             continue;  // the block is for tokens of the step
           (*row.blocks)[0].pop_back();
           return true;
         }
         return false;
       }},
      {"AStateIsKeptTooLong", "mamba_align", AuditRule::planned_blocks,
       [](Steps& steps, std::size_t at) {
         if (!steps[at].tables) return false;
         for (RecordedTable& table : *steps[at].tables) {
           if (std::ranges::count(table.blocks[1], kNullBlock) < 2) continue;
           std::ranges::replace(table.blocks[1], kNullBlock, table.blocks[1].back());
           return true;
         }
         return false;
       }},
      {"AnAdapterIsLeftOutOfTheHash", "full_prefix_cache", AuditRule::attention_read,
       [](Steps& steps, std::size_t at) {
         for (const RecordedScheduled& row : steps[at].scheduled)
           if (row.is_new && !row.resumed && row.computed > 0) {
             for (RecordedStep& step : steps)
               for (RecordedEvent& event : step.before)
                 if (event.kind == RecordedEvent::Kind::add && event.request.name == row.id)
                   event.request.keys.lora = {"sql", 1, "/a"};
             return true;
           }
         return false;
       }},
      {"DraftsAreVerifiedThatNobodyProposed", "spec_decode_ngram", AuditRule::drafts,
       [](Steps& steps, std::size_t at) {
         for (RecordedScheduled& row : steps[at].scheduled)
           if (!row.spec.empty() && row.spec[0] >= 0) {
             ++row.spec[0];
             return true;
           }
         return false;
       }},
      {"DraftsCountForWhoWasNotScheduled", "spec_decode_ngram", AuditRule::drafts,
       [](Steps& steps, std::size_t at) {
         for (const std::string& waiting : steps[at].waiting)
           if (steps[at].drafts && !steps[at].drafts->empty()) {
             steps[at].drafts->back().id = waiting;
             steps[at].drafts->back().tokens = {7};
             return true;
           }
         return false;
       }},
      {"AnEndIsToldToNobody", "full_attention", AuditRule::queues,
       [](Steps& steps, std::size_t at) {
         if (steps[at].stopped.empty() || at + 1 == steps.size()) return false;
         steps[at].stopped.clear();
         return true;
       }},
      {"AnEndIsNotReportedToTheWorker", "full_attention", AuditRule::queues,
       [](Steps& steps, std::size_t at) {
         if (steps[at].finished.empty()) return false;
         steps[at].finished.clear();
         return true;
       }},
      {"AStopTokenEndsNobody", "full_prefix_cache", AuditRule::sampled,
       [](Steps& steps, std::size_t at) {
         if (at + 1 >= steps.size()) return false;
         for (const RecordedStep& step : steps)
           for (const RecordedEvent& event : step.before)
             for (RecordedTokens& sampled : steps[at].sampled)
               if (event.kind == RecordedEvent::Kind::add && event.request.name == sampled.id &&
                   event.request.eos_token && event.request.min_tokens == 0 &&
                   std::ranges::find(steps[at + 1].scheduled, sampled.id, &RecordedScheduled::id) !=
                       steps[at + 1].scheduled.end()) {
                 sampled.tokens[0] = *event.request.eos_token;
                 return true;
               }
         return false;
       }},
      {"AVictimIsNotNamed", "preemption", AuditRule::queues,
       [](Steps& steps, std::size_t at) {
         if (steps[at].preempted.empty()) return false;
         steps[at].preempted.clear();
         return true;
       }},
      {"AResumedRequestIsHandedOverLikeOneThatRuns", "preemption", AuditRule::handed_out,
       [](Steps& steps, std::size_t at) {
         for (RecordedScheduled& row : steps[at].scheduled)
           if (row.resumed) {
             row.is_new = row.resumed = false;
             return true;
           }
         return false;
       }},
      {"AResumedRequestIsNewOnly", "preemption", AuditRule::starts,
       [](Steps& steps, std::size_t at) {
         const auto row = std::ranges::find(steps[at].scheduled, true, &RecordedScheduled::resumed);
         if (row == steps[at].scheduled.end()) return false;
         row->resumed = false;
         return true;
       }},
      {"AFirstRowIsResumed", "full_attention", AuditRule::starts,
       [](Steps& steps, std::size_t at) {
         const auto row = std::ranges::find(steps[at].scheduled, true, &RecordedScheduled::is_new);
         if (row == steps[at].scheduled.end() || row->resumed) return false;
         row->resumed = true;
         return true;
       }},
      {"AnEndIsReportedAgain", "full_attention", AuditRule::queues,
       [](Steps& steps, std::size_t at) {
         if (steps[at].finished.empty() || at + 1 == steps.size()) return false;
         steps[at + 1].finished.push_back(steps[at].finished[0]);
         return true;
       }},
      {"AHitIsFromBeforeAReset", "full_prefix_cache", AuditRule::forbidden_hit,
       [](Steps& steps, std::size_t at) {
         const auto& rows = steps[at].scheduled;
         if (rows.empty() || !rows[0].is_new || rows[0].computed == 0) return false;
         RecordedEvent& reset = steps[at].before.emplace_back();
         reset.kind = RecordedEvent::Kind::reset_prefix_cache;
         reset.reset_succeeded = true;
         return true;
       }},
      {"ARequestThatDoesNotReadTheCacheHits", "full_prefix_cache", AuditRule::forbidden_hit,
       [](Steps& steps, std::size_t at) {
         const auto& rows = steps[at].scheduled;
         if (rows.empty() || !rows[0].is_new || rows[0].computed == 0) return false;
         for (RecordedStep& step : steps)
           for (RecordedEvent& event : step.before)
             if (event.request.name == rows[0].id) event.request.skip_reading_prefix_cache = true;
         return true;
       }},
      {"TheWorkerIsHandedAnotherBlockThanTheTableHas", "sliding_window", AuditRule::handed_out,
       [](Steps& steps, std::size_t at) {
         if (!steps[at].tables) return false;
         for (RecordedTable& table : *steps[at].tables)
           if (table.blocks[0].back() > BlockId{1}) {
             table.blocks[0].back() = BlockId{index_of(table.blocks[0].back()) - 1};
             return true;
           }
         return false;
       }},
      {"AnOutputComesInTwice", "async_scheduling", AuditRule::stale_output,
       [](Steps& steps, std::size_t at) {
         if (at < 3 || steps[at].output_of_step.value_or(0) == 0) return false;
         --*steps[at].output_of_step;
         return true;
       }},
      {"MoreRequestsRunThanAWorkerHasRoomFor", "full_attention", AuditRule::limits,
       [](Steps& steps, std::size_t at) {
         if (steps[at].running.empty()) return false;
         for (int i = 0; i < 300; ++i) steps[at].running.push_back("another");
         return true;
       }},
      {"ARunningRequestComputesATokenAgain", "full_attention", AuditRule::computed_again,
       [](Steps& steps, std::size_t at) {
         for (RecordedScheduled& row : steps[at].scheduled) {
           if (row.is_new || row.computed == 0) continue;
           --row.computed;
           return true;
         }
         return false;
       }},
      {"ATableIsLongerThanItsTokensNeed", "full_attention", AuditRule::excess_blocks,
       [](Steps& steps, std::size_t at) {
         for (RecordedScheduled& row : steps[at].scheduled) {
           if (!row.is_new) continue;
           (*row.blocks)[0].push_back(kNullBlock);
           return true;
         }
         return false;
       }},
      {"ABlockIsLostWhenItsRequestEnds", "full_attention", AuditRule::conservation,
       [](Steps& steps, std::size_t at) {
         if (steps[at].finished.empty()) return false;
         lose_blocks(steps, at, 1);
         return true;
       }},
  };
}

class DecisionMutants : public testing::TestWithParam<DecisionMutant> {};

TEST_P(DecisionMutants, IsAccusedWhereItFirstShows) {
  const DecisionMutant& mutant = GetParam();
  const std::string folder =
      std::string(LOCKSTEP_SOURCE_DIR) + "/traces/samples/recordings/vllm-0.22.1/" + mutant.family;
  int num_planted = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    Result<Recording> recording = read_recording(entry.path().string());
    ASSERT_TRUE(recording) << recording.error().message;
    ASSERT_TRUE(audit(*recording, AuditScope::whole_recording).empty());
    for (std::size_t at = 0; at < recording->steps.size(); ++at) {
      Recording changed = *recording;
      if (!mutant.plant(changed.steps, at)) continue;
      const auto findings = audit(changed, AuditScope::whole_recording);
      const auto found = std::ranges::find(findings, mutant.rule, &AuditFinding::rule);
      ASSERT_NE(found, findings.end()) << entry.path() << " step " << at;
      EXPECT_GE(found->step, changed.steps[at].step);
      EXPECT_LE(found->step, changed.steps[at].step + 8) << line_of(*found);  // of tables
      EXPECT_EQ(line_of(*found).find("audit." + std::string(name_of(mutant.rule)) + " step "), 0u);
      if (++num_planted == 5) return;
      at += 7;
    }
  }
  EXPECT_GT(num_planted, 0);
}

void PrintTo(const DecisionMutant& mutant, std::ostream* out) { *out << mutant.name; }

INSTANTIATE_TEST_SUITE_P(All, DecisionMutants, testing::ValuesIn(mutants()),
                         [](const auto& mutant) { return mutant.param.name; });

}  // namespace
}  // namespace lockstep
