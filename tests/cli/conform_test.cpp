// `lockstep conform` from the outside: what it counts, and what a recording with one changed number
// comes to.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

const std::string kFamily = sample_path("recordings/vllm-0.22.1/preemption");

TEST(Conform, OfAFolderCountsItsRecordings) {
  const std::string path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep({"conform", kFamily, "--json", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("2 of 2 recordings agree"), std::string::npos) << outcome.out;
  const Json json = Json::parse(read_text(path));
  EXPECT_EQ(json.at("files"), 2);
  EXPECT_EQ(json.at("agreed"), 2);
  EXPECT_EQ(json.at("plans"), 0);
  EXPECT_EQ(json.at("mismatches"), Json::array());
}

TEST(Conform, OfMemoryPlansCountsThem) {
  const std::string path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep(
      {"conform", sample_path("recordings/vllm-0.22.1/layouts.jsonl"), "--json", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const Json json = Json::parse(read_text(path));
  EXPECT_GT(json.at("plans"), 0);
  EXPECT_EQ(json.at("agreed"), json.at("plans"));
}

TEST(Conform, OfARecordingWithOptionsBeyondTheFormatNamesThemBesideAMismatch) {
  std::string text = read_text(kFamily + "/0002.jsonl");
  const auto put = [&text](const std::string& found, const std::string& better) {
    const std::size_t at = text.find(found);
    ASSERT_NE(at, std::string::npos) << found;
    text.replace(at, found.size(), better);
  };
  put("\"num_blocks\":", "\"x_beyond_format\":[\"watermark\"],\"num_blocks\":");
  const std::string path = temporary_path("flagged.jsonl");
  write_text(path, text);
  EXPECT_EQ(run_lockstep({"conform", path}).status, 0);
  put("\"free_blocks\":20", "\"free_blocks\":19");
  write_text(path, text);
  const Outcome outcome = run_lockstep({"conform", path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_NE(outcome.out.find("options: watermark"), std::string::npos) << outcome.out;
}

TEST(Conform, OfAFolderSaysHowManyFilesItDidNotLookAt) {
  const Outcome outcome = run_lockstep({"conform", sample_path("recordings"), sample_path("")});
  EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find("Not compared: "), std::string::npos) << outcome.out;
}

TEST(Conform, TakesRecordingsWithAKVConnector) {
  const Outcome outcome =
      run_lockstep({"conform", sample_path("recordings/vllm-0.22.1/connectors")});
  EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find("13 of 13 recordings agree"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("Not compared"), std::string::npos) << outcome.out;
}

// Of many files one is torn before its last line, one is nothing that conform takes, and one does
// not exist.
TEST(Conform, OfManyFilesJudgesAllThatItCan) {
  const std::string cut = temporary_path("cut.jsonl");
  std::string text = read_text(kFamily + "/0002.jsonl");
  write_text(cut, text.substr(0, text.size() / 2) + "\n" + text.substr(text.size() / 2));
  const std::string json_path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep(
      {"conform", kFamily, cut, sample_path("README.md"), "nowhere.jsonl", "--json", json_path});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.out.find("2 of 2 recordings agree"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("Refused: 3 files"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("  " + cut + ":"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("nowhere.jsonl: "), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.err, "lockstep: 3 of 5 files refused\n");
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("files"), 2);
  EXPECT_EQ(json.at("agreed"), 2);
  EXPECT_EQ(json.at("refused"), 3);
  ASSERT_EQ(json.at("refusals").size(), 3u);
  EXPECT_EQ(json.at("refusals")[2].at("file"), "nowhere.jsonl");  // sorted
  for (const Json& refusal : json.at("refusals"))
    EXPECT_NE(refusal.at("reason").get<std::string>().find(refusal.at("file").get<std::string>()),
              std::string::npos)
        << refusal;
}

// A mismatch next to a refusal is listed, and the refusal decides the exit status.
TEST(Conform, OfAMismatchAndARefusalTellsBoth) {
  const std::string folder = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/damaged/";
  const std::string sampled = folder + "more_sampled_than_in_flight.jsonl";
  const std::string json_path = temporary_path("conform.json");
  const Outcome both = run_lockstep(
      {"conform", sampled, folder + "group_of_encoder_only.jsonl", "--json", json_path});
  EXPECT_EQ(both.status, 2);
  EXPECT_NE(both.out.find("sampled.r0"), std::string::npos) << both.out;
  EXPECT_NE(both.out.find("encoder_only groups: their blocks are not modelled"), std::string::npos)
      << both.out;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("mismatches").size(), 1u);
  EXPECT_EQ(json.at("refused"), 1);
  EXPECT_EQ(run_lockstep({"conform", sampled}).status, 1);
}

TEST(Conform, OfNothingButRefusedFilesHasNoResult) {
  const Outcome outcome = run_lockstep({"conform", "nowhere.jsonl", sample_path("README.md")});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_NE(outcome.err.find("nowhere.jsonl"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("README.md:1"), std::string::npos) << outcome.err;
}

TEST(Conform, AFolderWithoutARecordingIsRefusedAndTheOthersAreCompared) {
  const std::string empty = fresh_path("empty");
  std::filesystem::create_directory(empty);
  for (const std::string command : {"conform", "audit"}) {
    const Outcome outcome = run_lockstep({command, kFamily, empty});
    EXPECT_EQ(outcome.status, 2) << command;
    EXPECT_NE(outcome.out.find("  " + empty + ": contains no recording\n"), std::string::npos)
        << command << outcome.out;
    EXPECT_EQ(outcome.err, "lockstep: 1 of 3 files refused\n") << command;
    EXPECT_EQ(run_lockstep({command, empty}).err,
              "lockstep: " + empty + ": contains no recording\n");
  }
}

TEST(Conform, TheMembersOfTablesHaveNoOrder) {
  const std::string path = temporary_path("order.jsonl");
  std::istringstream lines(read_text(sample_path("recordings/vllm-0.33.0/preemption/0002.jsonl")));
  std::string changed;
  int count = 0;
  for (std::string text; std::getline(lines, text); changed += text + "\n") {
    auto line = nlohmann::ordered_json::parse(text);
    if (!line.contains("tables") || line["tables"].size() < 2) continue;
    nlohmann::ordered_json reversed = nlohmann::ordered_json::object();
    for (auto it = line["tables"].rbegin(); it != line["tables"].rend(); ++it)
      reversed[it.key()] = it.value();
    line["tables"] = reversed;
    text = line.dump();
    ++count;
  }
  EXPECT_GT(count, 0);
  write_text(path, changed);
  const Outcome outcome = run_lockstep({"conform", path});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
}

// The JSON library throws where a value is not of the type that a key has.
TEST(Conform, AValueOfAnotherTypeInAPlanIsAMismatchOfItsLine) {
  const std::string folder = fresh_path("plans");
  std::filesystem::create_directory(folder);
  const std::string plans = sample_path("recordings/vllm-0.33.0/layouts.jsonl");
  Json line;
  std::istringstream lines(read_text(plans));
  for (std::string text; !line.contains("pools") || line.at("pools").empty();) {
    ASSERT_TRUE(std::getline(lines, text));
    line = Json::parse(text);
  }
  const std::string pool = line.at("pools").begin().key();
  const Json::json_pointer at("/pools/" + pool);
  std::string changed;
  for (const Json& value : {Json(), Json(5), Json::array({1}), Json("pool")}) {
    for (const Json::json_pointer& place :
         {at, at / "first_runner", at / "first_runner" / "views", Json::json_pointer("/pools")}) {
      Json other = line;
      other[place] = value;
      changed += other.dump() + "\n";
    }
  }
  // A pool without blocks.
  Json renamed = line;
  renamed["pools"] = {{"0", line.at(at)}};
  write_text(folder + "/changed.jsonl", changed + renamed.dump() + "\n");
  std::filesystem::copy_file(plans, folder + "/plans.jsonl");
  const std::string json_path = fresh_path("plans.json");
  const Outcome outcome = run_lockstep({"conform", folder, "--json", json_path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("refused"), 0);
  ASSERT_EQ(json.at("mismatches").size(), 17u) << outcome.out;
  for (const Json& mismatch : json.at("mismatches")) {
    EXPECT_EQ(mismatch.at("file"), folder + "/changed.jsonl");
    EXPECT_TRUE(mismatch.at("what").get<std::string>().starts_with("pools")) << mismatch;
  }
}

TEST(Audit, OfManyFilesJudgesAllThatItCan) {
  const std::string folder = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/damaged";
  const std::string json_path = temporary_path("audit.json");
  const Outcome outcome = run_lockstep({"audit", kFamily, folder, "--json", json_path});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.out.find("block 1 becomes entry 0"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("Refused: 4 files"), std::string::npos) << outcome.out;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("refused"), 4);
  EXPECT_EQ(json.at("refusals").size(), 4u);
  EXPECT_EQ(json.at("files"), 2 + 12);
  EXPECT_GT(json.at("findings").size(), 4u);
  EXPECT_EQ(run_lockstep({"audit", kFamily}).status, 0);
}

// A folder may hold anything else, but a file that is named as one of lines is not left out.
TEST(Audit, RefusesADamagedRecordingOfAFolderAndNamesOtherFiles) {
  const std::string folder = fresh_path("folder");
  std::filesystem::create_directory(folder);
  const std::string whole = read_text(sample_path("recordings/vllm-0.33.0/mamba_none/0022.jsonl"));
  write_text(folder + "/whole.jsonl", whole);
  write_text(folder + "/notes.txt", "notes");
  const Outcome sound = run_lockstep({"audit", folder});
  EXPECT_EQ(sound.status, 0) << sound.out << sound.err;
  EXPECT_NE(sound.out.find("files of folders that are not recordings"), std::string::npos);
  std::filesystem::remove(folder + "/notes.txt");
  std::filesystem::create_directory_symlink(sample_path("recordings"), folder + "/linked");
  const Outcome linked = run_lockstep({"audit", folder});
  EXPECT_EQ(linked.status, 0) << linked.out << linked.err;
  EXPECT_NE(linked.out.find("links to folders"), std::string::npos) << linked.out;
  std::filesystem::create_symlink("absent", folder + "/dead.jsonl");
  ASSERT_EQ(mkfifo((folder + "/pipe.jsonl").c_str(), 0600), 0);
  write_text(folder + "/mark.jsonl", "\xef\xbb\xbf" + whole);
  write_text(folder + "/empty.jsonl", "");
  write_text(folder + "/twice.jsonl", replaced(whole, "\"seed\":", "\"seed\":1,\"seed\":"));
  const Outcome damaged = run_lockstep({"audit", folder});
  EXPECT_EQ(damaged.status, 2) << damaged.out;
  EXPECT_NE(damaged.out.find("Refused: 5 files"), std::string::npos) << damaged.out;
  EXPECT_NE(damaged.out.find("dead.jsonl: found a link"), std::string::npos) << damaged.out;
  EXPECT_NE(damaged.out.find("pipe.jsonl: found a pipe"), std::string::npos) << damaged.out;
  EXPECT_NE(damaged.out.find("twice.jsonl:1: found the key \"seed\" twice"), std::string::npos)
      << damaged.out;
}

TEST(Audit, SaysWhatWasHitAndFailsWhereThatIsTooLittle) {
  const std::string family = sample_path("recordings/vllm-0.22.1/spec_decode_eagle");
  const std::string json_path = temporary_path("hits.json");
  const Outcome enough =
      run_lockstep({"audit", family, "--min-hit-share", "1", "--json", json_path});
  EXPECT_EQ(enough.status, 0);
  EXPECT_NE(enough.out.find("prefix hits "), std::string::npos) << enough.out;
  EXPECT_NE(enough.out.find("  not hit: "), std::string::npos) << enough.out;
  const Json hits = Json::parse(read_text(json_path)).at("hits");
  EXPECT_GT(hits.at("not_hit").at("EAGLE"), 0);
  EXPECT_EQ(hits.at("not_hit").at("unexplained"), 0);
  EXPECT_GT(hits.at("in_pool"), hits.at("hit"));
  const Outcome too_little = run_lockstep({"audit", family, "--min-hit-share", "100"});
  EXPECT_EQ(too_little.status, 1);
  EXPECT_NE(too_little.out.find("--min-hit-share requires 100 %"), std::string::npos);
}

TEST(Conform, OfARecordingWithOneChangedNumberNamesStepFieldAndBothValues) {
  std::string text = read_text(kFamily + "/0002.jsonl");
  const std::size_t at = text.rfind("\"free_blocks\":") + 14;
  const std::size_t end = text.find_first_of(",}", at);
  const int recorded = std::stoi(text.substr(at, end - at));
  text.replace(at, end - at, std::to_string(recorded - 1));
  const std::size_t line = text.rfind('\n', at) + 1;
  const int step = Json::parse(text.substr(line, text.find('\n', line) - line)).at("step");
  const std::string path = temporary_path("changed.jsonl");
  write_text(path, text);

  const std::string json_path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep({"conform", path, "--json", json_path});
  EXPECT_EQ(outcome.status, 1);
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("agreed"), 0);
  ASSERT_EQ(json.at("mismatches").size(), 1u);
  const Json& mismatch = json.at("mismatches")[0];
  EXPECT_EQ(mismatch.at("file"), path);
  EXPECT_EQ(mismatch.at("step"), step);
  EXPECT_EQ(mismatch.at("what"), "free_blocks");
  EXPECT_EQ(mismatch.at("recorded"), recorded - 1);
  EXPECT_EQ(mismatch.at("model"), recorded);
}

}  // namespace
}  // namespace lockstep::tests
