// `./run` on a machine that lacks packages and cannot install them: a list of the needed packages,
// status 2, and nothing is built. `./run engines` without a package index: one line, status 2.
// The machine is a folder of a few programs as the whole PATH.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

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

  // A copy of the script and the files that it reads: its output must not land in the project.
  Outcome run_script(std::vector<std::string> arguments = {"--version"},
                     std::vector<std::string> environment = {}) {
    const fs::path root = world_ / "project";
    for (const char* name :
         {"run", "cmake/debian-packages.txt", "python/lockstep_engines/set_up.py"}) {
      fs::create_directories((root / name).parent_path());
      fs::copy_file(fs::path(LOCKSTEP_SOURCE_DIR) / name, root / name,
                    fs::copy_options::overwrite_existing);
    }
    arguments.insert(arguments.begin(), root / "run");
    environment.push_back("PATH=" + folder_.string());
    return run_program("/bin/bash", arguments, environment);
  }

  // A machine with all packages, and an environment whose pip is this script.
  Outcome set_up_engines(std::vector<std::string> releases, const std::string& pip) {
    fs::remove(folder_ / "dpkg-query");
    fs::create_symlink("/usr/bin/python3", folder_ / "python3");
    const fs::path engines = world_ / "engines";
    fs::create_directories(engines / "venv/bin");
    write_text(engines / "venv/bin/python", "#!/bin/bash\n" + pip + "\n");
    fs::permissions(engines / "venv/bin/python", fs::perms::owner_all);
    releases.insert(releases.begin(), "engines");
    return run_script(releases, {"LOCKSTEP_ENGINES=" + engines.string()});
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

TEST_F(BareMachine, WithoutAPackageIndexEnginesAreRefusedInOneLine) {
  if (!fs::exists("/usr/bin/python3")) GTEST_SKIP() << "no python3";
  const Outcome outcome = set_up_engines(
      {"0.22.1"}, "echo 'ERROR: No matching distribution found for vllm==0.22.1' >&2; exit 1");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err.find("lockstep: cannot set up vllm 0.22.1, because pip found no package "
                             "index that has it (No matching distribution found for "
                             "vllm==0.22.1); "),
            0)
      << outcome.err;
  EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
}

TEST_F(BareMachine, EveryReleaseIsSetUpWhereOneFails) {
  if (!fs::exists("/usr/bin/python3")) GTEST_SKIP() << "no python3";
  const Outcome outcome = set_up_engines({}, "echo \"$*\" | grep -o '[a-z]*==.*'; exit 1");
  EXPECT_EQ(outcome.status, 2);
  for (const char* asked : {"vllm==0.33.0 ", "vllm==0.22.1 ", "sglang==0.5.23 "})
    EXPECT_NE(outcome.out.find(asked), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace lockstep::tests
