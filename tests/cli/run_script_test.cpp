// `./run` on a machine that lacks packages and cannot install them: a list of what is needed,
// status 2, and nothing was built. The machine is a folder of a few programs as the whole PATH.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;

class BareMachine : public testing::Test {
 protected:
  BareMachine() {
    fs::create_directories(folder_);
    for (const char* tool :
         {"bash", "dirname", "readlink", "sed", "grep", "mkdir", "tail", "cut"}) {
      const fs::path usual = fs::path("/usr/bin") / tool;
      fs::create_symlink(fs::exists(usual) ? usual : fs::path("/bin") / tool, folder_ / tool);
    }
    add("dpkg-query", "");  // no package is installed
    add("id", "echo 1000");
  }

  void add(const std::string& name, const std::string& script) {
    const fs::path path = folder_ / name;
    write_text(path, "#!/bin/bash\n" + script + "\n");
    fs::permissions(path, fs::perms::owner_all);
  }

  // A copy of the script and its list: what it writes must not land in the project.
  Outcome run_script() {
    const fs::path root = world_ / "project";
    fs::create_directories(root / "cmake");
    fs::copy_file(fs::path(LOCKSTEP_SOURCE_DIR) / "run", root / "run");
    fs::copy_file(fs::path(LOCKSTEP_SOURCE_DIR) / "cmake/debian-packages.txt",
                  root / "cmake/debian-packages.txt");
    return run_program("/bin/bash", {root / "run", "--version"}, {"PATH=" + folder_.string()});
  }

  static void expect_list(const Outcome& outcome, const std::string& reason) {
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find(reason), std::string::npos) << outcome.err;
    for (const char* package : {"\n  g++\n", "\n  cmake\n", "\n  libfmt-dev\n"}) {
      EXPECT_NE(outcome.err.find(package), std::string::npos) << outcome.err;
    }
    EXPECT_EQ(outcome.out, "");
  }

 private:
  const fs::path world_ =
      temporary_path(testing::UnitTest::GetInstance()->current_test_info()->name());
  const fs::path folder_ = world_ / "bin";
};

TEST_F(BareMachine, WithoutAptListsWhatIsNeeded) { expect_list(run_script(), "no apt-get"); }

TEST_F(BareMachine, WithoutRootAndSudoListsWhatIsNeeded) {
  add("apt-get", "exit 0");
  expect_list(run_script(), "no sudo");
}

TEST_F(BareMachine, WhereAptFailsShowsItsLastWordsAndListsWhatIsNeeded) {
  add("apt-get", "exit 0");
  add("sudo", "echo 'E: no network' >&2; exit 100");
  const Outcome outcome = run_script();
  expect_list(outcome, "could not install");
  EXPECT_NE(outcome.err.find("E: no network"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace lockstep::tests
