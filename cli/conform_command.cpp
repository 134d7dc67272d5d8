// lockstep conform PATH...
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/atomic_file.h"
#include "cli/commands.h"
#include "cli/conform_inputs.h"
#include "cli/conform_summary.h"
#include "cli/exit_code.h"
#include "cli/progress.h"
#include "cli/terminal.h"
#include "cuda_backend/views/views.h"
#include "sim/conform/conform.h"
#include "sim/conform/conform_layouts.h"

namespace lockstep {
namespace {

struct ConformOptions {
  std::vector<std::string> paths;
  std::string json_path;
  int jobs = 1;
};

// The backend's derivation of the views, under the rule of the recorded engine.
Result<PoolViews> backend_views(const KVCacheConfig& plan, AttentionBackend backend,
                                CacheLayout layout) {
  return cuda::derive_views(
      plan, {.backend = backend, .layout = layout, .rule = LayoutRule::vllm_0_22_1});
}

ConformTotals compare(ConformInputs inputs, int jobs) {
  ConformTotals totals;
  totals.refused = std::move(inputs.refused);
  if (inputs.others > 0) {
    totals.not_looked_at.push_back(counted(inputs.others, "file") + " that conform does not take");
  }
  Progress progress("conforming", static_cast<std::int64_t>(inputs.schedules.size()));
  std::int64_t done = 0;
  if (!inputs.schedules.empty()) {
    totals.schedules =
        conform_recordings(std::move(inputs.schedules), jobs,
                           [&](const std::string& file) { progress.at(++done, file); });
    const auto& refused = totals.schedules.refused;
    totals.refused.insert(totals.refused.end(), refused.begin(), refused.end());
  }
  for (const std::string& path : inputs.layouts) {
    auto layouts = conform_layouts(path, backend_views);
    if (layouts)
      totals.layouts.push_back(std::move(*layouts));
    else
      totals.refused.push_back({path, layouts.error().message});
  }
  return totals;
}

int conform(const ConformOptions& options) {
  Result<ConformInputs> inputs = find_conform_inputs(options.paths);
  if (!inputs) return refuse(inputs.error().message);
  const ConformTotals totals = compare(std::move(*inputs), options.jobs);
  if (totals.files() > 0) fmt::print("{}", summary_text(totals));
  if (!options.json_path.empty()) {
    const Result<void> written = write_file_atomically(options.json_path, summary_json(totals));
    if (!written) return refuse(written.error().message);
  }
  return judged_exit_code(totals.refused, totals.files(), !totals.mismatches().empty());
}

}  // namespace

void add_conform_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ConformOptions>();
  options->jobs = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  CLI::App* command = app.add_subcommand(
      "conform", "Compare the model's decisions with what an engine recorded, field by field");
  command->footer(
      "A file that cannot be judged is refused with its reason, and the others are judged.\n"
      "Exit status: 0 all agree; 1 some do not; 2 some were refused, whatever the others came to.");
  command->add_option("PATH", options->paths, "recordings, and folders of them")->required();
  command->add_option("--json", options->json_path, "the result as JSON");
  command->add_option("--jobs", options->jobs, "files at a time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->callback([options, &exit_code] { exit_code = conform(*options); });
}

}  // namespace lockstep
