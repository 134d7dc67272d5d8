// `lockstep findings` from the outside, with the model behind the scheduler protocol: it shows the
// findings of the release that it is the model of. And the page that is made with engines.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "properties/findings/finding_cases.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/policies.h"
#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kModel = LOCKSTEP_BINARY_DIR "/model_engine";
const std::string kDocs = LOCKSTEP_SOURCE_DIR "/docs/";

// Cells of the table in docs/findings_by_release.md: by release, by finding.
std::map<std::string, std::map<int, std::string>> cells_of_page() {
  const std::string text = read_text(kDocs + "reference/findings_by_release.md");
  std::istringstream page(text);
  std::map<std::string, std::map<int, std::string>> cells;
  std::vector<std::string> releases;
  const std::size_t at = text.find("Releases: ");
  std::istringstream names(at == std::string::npos ? "" : text.substr(at + 10));
  for (std::string name; names >> name && name != "|";)
    releases.push_back(name.substr(0, name.find(',')));
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| ")) continue;
    std::vector<std::string> row;
    std::istringstream parts(line.substr(1));
    for (std::string cell; std::getline(parts, cell, '|');) {
      const std::size_t first = cell.find_first_not_of(' ');
      row.push_back(first == std::string::npos
                        ? ""
                        : cell.substr(first, cell.find_last_not_of(' ') - first + 1));
    }
    if (row.front().empty() || row.front().find_first_not_of("0123456789") != std::string::npos)
      continue;
    for (std::size_t i = 0; i < releases.size(); ++i)
      cells[releases[i]][std::stoi(row.front())] = row.at(i + 1);
  }
  return cells;
}

// The page of each finding, docs/findings/NN_name.md, by its number.
std::map<int, std::string> pages() {
  std::map<int, std::string> pages;
  for (const auto& entry : std::filesystem::directory_iterator(kDocs + "findings")) {
    const std::string name = entry.path().filename().string();
    if (std::isdigit(static_cast<unsigned char>(name.front())) == 0) continue;
    const int number = std::stoi(name);
    EXPECT_TRUE(pages.emplace(number, read_text(entry.path().string())).second) << name;
    EXPECT_NE(read_text(kDocs + "findings.md").find(fmt::format(": findings/{}\n", name)),
              std::string::npos)
        << name << " is missing in the index";
  }
  return pages;
}

TEST(Findings, EachHasAPageWithItsTitleAndCasesThatAreThere) {
  const auto all = pages();
  std::set<int> driven;
  for (const FindingCases& finding : finding_cases()) {
    EXPECT_TRUE(driven.insert(finding.number).second) << finding.number;
    EXPECT_TRUE(all.at(finding.number)
                    .starts_with(fmt::format("# {}. {}\n", finding.number, finding.title)))
        << finding.number;
    EXPECT_FALSE(finding.checks.empty());
    for (const std::string_view file : finding.files)
      EXPECT_TRUE(std::filesystem::exists(std::string(LOCKSTEP_SOURCE_DIR "/tests/regressions/") +
                                          std::string(file)))
          << file;
  }
  EXPECT_EQ(all.size(), 54u);
  EXPECT_EQ(all.rbegin()->first, 54);
  // The others are not decisions of a scheduler, or need requests that adapters do not make.
  for (const auto& [number, page] : all) {
    if (driven.contains(number)) continue;
    EXPECT_TRUE(page.find("Not a decision") != std::string::npos ||
                page.find("`lockstep findings` does not ask engines") != std::string::npos)
        << number;
  }
}

// The paragraph that states which configurations reach the finding.
std::string reach_of(const std::string& page) {
  const std::size_t at = page.find("\n**Reach.** ");
  return at == page.npos ? "" : page.substr(at + 12, page.find("\n\n", at) - at - 12);
}

TEST(Findings, EachStatesItsReachInOneOfThreeFormsAndItsReleases) {
  const std::regex releases(R"(\n\*\*Releases\.\*\* [^\n]*0\.\d+\.\d+)");
  for (const auto& [number, page] : pages()) {
    const std::string reach = reach_of(page);
    const bool names_an_option =
        reach.starts_with("Option needed: ") && reach.find('`') != reach.npos;
    EXPECT_TRUE(names_an_option || reach.starts_with("Default configuration: ") ||
                reach.starts_with("Unreachable today: "))
        << number << ": " << reach;
    EXPECT_TRUE(std::regex_search(page, releases)) << number;
    EXPECT_NE(page.find("\n**What "), std::string::npos) << number;
    EXPECT_NE(page.find("mallest case"), std::string::npos) << number;
  }
}

// The page alone is enough to reproduce the finding.
TEST(Findings, EachUpstreamPageHasCommandModelReleasesOutputAndPermalinks) {
  const auto all = pages();
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kDocs + "upstream")) {
    const std::string name = entry.path().filename().string();
    if (std::isdigit(static_cast<unsigned char>(name.front())) == 0) continue;
    const std::string page = read_text(entry.path().string());
    for (const std::string_view part :
         {"\n**Reach.** ", "\n**Releases.** ", "\n**Model.** ", "\n**Server", "\n**Observed** ",
          "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/", "    pytest cases/test_"})
      EXPECT_NE(page.find(part), std::string::npos) << name << ": " << part;
    const std::string& finding = all.at(std::stoi(name));
    EXPECT_NE(finding.find(fmt::format("(../upstream/{})", name)), std::string::npos) << name;
    EXPECT_EQ(reach_of(page), reach_of(finding)) << name;
    ++count;
  }
  EXPECT_EQ(count, 32);
}

// The model of 0.22.1 continues where vLLM stops, so it does not show 10 and 23.
TEST(Findings, TheModelBehindTheProtocolShowsThoseOfItsRelease) {
  const std::string path = temporary_path("findings.json");
  const std::string junit = temporary_path("findings.xml");
  const Outcome run =
      run_lockstep({"findings", "--engine", kModel, "--json", path, "--junit", junit});
  EXPECT_EQ(run.status, 1) << run.err;
  EXPECT_NE(read_text(junit).find("vllm-0.22.1: 1. "), std::string::npos);
  std::set<int> shown;
  const auto json = nlohmann::json::parse(read_text(path));
  for (const auto& finding : json["findings"]) {
    const auto& cell = finding["engines"][0];
    EXPECT_EQ(cell["engine"], "vllm-0.22.1");
    if (cell["verdict"] == "shows") shown.insert(finding["number"].get<int>());
    EXPECT_NE(cell["verdict"], "other") << finding["number"] << ": " << cell["what"];
  }
  EXPECT_EQ(shown, (std::set{1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 15, 22}));
}

TEST(Findings, MergedTablesMayNameAnyVersion) {
  const std::string path = fresh_path("findings.json");
  // A verdict over no case is none.
  const Outcome unbuilt = run_lockstep(
      {"findings", "1", "--engine", LOCKSTEP_BINARY_DIR "/paged_engine", "--json", path});
  EXPECT_EQ(unbuilt.status, 2) << unbuilt.out;
  EXPECT_NE(unbuilt.err.find("no finding was tried: paged-1: the engine does not support mamba"),
            std::string::npos)
      << unbuilt.err;
  // "release" is a part of "this release", which replaces the version in a reason.
  const std::string renamed =
      std::regex_replace(read_text(path), std::regex("\"paged-1\""), "\"paged-release\"");
  write_text(path, std::regex_replace(renamed, std::regex("does not support"), "not in release"));
  const Outcome merged = run_lockstep({"findings", "--merge", path});
  EXPECT_EQ(merged.status, 2) << merged.err;
  EXPECT_NE(merged.out.find("not in this release"), std::string::npos) << merged.out;
}

TEST(Findings, SeveralEnginesAreATableAndWhatNoneShowsIsAgreed) {
  const Outcome table =
      run_lockstep({"findings", "10", "23", "--engine", kModel, "--engine", kModel});
  EXPECT_EQ(table.status, 0) << table.out << table.err;
  EXPECT_NE(table.out.find("0.22.1  0.22.1"), std::string::npos) << table.out;
  const Outcome small = run_lockstep(
      {"findings", "1", "11", "--engine", LOCKSTEP_BINARY_DIR "/paged_engine", "--markdown"});
  EXPECT_EQ(small.status, 2) << small.out << small.err;  // no case can be built
  EXPECT_NE(small.out.find("| 1 | - |"), std::string::npos) << small.out;
  EXPECT_NE(small.out.find("- 1: the engine does not support mamba (1)"), std::string::npos)
      << small.out;
}

TEST(Findings, WithoutAnEngineTheCasesAreListedAndWhatIsNotThereIsRefused) {
  const std::string path = fresh_path("list.json");
  const Outcome list = run_lockstep({"findings", "7", "--json", path});
  EXPECT_EQ(list.status, 0);
  EXPECT_EQ(list.out,
            " 7  A loaded request waits for one that does not fit\n"
            "      vllm_0_22_1_loaded_behind_large.jsonl\n");
  const auto listed = nlohmann::json::parse(read_text(path)).at("findings").at(0);
  EXPECT_EQ(listed.at("number"), 7);
  EXPECT_EQ(listed.at("cases").at(0), "vllm_0_22_1_loaded_behind_large.jsonl");
  EXPECT_EQ(run_lockstep({"findings", "99"}).status, 2);
  const Outcome folder =
      run_lockstep({"findings", "7", "--engine", kModel, "--cases", "/no/such/folder"});
  EXPECT_EQ(folder.status, 2);
  EXPECT_NE(folder.err.find("/no/such/folder"), std::string::npos);
  const Outcome engine = run_lockstep({"findings", "7", "--engine", "vllm:/no/such/folder"});
  EXPECT_EQ(engine.status, 2);
  EXPECT_NE(engine.err.find("--engine vllm:/no/such/folder: no folder"), std::string::npos)
      << engine.err;
}

// What engines were seen to do, and what their policies make possible, are one table.
TEST(Findings, ThePageByReleaseAgreesWithThePoliciesOfTheProfiles) {
  const auto page = cells_of_page();
  ASSERT_EQ(page.size(), 14u);
  for (const auto& [release, cells] : page) {
    EXPECT_EQ(cells.size(), finding_cases().size()) << release;
    const EngineProfile& profile = engine_profile("vllm-" + release);
    for (const FindingPolicies& finding : finding_policies()) {
      if (!cells.contains(finding.finding)) continue;  // engines are not asked for it
      const std::string& cell = cells.at(finding.finding);
      EXPECT_NE(cell, "?") << release << ", finding " << finding.finding;
      if (cell == "-") continue;
      const bool is_shown = cell == "x";
      // A policy is what most models are served with, and the first form of a finding: more
      // releases show 8 with blocks that left a window, and 17 and 18 where kernels export
      // checkpoints.
      if (is_shown && (finding.finding == 8 || finding.finding == 17 || finding.finding == 18))
        continue;
      // An empty cell proves nothing: 0.25.1 pads too, but not in the smallest case.
      if (!is_shown && finding.finding == 19 && release == "0.25.1") continue;
      EXPECT_EQ(is_shown, is_possible(profile, finding))
          << release << ", finding " << finding.finding;
    }
  }
}

}  // namespace
}  // namespace lockstep::tests
