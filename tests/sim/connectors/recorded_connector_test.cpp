// What a recorded connector must not say: one clear refusal each, and never a wrong decision.
#include "sim/connectors/recorded_connector.h"

#include <gtest/gtest.h>

#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

// One request of 10 tokens, 8 of which are loaded; blocks of 4 tokens.
Recording loading() {
  Recording recording;
  recording.header.engine = {"vllm", "0.22.1"};
  recording.header.options.config.engine = "vllm-0.22.1";
  recording.header.options.config.block_size = 4;
  recording.header.groups.resize(1);
  recording.header.groups[0].layer_names = {"layers.0"};
  recording.header.groups[0].spec.block_size = 4;
  recording.header.num_blocks = 6;
  recording.header.connector.emplace();
  recording.steps.resize(2);
  RecordedEvent event;
  event.request.name = "a";
  event.request.prompt.append({TokenRun::Kind::seeded, 7, 0, 10});
  recording.steps[0].before = {event};
  recording.steps[0].connector = {{{"a", 0, 8, true}}};
  recording.steps[1].step = 1;
  recording.end = {.steps = 2, .unfinished = {"a"}};
  return recording;
}

Result<RunReport> run(const Recording& recording) {
  const RecordingHeader& header = recording.header;
  const auto workload = make_recording_workload(std::make_shared<const Recording>(recording));
  auto decisions = Scheduler::create(header.options.config, header.groups, header.num_blocks,
                                     kv_transfer(header, workload->connector()));
  if (!decisions) return tl::unexpected(decisions.error());
  LockstepConfig config;
  config.engine = header.options.config;
  config.backend.plan.num_blocks = header.num_blocks;
  config.backend.plan.groups = header.groups;
  return run_lockstep(config, {*decisions, *workload});
}

void expect_refused(const Recording& recording, const std::string& what) {
  const auto report = run(recording);
  ASSERT_FALSE(report) << "expected: " << what;
  EXPECT_NE(report.error().message.find(what), std::string::npos) << report.error().message;
}

TEST(RecordedConnector, ALoadUnderWayIsFollowed) {
  Recording recording = loading();
  recording.steps[0].worker = {{"a"}, {}, {}};
  const auto report = run(recording);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->summary.scheduled_tokens, 2);
}

TEST(RecordedConnector, MoreTokensThanTheRequestHasAreRefused) {
  Recording recording = loading();
  recording.steps[0].connector = {{{"a", 0, 11, true}}};
  expect_refused(recording,
                 "step 0: connector: 11 external tokens of request a; expected at most 10");
  recording.steps[0].connector = {{{"a", 0, 10, false}}};
  expect_refused(recording, "expected at most 9");
}

TEST(RecordedConnector, ALoadOfARequestThatLoadsNothingIsRefused) {
  Recording recording = loading();
  recording.steps[0].worker = {{"b"}, {}, {}};
  expect_refused(recording, "step 0: worker.received: nothing of request b is being transferred");
  recording.steps[0].worker = {{"a"}, {}, {}};
  recording.steps[1].worker = {{"a"}, {}, {}};
  expect_refused(recording, "step 1: worker.received: a request that waits for no load");
}

// What CPython 3.11 prints with PYTHONHASHSEED=0: {"r13", "r0"}, filled in that order, iterates as
// r0, r13; filled the other way round it iterates as r13, r0.
TEST(RecordedConnector, SendsOfTwoConnectorsAreReleasedInTheOrderOfTheSetTheyFillPartByPart) {
  RecordedStep step;
  step.held = {"r0", "r13"};
  step.worker = RecordedWorker{{}, {"r0", "r13"}, {}};
  RecordedConnectorConfig config;
  config.parts = 2;
  RecordedConnector connector(config, step);
  ASSERT_TRUE(connector.request_finished(RequestId{0}, "r0"));
  ASSERT_TRUE(connector.request_finished(RequestId{13}, "r13"));
  const auto released = [&](std::vector<RecordedPartReport> parts) {
    step.transfers.parts_worker = std::move(parts);
    KVConnectorOutput report;
    EXPECT_TRUE(connector.take_report(report));
    return report.finished_sending;
  };
  using Ids = std::vector<RequestId>;
  EXPECT_EQ(released({{.sent = {"r13"}}, {.sent = {"r0"}}}), (Ids{RequestId{0}, RequestId{13}}));
  EXPECT_EQ(released({{.sent = {"r0"}}, {.sent = {"r13"}}}), (Ids{RequestId{13}, RequestId{0}}));
  // Both parts keep r0: the report of the last one counts.
  EXPECT_EQ(released({{.sent = {"r0"}}, {.sent = {"r0", "r13"}}}),
            (Ids{RequestId{13}, RequestId{0}}));
}

TEST(RecordedConnector, BlocksSentThatNobodyKeepsAreRefused) {
  Recording recording = loading();
  recording.steps[0].worker = {{}, {"a"}, {}};
  expect_refused(recording, "step 0: worker.sent: a request whose blocks are not held");
}

TEST(RecordedConnector, InvalidBlocksOfSeveralGroupsOrBeyondThePoolAreRefused) {
  Recording recording = loading();
  recording.steps[0].worker = {{}, {}, {BlockId{6}}};
  expect_refused(recording, "block 6 is not in the pool of 6");
  recording.header.groups.push_back(recording.header.groups[0]);
  recording.header.groups[1].spec.kind = CacheKind::sliding_window;
  recording.header.groups[1].spec.sliding_window = 8;
  recording.steps[0].worker = {{}, {}, {BlockId{1}}};
  expect_refused(recording, "expected one KV cache group, found 2");
}

}  // namespace
}  // namespace lockstep
