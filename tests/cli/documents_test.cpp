// What documents show of the command is what it prints, shortened.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli/command.h"
#include "traces/models/model_file.h"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;

// A command of a page and the lines that follow it.
struct Transcript {
  std::string command;
  std::vector<std::string> output;
};

// With every run of spaces and newlines as one space: pages break lines.
std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    if (c != ' ' && c != '\n')
      line += c;
    else if (!line.empty() && line.back() != ' ')
      line += ' ';
  }
  return line;
}

std::vector<Transcript> transcripts_of(const std::string& page) {
  std::vector<Transcript> found;
  std::istringstream lines(read_text(std::string(LOCKSTEP_SOURCE_DIR "/") + page));
  bool is_inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("```")) {
      is_inside = false;
    } else if (line.starts_with("$ lockstep ")) {
      found.push_back(
          {.command = line.substr(std::string_view("$ lockstep ").size()), .output = {}});
      is_inside = true;
    } else if (is_inside && found.back().command.ends_with("\\")) {
      found.back().command.back() = ' ';
      found.back().command += line;
    } else if (is_inside && !line.empty()) {
      found.back().output.push_back(line);
    }
  }
  return found;
}

std::vector<std::string> words_of(const std::string& command) {
  std::istringstream words(command);
  std::vector<std::string> all;
  for (std::string word; words >> word;) all.push_back(word);
  return all;
}

// They need an engine, torch, a compiled plugin, or recordings of the reader's own. Tests of
// engines and tests/cli/plugin_test.cpp run them.
bool needs_more(const Transcript& transcript) {
  for (const char* part :
       {"lockstep_engines", "bug.so", "torch_kernels", "audit recordings", "explain found"})
    if (transcript.command.find(part) != std::string::npos) return true;
  return false;
}

TEST(Documents, ReadmeShowsWhatTheCommandsPrint) {
  const fs::path folder = fresh_path("readme"), before = fs::current_path();
  fs::create_directories(folder);
  fs::create_directory_symlink(LOCKSTEP_SOURCE_DIR "/traces", folder / "traces");
  fs::current_path(folder);
  int shown = 0;
  for (const Transcript& transcript : transcripts_of("README.md")) {
    if (needs_more(transcript)) continue;
    const std::string printed = one_line(run_lockstep(words_of(transcript.command)).out);
    for (const std::string& line : transcript.output) {
      ++shown;
      EXPECT_NE(printed.find(one_line(line)), printed.npos) << transcript.command << "\n" << line;
    }
  }
  fs::current_path(before);
  EXPECT_GE(shown, 15);
}

TEST(Documents, ReadmeCountsTheMutants) {
  const auto listed = nlohmann::json::parse(run_lockstep({"mutants", "--list", "--json", "-"}).out);
  const std::string words = fmt::format("plants {} defects", listed.at("mutants").size());
  EXPECT_NE(read_text(LOCKSTEP_SOURCE_DIR "/README.md").find(words), std::string::npos) << words;
}

// The text of a page from `start` to the end of its block, both excluded.
std::string block_of(const std::string& page, std::string_view start) {
  const std::string text = read_text(LOCKSTEP_SOURCE_DIR "/docs/" + page);
  const std::size_t at = text.find(start);
  EXPECT_NE(at, text.npos) << page << ": " << start;
  return at == text.npos ? ""
                         : text.substr(at + start.size(),
                                       text.find("```", at + start.size()) - at - start.size());
}

TEST(Documents, CommandsOfTheGuidesDoWhatTheyShow) {
  std::string hisparse = block_of("distributed.md", "--hisparse-host 64GiB\nlockstep ");
  std::erase(hisparse, '\\');
  EXPECT_EQ(run_lockstep(words_of(hisparse)).status, 0) << hisparse;

  auto related = words_of(block_of("fuzzing.md", "\nlockstep relations \"other kernel blocks\" "));
  related.insert(related.begin(), {"relations", "other kernel blocks"});
  EXPECT_NE(run_lockstep(related).out.find("  1 cases,"), std::string::npos);

  std::istringstream mutants(block_of("commands.md", "one line per defect:\n```\n"));
  for (std::string line; std::getline(mutants, line);) {
    const std::string shown = line.substr(0, line.find(','));  // without its time
    const std::string printed = run_lockstep({"mutants", line.substr(0, line.find(' '))}).out;
    EXPECT_NE(printed.find(shown + ","), printed.npos) << printed;
  }
}

// Where the optional data are: the figures of docs/commands.md.
TEST(Documents, FiguresOfTheAuditAreThoseOfAllRecordings) {
  const auto data = find_data_dir();
  if (!data || !fs::exists(*data / "recordings_more"))
    GTEST_SKIP() << "no optional data (LOCKSTEP_DATA)";
  const Outcome audited = run_lockstep({"audit", *data / "recordings", *data / "recordings_more"});
  const std::string printed = one_line(audited.out);
  const std::string page = read_text(LOCKSTEP_SOURCE_DIR "/docs/commands.md");
  const std::size_t at = page.find("\nprefix hits ");
  ASSERT_NE(at, page.npos);
  std::istringstream block(page.substr(at, page.find("```", at) - at));
  int shown = 0;
  for (std::string line; std::getline(block, line);) {
    const std::string part = one_line(line.substr(0, line.find("...")));
    if (part.empty()) continue;
    ++shown;
    EXPECT_NE(printed.find(part), printed.npos) << part << "\n" << audited.out;
  }
  EXPECT_EQ(shown, 3);
}

}  // namespace
}  // namespace lockstep::tests
