// lockstep mutants [ID...]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "base/atomic_file.h"
#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/mutant_bench.h"
#include "cli/mutants_text.h"
#include "cli/progress.h"
#include "cli/terminal.h"
#include "properties/mutants/mutant_catalogue.h"

namespace lockstep {
namespace {

struct MutantsOptions {
  std::vector<std::string> ids;
  bool list = false;
  std::string json_path, markdown_path, save_dir;
  int jobs = 1;
  MutantSearchOptions search;
};

Result<std::vector<const Mutant*>> chosen(const std::vector<std::string>& ids) {
  std::vector<const Mutant*> mutants;
  for (const std::string& id : ids) {
    const Mutant* mutant = find_mutant(id);
    if (mutant == nullptr)
      return fail(fmt::format("there is no mutant {}; `lockstep mutants --list` lists them", id));
    mutants.push_back(mutant);
  }
  if (ids.empty())
    for (const Mutant& mutant : mutant_catalogue()) mutants.push_back(&mutant);
  return mutants;
}

// In the order of `mutants`, whoever was faster. A case is judged in a child process of its own, so
// threads only wait and generate.
std::vector<MutantReport> search_all(const std::vector<const Mutant*>& mutants,
                                     const MutantsOptions& options) {
  const MutantBench bench = mutant_bench();
  Progress progress("searching", static_cast<std::int64_t>(mutants.size()));
  std::vector<MutantReport> reports(mutants.size());
  std::atomic<std::size_t> next = 0;
  std::int64_t done = 0;
  std::mutex line;
  const auto work = [&] {
    for (std::size_t i = next++; i < mutants.size(); i = next++) {
      reports[i] = search_mutant(*mutants[i], bench, options.search);
      const std::scoped_lock held(line);
      progress.at(++done, mutants[i]->id);
    }
  };
  std::vector<std::jthread> others;
  for (int job = 1; job < options.jobs; ++job) others.emplace_back(work);
  work();
  others.clear();
  return reports;
}

Result<void> leave(const MutantsOptions& options, const std::vector<MutantReport>& reports) {
  if (!options.save_dir.empty())
    if (auto saved = save_cases(options.save_dir, reports); !saved) return saved;
  if (options.json_path.empty()) return {};
  return write_file_atomically(options.json_path, mutants_json(reports));
}

int mutants(const MutantsOptions& options) {
  if (!options.markdown_path.empty()) {
    const auto written = write_file_atomically(options.markdown_path, mutants_markdown());
    return written ? kExitAgreed : refuse(written.error().message);
  }
  const auto selected = chosen(options.ids);
  if (!selected) return refuse(selected.error().message);
  if (options.list) {
    fmt::print("{}", list_text(*selected));
    return kExitAgreed;
  }
  const std::vector<MutantReport> reports = search_all(*selected, options);
  fmt::print("{}", mutants_text(reports));
  if (const auto left = leave(options, reports); !left) return refuse(left.error().message);
  return std::ranges::all_of(reports, &MutantReport::caught) ? kExitAgreed : kExitDisagreed;
}

}  // namespace

void add_mutants_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<MutantsOptions>();
  CLI::App* command = app.add_subcommand(
      "mutants", "Plant known defects one by one and search for cases that show them");
  command->add_option("ID", options->ids, "mutants; without any, all of them");
  command->add_flag("--list", options->list, "explain them and search for nothing");
  command->add_option("--json", options->json_path, "the result as JSON");
  command->add_option("--markdown", options->markdown_path, "write the catalogue as a page, only");
  command->add_option("--save", options->save_dir, "keep each smallest case in this folder");
  command->add_option("--jobs", options->jobs, "searches side by side")->check(CLI::Range(1, 256));
  command->add_option("--cases", options->search.cases_max, "give up after so many cases")
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", options->search.first_seed, "the first case's seed");
  command
      ->add_option("--shrink", options->search.shrink_evaluations_max,
                   "evaluations that making a case small may take; 0: leave it as found")
      ->check(CLI::NonNegativeNumber);
  command->callback([options, &exit_code] { exit_code = mutants(*options); });
}

}  // namespace lockstep
