// `mpirun -n N lockstep fuzz`: the ranks share out the seeds, and rank 0 says what one process
// would have said.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Arguments = std::vector<std::string>;

class FuzzOverMpi : public testing::Test {
 protected:
  // What Open MPI needs to run as root, with more ranks than there are cores, and on this machine
  // alone. Other implementations do not look at it.
  void SetUp() override {
    if (std::string_view(LOCKSTEP_MPIRUN).empty()) GTEST_SKIP() << "no MPI was found";
    for (const char* const name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                                   "OMPI_MCA_rmaps_base_oversubscribe"})
      setenv(name, "1", 1);
    setenv("OMPI_MCA_plm", "isolated", 1);
    const Outcome started =
        run_program(LOCKSTEP_MPIRUN, {"-n", "2", LOCKSTEP_COMMAND, "--version"});
    if (started.status != 0) GTEST_SKIP() << "mpirun starts nothing here: " << started.err;
  }

  static Outcome fuzz_on(int num_ranks, Arguments arguments) {
    arguments.insert(arguments.begin(),
                     {"-n", std::to_string(num_ranks), LOCKSTEP_COMMAND, "fuzz"});
    return run_program(LOCKSTEP_MPIRUN, arguments);
  }
  static Outcome fuzz_alone(Arguments arguments) {
    arguments.insert(arguments.begin(), "fuzz");
    return run_lockstep(arguments);
  }
};

std::size_t count_of(const std::string& text, std::string_view part) {
  std::size_t times = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++times;
  return times;
}

TEST_F(FuzzOverMpi, GivesTheReportOfOneProcessByteForByte) {
  const Arguments runs = {"--backend", "none", "--runs", "300", "--json"};
  const std::string alone = temporary_path("alone.json"), spread = temporary_path("spread.json");
  Arguments arguments = runs;
  arguments.push_back(alone);
  const Outcome whole = fuzz_alone(arguments);
  EXPECT_EQ(whole.status, 0) << whole.err;
  arguments.back() = spread;
  const Outcome outcome = fuzz_on(3, arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_FALSE(read_text(alone).empty());
  EXPECT_EQ(read_text(spread), read_text(alone));
  EXPECT_EQ(count_of(whole.out, "agreed,"), 1u) << whole.out;
  EXPECT_EQ(count_of(outcome.out, "agreed,"), 1u) << outcome.out;
}

TEST_F(FuzzOverMpi, TellsTheFailuresOfAllRanksAndSavesThem) {
  const Arguments runs = {"--mutant", "drop-slot", "--runs", "9", "--no-shrink", "--save"};
  const std::string alone = temporary_path("alone"), spread = temporary_path("spread");
  Arguments arguments = runs;
  arguments.insert(arguments.end(), {alone, "--json", alone + ".json"});
  EXPECT_EQ(fuzz_alone(arguments).status, 1);
  arguments = runs;
  arguments.insert(arguments.end(), {spread, "--json", spread + ".json"});
  const Outcome outcome = fuzz_on(3, arguments);
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_EQ(read_text(spread + ".json"), read_text(alone + ".json"));
  std::size_t num_saved = 0;
  for (const auto& entry : std::filesystem::directory_iterator(alone)) {
    ++num_saved;
    EXPECT_EQ(read_text(entry.path()), read_text(spread + "/" + entry.path().filename().string()));
  }
  EXPECT_GT(num_saved, 3u);
}

TEST_F(FuzzOverMpi, RefusesOnceWhatAllRanksFindFaultWith) {
  const Outcome by_the_clock = fuzz_on(2, {"--seconds", "1"});
  EXPECT_EQ(by_the_clock.status, 2);
  EXPECT_EQ(count_of(by_the_clock.err, "under mpirun"), 1u) << by_the_clock.err;
  const std::string file = temporary_path("no-folder");
  write_text(file, "");
  const Outcome unsaved =
      fuzz_on(3, {"--mutant", "drop-slot", "--runs", "9", "--no-shrink", "--save", file});
  EXPECT_EQ(unsaved.status, 2) << unsaved.out;
  EXPECT_EQ(count_of(unsaved.err, "no-folder"), 1u) << unsaved.err;
}

}  // namespace
}  // namespace lockstep::tests
