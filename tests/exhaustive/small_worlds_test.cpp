// Small worlds, all of them: pools of 2, 3 and 4 blocks, up to three requests, every order in which
// they arrive and are aborted, every kind of cache, under both engines. Every step's decision is
// audited by an independent ledger, every request is answered what it would be answered alone (all
// relations at once: whatever two runs differ in), and what was reached is counted: a world that
// never evicts, preempts, hits or starves would prove little.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "properties/audit/auditor.h"
#include "properties/relations/reading_model.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "tests/support/scripted_workload.h"

namespace lockstep {
namespace {

constexpr std::int32_t kBlockSize = 2;
constexpr int kTurns = 6;

struct World {
  std::string name;
  std::vector<KVCacheSpec> specs;
  MambaCacheMode mode = MambaCacheMode::none;
  bool caching = true;
  bool async = false;
  std::int32_t num_spec = 0;
  bool priority = false;
};

KVCacheSpec spec_of(CacheKind kind, std::int64_t tokens = 0,
                    MambaCacheMode mode = MambaCacheMode::none) {
  KVCacheSpec spec;
  spec.kind = kind;
  spec.block_size = kBlockSize;
  spec.head_size = 8;
  spec.mamba_cache_mode = mode;
  if (kind == CacheKind::sliding_window) spec.sliding_window = tokens;
  if (kind == CacheKind::chunked_local) spec.attention_chunk_size = tokens;
  if (kind == CacheKind::mamba) {
    spec.states = {{{4}, DType::fp32}};
    if (mode == MambaCacheMode::none) spec.block_size = 8;  // max_model_len
  }
  return spec;
}

std::vector<World> worlds() {
  const KVCacheSpec full = spec_of(CacheKind::full_attention);
  const KVCacheSpec window = spec_of(CacheKind::sliding_window, 3);
  const KVCacheSpec chunk = spec_of(CacheKind::chunked_local, 4);
  const auto states = [](MambaCacheMode mode) { return spec_of(CacheKind::mamba, 0, mode); };
  return {{"full", {full}},
          {"full_without_caching", {full}, MambaCacheMode::none, false},
          {"full_by_priority", {full}, MambaCacheMode::none, true, false, 0, true},
          {"full_async", {full}, MambaCacheMode::none, true, true},
          {"full_with_drafts", {full}, MambaCacheMode::none, true, false, 1},
          {"mla", {spec_of(CacheKind::mla)}},
          {"window", {window}},
          {"full_and_window", {full, window}},
          {"full_and_chunk", {full, chunk}},
          {"states_none", {full, states(MambaCacheMode::none)}, MambaCacheMode::none, false},
          {"states_align", {full, states(MambaCacheMode::align)}, MambaCacheMode::align},
          {"states_all", {full, states(MambaCacheMode::all)}, MambaCacheMode::all},
          {"hidden_states", {full, spec_of(CacheKind::hidden_state)}}};
}

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

struct Reached {
  std::set<std::uint64_t> states;
  std::int64_t runs = 0;
  std::int64_t steps = 0;
  std::int64_t preemptions = 0;
  std::int64_t evictions = 0;
  std::int64_t hits = 0;
  std::int64_t starved = 0;
  std::int64_t answers = 0;  // tokens, each of which a request alone was answered too
};

// Choice 0: nothing happens; 1 to 3: the request arrives or, if it has, is aborted.
std::vector<ScriptedWorkload::Turnful> script_of(int choices) {
  // One prompt is a whole number of blocks, one shares its first block, one fills a block and a
  // token.
  const std::vector<std::uint32_t> sizes = {5, 3, 2};
  const std::vector<std::int32_t> max_tokens = {3, 3, 1};
  std::vector<ScriptedWorkload::Turnful> script(kTurns);
  bool added[3] = {};
  for (auto& turn : script) {
    const int choice = choices % 4;
    choices /= 4;
    if (choice == 0) continue;
    const auto r = static_cast<std::size_t>(choice - 1);
    const std::string name = "r" + std::to_string(r);
    if (added[r]) {
      turn.push_back(ScriptedWorkload::abort(name));
    } else {
      turn.push_back(ScriptedWorkload::add(name, seeded_prompt(1, sizes[r]), max_tokens[r]));
      turn.back().request.priority = static_cast<std::int32_t>(2 - r);
      turn.back().request.arrival_ns = static_cast<std::int64_t>(r);
    }
    added[r] = true;
  }
  return script;
}

// The whole state of the engine as seen from outside: queues, tables, tokens, free and cached
// blocks.
std::uint64_t signature(const StepView& view, std::int64_t num_blocks) {
  const Scheduler& engine = view.model();
  std::uint64_t hash = 0;
  const auto mix = [&](std::uint64_t value) { hash = splitmix64(hash ^ value); };
  const auto mix_name = [&](RequestId id) {
    for (const char c : view.name(id)) mix(static_cast<std::uint64_t>(c));
  };
  for (const RequestId id : engine.running()) {
    mix_name(id);
    mix(static_cast<std::uint64_t>(engine.num_tokens(id)) << 32 |
        static_cast<std::uint64_t>(engine.num_computed_tokens(id)));
    for (std::int32_t g = 0; g < view.decision.num_groups; ++g)
      for (const BlockId block : engine.block_table(id, g))
        mix(static_cast<std::uint64_t>(index_of(block)) + 1);
  }
  mix(0xFFFF);
  for (const RequestId id : engine.waiting()) mix_name(id);
  mix(static_cast<std::uint64_t>(engine.num_free_blocks()));
  for (std::int32_t block = 1; block < num_blocks; ++block)
    mix(engine.is_cached(BlockId{block}) ? 1 : 2);
  return hash;
}

class StateCounter final : public StepObserver {
 public:
  StateCounter(RunRecorder& recorder, ReadingModel& model, std::int64_t num_blocks,
               std::set<std::uint64_t>& states)
      : recorder_(recorder), model_(model), num_blocks_(num_blocks), states_(states) {}
  bool decided(const StepView& view) override {
    states_.insert(signature(view, num_blocks_));
    return model_.decided(view) && recorder_.decided(view);
  }
  bool finished(const StepView& view) override {
    return model_.finished(view) && recorder_.finished(view);
  }

 private:
  RunRecorder& recorder_;
  ReadingModel& model_;
  std::int64_t num_blocks_;
  std::set<std::uint64_t>& states_;
};

EngineConfig engine_of(const World& world, const std::string& engine) {
  EngineConfig config;
  config.engine = engine;
  config.max_num_seqs = 2;
  config.max_num_batched_tokens = 4;
  config.max_model_len = 8;
  config.block_size = kBlockSize;
  config.enable_prefix_caching = world.caching;
  config.async_scheduling = world.async;
  config.mamba_cache_mode = world.mode;
  config.num_spec_tokens = world.num_spec;
  config.spec_method = world.num_spec > 0 ? SpecMethod::ngram : SpecMethod::none;
  config.policy = world.priority ? SchedulingPolicy::priority : SchedulingPolicy::fcfs;
  config.scheduler_reserve_full_isl = false;  // let requests in that will be preempted
  return config;
}

// Each request of a script is answered as if it were alone.
void expect_undisturbed(const SavedCase& world, const Answers& answers, int choices,
                        Reached& reached) {
  for (const ScriptedWorkload::Turnful& turn : script_of(choices))
    for (const WorkloadEvent& event : turn) {
      const auto answered = answers.tokens.find(event.request.name);
      if (event.kind != WorkloadEvent::Kind::add || answered == answers.tokens.end()) continue;
      UndisturbedRequest alone(world.cache.groups, event.request.prompt.materialize());
      for (const std::int32_t token : answered->second) {
        ASSERT_EQ(token, alone.next_token(std::ssize(alone.tokens())))
            << event.request.name << ", " << world.cache.num_blocks << " blocks, choices "
            << choices;
        alone.append(token);
        ++reached.answers;
      }
    }
}

void run_one(const World& world, const LockstepConfig& config,
             const std::vector<KVCacheGroupSpec>& groups, std::int64_t num_blocks, int choices,
             Reached& reached) {
  auto decisions = Scheduler::create(config.engine, groups, num_blocks);
  ASSERT_TRUE(decisions) << decisions.error().message;
  Auditor auditor(recording_header(config.engine, groups, num_blocks, *decisions));
  ScriptedWorkload script(script_of(choices), world.num_spec, choices % 2);
  SavedCase model_world;
  model_world.engine = config.engine;
  model_world.cache = config.backend.plan;
  ReadingModel model(script, model_world);
  RunRecorder recorder(model, [&](const RecordedStep& step) {
    auditor.step(step);
    reached.preemptions += std::ssize(step.preempted);
  });
  StateCounter counter(recorder, model, num_blocks, reached.states);
  const auto report = run_lockstep(config, {*decisions, recorder, {}, &counter});
  ASSERT_TRUE(report) << report.error().message;
  auditor.end(recorder.end());
  const auto findings = auditor.take_findings();
  ASSERT_TRUE(findings.empty()) << world.name << ", " << num_blocks << " blocks, choices "
                                << choices << ", step " << findings[0].step << ": "
                                << findings[0].what;
  ASSERT_NE(report->summary.verdict, Verdict::divergence);
  ASSERT_NO_FATAL_FAILURE(expect_undisturbed(model_world, model.answers(), choices, reached));
  if (report->summary.verdict == Verdict::agreed) {
    ASSERT_EQ(decisions->num_free_blocks(), num_blocks - 1) << "blocks leak, choices " << choices;
  }
  ++reached.runs;
  reached.steps += report->summary.steps;
  reached.evictions += report->summary.evictions;
  reached.hits += report->summary.hits;
  reached.starved += report->summary.verdict == Verdict::liveness ? 1 : 0;
}

Reached explore(const World& world, const std::string& engine) {
  Reached reached;
  std::vector<KVCacheGroupSpec> groups;
  for (const KVCacheSpec& spec : world.specs) {
    groups.emplace_back();
    groups.back().layer_names = {"layers." + std::to_string(groups.size() - 1)};
    groups.back().spec = spec;
  }
  // Without caching half of the scripts end in requests that preempt each other until the progress
  // guard gives up: 4 million steps instead of 80,000. Five turns reach the same classes.
  int num_scripts = 1;
  for (int turn = 0; turn < (world.caching ? kTurns : kTurns - 1); ++turn) num_scripts *= 4;
  for (const std::int64_t num_blocks : {2, 3, 4}) {
    // A hybrid takes a block of each group for one token: its pools are larger by as many.
    const std::int64_t pool = num_blocks + std::ssize(groups) - 1;
    LockstepConfig config;
    config.engine = engine_of(world, engine);
    auto plan = plan_for_groups(groups, pool);
    if (!plan) {
      ADD_FAILURE() << plan.error().message;
      return reached;
    }
    config.backend = make_backend_config(config.engine, *plan);
    for (int choices = 0; choices < num_scripts; ++choices) {
      run_one(world, config, groups, pool, choices, reached);
      if (testing::Test::HasFatalFailure()) return reached;
    }
  }
  return reached;
}

class SmallWorlds : public testing::TestWithParam<std::tuple<World, std::string>> {};

TEST_P(SmallWorlds, EveryOrderOfArrivalAndAbortIsClean) {
  const auto& [world, engine] = GetParam();
  if (world.mode == MambaCacheMode::all && engine == "vllm-0.33.0")
    GTEST_SKIP() << "vllm-0.33.0 refuses prefix caching of states in mode all";
  const Reached reached = explore(world, engine);
  RecordProperty("states", static_cast<int>(reached.states.size()));
  RecordProperty("steps", static_cast<int>(reached.steps));
  std::printf(
      "%s, %s: %lld runs, %lld steps, %zu states; %lld preemptions, %lld evictions, %lld hits, "
      "%lld starved, %lld tokens\n",
      world.name.c_str(), engine.c_str(), static_cast<long long>(reached.runs),
      static_cast<long long>(reached.steps), reached.states.size(),
      static_cast<long long>(reached.preemptions), static_cast<long long>(reached.evictions),
      static_cast<long long>(reached.hits), static_cast<long long>(reached.starved),
      static_cast<long long>(reached.answers));
  EXPECT_GT(reached.answers, 1000);
  EXPECT_GT(reached.states.size(), 60u);
  // A window alone never grows beyond what it was admitted with.
  if (world.name != "window") {
    EXPECT_GT(reached.preemptions, 0);
  }
  EXPECT_GT(reached.starved, 0);
  if (world.caching) {
    EXPECT_GT(reached.hits, 0);
    EXPECT_GT(reached.evictions, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SmallWorlds,
                         testing::Combine(testing::ValuesIn(worlds()),
                                          testing::Values("vllm-0.22.1", "vllm-0.33.0")),
                         [](const auto& world) {
                           std::string engine = std::get<1>(world.param);
                           for (char& c : engine) c = c == '-' || c == '.' ? '_' : c;
                           return std::get<0>(world.param).name + "_" + engine;
                         });

}  // namespace
}  // namespace lockstep
