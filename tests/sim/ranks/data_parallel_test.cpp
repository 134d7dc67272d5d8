// Data parallel ranks: every step they call collectives, an idle rank runs a batch that writes
// nothing, and a rank that does not match the others is found and named.
#include "sim/ranks/data_parallel.h"

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "cuda_backend/backends.h"
#include "sim/engine/faults.h"
#include "sim/recording/run_recorder.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

SessionParts requests(std::uint64_t seed, int num_requests) {
  SessionParts parts;
  parts.clients = make_trace_workload(make_traffic(seed, num_requests),
                                      {.step_time = {}, .seed = 7, .num_spec_tokens = 0});
  return parts;
}

LockstepConfig make_parallel(std::int32_t dp_size, std::int32_t tp_size = 1) {
  LockstepConfig config = make_world({make_group("a", 2, full_spec())}, 20);
  config.data_parallel.dp_size = dp_size;
  config.backend.parallel.tp_size = tp_size;
  return config;
}

Result<RunReport> run_engines(const LockstepConfig& config, bool with_backends = true,
                              int num_requests = 12) {
  SessionParts parts = requests(3, num_requests);
  if (with_backends) parts.backend = make_simt_backend;
  return run_session(config, std::move(parts));
}

std::string what(const RunReport& run) {
  if (run.summary.divergence) return to_text(*run.summary.divergence);
  return run.summary.stuck.empty() ? "agreed" : run.summary.stuck.front().why;
}

TEST(DataParallel, AllRanksAgreeAndIdleOnesTakePartInEveryStep) {
  for (const std::int32_t tp_size : {1, 2})
    for (const bool eager : {false, true}) {
      LockstepConfig config = make_parallel(3, tp_size);
      config.data_parallel.enforce_eager = eager;
      const auto run = run_engines(config);
      ASSERT_TRUE(run) << run.error().message;
      EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what(*run);
      EXPECT_GT(run->summary.idle_rank_steps, 0);
      EXPECT_GT(run->summary.collectives_checked, run->summary.steps);
      EXPECT_GT(run->summary.slots_checked, run->summary.scheduled_tokens);
      EXPECT_EQ(run->summary.requests,
                run->summary.finished_requests + run->summary.aborted_requests);
    }
}

TEST(DataParallel, TheSameRunHasTheSameHashAndEveryRequestRunsOnce) {
  const auto one = run_engines(make_parallel(2), false, 40);
  const auto two = run_engines(make_parallel(2), false, 40);
  const auto alone = run_engines(make_parallel(1), false, 40);
  ASSERT_TRUE(one && two && alone);
  EXPECT_EQ(one->summary.state_hash, two->summary.state_hash);
  EXPECT_EQ(one->summary.requests, alone->summary.requests);
  EXPECT_LT(one->summary.simulated_ns, alone->summary.simulated_ns);
}

TEST(DataParallel, AnIdleRankThatWritesItsPaddedTokensIsFoundOnItsSlots) {
  LockstepConfig config = make_parallel(2);
  config.backend.mutant = "dp-idle-writes";
  const auto run = run_engines(config);
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_EQ(run->summary.verdict, Verdict::divergence);
  EXPECT_EQ(run->summary.divergence->phase, Phase::slot_mapping);
  EXPECT_GE(run->summary.divergence->dp_rank, 0);
}

TEST(DataParallel, ASyncOfAnotherShapeIsAMismatchThatNamesTheRank) {
  LockstepConfig config = make_parallel(2);
  config.data_parallel.defect = DataParallelDefect::dp_sync_shape;
  const auto run = run_engines(config, false);
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_EQ(run->summary.verdict, Verdict::divergence);
  EXPECT_EQ(run->summary.divergence->phase, Phase::collective);
  EXPECT_EQ(run->summary.divergence->dp_rank, 1);
  EXPECT_NE(what(*run).find("[2, 2]"), std::string::npos) << what(*run);
}

TEST(DataParallel, AnIdleRankThatSitsAStepOutLeavesTheOthersWaiting) {
  LockstepConfig config = make_parallel(2);
  config.data_parallel.defect = DataParallelDefect::dp_idle_skips;
  const auto run = run_engines(config, false);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::liveness);
  EXPECT_NE(what(*run).find("waits in call 0"), std::string::npos) << what(*run);
  EXPECT_NE(what(*run).find("makes none"), std::string::npos) << what(*run);
}

TEST(DataParallel, TokensThatTpDoesNotDivideAreRefusedByTheReduceScatter) {
  LockstepConfig config = make_parallel(2, 2);
  config.data_parallel.enforce_eager = true;
  config.data_parallel.defect = DataParallelDefect::sp_padding;
  const auto run = run_engines(config);
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_EQ(run->summary.verdict, Verdict::divergence);
  EXPECT_NE(what(*run).find("1 % 2 is 1"), std::string::npos) << what(*run);
}

// Tables that python/tests/engines/vllm_ranks_test.py compares with vLLM's own functions.
nlohmann::json vllm_ranks() {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/sim/ranks/vllm_ranks.json");
  return nlohmann::json::parse(file);
}

TEST(DataParallel, EveryRequestGoesToTheRankThatVllmSelects) {
  const nlohmann::json table = vllm_ranks();
  for (const auto& [name, release] : table["releases"].items()) {
    for (std::size_t i = 0; i < table["loads"].size(); ++i) {
      LoadBalancer balancer(engine_profile(name));
      std::vector<std::size_t> selected;
      for (const auto& of_request : table["loads"][i]) {
        std::vector<RankLoad> loads;
        for (const auto& of_rank : of_request)
          loads.push_back({of_rank[0], of_rank[1], of_rank[2], of_rank[3]});
        selected.push_back(balancer.next(loads));
      }
      EXPECT_EQ(selected, release["ranks"][i].get<std::vector<std::size_t>>())
          << name << ", sequence " << i;
    }
  }
}

TEST(DataParallel, RanksVoteInTheStepsAndExchangeTheRowsOfTheRelease) {
  const nlohmann::json table = vllm_ranks();
  EXPECT_GE(table["releases"].size(), 5u);
  for (const auto& [name, release] : table["releases"].items()) {
    const EngineProfile& profile = engine_profile(name);
    std::vector<std::int64_t> votes;
    for (std::int64_t step = 1; step <= 64; ++step)
      if (is_vote_step(profile.dp_votes, step)) votes.push_back(step);
    EXPECT_EQ(votes, release["votes"].get<std::vector<std::int64_t>>()) << name;
    EXPECT_EQ(profile.dp_sync_rows, release["rows"]) << name;
  }
}

// One request per second, each with `output` tokens.
Result<RunReport> run_one_by_one(const std::string& engine, int num_requests, std::int32_t output) {
  LockstepConfig config = make_parallel(3);
  config.engine.engine = engine;
  config.engine.async_scheduling = false;
  Trace trace;
  for (int i = 0; i < num_requests; ++i) {
    TraceRequest request;
    request.spec.name = std::to_string(i);
    request.spec.prompt.append({TokenRun::Kind::seeded, 1, 0, 8});
    request.spec.max_tokens = request.output.length = output;
    request.spec.arrival_ns = i * 1'000'000'000LL;
    trace.records.emplace_back(std::move(request));
  }
  return run_world(config, trace, nullptr);
}

// The second request begins another wave, of `output` steps, and ends the run. Each request has one
// rank, so a wave of n steps has 3 * n - output idle ones.
TEST(DataParallel, AWaveEndsWithTheFirstVoteOfTheReleaseThatFindsNoRequest) {
  const auto steps_of_wave = [](const std::string& engine, std::int32_t output) {
    const auto run = run_one_by_one(engine, 2, output);
    EXPECT_TRUE(run) << run.error().message;
    EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what(*run);
    EXPECT_EQ(run->summary.not_checked.size(), 1u);  // memory: no backend
    return (run->summary.idle_rank_steps - output) / 3;
  };
  EXPECT_EQ(steps_of_wave("vllm-0.22.1", 1), 32);
  EXPECT_EQ(steps_of_wave("vllm-0.29.0", 3), 32);
  EXPECT_EQ(steps_of_wave("vllm-0.33.0", 1), 1);
  EXPECT_EQ(steps_of_wave("vllm-0.33.0", 3), 16);
  EXPECT_EQ(steps_of_wave("vllm-0.33.0", 17), 32);
}

TEST(DataParallel, EquallyLoadedRanksGetRequestsInTurnSinceReleasesRotate) {
  const auto requests_of = [](const std::string& engine) {
    const auto run = run_one_by_one(engine, 4, 2);
    EXPECT_TRUE(run) << run.error().message;
    std::vector<std::int64_t> requests;
    for (const RunSummary& rank : run->engines) requests.push_back(rank.requests);
    return requests;
  };
  EXPECT_EQ(requests_of("vllm-0.22.1"), (std::vector<std::int64_t>{4, 0, 0}));
  EXPECT_EQ(requests_of("vllm-0.25.1"), (std::vector<std::int64_t>{2, 1, 1}));
  EXPECT_EQ(requests_of("vllm-0.33.0"), (std::vector<std::int64_t>{2, 1, 1}));
}

// Recorders between each engine and its share of the workload.
TEST(DataParallel, AnEngineHearsOfItsOwnRequestsAndOfAllResets) {
  const LockstepConfig config = make_parallel(2);
  std::vector<std::unique_ptr<RunRecorder>> recorders;
  std::vector<std::vector<RecordedStep>> steps(2);
  SessionParts parts = requests(3, 60);
  parts.attach = [&](std::int32_t dp_rank, Workload* dealt) {
    auto& recorder = recorders.emplace_back(std::make_unique<RunRecorder>(
        *dealt, [&own = steps[static_cast<std::size_t>(dp_rank)]](const RecordedStep& step) {
          own.push_back(step);
        }));
    return Onlooker{.workload = recorder.get(), .observer = recorder.get()};
  };
  const auto run = run_session(config, std::move(parts));
  ASSERT_TRUE(run) << run.error().message;
  std::set<std::string> known[2];
  std::int64_t aborts = 0, resets[2] = {};
  for (std::size_t r = 0; r < 2; ++r)
    for (const RecordedStep& step : steps[r])
      for (const RecordedEvent& event : step.before) {
        if (event.kind == RecordedEvent::Kind::add) known[r].insert(event.request.name);
        if (event.kind == RecordedEvent::Kind::reset_prefix_cache) ++resets[r];
        if (event.kind != RecordedEvent::Kind::abort) continue;
        EXPECT_TRUE(known[r].contains(event.name)) << event.name << " is not of rank " << r;
        ++aborts;
      }
  EXPECT_EQ(std::ssize(known[0]) + std::ssize(known[1]), run->summary.requests);
  EXPECT_GT(aborts, 0);
  EXPECT_GT(resets[0], 0);
  EXPECT_EQ(resets[0], resets[1]);
  EXPECT_EQ(std::ssize(steps[0]), run->summary.steps);
  EXPECT_EQ(std::ssize(steps[1]), run->summary.steps);
}

// Outputs of rank 1 come late; rank 0 meets it in every step, and waits.
TEST(DataParallel, ARankWhoseOutputIsLateHoldsUpAll) {
  const auto run_with = [](std::string_view faults) {
    const LockstepConfig config = make_parallel(2);
    const SessionParts given = requests(3, 12);
    std::vector<Scheduler> schedulers;
    for (int rank = 0; rank < 2; ++rank)
      schedulers.push_back(*Scheduler::create(config.engine, config.backend.plan.groups,
                                              config.backend.plan.num_blocks));
    DealtWorkload first(*given.clients);
    auto dealt = std::make_unique<DealtWorkload>(*given.clients);
    DealtWorkload& second = *dealt;
    FaultyWorkload faulty(std::move(dealt),
                          faults.empty() ? FaultPlan() : *fault_plan_from_text(faults));
    faulty.watch(schedulers[1]);
    const std::vector<EngineParts> engines = {{first, {schedulers[0], first}},
                                              {second, {schedulers[1], faulty}}};
    return run_data_parallel(config, config.data_parallel, engines, *given.clients);
  };
  const auto calm = run_with("");
  const auto late = run_with("late_output@2");
  ASSERT_TRUE(calm && late);
  EXPECT_GT(late->summary.simulated_ns, calm->summary.simulated_ns + 150'000'000);
  EXPECT_EQ(late->summary.finished_requests + late->summary.aborted_requests,
            calm->summary.requests);
}

// Each engine with its own connectors, with or without backends.
Result<RunReport> run_connected(const LockstepConfig& config, std::uint64_t seed,
                                bool with_backends) {
  SessionParts parts = requests(seed, 40);
  parts.connector_seed = seed;
  if (with_backends) parts.backend = make_simt_backend;
  return run_session(config, std::move(parts));
}

LockstepConfig make_connected(std::vector<ConnectorKind> parts) {
  LockstepConfig config = make_parallel(2);
  config.engine.engine = "vllm-0.22.1";
  config.connector.parts = std::move(parts);
  config.connector.num_host_blocks = 30;
  config.backend.num_host_blocks =
      num_host_blocks(config.connector, config.engine, config.backend.plan);
  return config;
}

TEST(DataParallel, EveryEngineLoadsAndStoresBesideConnectorsOfItsOwn) {
  const LockstepConfig config = make_connected({ConnectorKind::peers, ConnectorKind::host});
  const auto run = run_connected(config, 3, true);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what(*run);
  EXPECT_GT(run->summary.blocks_loaded, 0);
  EXPECT_GT(run->summary.blocks_stored, 0);
  EXPECT_GT(run->summary.host_blocks_checked, run->summary.blocks_stored);
  const auto alone = run_connected(config, 3, false);
  ASSERT_TRUE(alone) << alone.error().message;
  EXPECT_EQ(alone->summary.scheduled_tokens, run->summary.scheduled_tokens);
  EXPECT_EQ(alone->summary.blocks_loaded, run->summary.blocks_loaded);
}

// vLLM 0.22.1, v1/core/sched/scheduler.py, get_request_counts(): a request that waits for its load
// is no reason to give its rank the next one.
TEST(DataParallel, RequestsThatWaitForAConnectorCountAsWaiting) {
  const LockstepConfig config = make_connected({ConnectorKind::peers});
  Trace trace;
  for (int i = 0; i < 2; ++i) {
    TraceRequest request;
    request.spec.name = std::to_string(i);
    request.spec.prompt.append({TokenRun::Kind::seeded, static_cast<std::uint64_t>(i), 0, 40});
    request.spec.max_tokens = request.output.length = 20;
    request.spec.arrival_ns = i;
    trace.records.emplace_back(std::move(request));
  }
  std::int64_t blocks_loaded = 0;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SessionParts parts;
    parts.clients = make_trace_workload(trace, {.step_time = {}, .seed = 7, .num_spec_tokens = 0});
    parts.connector_seed = seed;
    const auto run = run_session(config, std::move(parts));
    ASSERT_TRUE(run) << run.error().message;
    for (const RunSummary& rank : run->engines) EXPECT_EQ(rank.requests, 1) << "seed " << seed;
    blocks_loaded += run->summary.blocks_loaded;
  }
  EXPECT_GT(blocks_loaded, 0);
}

// With no request running and a load in flight, the run has not ended.
TEST(DataParallel, EnginesWaitForLoadsOfOneOfThem) {
  const LockstepConfig config = make_connected({ConnectorKind::peers});
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const auto run = run_connected(config, seed, false);
    ASSERT_TRUE(run) << run.error().message;
    EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what(*run);
    EXPECT_EQ(run->summary.finished_requests + run->summary.aborted_requests,
              run->summary.requests);
  }
}

TEST(DataParallel, ADefectOfOneEnginesTierIsFoundAndNamesIt) {
  LockstepConfig config = make_connected({ConnectorKind::host});
  config.connector.delay_steps_max = 12;
  config.connector.defect = ConnectorDefect::free_send_in_flight;
  const auto run = run_connected(config, 3, true);
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_EQ(run->summary.verdict, Verdict::divergence);
  EXPECT_EQ(run->summary.divergence->phase, Phase::transfer) << what(*run);
  EXPECT_GE(run->summary.divergence->dp_rank, 0);
}

TEST(DataParallel, RanksWithGraphsRunTheLargestSizeThatAnyOfThemTakes) {
  for (const std::int32_t tp_size : {1, 2}) {
    LockstepConfig config = make_parallel(3, tp_size);
    config.backend.max_cudagraph_capture_size = 32;
    const auto run = run_engines(config);
    ASSERT_TRUE(run) << run.error().message;
    EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what(*run);
    EXPECT_GT(run->summary.graphs.replayed, 0);
    EXPECT_GT(run->summary.idle_rank_steps, 0);
  }
  LockstepConfig config = make_parallel(3);
  config.backend.max_cudagraph_capture_size = 32;
  config.backend.mutant = "graph-too-small";
  const auto run = run_engines(config);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::divergence);
}

// Graphs of up to 4 tokens: chunks of prompts have none.
TEST(DataParallel, BesideARankWithoutAGraphNobodyReplaysOne) {
  LockstepConfig config = make_parallel(3);
  config.backend.max_cudagraph_capture_size = 4;
  const auto run = run_engines(config);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what(*run);
  EXPECT_GT(run->summary.graphs.replayed, 0);
  EXPECT_GT(run->summary.eager_rank_steps, 0);
  config.data_parallel.defect = DataParallelDefect::dp_graph_alone;
  const auto alone = run_engines(config, false);
  ASSERT_TRUE(alone) << alone.error().message;
  ASSERT_EQ(alone->summary.verdict, Verdict::divergence);
  EXPECT_EQ(alone->summary.divergence->phase, Phase::collective);
  EXPECT_NE(what(*alone).find("tokens to the experts"), std::string::npos) << what(*alone);
}

TEST(DataParallelRank, PadsToAGraphAndThenToTheLargestUnlessOneHasNone) {
  const RankSizes sizes{.tp_size = 2,
                        .sync_rows = 4,
                        .num_layers = 1,
                        .max_capture_size = 16,
                        .max_tokens_per_step = 64};
  const DataParallelRank rank({.dp_size = 2}, 0, sizes);
  EXPECT_EQ(rank.own_tokens(0), 2);
  EXPECT_EQ(rank.own_tokens(3), 4);
  EXPECT_EQ(rank.own_tokens(5), 8);
  EXPECT_EQ(rank.own_tokens(17), 18);
  const AgreedBatch with_graphs = rank.agreed_batch(std::vector<std::int64_t>{4, 16});
  EXPECT_EQ(with_graphs.num_tokens, 16);
  EXPECT_FALSE(with_graphs.is_eager);
  const AgreedBatch without = rank.agreed_batch(std::vector<std::int64_t>{4, 18});
  EXPECT_EQ(without.num_tokens, 4);
  EXPECT_TRUE(without.is_eager);
}

Collective reduce_of(std::vector<std::int64_t> shape) {
  return {.kind = CollectiveKind::all_reduce, .what = "test", .shape = std::move(shape)};
}

TEST(Collectives, EqualCallsMeetAndTheFirstUnequalOneIsTold) {
  using Calls = std::vector<std::vector<Collective>>;
  const Collective a = reduce_of({4, 2}), b = reduce_of({2, 2});
  EXPECT_FALSE(first_unmet(Calls{{a, b}, {a, b}}));
  const auto mismatch = first_unmet(Calls{{a, b}, {a, b}, {a, a}});
  ASSERT_TRUE(mismatch);
  EXPECT_FALSE(mismatch->hangs);
  EXPECT_EQ(mismatch->rank, 2);
  EXPECT_EQ(mismatch->call, 1);
  const auto hang = first_unmet(Calls{{a}, {a, b}});
  ASSERT_TRUE(hang);
  EXPECT_TRUE(hang->hangs);
  EXPECT_EQ(hang->rank, 0);
  EXPECT_EQ(hang->other, 1);
  // What a rank brings to a gather must be what all believe it brings.
  const Collective gather{.kind = CollectiveKind::all_gather, .what = "t", .shape = {4, 8}};
  Collective first = gather, second = gather;
  first.own = 4;
  second.own = 4;
  const auto lie = first_unmet(Calls{{first}, {second}});
  ASSERT_TRUE(lie);
  EXPECT_EQ(lie->rank, 1);
}

}  // namespace
}  // namespace lockstep
