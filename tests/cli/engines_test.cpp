// `lockstep engines`, `fit` and `diff-engines` from the outside.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

TEST(Engines, ListsWhatEachReleaseChangedAndWhatIsNotModelled) {
  const std::string path = temporary_path("engines.json");
  const Outcome outcome = run_lockstep({"engines", "--json", path});
  EXPECT_EQ(outcome.status, 0);
  for (const char* text : {"The default is vllm-0.33.0", "\nvllm-0.22.1", "eagle_hits: ",
                           " -> lookahead_hash", "Not modelled in vllm-0.20.2 to", "watermark"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
  const Json json = Json::parse(read_text(path));
  EXPECT_EQ(json.at("releases").size(), 14u);
  for (const Json& policy : json.at("policies")) {
    EXPECT_FALSE(policy.at("effect").get<std::string>().empty()) << policy;
    EXPECT_FALSE(policy.at("shown_by").get<std::string>().empty()) << policy;
  }
}

TEST(Engines, TellsEveryPolicyOfOneEngine) {
  const Outcome outcome = run_lockstep({"engines", "vllm-0.22.1,without=2"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(outcome.out.starts_with("vllm-0.22.1,cuts_every_full_group=yes\n")) << outcome.out;
  EXPECT_NE(outcome.out.find("Findings of docs/findings.md that it can show: 1 3 4"),
            std::string::npos)
      << outcome.out;
  EXPECT_EQ(run_lockstep({"engines", "vllm-0.22.1,freed=append"}).status, 2);
}

TEST(Engines, DocumentationHasTheChangeLogOfTheTable) {
  const std::string page =
      read_text(std::string(LOCKSTEP_SOURCE_DIR) + "/docs/reference/releases.md");
  const std::string log = run_lockstep({"engines", "--markdown"}).out;
  EXPECT_NE(page.find("<!-- engines -->\n" + log + "<!-- /engines -->"), std::string::npos)
      << "put this between the marks of docs/reference/releases.md:\n"
      << log;
}

// What a fit saves is an engine that a replay takes; a recording made with it names it.
TEST(Fit, SavesAnEngineFileThatReplayAndConformTake) {
  const std::string folder = sample_path("recordings/vllm-0.22.1/full_attention");
  const std::string engine = temporary_path("engine.json"), json_path = temporary_path("fit.json");
  const Outcome fitted = run_lockstep(
      {"fit", folder, "--leave-out", "vllm-0.22.1", "--save", engine, "--json", json_path});
  ASSERT_EQ(fitted.status, 0) << fitted.out << fitted.err;
  EXPECT_NE(fitted.out.find("Nearest release: "), std::string::npos) << fitted.out;
  EXPECT_LT(fitted.out.find(" agree in every field of "), fitted.out.find("Nearest release: "))
      << fitted.out;
  EXPECT_NE(fitted.out.find("Not determined"), std::string::npos) << fitted.out;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_TRUE(json.at("agrees").get<bool>());
  EXPECT_NE(json.at("nearest"), "vllm-0.22.1");

  EXPECT_EQ(run_lockstep({"conform", folder, "--engine", engine}).status, 0);
  const Outcome replayed =
      run_lockstep({"replay", kSample, "--engine", engine, "--backend", "none"});
  EXPECT_EQ(replayed.status, 0) << replayed.err;
  EXPECT_NE(replayed.out.find(json.at("engine").get<std::string>()), std::string::npos)
      << replayed.out;
}

TEST(Fit, SaysWhereNoCombinationAgreesAndCutsTheRecordingThere) {
  const std::string sample =
      std::filesystem::directory_iterator(sample_path("recordings/vllm-0.33.0/full_attention"))
          ->path()
          .string();
  std::string text = read_text(sample);
  const std::size_t step = text.find("\"step\":4,");
  const std::size_t free = text.find("\"free_blocks\":", step) + 14;
  text.replace(free, text.find_first_not_of("0123456789", free) - free, "1");
  const std::string changed = temporary_path("changed.jsonl"), cut = temporary_path("cut.jsonl");
  write_text(changed, text);
  const Outcome outcome = run_lockstep({"fit", changed, "--cut", cut});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_NE(outcome.out.find("No combination of policies agrees"), std::string::npos);
  EXPECT_NE(outcome.out.find("step 4: free_blocks"), std::string::npos) << outcome.out;
  const Outcome again = run_lockstep({"conform", cut});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("step 4: free_blocks"), std::string::npos) << again.out;
}

TEST(Conform, JudgesAnEngineWithoutAProfileByTheNearestRelease) {
  std::string text = read_text(sample_path("recordings/vllm-0.33.0/full_attention/0001.jsonl"));
  const std::string version = "\"version\":\"0.33.0\"";
  ASSERT_NE(text.find(version), std::string::npos);
  text.replace(text.find(version), version.size(), "\"version\":\"0.33.1.dev4+g12ab\"");
  const std::string fork = temporary_path("fork.jsonl");
  write_text(fork, text);
  const Outcome outcome = run_lockstep({"conform", fork});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_TRUE(
      outcome.out.starts_with("vllm-0.33.1.dev4+g12ab is compared with the profile vllm-0.33.0.\n"))
      << outcome.out;
  EXPECT_EQ(run_lockstep({"audit", fork}).status, 0);
  EXPECT_EQ(run_lockstep({"replay", fork, "--backend", "none"}).status, 0);
  // One that differs is reported with the command that shows where.
  const Outcome differs = run_lockstep({"conform", fork, "--engine", "vllm-0.22.1"});
  EXPECT_EQ(differs.status, 1) << differs.err;
  EXPECT_NE(differs.out.find("`lockstep fit` finds"), std::string::npos) << differs.out;
}

TEST(EngineFile, IsRefusedWhereItIsWrong) {
  const std::string path = temporary_path("engine.json");
  const auto refusal = [&](const char* text) {
    write_text(path, text);
    const Outcome outcome = run_lockstep({"engines", path});
    EXPECT_EQ(outcome.status, 2) << text;
    return outcome.err;
  };
  EXPECT_NE(refusal("{").find(path), std::string::npos);
  EXPECT_NE(refusal(R"({"engine_file":1,"base":"vllm-9.9"})").find("vllm-9.9"), std::string::npos);
  EXPECT_NE(
      refusal(R"({"engine_file":1,"base":"vllm-0.33.0","policies":{"x":"y"}})").find("policies.x"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"engine_file":1,"base":"vllm-0.33.0","policies":{"freed_blocks":"y"}})")
                .find("policies.freed_blocks"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"engine_file":2,"base":"vllm-0.33.0"})").find("engine_file"),
            std::string::npos);
  EXPECT_EQ(run_lockstep({"engines", temporary_path("none.json")}).status, 2);
}

TEST(DiffEngines, SaysWhereDecisionsPartAndWhatItCosts) {
  const std::string path = temporary_path("diff.json");
  const Outcome outcome = run_lockstep({"diff-engines", kSample, "--json", path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  for (const char* text : {"First difference in each field:", "of vllm-0.22.1:", "of vllm-0.33.0:"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
  const Json json = Json::parse(read_text(path));
  // The order of freed blocks differs first; the running requests differ only after an eviction.
  const Json& first = json.at("first_difference");
  ASSERT_TRUE(first.at("blocks").is_number());
  ASSERT_TRUE(first.at("evicted").is_number());
  EXPECT_LT(first.at("blocks"), first.at("evicted"));
  EXPECT_EQ(json.at("engines").size(), 2u);
}

TEST(DiffEngines, OverARangeTellsWhichPolicyCostsWhat) {
  const std::string path = temporary_path("upgrade.json");
  const std::string page = temporary_path("upgrade.html");
  const Outcome outcome =
      run_lockstep({"diff-engines", kSample, "--engines", "vllm-0.23.0..vllm-0.25.1", "--json",
                    path, "--report", page});
  const std::string html = read_text(page);
  EXPECT_NE(html.find("<code>freed_blocks = unhashed_first</code> alone: "), std::string::npos);
  EXPECT_TRUE(html.ends_with("</html>\n"));
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_NE(outcome.out.find("freed_blocks = unhashed_first alone: "), std::string::npos)
      << outcome.out;
  const Json stages = Json::parse(read_text(path)).at("engines");
  ASSERT_EQ(stages.size(), 3u);
  EXPECT_LT(stages[1].at("costs").at("evictions"), stages[0].at("costs").at("evictions"));
  EXPECT_EQ(stages[1].at("because")[0].at("policy"), "freed_blocks");
  EXPECT_TRUE(stages[2].at("because").empty());
  const Outcome backwards =
      run_lockstep({"diff-engines", kSample, "--engines", "vllm-0.25.1..vllm-0.23.0"});
  EXPECT_EQ(backwards.status, 2);
  EXPECT_NE(backwards.err.find("the older first"), std::string::npos) << backwards.err;
}

TEST(DiffEngines, OfAModelComparesItsMemoryWithOrWithoutATrace) {
  const std::string path = temporary_path("memory.json");
  const Outcome outcome =
      run_lockstep({"diff-engines", "--model", "qwen3-next-80b-a3b", "--json", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("Memory of qwen3-next-80b-a3b, 40.0 GiB"), std::string::npos);
  const Json releases = Json::parse(read_text(path)).at("memory").at("releases");
  ASSERT_EQ(releases.size(), 2u);
  EXPECT_EQ(releases[0].at("engine"), "vllm-0.22.1");
  EXPECT_EQ(releases[1].at("order"), "LBNHC");
  EXPECT_GT(releases[1].at("capacity_tokens").get<std::int64_t>(), 0);
  const Outcome both = run_lockstep(
      {"diff-engines", kSample, "--model", "llama-3.1-8b", "--limit", "2", "--json", path});
  EXPECT_LE(both.status, 1) << both.err;
  const Json json = Json::parse(read_text(path));
  EXPECT_EQ(json.at("engines").size(), 2u);
  EXPECT_EQ(json.at("memory").at("model"), "llama-3.1-8b");
  const Outcome neither = run_lockstep({"diff-engines"});
  EXPECT_EQ(neither.status, 2);
  EXPECT_NE(neither.err.find("--model"), std::string::npos) << neither.err;
}

TEST(DiffEngines, OfAConfigPlansInTheCheckpointsFormatAndPrintsWhatItAssumes) {
  const std::string path = temporary_path("fp8.config.json");
  std::ofstream(path) << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
      "num_hidden_layers": 32, "max_position_embeddings": 131072,
      "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}})";
  const Outcome outcome = run_lockstep({"diff-engines", "--model", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("655,360"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("assumed from the config.json: no dtype"), std::string::npos)
      << outcome.out;
  const Outcome named = run_lockstep({"diff-engines", "--model", path, "--dtype", "bf16"});
  EXPECT_NE(named.out.find("327,680"), std::string::npos) << named.out;
  const Outcome longer = run_lockstep({"layout", "--model", path, "--max-model-len", "131073"});
  EXPECT_NE(longer.out.find("more than the model's 131072 tokens"), std::string::npos)
      << longer.out;
}

TEST(DiffEngines, OfAnEngineWithItselfFindsNothing) {
  const Outcome outcome =
      run_lockstep({"diff-engines", kSample, "--engines", "vllm-0.33.0", "vllm-0.33.0"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("the same in every step"), std::string::npos);
}

TEST(DiffEngines, TakesARecordingAndABenchmark) {
  for (const char* name :
       {"recordings/vllm-0.33.0/mamba_align", "recordings/vllm-0.22.1/benchmarks/full.jsonl"}) {
    std::string path = sample_path(name);
    if (!path.ends_with(".jsonl"))
      path = std::filesystem::directory_iterator(path)->path().string();
    const Outcome outcome = run_lockstep({"diff-engines", path});
    EXPECT_EQ(outcome.status, 1) << path << outcome.err;
  }
}

TEST(DiffEngines, RefusesUnknownEnginesAndOptionsThatMeanNothingHere) {
  const Outcome unknown =
      run_lockstep({"diff-engines", kSample, "--engines", "vllm-0.33.0", "vllm-1.0"});
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find("vllm-0.22.1, vllm-0.23.0"), std::string::npos) << unknown.err;
  const Outcome useless = run_lockstep({"diff-engines", kSample, "--engine", "vllm-0.33.0"});
  EXPECT_EQ(useless.status, 2);
  EXPECT_NE(useless.err.find("--engine"), std::string::npos) << useless.err;
}

}  // namespace
}  // namespace lockstep::tests
