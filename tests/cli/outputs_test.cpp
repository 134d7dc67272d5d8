// Where `lockstep` writes: regular files, links, devices, FIFOs and standard output.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A command of a few milliseconds for each kind of output.
std::vector<std::vector<std::string>> writers() {
  const std::vector<std::string> replay = {"replay", kSample, "--backend", "none"};
  std::vector<std::vector<std::string>> all;
  for (const char* option :
       {"--json", "--junit", "--summary", "--report", "--perfetto", "--cache-events", "--hashes"}) {
    all.push_back(replay);
    all.back().emplace_back(option);
  }
  all.push_back(
      {"export", sample_path("foreign/mooncake.jsonl"), "--as", "mooncake", "--lossy", "--out"});
  all.push_back(
      {"export", sample_path("foreign/mooncake.jsonl"), "--as", "mooncake", "--lossy", "--json"});
  all.push_back({"capacity", "llama-3.1-8b", "--json"});
  all.push_back({"engines", "--json"});
  all.push_back({"mutants", "--markdown"});
  for (const char* option : {"--json", "--svg", "--dot"})
    all.push_back({"layout", "--model", "llama-3.1-8b", option});
  return all;
}

std::string words_of(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += word + " ";
  return text;
}

Outcome written_to(std::vector<std::string> words, const std::string& path) {
  words.push_back(path);
  return run_lockstep(words);
}

TEST(Outputs, AModelWithoutCachesHasAPlan) {
  const std::string config = temporary_path("bert.json");
  write_text(config, R"({"architectures": ["BertModel"], "model_type": "bert"})");
  for (const char* engine : {"vllm-0.33.0", "vllm-0.22.1"})
    for (const char* option : {"--json", "--svg", "--dot"}) {
      const std::string path = fresh_path("no_caches");
      const Outcome run =
          written_to({"layout", "--model", config, "--engine", engine, option}, path);
      EXPECT_EQ(run.status, 0) << run.err;
      EXPECT_NE(run.out.find("no layer keeps a cache"), std::string::npos) << run.out;
      const std::string text = read_text(path);
      EXPECT_FALSE(text.empty()) << option;
      if (option == std::string("--json")) {
        EXPECT_TRUE(Json::parse(text).at("workers").empty()) << text;
      }
    }
}

// Bytes that are not UTF-8, in a file's name: one alone, two overlong forms, a surrogate. The last
// character is U+FFFE, which JSON allows and XML does not.
TEST(Outputs, TextThatIsNotUtf8IsReplacedByteByByte) {
  const std::string file = fresh_path(
      "a\xff"
      "b\xc0\xaf"
      "c\xe0\x80\xaf"
      "d\xed\xa0\x80"
      "e\xef\xbf\xbe.jsonl");
  const std::string bad = "\xef\xbf\xbd";
  const std::string shown =
      "a" + bad + "b" + bad + bad + "c" + bad + bad + bad + "d" + bad + bad + bad + "e";
  fs::copy_file(sample_path("recordings/vllm-0.22.1/full_attention/0001.jsonl"), file);
  const std::string json = fresh_path("names.json"), junit = fresh_path("names.xml");
  for (const std::string command : {"audit", "conform", "replay"}) {
    const Outcome run = run_lockstep({command, file, "--json", json, "--junit", junit});
    EXPECT_EQ(run.status, 0) << command << run.err;
    EXPECT_TRUE(Json::accept(read_text(json))) << command << read_text(json);
    const std::string xml = read_text(junit);
    EXPECT_NE(xml.find(shown + bad + ".jsonl"), std::string::npos) << command << xml;
  }
  EXPECT_NE(read_text(json).find(shown), std::string::npos) << read_text(json);
}

TEST(Outputs, ADeviceStaysADevice) {
  for (const auto& words : writers()) {
    EXPECT_EQ(written_to(words, "/dev/null").status, 0) << words_of(words);
    ASSERT_TRUE(fs::is_character_file("/dev/null")) << words_of(words);
  }
}

TEST(Outputs, AFifoDeliversTheOutputAndStaysAFifo) {
  for (const auto& words : writers()) {
    const std::string fifo = fresh_path("fifo");
    ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
    std::string received;
    std::jthread reader([&] { received = read_text(fifo); });
    EXPECT_EQ(written_to(words, fifo).status, 0) << words_of(words);
    ::close(::open(fifo.c_str(), O_WRONLY | O_NONBLOCK));  // a reader that still waits ends
    reader.join();
    EXPECT_FALSE(received.empty()) << words_of(words);
    EXPECT_TRUE(fs::is_fifo(fifo)) << words_of(words);
  }
}

TEST(Outputs, ALinkIsFollowedAndTheModeOfItsFileIsKept) {
  for (const auto& words : writers()) {
    const std::string folder = fresh_path("linked");
    fs::create_directory(folder);
    write_text(folder + "/file", "old");
    fs::permissions(folder + "/file", fs::perms(0640));
    fs::create_symlink("file", folder + "/link");
    fs::create_symlink("new", folder + "/dangling");
    EXPECT_EQ(written_to(words, folder + "/link").status, 0) << words_of(words);
    EXPECT_EQ(written_to(words, folder + "/dangling").status, 0) << words_of(words);
    EXPECT_TRUE(fs::is_symlink(folder + "/link") && fs::is_symlink(folder + "/dangling"));
    EXPECT_NE(read_text(folder + "/file"), "old") << words_of(words);
    EXPECT_FALSE(read_text(folder + "/new").empty()) << words_of(words);
    EXPECT_EQ(fs::status(folder + "/file").permissions(), fs::perms(0640)) << words_of(words);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 4)
        << "a temporary file is left: " << words_of(words);
  }
}

TEST(Outputs, ADashIsStandardOutputAndCarriesNothingElse) {
  for (const auto& words : writers()) {
    const Outcome outcome = written_to(words, "-");
    EXPECT_EQ(outcome.status, 0) << words_of(words) << outcome.err;
    const std::string path = fresh_path("same");
    EXPECT_EQ(written_to(words, path).status, 0);
    // Times differ between two runs.
    EXPECT_EQ(outcome.out.substr(0, 100), read_text(path).substr(0, 100)) << words_of(words);
    EXPECT_EQ(outcome.out.find("Verdict"), read_text(path).find("Verdict")) << words_of(words);
  }
  EXPECT_EQ(Json::parse(run_lockstep({"replay", kSample, "--backend", "none", "--json", "-"}).out)
                .at("verdict"),
            "done");
}

TEST(Outputs, TheFileOfStandardOutputIsNotReplaced) {
  const Outcome outcome =
      run_lockstep({"replay", kSample, "--backend", "none", "--json", "/dev/stdout"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("Verdict: "), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("\"state_hash\": "), std::string::npos) << outcome.out;
  EXPECT_TRUE(fs::is_symlink("/dev/stdout"));
}

TEST(Outputs, AnUnwritableStandardOutputIsAnError) {
  const std::string program = LOCKSTEP_COMMAND;
  const std::vector<std::string> commands = {"engines", "--help", "demo", "mutants --list",
                                             "replay '" + kSample + "' --backend none"};
  for (const std::string& arguments : commands)
    for (const std::string end : {">/dev/full", ">&-"}) {
      const Outcome outcome =
          run_program("/bin/sh", {"-c", "'" + program + "' " + arguments + " " + end});
      EXPECT_EQ(outcome.status, 2) << arguments << end;
      // CLI11 flushes its help.
      const std::string why =
          arguments == "--help" ? "a part of it is lost" : "No space left on device";
      EXPECT_EQ(outcome.err, "lockstep: standard output: cannot be written: " + why + "\n")
          << arguments << end;
    }
}

TEST(Outputs, AClosedPipeKeepsTheFiles) {
  const std::string json = fresh_path("pipe.json"), junit = fresh_path("pipe.xml");
  run_program("/bin/bash",
              {"-c", "'" LOCKSTEP_COMMAND "' replay '" + kSample + "' --backend none --json " +
                         json + " --junit " + junit + " | true"});
  EXPECT_TRUE(fs::exists(json) && fs::exists(junit));
}

TEST(Outputs, AFullDeviceIsAnErrorOfItsFile) {
  const Outcome outcome =
      run_lockstep({"replay", kSample, "--backend", "none", "--json", "/dev/full"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("/dev/full: cannot be written: No space left"), std::string::npos)
      << outcome.err;
}

TEST(Outputs, TwoOptionsDoNotWriteOneFileAndNoInputIsOverwritten) {
  const std::string trace = fresh_path("trace.jsonl"), out = fresh_path("out"),
                    link = fresh_path("link");
  fs::copy_file(kSample, trace);
  fs::create_symlink(trace, link);
  const std::vector<std::string> replay = {"replay", trace, "--backend", "none"};
  for (const auto& [words, why] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--json", trace}, "--json: " + trace + " is also given as FILE"},
           {{"--json", link}, "--json: " + link + " is also given as FILE"},
           {{"--json", "-", "--report", "-"}, ": - is also given as "},
           {{"--json", out, "--junit", fs::path(out).parent_path() / "." / "out"},
            " is also given as --json"}}) {
    std::vector<std::string> all = replay;
    all.insert(all.end(), words.begin(), words.end());
    const Outcome outcome = run_lockstep(all);
    EXPECT_EQ(outcome.status, 2) << words_of(all);
    EXPECT_EQ(outcome.out, "") << words_of(all);
    EXPECT_NE(outcome.err.find(why), std::string::npos) << words_of(all) << outcome.err;
  }
  EXPECT_EQ(read_text(trace), read_text(kSample));
  EXPECT_FALSE(fs::exists(out));
  const Outcome in_folder = run_lockstep({"audit", fs::path(trace).parent_path(), "--json", trace});
  EXPECT_EQ(in_folder.status, 2);
  EXPECT_NE(in_folder.err.find(" is also given as PATH"), std::string::npos) << in_folder.err;
  std::vector<std::string> null = replay;
  null.insert(null.end(), {"--json", "/dev/null", "--report", "/dev/null"});
  EXPECT_EQ(run_lockstep(null).status, 0);
  // A word that is also the name of a file.
  EXPECT_EQ(run_program("/bin/sh", {"-c", "cd '" + fs::path(out).parent_path().string() +
                                              "' && touch none && '" LOCKSTEP_COMMAND
                                              "' replay trace.jsonl --backend none --json none"})
                .status,
            0);
}

TEST(Outputs, APathThatCannotBeWrittenIsRefusedBeforeTheWork) {
  const std::string folder = fresh_path("refused");
  fs::create_directory(folder);
  for (const auto& words : writers()) {
    for (const auto& [path, why] :
         {std::pair{folder + "/nowhere/file", "no folder " + folder + "/nowhere"},
          std::pair{folder, std::string("is a folder; give the name of a file")}}) {
      const Outcome outcome = written_to(words, path);
      EXPECT_EQ(outcome.status, 2) << words_of(words);
      EXPECT_EQ(outcome.out, "") << words_of(words);
      EXPECT_NE(outcome.err.find(path + ": " + why), std::string::npos)
          << words_of(words) << outcome.err;
    }
  }
  const std::string long_name = folder + "/" + std::string(255, 'n');
  EXPECT_EQ(written_to(writers()[0], long_name).status, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
  const Outcome too_long = written_to(writers()[0], long_name + "n");
  EXPECT_EQ(too_long.status, 2);
  EXPECT_EQ(too_long.out, "");
  const Outcome saved = run_lockstep({"fuzz", "--runs", "1", "--save", LOCKSTEP_COMMAND "/cases"});
  EXPECT_EQ(saved.status, 2);
  EXPECT_NE(saved.err.find("is not a folder"), std::string::npos) << saved.err;
}

}  // namespace
}  // namespace lockstep::tests
