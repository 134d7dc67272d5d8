// Cases in which a known finding of vLLM occurs in another way than in its own smallest case, and
// is still recognised.
#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"

namespace lockstep {
namespace {

void expect_known(const std::string& name, std::string_view check, std::int32_t number,
                  const BackendFactory& backend = make_simt_backend) {
  const auto saved =
      read_saved_case(LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const Outcome outcome = judge(*saved, backend);
  EXPECT_EQ(outcome.check, check) << outcome.what;
  const KnownFinding* finding = known_finding(*saved, outcome, backend);
  ASSERT_NE(finding, nullptr) << outcome.what;
  EXPECT_EQ(finding->number, number) << finding->title;
}

// Seed 700424. No group of attention shortens the hit, and the last whole block of a prompt has the
// hash of its tokens over the state of fewer.
TEST(VariantsOfFindings, WithEagleAStateHitIsWrongAlsoWhereStatesAreAlone) {
  expect_known("eagle_beside_states_alone", "decide", 1);
}

// Seed 176197. The hit ends with 0 tokens, after windows past the state were searched up to the
// state's own 8: the table of one starts with the null block, and 8 tokens are written to it.
TEST(VariantsOfFindings, WithEagleALongerStateHitLeavesNullBlocksToAShorterOne) {
  expect_known("state_hit_leaves_null_blocks", "audit.token_write", 1, {});
}

// Seed 90018723. The hit ends with 0 tokens, and the blocks that the group of states found stay in
// the table: they are not from the front of the free queue.
TEST(VariantsOfFindings, WithEagleAHitOfNoTokensKeepsTheStatesThatItFound) {
  expect_known("states_of_a_hit_of_no_tokens", "invariant.queue_front", 1, {});
}

// Seed 929018. Both requests have loaded everything; the slots of their drafts do not fit together.
TEST(VariantsOfFindings, TwoLoadedRequestsWaitForTheSlotsOfTheirDrafts) {
  expect_known("loads_without_room_for_drafts", "liveness.partial_load", 8);
}

// Seed 911317. Drafts of the one that runs take the last block; loaded, the other preempts it or is
// preempted, loads again, and so on. Reports of loads are no progress: fuzzing did not end.
TEST(VariantsOfFindings, TwoRequestsLoadAndPreemptEachOtherInTurn) {
  expect_known("loads_and_preemptions_in_turn", "liveness", 8);
}

// Seed 343 of 0.33.0. The pool has the slots of a request's drafts up to its longest length, and a
// load waits for blocks of their own.
TEST(VariantsOfFindings, ALoadWaitsForBlocksForDraftsThatThePoolDoesNotHave) {
  expect_known("load_waits_for_room_for_drafts", "liveness", 35);
}

// Seed 800755 of 0.33.0. The chunk in flight keeps its checkpoint too, so two blocks are missing.
TEST(VariantsOfFindings, ACheckpointOfAStepInFlightIsNotPlanned) {
  expect_known("checkpoints_in_flight_never_end", "liveness", 5, {});
}

// Seed 50157 of 0.33.0 itself: the engine stops, and the model fails by finding 13.
TEST(VariantsOfFindings, AnEngineStopsWhereTheModelHasAnotherFinding) {
  const auto saved = read_saved_case(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/padded_request_without_its_window.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  Outcome stops;
  stops.kind = OutcomeKind::violation;
  stops.check = "engine.exception";
  stops.step = 4;
  stops.what = "AssertionError: assert num_new_tokens == 1 + self.num_spec_tokens (in schedule)";
  const KnownFinding* finding = known_finding_of_engine(*saved, stops);
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->number, 21);
  stops.step = 5;
  EXPECT_EQ(known_finding_of_engine(*saved, stops), nullptr) << "the model fails before";
}

// Seed 8087461. Both load up to a token after their windows; what each needs for the next token
// counted as nothing, also in the profile without the finding.
TEST(VariantsOfFindings, TwoLoadsBehindWindowsLeaveNoRoomForAToken) {
  expect_known("loads_behind_windows_without_room", "liveness.partial_load", 8);
}

// Seed 8025916. A request has hit a lost block while it loads, and recomputes it while the request
// that computed it first still keeps it for a send.
TEST(VariantsOfFindings, ALostBlockThatIsSentIsWrittenAgain) {
  expect_known("lost_block_is_written_again", "audit.handed_out", 9);
}

// Seed 30662957. A request sent back to a lost block shares the previous block with another, and
// both compute that block in one step.
TEST(VariantsOfFindings, ALostBlockIsWrittenByTwoInOneStep) {
  expect_known("lost_block_is_written_by_two", "invariant.one_writer", 9, {});
}

// Seed 8177204. Without either of them the other one still gives the block away.
TEST(VariantsOfFindings, TwoFindingsThatLeadToOneFailureAreTheFirstOnes) {
  expect_known("two_findings_at_once", "invariant.queue_front", 2);
}

// Seed 7032034. Two requests load whole prompts: the client of one disconnects meanwhile, and the
// other runs into the finding. Without it a load keeps writing the window of the last token, too;
// the block was freed, reallocated and written by both, and the finding counted as a new failure.
TEST(VariantsOfFindings, AClientLeavesWhileTheWindowOfItsLastTokenLoads) {
  expect_known("client_leaves_while_its_window_loads", "decide", 13);
}

}  // namespace
}  // namespace lockstep
