// What could be hit, what was, and why not the rest; and what an engine tells of its prefix cache.
#include <gtest/gtest.h>

#include <string>

#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

struct Engine {
  std::string name;
  std::string release;
  std::vector<KVCacheSpec> specs;
  std::int32_t num_spec_tokens = 0;
  HitLoss loss = HitLoss::last_token;  // of a resend's last block
};

KVCacheSpec full() {
  KVCacheSpec spec;
  spec.block_size = 16;
  return spec;
}

KVCacheSpec window() {
  KVCacheSpec spec = full();
  spec.kind = CacheKind::sliding_window;
  spec.sliding_window = 40;
  return spec;
}

KVCacheSpec states() {
  KVCacheSpec spec = full();
  spec.kind = CacheKind::mamba;
  spec.mamba_cache_mode = MambaCacheMode::align;
  spec.states = {{{3, 8}, DType::bf16}, {{2, 4, 4}, DType::fp32}};
  return spec;
}

std::vector<Engine> engines() {
  return {{"full", "vllm-0.22.1", {full()}},
          {"Full033", "vllm-0.33.0", {full()}},
          {"windows", "vllm-0.22.1", {full(), window()}},
          {"Windows033", "vllm-0.33.0", {full(), window()}},
          {"states", "vllm-0.22.1", {full(), states()}},
          {"eagle", "vllm-0.22.1", {full()}, 2, HitLoss::eagle},
          {"Eagle033", "vllm-0.33.0", {full()}, 2}};
}

TraceRequest request(const std::string& name, std::uint32_t num_tokens,
                     const std::vector<std::string>& after) {
  TraceRequest request;
  request.spec.name = name;
  request.spec.prompt.append({TokenRun::Kind::seeded, 7, 0, num_tokens});
  request.spec.max_tokens = request.output.length = 3;
  request.after = after;
  return request;
}

// Runs the trace without a backend; every step goes through the auditor, and into `steps`.
Recording record(const Engine& engine, Trace trace, HashAlgorithm algorithm) {
  EngineConfig config;
  config.engine = engine.release;
  config.max_model_len = 1024;
  config.max_num_batched_tokens = 256;
  config.hash_algorithm = algorithm;
  config.num_spec_tokens = engine.num_spec_tokens;
  if (engine.num_spec_tokens > 0) config.spec_method = SpecMethod::eagle;
  std::vector<KVCacheGroupSpec> groups;
  for (const KVCacheSpec& spec : engine.specs) {
    groups.emplace_back().spec = spec;
    groups.back().layer_names = {"layers." + std::to_string(groups.size())};
    if (spec.kind == CacheKind::mamba) config.mamba_cache_mode = spec.mamba_cache_mode;
  }
  Recording recording;
  const std::int64_t num_blocks = 200;
  auto decisions = Scheduler::create(config, groups, num_blocks);
  auto plan = plan_for_groups(groups, num_blocks);
  EXPECT_TRUE(decisions && plan);
  if (!decisions || !plan) return recording;
  LockstepConfig run;
  run.engine = config;
  run.backend = make_backend_config(config, *plan);
  TraceWorkloadOptions options;
  options.num_spec_tokens = engine.num_spec_tokens;
  const auto workload = make_trace_workload(std::move(trace), options);
  recording.header = recording_header(config, groups, num_blocks, *decisions);
  RunRecorder recorder(*workload,
                       [&](const RecordedStep& step) { recording.steps.push_back(step); });
  const auto report = run_lockstep(run, {*decisions, recorder, {}, &recorder});
  EXPECT_TRUE(report) << report.error().message;
  recording.end = recorder.end();
  return recording;
}

HitTotals hits_of(const Recording& recording) {
  Auditor auditor(recording.header);
  for (const RecordedStep& step : recording.steps) auditor.step(step);
  EXPECT_TRUE(auditor.take_findings().empty());
  return auditor.hits();
}

std::int64_t lost(const HitTotals& hits, HitLoss cause) {
  return hits.lost[static_cast<std::size_t>(cause)];
}

class ResendTest : public testing::TestWithParam<Engine> {};

// One token is computed again, and with it its block; a drafter of old costs one block more.
TEST_P(ResendTest, IntoAQuietPoolHitsWhatThePolicyPromises) {
  const bool keeps_states = GetParam().specs.back().kind == CacheKind::mamba;
  for (const std::uint32_t num_tokens : {33u, 64u, 100u, 128u, 160u, 161u}) {
    const Recording recording =
        record(GetParam(),
               {{}, {request("first", num_tokens, {}), request("again", num_tokens, {"first"})}},
               HashAlgorithm::content);
    const HitTotals hits = hits_of(recording);
    EXPECT_EQ(hits.lookups, 2);
    const std::int64_t before_last = (num_tokens - 1) / 16 * 16;
    // The only state that is left lies at the end of the prompt's last whole block.
    const bool has_state = !keeps_states || num_tokens % 16 != 0;
    const std::int64_t there = num_tokens / 16 * 16;
    EXPECT_EQ(hits.there, there);
    EXPECT_EQ(lost(hits, HitLoss::unexplained), 0) << num_tokens;
    const bool drops = GetParam().loss == HitLoss::eagle;
    EXPECT_EQ(hits.hit, !has_state ? 0 : drops ? before_last - 16 : before_last) << num_tokens;
    EXPECT_EQ(lost(hits, HitLoss::state), has_state ? 0 : before_last);
    EXPECT_EQ(lost(hits, HitLoss::last_token), there - before_last);
    EXPECT_EQ(lost(hits, HitLoss::eagle), drops ? 16 : 0);
  }
}

void PrintTo(const Engine& engine, std::ostream* out) { *out << engine.name; }

INSTANTIATE_TEST_SUITE_P(Engines, ResendTest, testing::ValuesIn(engines()),
                         [](const auto& engine) { return engine.param.name; });

Trace three_requests() {
  TraceRequest salted = request("salted", 80, {"first"});
  salted.spec.cache_salt = "s";
  return {{},
          {request("first", 80, {}), request("again", 90, {"first"}), salted,
           request("last", 85, {"again", "salted"})}};
}

// Recorded with their events; each case changes something in them.
Recording told(const Engine& engine = engines()[0]) {
  return record(engine, three_requests(), HashAlgorithm::xxhash_cbor);
}

RecordedStep& first_step_with_events(Recording& recording) {
  return *std::ranges::find_if(recording.steps,
                               [](const RecordedStep& step) { return !step.events.empty(); });
}

void expect_event_finding(const Recording& recording, const std::string& what) {
  const auto findings = audit(recording);
  ASSERT_FALSE(findings.empty()) << "expected: " << what;
  EXPECT_EQ(findings[0].rule, AuditRule::cache_events);
  EXPECT_NE(findings[0].what.find(what), std::string::npos) << findings[0].what;
}

TEST(CacheEvents, OfARightEngineAreWhatItsPoolHolds) {
  for (const Engine& engine : engines()) {
    const Recording recording = told(engine);
    EXPECT_TRUE(recording.header.has_cache_events);
    EXPECT_TRUE(std::ranges::any_of(recording.steps,
                                    [](const RecordedStep& step) { return !step.events.empty(); }));
    const auto findings = audit(recording);
    EXPECT_TRUE(findings.empty()) << engine.name << ": " << line_of(findings[0]);
  }
}

TEST(CacheEvents, ThatAreLostAreMissed) {
  Recording recording = told();
  first_step_with_events(recording).events.clear();
  expect_event_finding(recording,
                       "events report 0 hashes stored and 0 removed; the prefix cache had 5 and 0");
  // Where the engine does not count them either, requests that hit the blocks show it.
  first_step_with_events(recording = told()).stored = 0;
  first_step_with_events(recording).events.clear();
  for (RecordedStep& step : recording.steps)
    for (RecordedCacheEvent& event : step.events) event.parent.reset();
  expect_event_finding(recording,
                       "a hit has tokens [0, 16), and by its events the prefix cache has "
                       "no such block");
}

TEST(CacheEvents, OfABlockBehindNothingAreFound) {
  Recording recording = told();
  first_step_with_events(recording).events[0].parent = "0123";
  expect_event_finding(recording, "is stored after 0123, which is not there");
}

TEST(CacheEvents, ThatRemoveWhatIsNotThereAreFound) {
  Recording recording = told();
  RecordedStep& step = first_step_with_events(recording);
  RecordedCacheEvent removed = step.events[0];
  removed.kind = RecordedCacheEvent::Kind::removed;
  step.events.insert(step.events.begin(), removed);
  step.evicted = std::ssize(removed.block_hashes);
  expect_event_finding(recording, "is removed from group 0, where nothing of it is stored");
}

TEST(CacheEvents, WithTheWrongSaltAreFound) {
  Recording recording = told();
  for (RecordedStep& step : recording.steps)
    for (RecordedCacheEvent& event : step.events)
      for (auto& keys : event.extra_keys) keys.clear();
  Engine engine = engines()[0];
  expect_event_finding(recording, "the event says no key of block");  // no request hits it
  TraceRequest one = request("one", 80, {});
  TraceRequest two = request("two", 80, {"one"});
  one.spec.cache_salt = two.spec.cache_salt = "s";
  recording = record(engine, {{}, {one, two}}, HashAlgorithm::xxhash_cbor);
  EXPECT_TRUE(audit(recording).empty());
  for (RecordedStep& step : recording.steps)
    for (RecordedCacheEvent& event : step.events)
      for (auto& keys : event.extra_keys) keys.clear();
  expect_event_finding(recording, "the event says no key of block 1, one has s there");
}

TEST(CacheEvents, ThatGiveAHashToOtherTokensAreFound) {
  Recording recording = told();
  // The salted request stores the same number of blocks.
  const RecordedCacheEvent first = first_step_with_events(recording).events[0];
  for (RecordedStep& step : recording.steps)
    for (RecordedCacheEvent& event : step.events)
      if (!event.parent && event.block_hashes.size() == first.block_hashes.size())
        event.block_hashes = first.block_hashes;
  expect_event_finding(recording, "is stored with other tokens, another key or another block");
}

TEST(CacheEvents, WhoseTokensAreNotWholeBlocksAreFound) {
  Recording recording = told();
  first_step_with_events(recording).events[0].token_ids.pop_back();
  expect_event_finding(recording, "5 hashes of blocks of 16 tokens are stored with 79 tokens");
}

TEST(CacheEvents, AreReadAsTheyWereWritten) {
  const Recording recording = told();
  const std::string path = testing::TempDir() + "told.jsonl";
  auto writer = RecordingWriter::create(path, recording.header);
  ASSERT_TRUE(writer);
  for (const RecordedStep& step : recording.steps) ASSERT_TRUE(writer->write(step));
  ASSERT_TRUE(writer->close(recording.end));
  const auto read = read_recording(path);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->steps.size(), recording.steps.size());
  for (std::size_t i = 0; i < recording.steps.size(); ++i)
    EXPECT_EQ(read->steps[i].events, recording.steps[i].events);
}

// "again" comes with nothing hit, though nothing stands against it.
TEST(HitsLost, ForNoReasonAreCounted) {
  Recording recording =
      record(engines()[0], {{}, {request("first", 80, {}), request("again", 80, {"first"})}},
             HashAlgorithm::content);
  for (RecordedStep& step : recording.steps)
    for (RecordedScheduled& row : step.scheduled) {
      if (row.id != "again" || !row.is_new) continue;
      row.tokens += row.computed;
      row.computed = 0;
      for (std::size_t i = 0; i < 4; ++i) (*row.blocks)[0][i] = BlockId{100 + static_cast<int>(i)};
    }
  const HitTotals hits = hits_of(recording);
  EXPECT_EQ(hits.there, 80);
  EXPECT_EQ(hits.hit, 0);
  EXPECT_EQ(lost(hits, HitLoss::last_token), 16);
  EXPECT_EQ(lost(hits, HitLoss::unexplained), 64);
  const auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, AuditRule::hits);
  EXPECT_EQ(findings[0].request, "again");
  EXPECT_NE(findings[0].what.find("0 of 80 tokens are hit, and 64 more are in the pool without a "
                                  "reason against a hit; so are 64 of the 80 tokens"),
            std::string::npos)
      << findings[0].what;
  recording.header.options.config.enable_prefix_caching = false;
  EXPECT_EQ(lost(hits_of(recording), HitLoss::off), 80);
}

}  // namespace
}  // namespace lockstep
