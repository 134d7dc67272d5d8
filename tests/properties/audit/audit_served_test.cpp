// The audit follows what releases as served do: states from inside a chunk, parts of blocks that
// are copied, windows that are computed again, rings, pauses. Each case is a recording of vLLM
// 0.33.0 that is right, with one thing in it made wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "properties/audit/audit.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

Recording recorded(const std::string& name) {
  Result<Recording> recording =
      read_recording(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + name + ".jsonl");
  EXPECT_TRUE(recording) << recording.error().message;
  return recording ? *recording : Recording{};
}

std::vector<AuditFinding> audit(const Recording& recording) {
  Auditor auditor(recording.header, AuditScope::whole_recording);
  for (const RecordedStep& step : recording.steps) auditor.step(step);
  auditor.end(recording.end);
  return auditor.take_findings();
}

// Right as recorded; once changed, the first finding is about `request` and says `what`.
void expect_found(const std::string& name, const std::function<void(Recording&)>& change,
                  const std::string& request, const std::string& what) {
  Recording recording = recorded(name);
  EXPECT_TRUE(audit(recording).empty()) << name;
  change(recording);
  const std::vector<AuditFinding> findings = audit(recording);
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

TEST(AuditAsServed, a_hit_of_another_block_than_the_checkpoint_s_is_found) {
  // Block 2 has the state that the writer goes on with.
  expect_found(
      "hit_of_a_prefill_checkpoint",
      [](Recording& recording) {
        reader_blocks(recording, 3, 0)[1] = BlockId{2};
        reader_blocks(recording, 3, 1)[2] = BlockId{6};
      },
      "reader",
      "the state after 8 tokens is read from block 5, which holds the one after 9 tokens of "
      "request writer");
}

TEST(AuditAsServed, a_hit_of_a_checkpoint_that_no_kernel_exports_is_found) {
  expect_found(
      "hit_of_a_prefill_checkpoint",
      [](Recording& recording) {
        recording.header.groups[0].spec.prefill_checkpoint_alignment = 0;
      },
      "reader", "the state after 8 tokens is read from block 5, which holds none");
}

TEST(AuditAsServed, a_checkpoint_that_does_not_lie_on_the_kernel_s_grid_is_not_there) {
  expect_found(
      "hit_of_a_prefill_checkpoint",
      [](Recording& recording) {
        recording.header.groups[0].spec.prefill_checkpoint_alignment = 3;
      },
      "reader", "the state after 8 tokens is read from block 5, which holds none");
}

// The case of docs/findings.md up to its third request, which hits a part of a block.
Recording hit_of_a_part(bool is_copied) {
  Recording recording = recorded("vllm_0_33_0_state_under_longer_prefix");
  recording.steps.resize(7);
  if (!is_copied) recording.steps[5].copies.clear();
  return recording;
}

TEST(AuditAsServed, a_hit_of_a_part_of_a_block_that_is_not_copied_is_found) {
  EXPECT_TRUE(audit(hit_of_a_part(true)).empty());
  const std::vector<AuditFinding> findings = audit(hit_of_a_part(false));
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings[0].request, "middle");
  EXPECT_EQ(findings[0].step, 5);
}

TEST(AuditAsServed, a_copy_to_a_block_in_use_is_found) {
  expect_found(
      "window_is_computed_again",
      [](Recording& recording) {
        recording.steps[2].copies = {{BlockId{10}, BlockId{4}}};
      },
      "writer", "block 10 is copied to block 4, which this request still reads");
}

TEST(AuditAsServed, a_window_that_is_computed_again_needs_its_blocks) {
  expect_found(
      "window_is_computed_again",
      [](Recording& recording) { reader_blocks(recording, 1, 1)[2] = kNullBlock; }, "reader",
      "a token is written to the null block");
}

TEST(AuditAsServed, a_window_that_is_not_computed_again_needs_what_lies_before_it) {
  expect_found(
      "window_is_computed_again",
      [](Recording& recording) { recording.header.groups[1].spec.bounded_replay = false; },
      "reader", "beyond the hit of 8 tokens, while request writer still reads it");
}

TEST(AuditAsServed, a_ring_of_two_requests_is_found) {
  expect_found(
      "window_is_computed_again",
      [](Recording& recording) { reader_blocks(recording, 1, 2)[0] = BlockId{9}; }, "reader",
      "block 9 becomes entry 0 of the table");
}

TEST(AuditAsServed, a_request_without_its_ring_is_found) {
  expect_found(
      "window_is_computed_again",
      [](Recording& recording) { reader_blocks(recording, 1, 2).clear(); }, "reader",
      "a ring has one block, and the table of this group has 0");
}

TEST(AuditAsServed, a_request_that_nobody_keeps_out_is_found) {
  expect_found(
      "nobody_is_let_in_by_a_pause",
      [](Recording& recording) {
        recording.header.options.config.max_model_len = 16;  // and the pool holds that
        std::erase_if(recording.steps[1].before, [](const RecordedEvent& event) {
          return event.kind == RecordedEvent::Kind::pause_state;
        });
      },
      "b", "all blocks are free, and this request is not let in");
}

TEST(AuditAsServed, tokens_that_an_output_did_not_name_are_found_once_the_next_one_is_there) {
  expect_found(
      "ends_with_steps_in_flight",
      [](Recording& recording) { recording.steps[2].output_of_step = 0; }, "a",
      "tokens [6, 7) are scheduled, but only 6 are known");
}

TEST(AuditAsServed, a_name_that_is_used_again_before_its_bearer_ends_is_found) {
  expect_found(
      "name_used_again_at_its_end",
      [](Recording& recording) {
        for (RecordedStep& step : recording.steps) step.stopped.clear();
      },
      "a", "two live requests are called so");
}

}  // namespace
}  // namespace lockstep
