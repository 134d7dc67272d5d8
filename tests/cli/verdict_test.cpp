// Verdicts state what they judged: runs of recordings that the model does not decide, engines
// without a profile, lost prefix hits, and plans that leave something out.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "reference/types/engine_config.h"
#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kCases = LOCKSTEP_SOURCE_DIR "/tests/cli/cases/";
const std::string kParts = kCases + "no_slots_in_flight.jsonl";
const std::string kNoProfile = kCases + "sglang.jsonl";
const std::string kSmallEngine = "python3 " LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py";
const std::string kFollowed =
    LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_33_0_padded_prompt_of_one_token.jsonl";

bool has(const std::string& text, std::string_view part) { return text.find(part) != text.npos; }

TEST(Verdicts, AReplayFollowsTheRecordedDecisionsAndTheirAudit) {
  for (const std::string backend : {"simt", "none"}) {
    const std::string json = temporary_path("followed.json");
    const Outcome run = run_lockstep({"replay", kParts, "--backend", backend, "--json", json});
    EXPECT_EQ(run.status, 1) << run.out << run.err;
    EXPECT_TRUE(has(run.out, "Verdict: audit.draft_slots in step 1, request r0\n")) << run.out;
    const auto result = nlohmann::json::parse(read_text(json));
    EXPECT_EQ(result["verdict"], "audit");
    EXPECT_EQ(result["violation"]["check"], "audit.draft_slots");
    EXPECT_EQ(result["violation"]["request"], "r0");
  }
}

TEST(Verdicts, ARecordingThatAgreesSaysWhatWasCompared) {
  const std::string path =
      LOCKSTEP_SOURCE_DIR "/tests/regressions/hit_of_a_prefill_checkpoint.jsonl";
  const Outcome pages = run_lockstep({"replay", path, "--backend", "simt"});
  EXPECT_EQ(pages.status, 0) << pages.out;
  EXPECT_TRUE(has(pages.out, "The recorded decisions compared equal in every step")) << pages.out;
  const Outcome none = run_lockstep({"replay", path, "--backend", "none"});
  EXPECT_TRUE(has(none.out, "without a backend, so no page was compared; their audit has no"))
      << none.out;
  EXPECT_TRUE(has(none.out, "whether the model of vllm-0.33.0 decides the same")) << none.out;
}

TEST(Verdicts, AnExplanationDrawsTheRecordedTables) {
  const std::string json = temporary_path("explained.json");
  const Outcome run = run_lockstep({"explain", kParts, "--json", json});
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  EXPECT_TRUE(has(run.out, "Here it fails: audit.draft_slots")) << run.out;
  EXPECT_FALSE(has(run.out, "[5*")) << run.out;  // the block that the model would hand over
  EXPECT_EQ(nlohmann::json::parse(read_text(json))["check"], "audit.draft_slots");
}

// Its finding comes after the last step. It lists no queue and no free blocks.
TEST(Verdicts, ASmallRecordingNamesWhatItDoesNotList) {
  const std::string path =
      LOCKSTEP_SOURCE_DIR "/tests/properties/audit/cases/unfinished_after_its_end.jsonl";
  const std::string what = "the end line lists r0 as unfinished, but no live request has this name";
  for (const std::string command : {"audit", "replay", "explain"}) {
    const Outcome run = run_lockstep({command, path});
    EXPECT_EQ(run.status, 1) << run.err;
    EXPECT_TRUE(has(run.out, what)) << run.out;
    EXPECT_FALSE(has(run.out, "step -1")) << run.out;
  }
  const std::string json = temporary_path("small.json");
  run_lockstep({"audit", path, "--json", json});
  const auto result = nlohmann::json::parse(read_text(json));
  EXPECT_EQ(result["findings"].size(), 1u);
  const auto not_checked = result["not_checked"].get<std::vector<std::string>>();
  for (const std::string part :
       {"lost blocks: no step shows all blocks that are held and free",
        "the queue of each request: the recording does not list its queues"})
    EXPECT_EQ(std::ranges::count(not_checked, part), 1) << part;
}

TEST(Verdicts, AShrunkRecordingKeepsItsFailureAndItsSubject) {
  const std::string smallest = temporary_path("no_slots.min.case.jsonl");
  const Outcome run = run_lockstep({"shrink", kParts, "-o", smallest});
  EXPECT_EQ(run.status, 1) << run.err;
  for (const std::string command : {"replay", "explain", "shrink"}) {
    const Outcome again = run_lockstep({command, smallest});
    EXPECT_EQ(again.status, 1) << command << again.err;
    EXPECT_TRUE(has(again.out, "audit.draft_slots")) << command << again.out;
  }
}

TEST(Verdicts, WithTheModelDecidingAReplayNamesTheStepWhereTheRecordingParts) {
  const std::string json = temporary_path("parted.json");
  const std::string junit = temporary_path("parted.xml");
  const Outcome run = run_lockstep({"replay", kParts, "--decide", "model", "--backend", "simt",
                                    "--json", json, "--junit", junit});
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  EXPECT_TRUE(has(run.out,
                  "Verdict: the model's decisions agree on the backend; the recording differs from "
                  "the model in step 1; audit: 1 finding.\n"
                  "  in step 1: scheduled[0].blocks: recorded null, model [[5]]\n"
                  "  audit.draft_slots step 1 request r0"))
      << run.out;
  EXPECT_FALSE(has(run.out, "Verdict: agreed")) << run.out;
  const auto result = nlohmann::json::parse(read_text(json));
  EXPECT_EQ(result["verdict"], "audit");
  EXPECT_EQ(result["recording"]["parts"]["step"], 1);
  EXPECT_EQ(result["recording"]["findings"].size(), 1u);
  EXPECT_TRUE(has(read_text(junit), "audit.draft_slots"));
  // The model decides as vLLM does, and the audit has a finding: nothing parts.
  const Outcome found =
      run_lockstep({"replay", kFollowed, "--decide", "model", "--backend", "none"});
  EXPECT_EQ(found.status, 1) << found.out;
  EXPECT_TRUE(has(found.out, "the recording holds the same decisions; audit: 1 finding"))
      << found.out;
}

TEST(Verdicts, WithTheModelDecidingANarrativeMarksWhereItLeavesTheRecording) {
  const std::string json = temporary_path("explained.json");
  const Outcome run = run_lockstep({"explain", kParts, "--decide", "model", "--json", json});
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  EXPECT_TRUE(has(run.out, "The recording and the model differ here (scheduled[0].blocks"))
      << run.out;
  EXPECT_TRUE(has(run.out, "audit.draft_slots step 1 request r0")) << run.out;
  EXPECT_FALSE(has(run.out, "it is agreed")) << run.out;
  EXPECT_EQ(nlohmann::json::parse(read_text(json))["recording"]["parts"]["step"], 1);
  const Outcome shrunk = run_lockstep({"shrink", kParts, "--decide", "model"});
  EXPECT_EQ(shrunk.status, 1);
  EXPECT_TRUE(has(shrunk.out, "the recording differs from the model in step 1; audit: 1 finding"))
      << shrunk.out;
}

TEST(Verdicts, ARecordingOfAnEngineWithoutAProfileIsFollowed) {
  const Outcome audit = run_lockstep({"audit", kNoProfile});
  EXPECT_EQ(audit.status, 1);
  EXPECT_TRUE(has(audit.out, "`lockstep explain ")) << audit.out;
  for (const std::string command : {"explain", "replay"}) {
    const Outcome run = run_lockstep({command, kNoProfile});
    EXPECT_EQ(run.status, 1) << command << run.err;
    EXPECT_TRUE(has(run.out, "audit.computed_again")) << command << run.out;
    const Outcome model = run_lockstep({command, kNoProfile, "--decide", "model"});
    EXPECT_EQ(model.status, 2) << command << model.out;
    EXPECT_TRUE(has(model.err, "sglang.jsonl:1: engine: sglang-0.5.23 has no profile"))
        << model.err;
    EXPECT_EQ(model.out, "") << command;
  }
  EXPECT_TRUE(has(run_lockstep({"replay", kNoProfile}).out, "sglang-0.5.23 has no profile"));
  for (const std::string command : {"explain", "replay"}) {
    const Outcome engine = run_lockstep({command, kNoProfile, "--decisions", kSmallEngine});
    EXPECT_EQ(engine.status, 0) << command << engine.err;
    EXPECT_TRUE(has(engine.out, "agreed")) << command << engine.out;
  }
  const std::string windows =
      LOCKSTEP_SOURCE_DIR "/traces/samples/recordings/vllm-0.33.0/sliding_window/0005.jsonl";
  const Outcome refused = run_lockstep({"explain", windows, "--decisions", kSmallEngine});
  EXPECT_EQ(refused.status, 2) << refused.out;
  EXPECT_TRUE(has(refused.err, windows + ": paged-")) << refused.err;
  std::string saved =
      read_text(LOCKSTEP_SOURCE_DIR "/tests/regressions/more_memory_finishes_later.case.jsonl");
  const std::size_t at = saved.find(R"("engine":"vllm-)");
  ASSERT_NE(at, saved.npos);
  const std::string path = temporary_path("no_profile.case.jsonl");
  write_text(path, saved.replace(at, 14, R"("engine":"x)"));
  for (const std::string command : {"explain", "shrink", "replay"})
    EXPECT_EQ(run_lockstep({command, path}).status, 2) << command;
}

// Requests that had not finished, and a request that only the lost steps preempt, are no findings.
TEST(Verdicts, EveryCommandNamesTheStepThatARecordingIsCutOffAfter) {
  const std::string whole =
      read_text(kFollowed.substr(0, kFollowed.rfind('/')) + "/hit_of_a_prefill_checkpoint.jsonl");
  std::size_t end = 0;
  for (int line = 0; line < 4; ++line) end = whole.find('\n', end) + 1;
  const std::string path = temporary_path("killed.jsonl");
  write_text(path, whole.substr(0, end + 30));
  for (const std::string command : {"audit", "conform", "replay", "explain", "shrink", "fit"}) {
    const std::string json = temporary_path("cut.json");
    const Outcome run = run_lockstep({command, path, "--json", json});
    EXPECT_EQ(run.status, 0) << command << run.out << run.err;
    EXPECT_TRUE(has(run.out, "cut off after step 2")) << command << run.out;
    const auto result = nlohmann::json::parse(read_text(json));
    EXPECT_TRUE(has(result.at("cut_off").dump(), "cut off after step 2")) << command;
  }
  // Without a whole step nothing is judged, and nothing is called clean.
  write_text(path, whole.substr(0, whole.find('\n') + 30));
  const Outcome none = run_lockstep({"audit", path});
  EXPECT_TRUE(has(none.out, "audited 0 of 1 recording: 0 clean, 0 findings")) << none.out;
  EXPECT_TRUE(has(none.out, "cut off before its first step")) << none.out;
  write_text(path, whole.substr(0, 50));
  const Outcome torn = run_lockstep({"audit", path});
  EXPECT_EQ(torn.status, 2);
  EXPECT_TRUE(has(torn.err, "killed.jsonl:1: column 50: ")) << torn.err;
  EXPECT_TRUE(has(torn.err, "; the file is cut off here\n")) << torn.err;
  write_text(path, whole.substr(0, end + 30));
  const Outcome exported =
      run_lockstep({"export", path, "--as", "mooncake", "--lossy", "--block", "16"});
  EXPECT_TRUE(has(exported.err, "is cut off after step 2")) << exported.err;
}

// The recorded engine's own fault is a failure wherever its decisions are followed.
TEST(Verdicts, TwoLiveRequestsOfOneNameAreAFault) {
  for (const std::string command : {"audit", "replay", "explain"}) {
    const Outcome run = run_lockstep(
        {command, LOCKSTEP_SOURCE_DIR "/tests/regressions/damaged/two_of_one_name.jsonl"});
    EXPECT_EQ(run.status, 1) << command << run.err;
    EXPECT_TRUE(has(run.out, "two live requests have th")) << command << run.out;
  }
}

TEST(Verdicts, LostHitsHaveAReason) {
  const std::string json = temporary_path("hits.json");
  const auto replay = [&](const std::string& trace, const std::string& max_model_len) {
    return run_lockstep({"replay", kCases + trace, "--model", "qwen3.5-4b", "--engine",
                         "vllm-0.22.1", "--backend", "none", "--mamba-cache-mode", "align",
                         "--num-blocks", "400", "--max-model-len", max_model_len, "--json", json});
  };
  const Outcome lost = replay("shared_1500.jsonl", "4096");
  EXPECT_EQ(lost.status, 0) << lost.err;
  EXPECT_TRUE(has(lost.out, "were in the pool; not hit: 5,280 state")) << lost.out;
  const auto hits = nlohmann::json::parse(read_text(json))["prefix_hits"];
  EXPECT_EQ(hits["hit"], 0);
  EXPECT_EQ(hits["in_pool"], 5280);
  EXPECT_EQ(hits["is_whole"], true);
  EXPECT_EQ(hits["not_hit"]["state"], hits["in_pool"]) << hits;
  const Outcome found = replay("shared_1600.jsonl", "4096");
  EXPECT_TRUE(has(found.out, "prefix hits           62.9 %")) << found.out;
}

// vllm/config/model.py, is_prefix_caching_supported(): off by default without attention.
TEST(Verdicts, ModelsOfStatesAloneHavePrefixCachingOnlyIfAsked) {
  const std::string model = temporary_path("states.json");
  write_text(model, R"({"model_file": 1, "name": "states", "max_model_len": 1024, "layer_kinds":
      {"s": {"kind": "mamba", "states": "mamba2", "num_heads": 4, "head_dim": 16,
             "intermediate_size": 64, "n_groups": 1, "state_size": 16, "conv_kernel": 4}},
      "layers": ["s", "s"]})");
  const auto replay = [](const std::string& of, const std::vector<std::string>& more) {
    std::vector<std::string> words = {
        "replay",       LOCKSTEP_SOURCE_DIR "/traces/samples/shared_prefixes.jsonl",
        "--limit",      "4",
        "--model",      of,
        "--backend",    "none",
        "--num-blocks", "400"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_lockstep(words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome.out;
  };
  const std::string off = "no prefix caching, as the engine serves models without attention";
  EXPECT_TRUE(has(replay(model, {}), off));
  const std::string asked = replay(model, {"--mamba-cache-mode", "align"});
  EXPECT_FALSE(has(asked, off)) << asked;
  EXPECT_TRUE(has(asked, "mode align")) << asked;
  const std::string none =
      replay("qwen3.5-0.8b", {"--no-prefix-caching", "--mamba-cache-mode", "align"});
  EXPECT_TRUE(has(none, "states are kept in mode none, not align")) << none;
}

TEST(Verdicts, APromptThatCanFillNoBlockIsNamed) {
  const Outcome plan = run_lockstep({"layout", "--model", "qwen3.5-4b", "--mamba-cache-mode",
                                     "align", "--max-model-len", "500", "--memory", "4GiB"});
  EXPECT_TRUE(has(plan.out,
                  "warning: no prompt can fill a block and be hit: hits end at multiples "
                  "of 576 tokens, and max_model_len is 500"))
      << plan.out << plan.err;
  const Outcome capacity = run_lockstep({"capacity", "qwen3.5-4b", "--engine", "vllm-0.33.0",
                                         "--mamba-cache-mode", "align", "--max-model-len", "500"});
  EXPECT_TRUE(has(capacity.out, "warning: qwen3.5-4b: no prompt can fill a block")) << capacity.out;
  const Outcome replay =
      run_lockstep({"replay", LOCKSTEP_SOURCE_DIR "/traces/samples/shared_prefixes.jsonl",
                    "--model", "qwen3.5-4b", "--backend", "none", "--max-model-len", "4096"});
  EXPECT_TRUE(has(replay.out, "no prompt can fill a block and be hit")) << replay.out;
  EXPECT_TRUE(has(replay.out, "the longest prompt is")) << replay.out;
}

TEST(Verdicts, ACapacityIsThatOfAllPipelineStages) {
  const auto json_of = [](std::vector<std::string> words) {
    words.insert(words.end(), {"--engine", "vllm-0.33.0", "--pp", "4", "--json", "-"});
    return nlohmann::json::parse(run_lockstep(words).out);
  };
  const auto plan = json_of({"layout", "--model", "deepseek-v4-flash"});
  std::int64_t widest = 0;
  for (const auto& stage : plan.at("workers"))
    widest = std::max(widest, stage.at("bytes_per_block").get<std::int64_t>());
  const auto& first = plan.at("workers").at(0);
  ASSERT_GT(widest, first.at("bytes_per_block"));
  const auto row = json_of({"capacity", "deepseek-v4-flash"}).at("models").at(0);
  const auto tokens = row.at("capacity_tokens").get<std::int64_t>();
  EXPECT_EQ(row.at("bytes_per_token"), widest * row.at("num_blocks").get<std::int64_t>() / tokens);
}

TEST(Verdicts, ACapacityHasNoHitsOfModelsThatAreServedWithoutPrefixCaching) {
  const auto rows =
      nlohmann::json::parse(run_lockstep({"capacity", "whisper-large-v3", "unlimited-ocr-like",
                                          "deepseek-v4.1-like", "--json", "-"})
                                .out);
  std::vector<int> hits;
  for (const auto& row : rows.at("models")) hits.push_back(row.at("resend_hit_tokens"));
  EXPECT_EQ(hits, (std::vector{0, 0, 1'856}));  // a replay hits as many; 1,984 are cached
}

TEST(Verdicts, ACapacitysColumnsStayApart) {
  const Outcome run =
      run_lockstep({"capacity", "zamba2-7b", "--engine", "vllm-0.22.1", "--mamba-cache-mode", "all",
                    "--attn-pack", "4", "--max-model-len", "1024"});
  EXPECT_TRUE(has(run.out, "4.15 10,092,544 ")) << run.out << run.err;
}

TEST(Verdicts, ACapacityHasTheHitsOfAResendInEveryRelease) {
  // Of 2,100 tokens: 3 blocks of 528, and of 576.
  for (const auto& [engine, share] :
       {std::pair{"vllm-0.22.1", "75.4 %\n"}, {"vllm-0.33.0", "82.3 %\n"}}) {
    const Outcome run = run_lockstep({"capacity", "qwen3.5-4b", "--engine", engine,
                                      "--mamba-cache-mode", "align", "--prompt-tokens", "2100"});
    EXPECT_EQ(run.status, 0) << run.err;
    EXPECT_TRUE(has(run.out, share)) << run.out;
  }
}

TEST(Verdicts, APlanNamesWhatItLeavesOut) {
  const auto plan = [](const std::string& engine) {
    return run_lockstep({"layout", "--model", kCases + "window_drafter.json", "--engine", engine,
                         "--mamba-cache-mode", "align", "--num-spec", "3", "--memory", "40GiB"});
  };
  const std::string old = plan("vllm-0.27.1").out;
  EXPECT_TRUE(has(old, "warning: planned by the rules of vllm-0.22.1: vllm-0.27.1")) << old;
  EXPECT_TRUE(has(old, "warning: the draft model's layers are left out: 2 of 26 layers")) << old;
  EXPECT_FALSE(has(plan("vllm-0.33.0").out, "warning:"));
  EXPECT_TRUE(has(
      run_lockstep({"capacity", "deepseek-v3", "--engine", "vllm-0.22.1", "--num-spec", "1"}).out,
      "warning: deepseek-v3: the draft model's layers are left out: 1 of 62 layers"));
}

TEST(Verdicts, PlansAndReplaysHaveOneDefaultEngineAndNameIt) {
  const std::string engine = EngineConfig{}.engine;
  EXPECT_TRUE(has(run_lockstep({"replay", kSample, "--backend", "none"}).out, "engine  " + engine));
  EXPECT_TRUE(has(run_lockstep({"layout", "--model", "llama-3.1-8b"}).out, "8b: " + engine + ","));
  EXPECT_TRUE(
      has(run_lockstep({"capacity", "llama-3.1-8b"}).out, "Planned by the rules of " + engine));
  const Outcome packed = run_lockstep({"layout", "--model", "qwen3.5-4b", "--attn-pack", "2"});
  EXPECT_EQ(packed.status, 2);
  EXPECT_TRUE(has(packed.err, "releases before vllm-0.33.0 do")) << packed.err;
  const auto json = nlohmann::json::parse(
      run_lockstep({"capacity", "qwen3.5-4b", "--attn-pack", "1,2", "--json", "-"}).out);
  EXPECT_EQ(json.at("engine"), engine);
  EXPECT_GT(json.at("models").at(0).at("num_blocks"), 0);
  EXPECT_TRUE(json.at("models").at(1).contains("refused"));
}

TEST(Verdicts, QuantisationThatIsNotCheckedIsListed) {
  const std::string json = temporary_path("quantised.json");
  const Outcome run =
      run_lockstep({"replay", LOCKSTEP_SOURCE_DIR "/traces/samples/shared_prefixes.jsonl",
                    "--limit", "4", "--backend", "simt", "--dtype", "nvfp4", "--json", json});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  EXPECT_TRUE(has(run.out, "  - conversion of K and V to nvfp4")) << run.out;
  EXPECT_TRUE(has(nlohmann::json::parse(read_text(json))["not_checked"].dump(), "nvfp4"));
}

// Found by changing files of all formats at random.
TEST(Verdicts, ASavedCaseWhoseLayerHasNoTensorIsRefused) {
  std::string text = read_text(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/id_of_a_request_that_left_while_loading.case.jsonl");
  const std::string_view shared = R"("shared_by":["g0.0"])";
  const std::size_t at = text.find(shared);
  ASSERT_NE(at, text.npos);
  const std::string path = temporary_path("no_tensor.case.jsonl");
  write_text(path, text.replace(at, shared.size(), R"("shared_by":["other"])"));
  const Outcome run = run_lockstep({"replay", path});
  EXPECT_EQ(run.status, 2) << run.out;
  EXPECT_TRUE(has(run.err, "a tensor for each layer; 'g0.0' has none")) << run.err;
}

TEST(Verdicts, ASavedCaseWhosePagesAreTooSmallIsRefused) {
  std::string text =
      read_text(LOCKSTEP_SOURCE_DIR "/tests/regressions/load_shorter_than_hit.case.jsonl");
  const std::string_view padded = R"("page_size_padded":16)";
  const std::size_t at = text.find(padded);
  ASSERT_NE(at, text.npos);
  const std::string path = temporary_path("small_page.case.jsonl");
  write_text(path, text.replace(at, padded.size(), R"("page_size_padded":1)"));
  for (const std::string command : {"explain", "shrink"}) {
    const Outcome run = run_lockstep({command, path});
    EXPECT_EQ(run.status, 2) << run.out;
    EXPECT_TRUE(has(run.err, "page_size_padded: 1; its rows take")) << run.err;
  }
}

TEST(Verdicts, NothingAgreesWithoutAStep) {
  const std::string path = temporary_path("killed.jsonl"), whole = read_text(kFollowed);
  write_text(path, whole.substr(0, whole.find('\n') + 1));
  EXPECT_EQ(run_lockstep({"audit", path}).status, 2);
  for (const std::string command : {"conform", "replay", "explain", "shrink"}) {
    const Outcome run = run_lockstep({command, path});
    EXPECT_EQ(run.status, 2) << command << run.out;
    EXPECT_TRUE(has(run.err, "killed.jsonl:1: has no step to ")) << run.err;
  }
}

TEST(Verdicts, AReleaseWithoutAProfileIsNamed) {
  const std::string path = temporary_path("newer.jsonl");
  write_text(path,
             replaced(read_text(kFollowed), R"("version":"0.33.0")", R"("version":"0.40.0")"));
  const Outcome run = run_lockstep({"replay", path, "--backend", "none"});
  EXPECT_TRUE(has(run.out, "rules of vllm-0.33.0: vllm-0.40.0 has no profile")) << run.out;
}

TEST(Verdicts, ASpecWithoutABlockSizeIsNotTaken) {
  const std::string path = temporary_path("no_block_size.jsonl");
  write_text(path, replaced(read_text(kFollowed), R"("block_size":4,"num_kv_heads")",
                            R"("num_kv_heads")"));
  const Outcome run = run_lockstep({"audit", path});
  EXPECT_EQ(run.status, 2) << run.out;
  EXPECT_TRUE(has(run.err, R"(no key "block_size")")) << run.err;
}

TEST(Verdicts, ARequestBeyondAllLimitsIsNamed) {
  const std::string path = temporary_path("long.jsonl");
  write_text(path, R"({"timestamp":0,"input_length":2147483647,"output_length":500})"
                   "\n");
  const Outcome run = run_lockstep({"replay", path, "--backend", "none"});
  EXPECT_EQ(run.status, 2) << run.out;
  EXPECT_TRUE(has(run.err, "has 2,147,484,147 tokens of prompt and output; at most 536,870,912"))
      << run.err;
}

TEST(Verdicts, CacheEventsAreTheModels) {
  const std::string events = temporary_path("no_events.jsonl");
  const Outcome followed = run_lockstep({"replay", kFollowed, "--cache-events", events});
  EXPECT_EQ(followed.status, 2) << followed.out;
  EXPECT_TRUE(has(followed.err, "add --decide model")) << followed.err;
  const Outcome other = run_lockstep({"replay", kSample, "--cache-events", events, "--decisions",
                                      LOCKSTEP_BINARY_DIR "/model_engine"});
  EXPECT_EQ(other.status, 2) << other.out;
  EXPECT_TRUE(has(other.err, "another engine decides; omit --decisions")) << other.err;
  EXPECT_FALSE(std::filesystem::exists(events));
}

// Nothing is compared without a backend, and nothing where no request runs.
TEST(Verdicts, ARunThatComparedNothingIsDoneAndNotAgreed) {
  const std::string refused = temporary_path("refused.jsonl");
  write_text(refused, trace_of({R"({"id":"a","t":0,"prompt":[[1,4000]],"output":{"length":9}})"}));
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"replay", kSample, "--limit", "5", "--backend", "none"},
           {"replay", refused, "--backend", "simt", "--max-model-len", "100"}}) {
    const std::string json = temporary_path("done.json"), junit = temporary_path("done.xml");
    std::vector<std::string> all = arguments;
    all.insert(all.end(), {"--json", json, "--junit", junit});
    const Outcome run = run_lockstep(all);
    EXPECT_EQ(run.status, 0) << run.out << run.err;
    EXPECT_TRUE(has(run.out, "Verdict: done")) << run.out;
    EXPECT_EQ(nlohmann::json::parse(read_text(json))["verdict"], "done");
    EXPECT_TRUE(has(read_text(junit), "skipped=\"1\"")) << read_text(junit);
  }
}

TEST(Verdicts, ASavedFailureThatDoesNotFailFailsItsItem) {
  const std::string path = temporary_path("mended.case.jsonl"), junit = temporary_path("4.xml");
  write_text(path, replaced(read_text(LOCKSTEP_SOURCE_DIR
                                      "/tests/regressions/states_in_flight_never_end.case.jsonl"),
                            R"("async_scheduling":true)", R"("async_scheduling":false)"));
  const Outcome run = run_lockstep({"replay", path, "--backend", "none", "--junit", junit});
  EXPECT_EQ(run.status, 4) << run.out << run.err;
  EXPECT_TRUE(has(read_text(junit), "failures=\"1\"")) << read_text(junit);
}

// The run that follows a recording is a case as well as a recording.
TEST(Verdicts, ARecordingWithAFindingIsSavedAsACase) {
  const std::string folder = temporary_path("saved");
  const Outcome run = run_lockstep({"replay", kParts, "--backend", "none", "--save", folder});
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  const std::size_t at = run.out.find("Saved: ");
  ASSERT_NE(at, std::string::npos) << run.out;
  const std::string path = run.out.substr(at + 7, run.out.find('\n', at) - at - 7);
  const Outcome again = run_lockstep({"replay", path});
  EXPECT_EQ(again.status, 1) << again.out;
  EXPECT_TRUE(has(again.out, "audit.draft_slots")) << again.out;
}

// Two failures in one step, whose cases would have one name.
TEST(Verdicts, ASavedCaseDoesNotReplaceAnotherOne) {
  const std::string folder = temporary_path("two");
  for (const std::string mutant : {"drop-slot", "wrong-stride", "drop-slot"}) {
    const Outcome run = run_lockstep({"replay", kSample, "--limit", "5", "--backend", "simt",
                                      "--mutant", mutant, "--save", folder});
    EXPECT_EQ(run.status, 1) << run.out << run.err;
  }
  std::size_t count = 0, steps = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++count;
    steps += has(entry.path().filename().string(), "step0");
    EXPECT_EQ(run_lockstep({"replay", entry.path().string()}).status, 1);
  }
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(steps, 2u);
}

// One block more than a row of the group of states holds. The check fails in the backend while
// another thread computes what the step should show.
TEST(Verdicts, AFailedCheckOfTheBackendIsAVerdictInSeveralThreadsToo) {
  std::string lines = read_text(sample_path("recordings/vllm-0.33.0/mamba_none/0022.jsonl"));
  const std::size_t row = lines.find("\"blocks\":[["), second = lines.find("],[", row);
  ASSERT_NE(second, std::string::npos);
  lines.insert(lines.find(']', second + 3), ",14");  // the last block of the pool
  const std::string path = temporary_path("wide.jsonl");
  write_text(path, lines);
  for (const std::string jobs : {"1", "2", "2"}) {
    const Outcome run = run_lockstep({"replay", path, "--backend", "simt", "--jobs", jobs});
    EXPECT_EQ(run.status, 1) << run.out << run.err;
    EXPECT_TRUE(has(run.out, "THE ENGINE FAILED") || has(run.out, "audit.")) << run.out;
  }
}

}  // namespace
}  // namespace lockstep::tests
