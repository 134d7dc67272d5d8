// The audit follows what releases as served do: states from inside a chunk, parts of blocks that
// are copied, windows that are computed again, rings, pauses. Each case is a recording of vLLM
// 0.33.0 that is right, with one thing in it made wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "properties/audit/audit.h"
#include "tests/properties/audit/audited.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

// A recording below tests/, without its extension.
Recording recorded(const std::string& name) {
  Result<Recording> recording =
      read_recording(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/" + name + ".jsonl");
  EXPECT_TRUE(recording) << recording.error().message;
  return recording ? *recording : Recording{};
}

// Right as recorded; once changed, the first finding is about `request` and says `what`.
void expect_found(const std::string& name, const std::function<void(Recording&)>& change,
                  const std::string& request, const std::string& what) {
  Recording recording = recorded(name);
  ASSERT_FALSE(recording.steps.empty());
  EXPECT_TRUE(audit(recording, AuditScope::whole_recording).empty()) << name;
  change(recording);
  const std::vector<AuditFinding> findings = audit(recording, AuditScope::whole_recording);
  ASSERT_FALSE(findings.empty()) << "expected: " << what;
  EXPECT_EQ(findings[0].request, request) << findings[0].what;
  EXPECT_NE(findings[0].what.find(what), std::string::npos) << findings[0].what;
}

// What a step hands to "reader" of a group.
std::vector<BlockId>& reader_blocks(Recording& recording, std::size_t step, std::size_t group) {
  auto& scheduled = recording.steps[step].scheduled;
  const auto row = std::ranges::find(scheduled, "reader", &RecordedScheduled::id);
  return (*row->blocks)[group];
}

TEST(AuditAsServed, AHitOfAnotherBlockThanTheCheckpointSIsFound) {
  // Block 2 has the state that the writer continues with.
  expect_found(
      "regressions/hit_of_a_prefill_checkpoint",
      [](Recording& recording) {
        reader_blocks(recording, 3, 0)[1] = BlockId{2};
        reader_blocks(recording, 3, 1)[2] = BlockId{6};
        std::ranges::replace(recording.steps[3].zero, BlockId{2}, BlockId{6});
      },
      "reader",
      "the state after 8 tokens is read from block 5, which holds the one after 9 tokens of "
      "request writer");
}

TEST(AuditAsServed, AHitOfACheckpointThatNoKernelExportsIsFound) {
  expect_found(
      "regressions/hit_of_a_prefill_checkpoint",
      [](Recording& recording) {
        recording.header.groups[0].spec.prefill_checkpoint_alignment = 0;
      },
      "reader", "the state after 8 tokens is read from block 5, which holds none");
}

TEST(AuditAsServed, ACheckpointThatDoesNotLieOnTheKernelSGridIsNotThere) {
  expect_found(
      "regressions/hit_of_a_prefill_checkpoint",
      [](Recording& recording) {
        recording.header.groups[0].spec.prefill_checkpoint_alignment = 3;
      },
      "reader", "the state after 8 tokens is read from block 5, which holds none");
}

// The case of docs/findings.md up to its third request, which hits a part of a block.
Recording hit_of_a_part(bool is_copied) {
  Recording recording = recorded("regressions/vllm_0_33_0_state_under_longer_prefix");
  recording.steps.resize(7);
  if (!is_copied) recording.steps[5].copies.clear();
  return recording;
}

TEST(AuditAsServed, AHitOfAPartOfABlockThatIsNotCopiedIsFound) {
  EXPECT_TRUE(audit(hit_of_a_part(true)).empty());
  const std::vector<AuditFinding> findings = audit(hit_of_a_part(false));
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings[0].request, "middle");
  EXPECT_EQ(findings[0].step, 5);
}

TEST(AuditAsServed, ACopyToABlockInUseIsFound) {
  expect_found(
      "regressions/window_is_computed_again",
      [](Recording& recording) {
        recording.steps[2].copies = {{BlockId{10}, BlockId{4}}};
      },
      "writer", "block 10 is copied to block 4, which this request still reads");
}

TEST(AuditAsServed, AWindowThatIsComputedAgainNeedsItsBlocks) {
  expect_found(
      "regressions/window_is_computed_again",
      [](Recording& recording) { reader_blocks(recording, 1, 1)[2] = kNullBlock; }, "reader",
      "a token is written to the null block");
}

TEST(AuditAsServed, AWindowThatIsNotComputedAgainNeedsWhatLiesBeforeIt) {
  expect_found(
      "regressions/window_is_computed_again",
      [](Recording& recording) { recording.header.groups[1].spec.bounded_replay = false; },
      "reader", "beyond the hit of 8 tokens, while request writer still reads it");
}

TEST(AuditAsServed, ARingOfTwoRequestsIsFound) {
  expect_found(
      "regressions/window_is_computed_again",
      [](Recording& recording) { reader_blocks(recording, 1, 2)[0] = BlockId{9}; }, "reader",
      "block 9 becomes entry 0 of the table");
}

TEST(AuditAsServed, ARequestWithoutItsRingIsFound) {
  expect_found(
      "regressions/window_is_computed_again",
      [](Recording& recording) { reader_blocks(recording, 1, 2).clear(); }, "reader",
      "a ring has one block, and the table of this group has 0");
}

TEST(AuditAsServed, ARequestThatNobodyKeepsOutIsFound) {
  expect_found(
      "regressions/nobody_is_let_in_by_a_pause",
      [](Recording& recording) {
        recording.header.options.config.max_model_len = 16;  // and the pool holds that
        std::erase_if(recording.steps[1].before, [](const RecordedEvent& event) {
          return event.kind == RecordedEvent::Kind::pause_state;
        });
      },
      "b", "all blocks are free, and this request is not admitted");
}

TEST(AuditAsServed, TokensThatAnOutputDidNotNameAreFoundOnceTheNextOneIsThere) {
  expect_found(
      "regressions/ends_with_steps_in_flight",
      [](Recording& recording) { recording.steps[2].output_of_step = 0; }, "a",
      "tokens [6, 7) are scheduled, but only 6 are known");
}

TEST(AuditAsServed, ANameThatIsUsedAgainBeforeItsBearerEndsIsFound) {
  expect_found(
      "regressions/name_used_again_at_its_end",
      [](Recording& recording) {
        for (RecordedStep& step : recording.steps) step.stopped.clear();
      },
      "a", "two live requests have this name");
}

// Three modules: with all three drafts of step 4 rejected, the two tokens before it are run again,
// and their window reaches into block 6, which the row's own does not.
TEST(AuditAsServed, TheWindowOfTokensThatTheDrafterRunsAgainIsNeeded) {
  expect_found(
      "conformance/as_served/several_mtp_modules",
      [](Recording& recording) {
        recording.steps[4].copies = {{BlockId{1}, BlockId{6}}};
      },
      "a", "the draft model runs 2 tokens before token 68 again and reads token 47");
}

// Two modules. "a" samples token 3 with its prompt, and token 4 in a step of its own; "b" has the
// same tokens as a prompt and hits the block of the first four.
Recording drafts_before_a_hit(bool are_verified) {
  RecordedEvent b;
  b.request.name = "b";
  b.request.prompt.append({TokenRun::Kind::seeded, 7, 0, 7});
  const std::vector<std::int32_t> tokens = b.request.prompt.materialize();
  RecordedEvent a;
  a.request.name = "a";
  a.request.prompt.append({TokenRun::Kind::seeded, 7, 0, 3});
  Recording recording;
  recording.header.engine = {"vllm", "0.33.0"};
  EngineConfig& config = recording.header.options.config;
  config.spec_method = SpecMethod::eagle;
  config.num_spec_tokens = config.num_hash_lookahead_tokens = 2;
  config.max_model_len = 8;  // no drafts behind it
  recording.header.groups.resize(1);
  recording.header.groups[0].spec.block_size = 4;
  recording.header.num_blocks = 8;
  recording.header.scheduler_block_size = recording.header.hash_block_size = 4;
  recording.steps.resize(4);
  // The only row of a step; `blocks`: handed over to a new request, or one more block.
  const auto run = [&](std::size_t step, const std::string& id, std::int32_t computed,
                       const std::vector<BlockId>& blocks, const std::vector<std::int32_t>& drafts,
                       const std::vector<std::int32_t>& sampled) {
    RecordedScheduled row;
    row.id = id;
    row.computed = computed;
    row.is_new = step % 3 == 0;
    row.tokens = row.is_new ? 3 : 1 + static_cast<std::int32_t>(drafts.size());
    row.spec = drafts;
    if (!blocks.empty()) row.blocks = {{blocks}};
    recording.steps[step].step = static_cast<std::int64_t>(step);
    recording.steps[step].scheduled = {row};
    recording.steps[step].running = {id};
    recording.steps[step].sampled = {{id, sampled}};
  };
  recording.steps[0].before = {a};
  run(0, "a", 0, {BlockId{1}, BlockId{2}}, {}, {tokens[3]});
  if (are_verified) {
    run(1, "a", 3, {}, {tokens[4], tokens[5]}, {tokens[4], tokens[5], tokens[6]});
    run(2, "a", 6, {}, {}, {1});
  } else {
    run(1, "a", 3, {}, {}, {tokens[4]});
    run(2, "a", 4, {}, {}, {tokens[5]});
  }
  recording.steps[3].before = {b};
  run(3, "b", 4, {BlockId{1}, BlockId{3}}, {}, {1});
  recording.steps[3].finished = {"a"};
  return recording;
}

TEST(AuditAsServed, AHitOfRowsThatWereMadeOfDraftsWhichNobodyVerifiedIsFound) {
  EXPECT_TRUE(audit(drafts_before_a_hit(true)).empty());
  const std::vector<AuditFinding> findings = audit(drafts_before_a_hit(false));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, AuditRule::draft_read);
  EXPECT_EQ(findings[0].request, "b");
  EXPECT_NE(findings[0].what.find("a hit ends with token 2 in slot 2 of block 1, which holds token "
                                  "2 of request a and was drafted from with less after it"),
            std::string::npos)
      << findings[0].what;
}

}  // namespace
}  // namespace lockstep
