// The audit of what a KV connector moves: nothing is found in right decisions, and every kind of
// wrong one is.
#include <gtest/gtest.h>

#include <algorithm>

#include "properties/audit/audit.h"
#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

RecordedEvent add(const std::string& name, std::uint64_t seed, std::uint32_t size) {
  RecordedEvent event;
  event.request.name = name;
  event.request.prompt.append({TokenRun::Kind::seeded, seed, 0, size});
  event.request.max_tokens = 1;
  return event;
}

RecordedScheduled scheduled(const std::string& id, std::int32_t computed, std::int32_t tokens,
                            const std::vector<std::int32_t>& blocks) {
  RecordedScheduled row;
  row.id = id;
  row.computed = computed;
  row.tokens = tokens;
  row.is_new = true;
  row.blocks.emplace(1);
  for (const std::int32_t block : blocks) row.blocks->front().push_back(BlockId{block});
  return row;
}

// One request is all that the step runs, and it samples a token.
void run_alone(RecordedStep& step, const RecordedScheduled& row, std::int32_t token,
               std::int64_t free_blocks) {
  step.scheduled = {row};
  step.running = {row.id};
  step.sampled = {{row.id, {token}}};
  step.free_blocks = free_blocks;
}

RecordingHeader header() {
  RecordingHeader header;
  header.engine = {"vllm", "0.22.1"};
  header.groups.resize(1);
  header.groups[0].spec.block_size = 4;
  header.num_blocks = 6;
  header.connector.emplace();
  header.scheduler_block_size = 4;
  header.hash_block_size = 4;
  return header;
}

// Request a has 8 of its 10 tokens loaded into blocks 1 and 2, computes the rest, and its blocks
// are kept until they are sent, while b runs.
Recording load_and_send() {
  Recording recording;
  recording.header = header();
  recording.steps.resize(4);
  RecordedStep& load = recording.steps[0];
  load.before = {add("a", 7, 10)};
  load.connector = {{{"a", 0, 8, true}}};
  load.skipped = {{{"a", "WAITING_FOR_REMOTE_KVS"}}};
  load.loading = {{{"a", {{BlockId{1}, BlockId{2}}}}}};
  load.free_blocks = 3;
  load.worker = {{"a"}, {}, {}};
  RecordedStep& compute = recording.steps[1];
  run_alone(compute, scheduled("a", 8, 2, {1, 2, 3}), 21, 2);
  compute.stopped = {{"a", "length"}};
  compute.held = {"a"};
  RecordedStep& other = recording.steps[2];
  other.before = {add("b", 8, 4)};
  other.finished = {"a"};
  other.connector = {{{"b", 0, 0, false}}};
  run_alone(other, scheduled("b", 0, 4, {4}), 22, 1);
  other.stopped = {{"b", "length"}};
  other.worker = {{}, {"a"}, {}};
  RecordedStep& last = recording.steps[3];
  last.finished = {"b"};
  last.free_blocks = 5;
  for (std::size_t i = 0; i < recording.steps.size(); ++i) {
    recording.steps[i].step = static_cast<std::int64_t>(i);
    if (!recording.steps[i].skipped) recording.steps[i].skipped.emplace();
  }
  recording.end.steps = 4;
  return recording;
}

// Request a has 8 tokens loaded within its step; block 2 is not filled, so it computes tokens 4 to
// 9 in the next step.
Recording failed_load() {
  Recording recording;
  recording.header = header();
  recording.steps.resize(2);
  RecordedStep& load = recording.steps[0];
  load.before = {add("a", 7, 10)};
  load.connector = {{{"a", 0, 8, false}}};
  run_alone(load, scheduled("a", 8, 2, {1, 2, 3}), 21, 2);
  load.worker = {{}, {}, {BlockId{2}}};
  RecordedStep& again = recording.steps[1];
  again.step = 1;
  run_alone(again, scheduled("a", 4, 6, {}), 22, 2);
  again.scheduled[0].is_new = false;
  again.scheduled[0].blocks.reset();
  recording.end = {.steps = 2, .unfinished = {"a"}};
  return recording;
}

void expect_first(const Recording& recording, std::int64_t step, const std::string& what) {
  const std::vector<AuditFinding> findings = audit(recording);
  ASSERT_FALSE(findings.empty()) << "expected: " << what;
  EXPECT_EQ(findings[0].step, step) << findings[0].what;
  EXPECT_NE(findings[0].what.find(what), std::string::npos) << findings[0].what;
}

TEST(AuditTransfers, RightLoadsAndSendsAreClean) {
  EXPECT_TRUE(audit(load_and_send()).empty());
  EXPECT_TRUE(audit(failed_load()).empty());
}

TEST(AuditTransfers, ALoadThatIsNotOverIsNotRead) {
  Recording recording = load_and_send();
  recording.steps[0].worker.reset();
  expect_first(recording, 1, "reads token 0 from slot 0 of block 1, which holds nothing");
}

TEST(AuditTransfers, ABlockThatALongerLoadDidNotFillIsNotRead) {
  Recording recording = load_and_send();
  recording.steps[0].worker->invalid_blocks = {BlockId{2}};
  expect_first(recording, 1, "reads token 4 from slot 0 of block 2, which holds nothing");
}

TEST(AuditTransfers, ABlockThatALoadWithinTheStepDidNotFillIsComputed) {
  Recording recording = failed_load();
  recording.steps[1].scheduled[0].computed = 8;
  recording.steps[1].scheduled[0].tokens = 2;
  expect_first(recording, 1, "reads token 4 from slot 0 of block 2, which holds nothing");
}

// The connector has only the tokens of block 1, or none.
TEST(AuditTransfers, ALoadWithinTheStepEndsWhereTheAnswerEnds) {
  Recording recording = failed_load();
  recording.steps[0].worker.reset();
  recording.steps.resize(1);
  recording.end.steps = 1;
  EXPECT_TRUE(audit(recording).empty());
  (*recording.steps[0].connector)[0].external = 4;
  expect_first(recording, 0, "reads token 4 from slot 0 of block 2, which holds nothing");
  (*recording.steps[0].connector)[0].external = 0;
  expect_first(recording, 0, "reads token 0 from slot 0 of block 1, which holds nothing");
}

TEST(AuditTransfers, ABlockThatIsBeingSentIsHandedToNobody) {
  Recording recording = load_and_send();
  recording.steps[2].scheduled = {scheduled("b", 0, 4, {3})};
  expect_first(recording, 2, "block 3 becomes entry 0 of the table");
}

TEST(AuditTransfers, ABlockThatALoadStillWritesIsHandedToNobody) {
  Recording recording = load_and_send();
  recording.steps[0].worker.reset();
  recording.steps[1] = recording.steps[2];
  recording.steps[1].step = 1;
  recording.steps[1].finished.clear();
  recording.steps[1].worker.reset();
  recording.steps[1].scheduled = {scheduled("b", 0, 4, {2})};
  recording.steps.resize(2);
  expect_first(recording, 1, "while request a still loads it");
}

// A window of one token, and a prompt that is loaded whole: an engine that has a block for its last
// token has nothing for the one after. The client disconnects, and the load still writes.
TEST(AuditTransfers, ALoadForNobodyStillWritesBehindTheWindow) {
  Recording recording = load_and_send();
  KVCacheSpec& spec = recording.header.groups[0].spec;
  spec.kind = CacheKind::sliding_window;
  spec.sliding_window = 1;
  recording.steps.resize(2);
  RecordedStep& load = recording.steps[0];
  load.before = {add("a", 7, 4)};
  load.connector = {{{"a", 0, 4, true}}};
  load.loading = {{{"a", {{BlockId{1}}}}}};
  load.free_blocks = 4;
  load.worker.reset();
  RecordedStep& other = recording.steps[1] = RecordedStep();
  other.step = 1;
  other.before = {add("b", 8, 4)};
  other.finished = {"a"};
  other.skipped.emplace();
  other.connector = {{{"b", 0, 0, false}}};
  run_alone(other, scheduled("b", 0, 4, {2}), 22, 3);
  recording.end = {.steps = 2, .unfinished = {"b"}};
  EXPECT_TRUE(audit(recording).empty());
  other.scheduled = {scheduled("b", 0, 4, {1})};
  expect_first(recording, 1, "while request a still loads it");
}

TEST(AuditTransfers, BlocksOfALoadCountAsHeld) {
  Recording recording = load_and_send();
  recording.steps[0].free_blocks = 5;
  expect_first(recording, 0, "with 2 kept for transfers");
}

TEST(AuditTransfers, ATransferThatNobodyWaitsForIsFound) {
  Recording received = load_and_send();
  received.steps[3].worker = {{"a"}, {}, {}};
  expect_first(received, 3, "a load is reported complete that is not in flight");
  Recording sent = load_and_send();
  sent.steps[3].worker = {{}, {"b"}, {}};
  expect_first(sent, 3, "blocks are reported sent that no request keeps");
}

TEST(AuditTransfers, ALoadInFlightKeepsItsBlocks) {
  Recording recording = load_and_send();
  recording.steps.resize(2);
  recording.steps[0].worker.reset();
  RecordedStep& later = recording.steps[1] = recording.steps[0];
  later.step = 1;
  later.before.clear();
  later.connector.reset();
  recording.end = {.steps = 2, .unfinished = {"a"}};
  EXPECT_TRUE(audit(recording).empty());
  later.loading = {{{"a", {{BlockId{1}, BlockId{3}}}}}};
  expect_first(recording, 1, "blocks of its load in flight are not those that the load started");
}

TEST(AuditTransfers, ARequestThatEndedDoesNotRunAndOneThatWaitsIsInAQueue) {
  const auto first = [](const Recording& recording) {
    const auto findings = audit(recording, AuditScope::whole_recording);
    return findings.empty() ? "" : findings[0].what;
  };
  Recording recording = load_and_send();
  EXPECT_EQ(first(recording), "");
  recording.steps[0].skipped.emplace();
  EXPECT_EQ(first(recording),
            "has 8 of its 10 tokens computed and is in no queue: nothing runs it again");
  recording = load_and_send();
  RecordedEvent& abort = recording.steps[1].before.emplace_back();
  abort.kind = RecordedEvent::Kind::abort;
  abort.name = "a";
  EXPECT_EQ(first(recording), "is scheduled, and an output or its client has ended it");
}

// Request r15 hits in step 24 what r14 loaded in step 23, before it is known that the load failed.
// Both end in an error; with r15 running, its answer would rest on blocks that no load filled.
TEST(AuditTransfers, WhoHitsALostBlockBeforeItIsKnownHasToEnd) {
  auto recording =
      read_recording(LOCKSTEP_SOURCE_DIR "/tests/regressions/lost_block_is_hit_in_flight.jsonl");
  ASSERT_TRUE(recording) << recording.error().message;
  EXPECT_TRUE(audit(*recording).empty());
  ASSERT_EQ(std::erase(recording->steps[24].stopped, RecordedStopped{"r15", "error"}), 1u);
  ASSERT_EQ(std::erase(recording->steps[25].finished, "r15"), 1u);
  EXPECT_TRUE(std::ranges::any_of(audit(*recording), [](const AuditFinding& finding) {
    return finding.request == "r15" &&
           finding.what.find("before it was known") != std::string::npos;
  }));
}

}  // namespace
}  // namespace lockstep
