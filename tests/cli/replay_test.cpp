// `lockstep replay` from the outside: verdicts, files it leaves, and that two runs are one.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

Json replay_json(std::vector<std::string> arguments, int expected_status = 0) {
  const std::string path = temporary_path("result.json");
  arguments.insert(arguments.begin(), "replay");
  arguments.insert(arguments.end(), {"--json", path});
  const Outcome outcome = run_lockstep(arguments);
  EXPECT_EQ(outcome.status, expected_status) << outcome.err << outcome.out;
  return Json::parse(read_text(path));
}

// What may differ between two runs: how long they took.
Json without_times(Json json) {
  for (const char* key :
       {"wall_s", "schedule_s", "program_s", "execute_s", "compare_s", "seconds"}) {
    json.erase(key);
  }
  return json;
}

TEST(Replay, OfTheSampleAgreesAndChecksPages) {
  const Json json = replay_json({kSample, "--backend", "simt"});
  EXPECT_EQ(json.at("verdict"), "agreed");
  for (const char* key : {"requests", "steps", "request_steps", "scheduled_tokens", "cached_tokens",
                          "preemptions", "evictions", "pages_checked"}) {
    EXPECT_GT(json.at(key).get<std::int64_t>(), 0) << key;
  }
  for (const char* key : {"not_checked", "state_hash", "schedule_s", "wall_s"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
}

TEST(Replay, TwiceGivesTheSameResultApartFromTimes) {
  const std::vector<std::string> arguments = {kSample, "--backend", "simt", "--limit", "60"};
  EXPECT_EQ(without_times(replay_json(arguments)), without_times(replay_json(arguments)));
}

TEST(Replay, GivesTheSameResultWithAnyNumberOfThreads) {
  const auto result = [](std::vector<std::string> what, int status, const char* jobs) {
    what.insert(what.end(), {kSample, "--backend", "simt", "--limit", "60", "--jobs", jobs});
    return without_times(replay_json(what, status));
  };
  for (const char* jobs : {"2", "5"}) {
    EXPECT_EQ(result({"--numbers", "real"}, 0, jobs), result({"--numbers", "real"}, 0, "1"));
    EXPECT_EQ(result({"--mutant", "wrong-stride"}, 1, jobs),
              result({"--mutant", "wrong-stride"}, 1, "1"));
  }
}

TEST(Replay, OfATraceThatHintsDraftsAcceptsAsManyAsAsked) {
  std::string text = read_text(kSample);
  const std::string hint = "\"block_size\":16";
  const std::size_t at = text.find(hint);
  ASSERT_NE(at, std::string::npos);
  text.insert(at + hint.size(), ",\"num_spec_tokens\":2,\"spec_method\":\"ngram\"");
  const std::string path = temporary_path("drafts.jsonl");
  write_text(path, text);
  const auto steps = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {path, "--backend", "simt", "--limit", "30"});
    const Json json = replay_json(more);
    EXPECT_EQ(json.at("verdict"), "agreed");
    return json.at("steps").get<int>();
  };
  const int all = steps({"--draft-acceptance", "100"}), as_is = steps({});
  EXPECT_LT(all, as_is);
  EXPECT_LT(as_is, steps({"--draft-acceptance", "0"}));
  EXPECT_EQ(run_lockstep({"replay", path, "--draft-acceptance", "101"}).status, 2);
  const Outcome refused = run_lockstep({"replay", kSample, "--draft-acceptance", "50"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_NE(refused.err.find("--draft-acceptance needs drafts"), std::string::npos) << refused.err;
}

TEST(Replay, SurvivesFaultsAndCountsThem) {
  const std::string faults =
      "refuse_allocation@20+10,pinch_pool@60+20:70,abort_decode@9,abort_waiting@30,abort_again@1";
  const Json json = replay_json({kSample, "--backend", "none", "--faults", faults});
  EXPECT_EQ(json.at("verdict"), "done");
  EXPECT_EQ(json.at("faults").size(), 5u);
  EXPECT_EQ(json.at("faults")[1], "pinch_pool@60+20:70");
  const Json& effects = json.at("fault_effects");
  EXPECT_EQ(effects.at("refuse_allocation"), 10);
  EXPECT_EQ(effects.at("abort_decode"), 1);
  EXPECT_EQ(effects.at("abort_again"), 1);
  EXPECT_GT(json.at("refused_allocations"), 0);
  const Json drawn = replay_json({kSample, "--backend", "none", "--faults", "7"});
  EXPECT_GT(drawn.at("faults").size(), 5u);
  EXPECT_EQ(without_times(drawn),
            without_times(replay_json({kSample, "--backend", "none", "--faults", "7"})));
}

TEST(Replay, SavesTheFaultsOfADivergence) {
  const std::string folder = temporary_path("faulty-cases");
  const Outcome found =
      run_lockstep({"replay", kSample, "--backend", "simt", "--mutant", "drop-slot", "--limit", "8",
                    "--faults", "abort_decode@3:1", "--save", folder});
  ASSERT_EQ(found.status, 1) << found.err;
  const std::size_t at = found.out.find("Saved: ") + 7;
  const std::string path = found.out.substr(at, found.out.find('\n', at) - at);
  EXPECT_NE(read_text(path).find("abort_decode"), std::string::npos);
  EXPECT_NE(run_lockstep({"replay", path}).out.find("The case is reproduced."), std::string::npos);
}

const std::string kDeadlock =
    std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/vllm_0_22_1_two_half_loaded.jsonl";

TEST(Replay, OfADeadlockWithAConnectorIsStuckAndNamesTheCircle) {
  const Outcome outcome =
      run_lockstep({"replay", kDeadlock, "--decide", "model", "--backend", "none"});
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_NE(outcome.out.find("Cycle: first (1 block, held since step 0) waits for 3 blocks"),
            std::string::npos)
      << outcome.out;
  const Json json = replay_json({kDeadlock, "--decide", "model", "--backend", "none"}, 3);
  EXPECT_NE(json.at("wait_cycle").get<std::string>().find("second (2 blocks"), std::string::npos);
}

TEST(Replay, OfAConnectorEndsInTheSameCircleOnABackend) {
  const Json alone = replay_json({kDeadlock, "--decide", "model", "--backend", "none"}, 3);
  const Json simt = replay_json({kDeadlock, "--decide", "model", "--backend", "simt"}, 3);
  EXPECT_EQ(alone.at("wait_cycle"), simt.at("wait_cycle"));
  EXPECT_EQ(alone.at("steps"), simt.at("steps"));
  EXPECT_GT(simt.at("pages_checked"), 0);
}

TEST(Replay, BesideAHostTierComparesWhatIsStoredAndLoaded) {
  const Json json = replay_json({kSample, "--engine", "vllm-0.22.1", "--backend", "simt",
                                 "--connector", "host", "--host-blocks", "200", "--limit", "80"});
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_EQ(json.at("configuration").at("connector"), "host");
  EXPECT_GT(json.at("blocks_loaded"), 0);
  EXPECT_GT(json.at("host_blocks_checked"), json.at("blocks_stored"));
}

TEST(Replay, BesideSeveralConnectorsLoadsFromEachInTheirOrder) {
  const auto beside = [](const char* parts) {
    return replay_json({kSample, "--engine", "vllm-0.22.1", "--backend", "simt", "--connector",
                        parts, "--load-failures", "0", "--limit", "60"});
  };
  const Json peers_first = beside("peers+host");
  EXPECT_EQ(peers_first.at("verdict"), "agreed");
  EXPECT_EQ(peers_first.at("configuration").at("connector"), "peers+host");
  EXPECT_EQ(peers_first.at("configuration").at("num_host_blocks"), 256);
  EXPECT_GT(peers_first.at("blocks_loaded"), 0);
  EXPECT_EQ(peers_first.at("blocks_lost"), 0);
  EXPECT_NE(peers_first.at("state_hash"), beside("host+peers").at("state_hash"));
}

TEST(Replay, BesideAConnectorOfOneGroupKeepsAllLayersAlike) {
  const Json json =
      replay_json({kSample, "--engine", "vllm-0.22.1", "--backend", "none", "--model",
                   "gpt-oss-20b", "--connector", "one-group-peers+host", "--limit", "10"});
  EXPECT_EQ(json.at("configuration").at("groups"), 1);
  const Json several =
      replay_json({kSample, "--engine", "vllm-0.22.1", "--backend", "none", "--model",
                   "gpt-oss-20b", "--num-blocks", "400", "--max-model-len", "1024", "--connector",
                   "peers+host", "--limit", "10"});
  EXPECT_EQ(several.at("configuration").at("groups"), 2);
}

TEST(Replay, OfPeersThatLoseEveryOtherLoadCountsMoreBlocksLost) {
  const auto lost = [](const char* percent) {
    return replay_json({kSample, "--engine", "vllm-0.22.1,without=all", "--backend", "none",
                        "--connector", "peers", "--load-failures", percent})
        .at("blocks_lost")
        .get<std::int64_t>();
  };
  EXPECT_EQ(lost("0"), 0);
  EXPECT_GT(lost("50"), lost("5"));
}

TEST(Replay, BesideASimulatedConnectorIsTheSameTwiceAndAnotherWithAnotherSeed) {
  const std::vector<std::string> arguments = {kSample,     "--engine", "vllm-0.22.1",
                                              "--backend", "none",     "--connector"};
  const Json first = replay_json(arguments);
  EXPECT_EQ(without_times(first), without_times(replay_json(arguments)));
  std::vector<std::string> other = arguments;
  other.insert(other.end(), {"--seed", "1"});
  EXPECT_NE(first.at("state_hash"), replay_json(other).at("state_hash"));
  EXPECT_EQ(run_lockstep({"replay", kSample, "--backend", "none", "--connector"}).status, 0)
      << "with the default engine";
}

TEST(Replay, WithoutABackendDecidesTheSameAndSaysThatNothingWasCompared) {
  const Json alone = replay_json({kSample, "--backend", "none", "--limit", "60"});
  const Json simt = replay_json({kSample, "--backend", "simt", "--limit", "60"});
  for (const char* key : {"requests", "steps", "request_steps", "scheduled_tokens", "cached_tokens",
                          "preemptions", "evictions"}) {
    EXPECT_EQ(alone.at(key), simt.at(key)) << key;
  }
  EXPECT_EQ(alone.at("pages_checked"), 0);
  EXPECT_FALSE(alone.at("not_checked").empty());
}

// The recorded loads reach the host's pages whether the recording decides or the model.
TEST(Replay, OfHiSparseMovesItsPagesWhicheverDecides) {
  const std::string folder = LOCKSTEP_SOURCE_DIR "/tests/conformance/hisparse/";
  for (const char* decider : {"recording", "model"}) {
    for (const char* file : {"hisparse/0011.jsonl", "hisparse_async/0054.jsonl"})
      EXPECT_EQ(
          run_lockstep({"replay", folder + file, "--backend", "simt", "--decide", decider}).status,
          0)
          << file << " " << decider;
    // Finding 46: the page that a load within a step should fill.
    const Outcome empty = run_lockstep({"replay", folder + "hisparse_drafts/0011.jsonl",
                                        "--backend", "simt", "--decide", decider});
    EXPECT_EQ(empty.status, 1) << decider;
    EXPECT_NE(empty.out.find("over r3's tokens [0, 16) is wrong"), std::string::npos) << empty.out;
  }
}

TEST(Replay, InAPoolTooSmallForARequestIsStuckAndNamesIt) {
  const Outcome outcome =
      run_lockstep({"replay", kSample, "--backend", "none", "--num-blocks", "3"});
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_NE(outcome.out.find("STUCK"), std::string::npos) << outcome.out;
}

// Of a trace, and of recorded decisions.
class SavedReplay : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Replay, SavedReplay,
                         testing::Values(kSample, LOCKSTEP_SOURCE_DIR
                                         "/traces/samples/recordings/vllm-0.22.1/async_scheduling/"
                                         "0000.jsonl"),
                         [](const auto& one) {
                           return std::string(one.param == kSample ? "Trace" : "Recording");
                         });

TEST_P(SavedReplay, OfAMutantDivergesIsSavedAndTheCaseReproducesIt) {
  const std::string folder = fresh_path("cases");
  const Outcome found = run_lockstep(
      {"replay", GetParam(), "--backend", "simt", "--mutant", "wrong-stride", "--save", folder});
  ASSERT_EQ(found.status, 1) << found.err << found.out;
  EXPECT_NE(found.out.find("DIVERGENCE"), std::string::npos);
  std::vector<std::string> cases;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    cases.push_back(entry.path().string());
  }
  ASSERT_EQ(cases.size(), 1u);
  const Outcome again = run_lockstep({"replay", cases[0]});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
  const std::size_t verdict = found.out.find("DIVERGENCE");
  const std::string text = found.out.substr(verdict, found.out.find("Saved:") - verdict);
  EXPECT_NE(again.out.find(text), std::string::npos) << "the divergence reads differently";
  EXPECT_EQ(run_lockstep({"explain", cases[0]}).status, 1);
}

TEST(Replay, ToldOfAZeroingThatDoesNotComeNamesThePoisonThatWaitedForIt) {
  const Json json =
      replay_json({kSample, "--backend", "simt", "--model", "qwen3.5-0.8b", "--num-blocks", "9",
                   "--limit", "1", "--mutant", "zero-lost", "--no-prefill-checkpoints"},
                  1);
  const std::string owner = json.at("divergence").at("owner");
  EXPECT_NE(owner.find("allocated to be zeroed"), std::string::npos) << owner;
}

TEST(Replay, OverSeveralStreamsGivesTheSameStateHash) {
  const Json one = replay_json({kSample, "--backend", "simt", "--limit", "30"});
  const Json late = replay_json(
      {kSample, "--backend", "simt", "--limit", "30", "--streams", "4", "--delay-streams"});
  const Json watched = replay_json(
      {kSample, "--backend", "simt", "--limit", "10", "--streams", "3", "--check", "check"});
  EXPECT_EQ(one.at("verdict"), "agreed");
  EXPECT_EQ(late.at("verdict"), "agreed");
  EXPECT_EQ(late.at("pages_checked"), one.at("pages_checked"));
  EXPECT_EQ(late.at("state_hash"), one.at("state_hash"));
  EXPECT_EQ(watched.at("verdict"), "agreed");
  EXPECT_EQ(watched.at("configuration").at("num_streams"), 3);
}

TEST(Replay, FromCapturedGraphsChecksTheSamePagesAndSavesWhatItCaptured) {
  const Json eager = replay_json({kSample, "--backend", "simt", "--limit", "30"});
  EXPECT_EQ(eager.at("graphs").at("captured"), 0);
  for (const std::vector<std::string>& streams :
       {std::vector<std::string>{}, {"--streams", "3", "--delay-streams"}}) {
    std::vector<std::string> arguments = {kSample, "--backend", "simt", "--limit",
                                          "30",    "--graphs",  "64"};
    arguments.insert(arguments.end(), streams.begin(), streams.end());
    const Json graphs = replay_json(arguments);
    EXPECT_EQ(graphs.at("verdict"), "agreed");
    EXPECT_EQ(graphs.at("pages_checked"), eager.at("pages_checked"));
    EXPECT_EQ(graphs.at("configuration").at("max_cudagraph_capture_size"), 64);
    EXPECT_GT(graphs.at("graphs").at("captured"), 10);
    EXPECT_GT(graphs.at("graphs").at("replayed"), 100);
  }
  const std::string folder = fresh_path("cases");
  const Outcome found = run_lockstep({"replay", kSample, "--backend", "simt", "--graphs", "64",
                                      "--mutant", "graph-stale-param", "--save", folder});
  ASSERT_EQ(found.status, 1) << found.err << found.out;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    EXPECT_EQ(run_lockstep({"replay", entry.path().string()}).status, 1);
}

// Its name in a plan is "fp8", as vLLM's.
TEST(Replay, OfEightBitFloatsTakesBothOfTheirNames) {
  const Json json =
      replay_json({kSample, "--backend", "simt", "--limit", "5", "--dtype", "fp8_e4m3"});
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_GT(json.at("outputs_checked"), 0);
}

// The numbers of a bf16 cache are its words, so that pages are the same; attention is not.
TEST(Replay, WithRealNumbersRunsTheKernelsOfAnEngine) {
  const Json words = replay_json({kSample, "--backend", "simt", "--limit", "20"});
  const Json real =
      replay_json({kSample, "--backend", "simt", "--limit", "20", "--numbers", "real"});
  EXPECT_EQ(real.at("verdict"), "agreed");
  EXPECT_EQ(real.at("configuration").at("numbers"), "real");
  EXPECT_EQ(real.at("state_hash"), words.at("state_hash"));
  const Json int8 = replay_json({kSample, "--backend", "simt", "--limit", "20", "--numbers", "real",
                                 "--dtype", "int8", "--graphs", "32", "--streams", "2"});
  EXPECT_EQ(int8.at("verdict"), "agreed");
  // Rows of bf16 are moved, rows of int8 quantised.
  for (const auto& [run, write] :
       {std::pair{&real, "write_rows"}, std::pair{&int8, "write_parts"}}) {
    EXPECT_GT(run->at("outputs_checked"), 10'000);
    std::set<std::string> kernels;
    for (const Json& kernel : run->at("kernels")) kernels.insert(kernel.at("kernel"));
    for (const char* name : {write, "split_attention", "attention_combine"})
      EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

TEST(Replay, WithAScaleForEachTokenAndHeadRunsTheKernelThatMakesThem) {
  for (const char* dtype : {"int8_per_token_head", "fp8_per_token_head"}) {
    const Json real = replay_json({kSample, "--backend", "simt", "--limit", "20", "--numbers",
                                   "real", "--dtype", dtype, "--graphs", "32"});
    EXPECT_EQ(real.at("verdict"), "agreed");
    EXPECT_GT(real.at("outputs_checked"), 10'000);
    std::set<std::string> kernels;
    for (const Json& kernel : real.at("kernels")) kernels.insert(kernel.at("kernel"));
    EXPECT_TRUE(kernels.contains("quantise_rows"));
    EXPECT_FALSE(kernels.contains("write_parts"));
  }
}

TEST(Replay, CountsWhatEveryKernelDid) {
  const Json json = replay_json({kSample, "--backend", "simt", "--limit", "5", "--check", "check"});
  bool wrote_rows = false;
  for (const Json& kernel : json.at("kernels")) {
    for (const char* key : {"launches", "ctas", "threads", "accesses"})
      EXPECT_GT(kernel.at(key).get<std::int64_t>(), 0) << kernel.dump();
    EXPECT_GE(kernel.at("threads"), kernel.at("ctas"));
    wrote_rows |= kernel.at("kernel") == "write_rows";
  }
  EXPECT_TRUE(wrote_rows);
}

TEST(Replay, OfAModelOfTheCatalogueTakesItsLayers) {
  const std::string path = temporary_path("short.jsonl");
  std::ofstream(path)
      << R"({"lockstep_trace":1,"time":"ns","source":{"kind":"by hand","name":"one"},)"
         R"("engine":{"config":{"max_num_batched_tokens":256,"max_model_len":1024}}})"
         "\n"
         R"({"id":"r0","t":0,"prompt":[[1,40]],"output":{"length":4}})"
         "\n"
         R"({"end":true,"records":1})"
         "\n";
  const Json json = replay_json({path, "--backend", "simt", "--model", "qwen3.5-0.8b",
                                 "--num-blocks", "24", "--no-prefill-checkpoints"});
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_EQ(json.at("configuration").at("groups"), 4);
  EXPECT_EQ(json.at("configuration").at("block_size"), 544);
  EXPECT_GT(json.at("pages_checked").get<std::int64_t>(), 0);
}

// FlashAttention of the release takes a hybrid's blocks whole, so that they may lie packed.
TEST(Replay, OfAModelTakesPackedBlocksWhereTheReleaseDoes) {
  const std::string model = temporary_path("hybrid.json");
  write_text(model, R"({"model_file": 1, "name": "hybrid", "layer_kinds": {
    "linear": {"kind": "mamba", "states": "mamba1", "intermediate_size": 64, "state_size": 16,
               "conv_kernel": 4, "ssm_dtype": "fp32"},
    "attn": {"kind": "full", "num_kv_heads": 2, "head_size": 16}},
    "layers": [{"repeat": 2, "of": ["linear", "linear", "attn"]}]})");
  std::vector<std::string> command{kSample,   "--backend", "simt",     "--limit", "4",
                                   "--model", model,       "--layout", "BLNHC"};
  const Json json = replay_json(command);
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_EQ(json.at("configuration").at("layout"), "BLNHC");
  EXPECT_EQ(json.at("configuration").at("block_size"), 48);
  command.insert(command.begin(), "replay");
  command.insert(command.end(), {"--attention-backend", "flashinfer"});
  const Outcome outcome = run_lockstep(command);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("the engine core accepts this plan, but the worker crashes"),
            std::string::npos)
      << outcome.err;
}

// An option that was not given has the release's default; the trace's hints are not of this model.
TEST(Replay, OfAModelIsAsItsReleaseServesIt) {
  const auto serving = [](const std::vector<std::string>& more) {
    std::vector<std::string> command{kSample,   "--backend",         "none", "--limit", "2",
                                     "--model", "qwen3-next-80b-a3b"};
    command.insert(command.end(), more.begin(), more.end());
    return replay_json(command).at("serving");
  };
  const Json newest = serving({});
  EXPECT_EQ(newest.at("async_scheduling"),
            (Json{{"value", true}, {"default", true}, {"said_by", "release"}}));
  EXPECT_EQ(newest.at("prefix_cache_retention_interval").at("value"), 0);
  EXPECT_EQ(newest.at("prefill_checkpoint_alignment").at("value"), 1088);
  const Json told = serving({"--no-async-scheduling", "--no-prefill-checkpoints"});
  EXPECT_EQ(told.at("async_scheduling"),
            (Json{{"value", false}, {"default", true}, {"said_by", "command line"}}));
  EXPECT_EQ(told.at("prefill_checkpoint_alignment"),
            (Json{{"value", 0}, {"default", 1088}, {"said_by", "command line"}}));
  const Json older = serving({"--engine", "vllm-0.22.1", "--max-num-batched-tokens", "2048"});
  EXPECT_EQ(older.at("prefix_cache_retention_interval").at("value"), -1);
  EXPECT_EQ(older.at("prefill_checkpoint_alignment").at("value"), 0);
}

TEST(Replay, OfATraceWithHintsSaysWhatTheyTold) {
  const Json serving = replay_json({kSample, "--backend", "none", "--limit", "2"}).at("serving");
  EXPECT_EQ(serving.at("async_scheduling"),
            (Json{{"value", false}, {"default", true}, {"said_by", "trace"}}));
}

TEST(Replay, LeavesAReportThatNeedsNoNetwork) {
  const std::string path = temporary_path("report.html");
  const Outcome outcome =
      run_lockstep({"replay", kSample, "--backend", "none", "--limit", "20", "--report", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const std::string page = read_text(path);
  EXPECT_NE(page.find("</html>"), std::string::npos);
  EXPECT_EQ(page.find("http://"), page.find("http://www.w3.org/"));
  EXPECT_EQ(page.find("https://"), std::string::npos);
}

TEST(Replay, IntoAPipeDrawsNoProgress) {
  const Outcome outcome = run_lockstep({"replay", kSample, "--backend", "none"});
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(outcome.out.find('\r'), std::string::npos);
}

// A router that believes the events knows at any time what can be hit.
TEST(Replay, CacheEventsTellEveryBlockThatIsStoredAndRemoved) {
  const std::string events_path = temporary_path("cache_events.jsonl");
  const std::string json_path = temporary_path("cache_events_result.json");
  const Outcome outcome = run_lockstep({"replay", kSample, "--backend", "none", "--num-blocks",
                                        "96", "--cache-events", events_path, "--json", json_path});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  std::multiset<std::string> known;
  std::int64_t stored = 0, removed = 0, cleared = 0;
  std::istringstream lines(read_text(events_path));
  for (std::string line; std::getline(lines, line);) {
    const auto step = Json::parse(line);
    for (const auto& event : step["events"]) {
      if (event["type"] == "AllBlocksCleared") {
        ++cleared;
        known.clear();
      } else if (event["type"] == "BlockStored") {
        if (!event["parent_block_hash"].is_null()) {
          EXPECT_TRUE(known.contains(event["parent_block_hash"])) << line;
        }
        for (const auto& hash : event["block_hashes"]) known.insert(hash);
        stored += std::ssize(event["block_hashes"]);
        EXPECT_EQ(std::ssize(event["token_ids"]),
                  event["block_size"].get<std::int64_t>() * std::ssize(event["block_hashes"]));
      } else {
        ASSERT_EQ(event["type"], "BlockRemoved");
        for (const auto& hash : event["block_hashes"]) {
          const auto found = known.find(hash);
          ASSERT_NE(found, known.end()) << line;
          known.erase(found);
          ++removed;
        }
      }
    }
  }
  const Json result = Json::parse(read_text(json_path));
  EXPECT_EQ(stored, result["stored"]);
  EXPECT_EQ(removed, result["evictions"]);
  EXPECT_GT(removed, 0);
}

}  // namespace
}  // namespace lockstep::tests
