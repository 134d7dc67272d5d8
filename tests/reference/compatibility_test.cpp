// The table of combinations that are not supported: its rows and
// docs/reference/compatibility.md. LOCKSTEP_WRITE_TABLES=1 writes the page.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "reference/profiles/compatibility.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

TEST(Compatibility, EveryRowHasItsOwnNameAndRefusesWhatItNames) {
  std::set<std::string_view> names;
  for (const CompatibilityRow& row : compatibility()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    bool refuses = false;
    for (const EngineProfile& profile : engine_profiles()) {
      const RunFacts facts{&profile, row.with};
      const bool applies = row.of == nullptr || row.of(profile);
      refuses |= applies;
      if (applies) {
        EXPECT_FALSE(supported_with_memory(facts)) << row.name;
      }
    }
    EXPECT_TRUE(refuses) << row.name;
  }
}

RunFacts facts_without_groups(const EngineConfig& engine) {
  return facts_of(engine, std::span<const KVCacheGroupSpec>());
}

TEST(Compatibility, OneSentenceNamesTheFeaturesTheReleaseAndWhatToDo) {
  EngineConfig engine;
  engine.engine = "vllm-0.22.1";
  const RunFacts facts = facts_without_groups(engine).with({RunTrait::rings});
  EXPECT_EQ(supported(facts).error().message,
            "rings (circular_buffer): vllm-0.22.1 has none that is modelled");
  EXPECT_EQ(
      supported(facts_without_groups(engine).with({RunTrait::hisparse_workers})).error().message,
      "HiSparse's workers (--connector hisparse) without HiSparse (hisparse_source): the "
      "cache has no pages for them; leave hisparse out of --connector");
  const RunFacts in_flight = facts_without_groups(engine).with(
      {RunTrait::states, RunTrait::drafts, RunTrait::async_scheduling});
  EXPECT_TRUE(supported(in_flight));
  EXPECT_EQ(supported_with_memory(in_flight).error().message,
            "states with asynchronous scheduling and drafts: only the worker of vllm-0.22.1 has "
            "the position of a running state; use --no-async-scheduling, or --backend none");
}

TEST(Compatibility, RowsOfDecisionsAreTheModels) {
  EngineConfig engine;
  engine.engine = "vllm-0.28.0";
  const RunFacts facts = facts_without_groups(engine).with({RunTrait::connector});
  EXPECT_FALSE(supported(facts));
  EXPECT_TRUE(supported(facts.with({RunTrait::other_engine})));
  engine.engine = "fork-1.0";  // no profile: nothing follows from its release
  EXPECT_TRUE(supported(facts_without_groups(engine).with({RunTrait::connector})));
}

// A list item on lines of at most 98 columns.
std::string item(std::string_view text) {
  std::string lines = "-";
  std::size_t column = 1;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    const bool fits = column + 1 + word.size() <= 98;
    lines += fmt::format("{}{}", fits ? " " : "\n  ", word);
    column = (fits ? column + 1 : 2) + word.size();
    text.remove_prefix(std::min(text.size(), word.size() + 1));
  }
  return lines + "\n";
}

std::string page_of_scope(CompatibilityRow::Scope scope) {
  std::string page;
  for (const CompatibilityRow& row : compatibility()) {
    if (row.scope != scope) continue;
    std::string of;
    for (const Release& release : releases())
      if (row.of != nullptr && row.of(engine_profile(release.name)))
        of += fmt::format("{}{}", of.empty() ? "" : ", ",
                          release.name.substr(release.name.find('-') + 1));
    page += item(fmt::format("`{}` ({}; {}): {}.", row.name, name_of(row.reason),
                             of.empty() ? "all releases" : of, text_of(row, "the release")));
  }
  return page;
}

std::string page() {
  std::string page =
      "# What does not go together\n\n"
      "Commands refuse these combinations with exit code 2 and the words below; the generator "
      "never\n"
      "makes them. The rows are in `reference/profiles/compatibility.cpp`; `reference_tests` "
      "with\n"
      "LOCKSTEP_WRITE_TABLES=1 writes this page.\n";
  using Scope = CompatibilityRow::Scope;
  for (const auto& [scope, head] :
       {std::pair{Scope::run, "In every run"},
        std::pair{Scope::decisions, "In the model's decisions"},
        std::pair{Scope::memory, "With a backend; the decisions are supported"}})
    page += fmt::format("\n## {}\n\n{}", head, page_of_scope(scope));
  return page;
}

TEST(Compatibility, ThePageOfTheDocsIsTheTable) {
  const std::string path = LOCKSTEP_SOURCE_DIR "/docs/reference/compatibility.md";
  std::stringstream read;
  read << std::ifstream(path).rdbuf();
  if (std::getenv("LOCKSTEP_WRITE_TABLES") != nullptr) std::ofstream(path) << page();
  EXPECT_EQ(read.str(), page()) << "write it again: LOCKSTEP_WRITE_TABLES=1 and this test";
}

}  // namespace
}  // namespace lockstep
