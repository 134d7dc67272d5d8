// The runs of tests/gpu/check_on_gpu.sh, on the CPU: together they launch every kernel of the
// backend, so no kernel meets a GPU without a comparison.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/forwarding_backend.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "tests/cuda_backend/kernel_names.h"
#include "tests/support/temporary_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = LOCKSTEP_SOURCE_DIR;

// The names of all launches: literals passed with the place, or assigned to a launch's name.
Names names_of_launches() {
  Names names;
  for (const auto& file : fs::directory_iterator(kRoot / "cuda_backend/launch"))
    if (file.path().extension() == ".cpp")
      names.merge(matches(text_of(file.path()), R"re((?:place, |\.name = )"(\w+)")re"));
  return names;
}

// Adds the launched kernels to a set when it is destroyed.
class NamingBackend final : public ForwardingBackend {
 public:
  NamingBackend(std::unique_ptr<Backend> inner, Names& names)
      : ForwardingBackend(std::move(inner)), names_(names) {}
  ~NamingBackend() override {
    for (const KernelStatistics& kernel : kernel_statistics()) names_.insert(kernel.kernel);
  }

 private:
  Names& names_;
};

void add_kernels_of_case(std::uint64_t seed, Names& names) {
  GeneratorOptions options;
  options.check = "fast";
  options.device_modes = true;
  const SavedCase saved = generate_case(seed, options);
  const JudgeOptions judging{
      .backend = [&names](BackendConfig config) -> Result<std::unique_ptr<Backend>> {
        LS_ASSIGN_OR_RETURN(auto backend, make_simt_backend(config));
        return std::unique_ptr<Backend>(std::make_unique<NamingBackend>(std::move(backend), names));
      }};
  const Outcome outcome = judge(saved, judging);
  EXPECT_TRUE(outcome.kind != OutcomeKind::divergence ||
              known_finding(saved, outcome, judging) != nullptr)
      << "seed " << seed << ": " << outcome.what;
}

void add_kernels_of_replay(const std::string& options, Names& names) {
  const std::string json = tests::temporary_path("replay.json");
  const std::string limit = options.find("--limit") == std::string::npos ? " --limit 10" : "";
  const std::string command = "'" LOCKSTEP_BINARY_DIR "/lockstep' replay '" + kRoot.string() +
                              "/traces/samples/shared_prefixes.jsonl' --backend simt --json '" +
                              json + "' " + options + limit + " >/dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
  const auto report = nlohmann::json::parse(text_of(json));
  for (const auto& kernel : report.at("kernels"))
    names.insert(kernel.at("kernel").get<std::string>());
}

TEST(GpuScript, ItsRunsLaunchEveryKernel) {
  const std::string script = text_of(kRoot / "tests/gpu/check_on_gpu.sh");
  std::smatch fuzz;
  ASSERT_TRUE(std::regex_search(script, fuzz, std::regex("fuzz --seed (\\d+) --runs (\\d+)")));
  Names launched;
  std::istringstream lines(text_of(kRoot / "tests/gpu/replays.txt"));
  int replays = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.front() == '#') continue;
    const auto space = line.find(' ');
    add_kernels_of_replay(space == std::string::npos ? "" : line.substr(space), launched);
    ++replays;
  }
  EXPECT_GT(replays, 5);
  const std::uint64_t first = std::stoull(fuzz[1]), count = std::stoull(fuzz[2]);
  for (std::uint64_t seed = first; seed < first + count; ++seed)
    add_kernels_of_case(seed, launched);
  const Names all = names_of_launches();
  EXPECT_GE(all.size(), 25u);
  for (const std::string& name : all)
    EXPECT_TRUE(launched.contains(name)) << name << " is launched by no run of check_on_gpu.sh";
}

}  // namespace
}  // namespace lockstep
