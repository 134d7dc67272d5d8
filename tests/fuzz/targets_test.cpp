// Every fuzz target takes its own inputs, and some thousand seeded mutations of them.
#include "tests/fuzz/targets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "properties/generate/choices.h"
#include "tests/fuzz/recording_damage.h"

namespace lockstep {
namespace {

constexpr int kMutationsPerSeed = 400;

// A few bytes changed, taken out, put in, or copied from elsewhere in the input.
std::string mutated(std::string text, ChoiceSource& choices) {
  for (std::int64_t times = choices.between(1, 4); times > 0 && !text.empty(); --times) {
    const auto at = static_cast<std::size_t>(choices.below(std::ssize(text)));
    const auto from = static_cast<std::size_t>(choices.below(std::ssize(text)));
    const auto count = static_cast<std::size_t>(choices.between(1, 12));
    switch (choices.below(5)) {
      case 0:
        text[at] = static_cast<char>(choices.below(256));
        break;
      case 1:
        text.erase(at, count);
        break;
      case 2:
        text.insert(at, text.substr(from, count));
        break;
      case 3:
        text.resize(at);
        break;
      default:
        text[at] = "0123456789-[]{},:\"\n"[choices.below(19)];
        break;
    }
  }
  return text;
}

void run(const FuzzTarget& target, const std::string& text) {
  target.run({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

class Targets : public testing::TestWithParam<std::string_view> {};

TEST_P(Targets, TakeTheirInputsAndMutationsOfThem) {
  const FuzzTarget& target = fuzz_target(GetParam());
  const std::vector<std::string> seeds = target.seeds();
  ASSERT_FALSE(seeds.empty());
  run(target, "");
  SeededChoices choices(1);
  for (const std::string& seed : seeds) {
    run(target, seed);
    for (int i = 0; i < kMutationsPerSeed; ++i) run(target, mutated(seed, choices));
  }
}

// Inputs that are kept: of borders and mistakes, each by its name.
TEST_P(Targets, TakeTheirCorpus) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/fuzz/corpus" / GetParam();
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  ASSERT_FALSE(files.empty()) << folder;
  std::ranges::sort(files);
  for (const fs::path& file : files) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    run(fuzz_target(GetParam()), text.str());
  }
}

// Long runs: docs/fuzzing.md.
TEST(DamagedRecordings, StopNoProcess) {
  const DamageRuns runs = run_damaged(1, 2'000);
  EXPECT_EQ(runs.crashes, 0) << runs.report;
  // Damage that nothing detects, or that no reader accepts, would test nothing.
  EXPECT_GT(runs.counts.read, 600);
  EXPECT_GT(runs.counts.parting, 300);
  EXPECT_GT(runs.counts.faulted, 200);
  EXPECT_GT(runs.counts.replayed, 600);
}

TEST(DamagedRecordings, AreTheSameForTheSameChoices) {
  SeededChoices first(7);
  SeededChoices second(7);
  EXPECT_EQ(damaged_recording(first), damaged_recording(second));
}

// A target that CMakeLists.txt does not name would never be built for libFuzzer.
TEST(FuzzTargets, AreAllBuiltForLibfuzzer) {
  std::string names;
  for (const FuzzTarget& target : fuzz_targets())
    names += (names.empty() ? "" : ",") + std::string(target.name);
  EXPECT_EQ(names, LOCKSTEP_FUZZ_NAMES);
}

std::vector<std::string_view> names() {
  std::vector<std::string_view> names;
  for (const FuzzTarget& target : fuzz_targets()) names.push_back(target.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(Each, Targets, testing::ValuesIn(names()),
                         [](const auto& target) { return std::string(target.param); });

}  // namespace
}  // namespace lockstep
