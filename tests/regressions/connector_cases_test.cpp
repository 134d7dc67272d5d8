// What `lockstep fuzz` found in this project once it drew KV connectors, each as the small case
// that showed it.
#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "properties/judge/judge.h"

namespace lockstep {
namespace {

// The case runs to its end, and comes by what it is about.
void expect_agreed(const std::string& name, Reached what, std::int64_t times = 1) {
  const auto saved =
      read_saved_case(LOCKSTEP_SOURCE_DIR "/tests/regressions/" + name + ".case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const Outcome outcome = judge(*saved, make_simt_backend);
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  EXPECT_GE(outcome.tally[what], times);
}

// Seed 704459. A request ended while loading, and the next one had its id: blocks of the load
// counted as the other's, and were not allocated to it.
TEST(ConnectorCasesFound, TheIdOfARequestThatLeftWhileLoadingIsAnothers) {
  expect_agreed("id_of_a_request_that_left_while_loading", Reached::abort_loading);
}

// Seed 700736. A finished request sends a block with one token in it, and is spread over two ranks
// of context parallelism: one of them has nothing to send.
TEST(ConnectorCasesFound, ARankMayKeepNothingOfABlockThatIsSent) {
  expect_agreed("rank_that_keeps_nothing_of_a_sent_block", Reached::delayed_free);
}

// Seed 2133. A request ends and keeps its blocks until its stores complete. They are dropped,
// because its window has freed the blocks; the tier had nothing left to do, and the next request
// counted as stuck before the blocks were freed.
TEST(ConnectorCasesFound, AHostTierThatHasBlocksToGiveBackIsBusy) {
  expect_agreed("host_tier_whose_last_stores_are_dropped", Reached::length_end, 2);
}

// Seed 3016807, and six more seeds that no finding of an engine explained. A window has freed a
// block, and the next request loads into it and loses it. The worker's table still names the block;
// the row counted as void, and what it wrote as wrong in the next step.
TEST(ConnectorCasesFound, ARowIsVoidIfItReadsWhatWasLost) {
  expect_agreed("block_behind_a_window_lost_by_another", Reached::lost_blocks);
}

// Seed 3142. A load fails, the request is aborted, and the next one has the block when the report
// arrives: it is sent back as well, which counted as tokens computed again without a cause.
TEST(ConnectorCasesFound, ALateReportSendsBackTheRequestThatHasTheBlockNow) {
  const auto saved = read_saved_case(LOCKSTEP_SOURCE_DIR
                                     "/tests/regressions/late_report_of_a_reused_block.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const Outcome outcome = judge(*saved);  // no kernel takes blocks of one token
  EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  EXPECT_GE(outcome.tally[Reached::lost_blocks], 1);
}

// Seeds 2137 and 4110. A request is aborted while it loads, and its last page is restored to the
// device anyway. The next request takes that block, which counted as restored for it.
TEST(ConnectorCasesFound, APageRestoredForAnAbortedRequestIsNobodysHit) {
  expect_agreed("page_restored_for_an_aborted_request", Reached::abort_loading);
}

}  // namespace
}  // namespace lockstep
