// `lockstep same`: where two runs part, as the command that judged them says.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

const std::string kRecording = sample_path("recordings/vllm-0.22.1/preemption/0002.jsonl");

// The first requests of the sample.
const std::string& short_trace() {
  static const std::string path = [] {
    constexpr int kRecords = 24;
    const std::string text = read_text(kSample);
    std::size_t end = 0;
    for (int line = 0; line <= kRecords; ++line) end = text.find('\n', end) + 1;
    std::string name = temporary_path("short.jsonl");
    write_text(name, text.substr(0, end) + "{\"end\":true,\"records\":" + std::to_string(kRecords) +
                         "}\n");
    return name;
  }();
  return path;
}

// The step hashes of a replay.
std::string hashes_of(const std::string& name, std::vector<std::string> options, int status = 0,
                      const std::string& trace = short_trace()) {
  std::string path = fresh_path(name + ".hashes.jsonl");
  std::vector<std::string> words = {"replay", trace, "--hashes", path, "--json", path + ".json"};
  words.insert(words.end(), options.begin(), options.end());
  const Outcome outcome = run_lockstep(words);
  EXPECT_EQ(outcome.status, status) << outcome.out << outcome.err;
  return path;
}

Json same_json(const std::string& left, const std::string& right, int status) {
  const std::string path = fresh_path("same.json");
  const Outcome outcome = run_lockstep({"same", left, right, "--json", path});
  EXPECT_EQ(outcome.status, status) << outcome.out << outcome.err;
  return Json::parse(read_text(path));
}

TEST(Same, TwoRunsOfOneTraceAreTheSameAndEndInTheStateHashOfTheReplay) {
  const std::string first = hashes_of("first", {"--backend", "simt"});
  const std::string second = hashes_of("second", {"--backend", "simt"});
  EXPECT_EQ(read_text(first), read_text(second));
  const Json json = same_json(first, second, 0);
  EXPECT_EQ(json.at("same"), true);
  EXPECT_EQ(json.at("first"), nullptr);
  const Json replay = Json::parse(read_text(first + ".json"));
  EXPECT_EQ(json.at("runs")[0].at("steps_read"), replay.at("steps"));
  const std::string hash = replay.at("state_hash");
  EXPECT_NE(read_text(first).find("\"hash\":\"" + hash + "\""), std::string::npos) << hash;
}

TEST(Same, AnotherEngineDiffersInTheStepThatDiffEnginesNames) {
  const std::vector<std::string> engines = {"vllm-0.33.0", "vllm-0.22.1"};
  std::string files[2];
  for (int i = 0; i < 2; ++i)
    files[i] = hashes_of(engines[i], {"--backend", "none", "--engine", engines[i]}, 0, kSample);
  const Json found = same_json(files[0], files[1], 1);
  const std::string diff = fresh_path("diff.json");
  EXPECT_EQ(run_lockstep({"diff-engines", kSample, "--engines", engines[0], "--engines", engines[1],
                          "--json", diff})
                .status,
            1);
  std::int64_t first = -1;
  const Json steps = Json::parse(read_text(diff)).at("first_difference");
  for (const auto& [field, step] : steps.items())
    if (step.is_number() && (first < 0 || step < first)) first = step;
  EXPECT_EQ(found.at("first").at("step"), first) << found;
  EXPECT_EQ(found.at("first").at("part"), "decision") << found;
}

TEST(Same, AnotherSeedDiffersInAPageAndNotInADecision) {
  const std::string first = hashes_of("seed1", {"--backend", "simt", "--seed", "1"});
  const std::string second = hashes_of("seed2", {"--backend", "simt", "--seed", "2"});
  const Json found = same_json(first, second, 1);
  EXPECT_EQ(found.at("first").at("part"), "page") << found;
  const std::string what = found.at("first").at("what");
  EXPECT_TRUE(what.starts_with("page of block ")) << what;
}

TEST(Same, APlantedDefectDiffersInTheStepOfItsDivergence) {
  const std::string healthy = hashes_of("healthy", {"--backend", "simt"});
  const std::string planted =
      hashes_of("planted", {"--backend", "simt", "--mutant", "drop-slot"}, 1);
  const Json found = same_json(healthy, planted, 1);
  const Json divergence = Json::parse(read_text(planted + ".json")).at("divergence");
  EXPECT_EQ(found.at("first").at("step"), divergence.at("step")) << found << divergence;
  const std::string right = found.at("first").at("b");
  const std::string phase = divergence.at("phase");
  EXPECT_EQ(right, "end of the run: divergence " + phase);
  EXPECT_EQ(found.at("first").at("part"), phase.starts_with("page") ? "page" : "table");
}

TEST(Same, ARunWithoutABackendIsComparedUpToItsTables) {
  const Json found = same_json(hashes_of("with", {"--backend", "simt"}),
                               hashes_of("without", {"--backend", "none"}), 0);
  EXPECT_EQ(found.at("not_checked")[0], "pages: B ran without a backend");
}

TEST(Same, ChangedPartsOfAStepAreNamed) {
  const std::string path = hashes_of("parts", {"--backend", "simt"});
  const std::string text = read_text(path);
  const std::size_t line = text.find("{\"step\":3,");
  ASSERT_NE(line, std::string::npos);
  const std::string other(32, '0');
  const auto part_at = [&](std::size_t at) {
    std::string changed = text;
    changed.replace(at, 32, other);
    const std::string file = fresh_path("changed.jsonl");
    write_text(file, changed);
    const Json first = same_json(path, file, 1).at("first");
    EXPECT_EQ(first.at("step"), 3) << first;
    EXPECT_EQ(first.at("b"), other) << first;
    return first;
  };
  EXPECT_EQ(part_at(text.find("\"hash\":\"", line) + 8).at("part"), "output");
  EXPECT_EQ(part_at(text.find("\"decision\":\"", line) + 12).at("part"), "decision");
  const Json table = part_at(text.find("[\"", line) + 2);
  EXPECT_EQ(table.at("part"), "table");
  EXPECT_EQ(table.at("what"), "tables." + table.at("request").get<std::string>() + "[0]");
  const Json page = part_at(text.find('"', text.find("\"pages\":[[", line) + 8) + 1);
  EXPECT_EQ(page.at("part"), "page");
  const std::string what = page.at("what");
  EXPECT_TRUE(what.starts_with("page of block ") && what.ends_with(", tensor 0, rank 0")) << what;
}

TEST(Same, ARecordingDiffersInTheFieldThatWasChanged) {
  EXPECT_EQ(same_json(kRecording, kRecording, 0).at("same"), true);
  const std::string text = read_text(kRecording);
  const std::string path = fresh_path("recording.jsonl");
  const auto first_of = [&](const std::string& found, const std::string& better) {
    write_text(path, replaced(text, found, better));
    return same_json(kRecording, path, 1);
  };
  const Json free = first_of("\"free_blocks\":20", "\"free_blocks\":19").at("first");
  EXPECT_EQ(free.at("part"), "decision");
  EXPECT_EQ(free.at("what"), "free_blocks");
  EXPECT_EQ(free.at("a"), "20");
  EXPECT_EQ(free.at("b"), "19");
  const Outcome conform = run_lockstep({"conform", path});
  EXPECT_EQ(conform.status, 1);
  EXPECT_NE(conform.out.find("step " + std::to_string(free.at("step").get<int>())),
            std::string::npos)
      << conform.out;
  const Json scheduled = first_of("\"computed\":0", "\"computed\":1").at("first");
  EXPECT_EQ(scheduled.at("what"), "scheduled[0].computed");
  EXPECT_NE(text.find("\"id\":\"" + scheduled.at("request").get<std::string>() + "\""),
            std::string::npos)
      << scheduled;
}

TEST(Same, InputsThatDifferBeforeADecisionAreNamedWithIt) {
  // Step 5 of the copy samples another token, and step 8 schedules another number.
  std::string text = read_text(kRecording);
  const std::size_t sampled = text.find("\"sampled\":{\"", text.find("{\"step\":5,"));
  const std::size_t token = text.find(":[", sampled + 10) + 2;
  text.replace(token, text.find_first_of(",]", token) - token, "77");
  const std::string path = fresh_path("inputs.jsonl");
  write_text(path, text);
  const Json input = same_json(kRecording, path, 1);
  EXPECT_EQ(input.at("first"), nullptr) << input;
  EXPECT_EQ(input.at("first_input").at("step"), 5) << input;
  EXPECT_EQ(input.at("first_input").at("b"), "77") << input;
  const std::string request = input.at("first_input").at("request");
  EXPECT_EQ(input.at("first_input").at("what"), "sampled." + request + "[0]");
  const std::size_t tokens = text.find("\"tokens\":", text.find("{\"step\":8,")) + 9;
  text.replace(tokens, text.find_first_of(",}", tokens) - tokens, "1000");
  write_text(path, text);
  const Json both = same_json(kRecording, path, 1);
  EXPECT_EQ(both.at("first").at("step"), 8) << both;
  EXPECT_EQ(both.at("first").at("what"), "scheduled[0].tokens") << both;
  EXPECT_EQ(both.at("first_input").at("step"), 5) << both;
}

TEST(Same, AnotherEnginesNameIsNoDifferenceAndAnotherPoolIs) {
  const std::string path = fresh_path("other.jsonl");
  const std::string text = read_text(kRecording);
  // vLLM 0.33.0 computes no common prefix.
  write_text(path,
             std::regex_replace(replaced(text, "\"version\":\"0.22.1\"", "\"version\":\"0.33.0\""),
                                std::regex(R"("common_prefix_blocks":\[[0-9]+\])"),
                                R"("common_prefix_blocks":[])"));
  const Json named = same_json(kRecording, path, 0);
  EXPECT_EQ(named.at("runs")[0].at("engine"), "vllm-0.22.1");
  EXPECT_EQ(named.at("runs")[1].at("engine"), "vllm-0.33.0");
  EXPECT_EQ(named.at("not_checked").size(), 1u) << named;
  const Json header = Json::parse(text.substr(0, text.find('\n')));
  const int blocks = header.at("num_blocks").get<int>();
  write_text(path, replaced(text, "\"num_blocks\":" + std::to_string(blocks),
                            "\"num_blocks\":" + std::to_string(blocks + 1)));
  const Json sized = same_json(kRecording, path, 1);
  EXPECT_EQ(sized.at("first"), nullptr);
  EXPECT_EQ(sized.at("headers"), Json::array({{{"what", "num_blocks"},
                                               {"a", std::to_string(blocks)},
                                               {"b", std::to_string(blocks + 1)}}}));
}

TEST(Same, ARecordingThatIsCutOffIsComparedUpToItsLastStep) {
  const std::string path = fresh_path("cut.jsonl");
  std::string text = read_text(kRecording);
  text.resize(text.find("{\"step\":7,"));
  write_text(path, text);
  const Json found = same_json(kRecording, path, 0);
  EXPECT_EQ(found.at("not_checked"), Json::array({"step 7 and later: B is cut off after step 6"}));
}

TEST(Same, APageOfAWorkersFactsIsNamedByItsBlock) {
  const std::string facts = sample_path("recordings/worker_facts/tiny_pool-0008.jsonl");
  std::string text = read_text(facts);
  const std::size_t digest = text.find("\"digest\":\"", text.find("{\"step\":6,")) + 10;
  text.replace(digest, 32, std::string(32, '0'));
  const std::string path = fresh_path("facts.jsonl");
  write_text(path, text);
  const Json found = same_json(facts, path, 1).at("first");
  EXPECT_EQ(found.at("step"), 6) << found;
  EXPECT_EQ(found.at("part"), "page") << found;
  const std::size_t block = text.rfind("\"block\":", digest) + 8;
  const std::string number = text.substr(block, text.find(',', block) - block);
  const std::string what = found.at("what");
  EXPECT_NE(what.find("(page of block " + number + ", tensor "), std::string::npos) << found;
}

TEST(Same, AnInterruptedRunIsComparedUpToItsLastStep) {
  const std::string whole = hashes_of("whole", {"--backend", "none"});
  const std::string text = read_text(whole);
  const std::string path = fresh_path("interrupted.jsonl");
  const std::string steps = text.substr(0, text.find("{\"step\":3,"));
  write_text(path, steps + "{\"end\":true,\"steps\":3,\"verdict\":\"interrupted\"}\n");
  EXPECT_EQ(same_json(whole, path, 0).at("not_checked"),
            Json::array({"step 3 and later: B is interrupted before step 3"}));
  write_text(path, steps + "{\"end\":true,\"steps\":3,\"verdict\":\"liveness\"}\n");
  const Json first = same_json(whole, path, 1).at("first");
  EXPECT_EQ(first.at("step"), 3) << first;
  EXPECT_EQ(first.at("part"), "end") << first;
}

TEST(Same, RefusesFilesOfTwoKindsAndDamage) {
  const std::string hashes = hashes_of("whole", {"--backend", "none"});
  const Outcome mixed = run_lockstep({"same", kRecording, hashes});
  EXPECT_EQ(mixed.status, 2);
  const Outcome replayed = run_lockstep({"replay", hashes});
  EXPECT_EQ(replayed.status, 2);
  EXPECT_NE(replayed.err.find("`lockstep same` compares"), std::string::npos) << replayed.err;
  EXPECT_NE(mixed.err.find("is a recording and " + hashes + " has step hashes"), std::string::npos)
      << mixed.err;
  const std::string text = read_text(hashes);
  const std::string path = fresh_path("damaged.jsonl");
  const std::size_t end = text.find("{\"end\":");
  const std::size_t third = text.find("{\"step\":2,"), fourth = text.find("{\"step\":3,");
  ASSERT_NE(fourth, std::string::npos);
  const std::pair<std::string, std::string> damaged[] = {
      {text.substr(0, end), ": the file ends without its end line"},
      {text.substr(0, third + 20), path + ":4: "},
      {text.substr(0, third) + text.substr(fourth),
       path + ":4: field `step`: found 3; expected the integer 2"},
      {text + "{}\n", ": a line after the end line"},
      {replaced(text, "\"decision\":\"", "\"decision\":\"x"), path + ":2: field `decision`"},
      {replaced(text, "\"lockstep_hashes\":1", "\"lockstep_hashes\":2"),
       path + ":1: field `lockstep_hashes`"},
      {"{\"lockstep_trace\":1}\n", path + ":1: neither a recording nor step hashes"},
  };
  for (const auto& [content, message] : damaged) {
    write_text(path, content);
    const Outcome refused = run_lockstep({"same", hashes, path});
    EXPECT_EQ(refused.status, 2) << message;
    EXPECT_NE(refused.err.find(message), std::string::npos) << refused.err;
  }
}

TEST(Same, EveryDataParallelRankHasItsOwnHashes) {
  const std::string path = fresh_path("dp.jsonl");
  const std::string stem = path.substr(0, path.size() - 6);
  const Outcome outcome = run_lockstep({"replay", short_trace(), "--backend", "simt",
                                        "--data-parallel-size", "2", "--hashes", path});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(same_json(stem + ".dp0.jsonl", stem + ".dp0.jsonl", 0).at("same"), true);
  EXPECT_EQ(same_json(stem + ".dp0.jsonl", stem + ".dp1.jsonl", 1).at("same"), false);
}

}  // namespace
}  // namespace lockstep::tests
