// Every kernel has a test that checks its accesses: a test of single kernels launches every
// __global__ of cuda_backend/kernels in check mode.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "tests/cuda_backend/kernel_log.h"
#include "tests/cuda_backend/kernel_names.h"
#include "tests/support/temporary_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

Names kernels_in(const std::string& text) {
  return matches(text, R"(__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\()");
}

// Kernels by the name of their launch. A launcher contains both: a function of launch/ that starts
// at the start of a line and ends with a brace there.
std::map<std::string, Names> kernels_by_launch(const std::string& text) {
  std::map<std::string, Names> kernels;
  std::istringstream lines(text);
  std::string function;
  for (std::string line; std::getline(lines, line);) {
    function += line + "\n";
    if (line != "}") continue;
    for (const std::string& launch : matches(function, "\"(\\w+)\""))
      kernels[launch].merge(matches(function, "(\\w+_kernel)\\b"));
    function.clear();
  }
  return kernels;
}

Names uncovered(const Names& kernels, const std::map<std::string, Names>& by_launch,
                const Names& launched) {
  Names left = kernels;
  for (const std::string& launch : launched)
    if (const auto found = by_launch.find(launch); found != by_launch.end())
      for (const std::string& kernel : found->second) left.erase(kernel);
  return left;
}

// Runs all tests of single kernels in other processes: those of this program, without whole
// backends and the executor, and those of kernel_matrices.
Names launched_by_kernel_tests() {
  const std::string log = tests::temporary_path("kernels");
  const std::string variable = std::string(kKernelLogVariable) + "='" + log + "' ";
  for (const std::string& program :
       {"'" + fs::read_symlink("/proc/self/exe").string() +
            "' --gtest_filter='-*Backend*:*Mutant*:Simt*:*Coverage*:*Slow*' --gtest_brief=1",
        std::string("'" LOCKSTEP_KERNEL_MATRICES "' '~[slow]~[executor]~[!benchmark]'")}) {
    const std::string command = variable + program + " >/dev/null";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
  Names launched;
  std::ifstream file(log);
  for (std::string name; std::getline(file, name);) launched.insert(name);
  return launched;
}

TEST(KernelCoverage, EveryKernelIsLaunchedByATestThatWatchesItsAccesses) {
  std::string kernels, launchers;
  const fs::path root = LOCKSTEP_SOURCE_DIR "/cuda_backend";
  for (const auto& file : fs::directory_iterator(root / "kernels")) kernels += text_of(file.path());
  for (const auto& file : fs::directory_iterator(root / "launch"))
    launchers += text_of(file.path());
  const Names declared = kernels_in(kernels);
  EXPECT_GE(declared.size(), 15u);
  const Names left = uncovered(declared, kernels_by_launch(launchers), launched_by_kernel_tests());
  for (const std::string& kernel : left)
    ADD_FAILURE() << kernel << " has no test in check mode; write one with KernelDevice";
}

TEST(KernelCoverage, AKernelThatNothingLaunchesIsFound) {
  const Names kernels = kernels_in(
      "template <class T>\n__global__ void one_kernel(Params p) {\n"
      "__global__ void __launch_bounds__(256) two_kernel(Params p) {\n"
      "__global__\nvoid three_kernel(Params p) {\n");
  EXPECT_EQ(kernels, (Names{"one_kernel", "two_kernel", "three_kernel"}));
  const auto by_launch = kernels_by_launch(
      "int launch_first(P p) {\n  auto config = config_of(place, \"first\");\n"
      "  auto* kernel = one_kernel<8>;\n}\n"
      "int launch_second(P p) {\n  run(flat_grid(place, \"second\", 3), two_kernel);\n}\n");
  EXPECT_EQ(uncovered(kernels, by_launch, {"first"}), (Names{"two_kernel", "three_kernel"}));
  EXPECT_EQ(uncovered(kernels, by_launch, {"first", "second"}), Names{"three_kernel"});
}

}  // namespace
}  // namespace lockstep
