#include "properties/mutants/mutant_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/stop_signal.h"
#include "properties/mutants/mutant_parts.h"
#include "properties/shrink/shrinker.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

// A site of the catalogue with the heading and the introduction of its section.
struct SiteText {
  std::string_view name;
  std::string_view about;
};
// In the order of MutantSite.
constexpr SiteText kSites[] = {
    {"scheduler",
     "Decisions: scheduled requests, their blocks, their hits. Cases run without a backend."},
    {"backend",
     "The backend: tables, slots, rows, states, and views at work. Cases run on the CPU executor."},
    {"views", "Views and addresses of a memory plan, proved by writing and finding every element."},
    {"planner", "What an engine tells its users and kernels about a plan."},
    {"transfer",
     "Two engines with a network between them (docs/distributed.md), and an engine's own "
     "connectors."},
};

const SiteText& text_of(MutantSite site) { return kSites[static_cast<std::size_t>(site)]; }

// A table of the catalogue. A function, because the tables are initialised in other files.
struct Part {
  MutantSite site;
  std::span<const Mutant> (*mutants)();
};
// In the order of the page; tables of one site must be adjacent.
constexpr Part kParts[] = {
    {MutantSite::scheduler, mutants_of_decisions},
    {MutantSite::scheduler, mutants_of_shares_and_pages},
    {MutantSite::backend, mutants_of_backend},
    {MutantSite::backend, mutants_of_launches},
    {MutantSite::backend, mutants_of_plans_at_work},
    {MutantSite::backend, mutants_of_host_tier},
    {MutantSite::views, mutants_of_addresses},
    {MutantSite::planner, mutants_of_figures},
    {MutantSite::transfer, mutants_of_transfers},
};

}  // namespace

std::string_view name_of(MutantSite site) { return text_of(site).name; }

// Built on first use and never changed, so that pointers to rows stay valid.
std::span<const Mutant> mutant_catalogue() {
  static const std::vector<Mutant> all = [] {
    std::vector<Mutant> mutants;
    for (const Part& part : kParts)
      for (const Mutant& mutant : part.mutants()) mutants.emplace_back(mutant).site = part.site;
    return mutants;
  }();
  return all;
}

const Mutant* find_mutant(std::string_view id) {
  const auto all = mutant_catalogue();
  const auto found = std::ranges::find(all, id, &Mutant::id);
  return found == all.end() ? nullptr : &*found;
}

namespace {

constexpr std::string_view kHead =
    R"(# Planted defects

A harness that finds nothing proves nothing until it has been shown to find something. Each entry is
a defect that an engine had (its source is named), or could have in the same place ("this project").
Its name switches it on in the side under test, never in what judges it. `lockstep mutants` searches
for each with generated cases until a check fails, shrinks the case, and runs it again without the
defect, which must agree.

```
lockstep mutants --list               list them
lockstep mutants                      search for all of them
lockstep mutants table-width --save cases
lockstep replay cases/table-width.case.jsonl
```

"Found by" lists the checks that may see it first: phases of the comparison with the model
(`page_written`, ...), rules of the audit, invariants of the scheduler, liveness, or proofs of a
memory plan. `engine.check` is a check inside the scheduler.

This page is written by `lockstep mutants --markdown docs/reference/mutants.md`.
)";

constexpr std::string_view kTail = R"(
## Not here
- `table-edit-lost`: a program can change single entries of a row (`TableEdit` in
  `sim/protocol/step_program.h`), and the backend's own tests find a backend that loses one. No
  decision of a scheduler needs it: vLLM sends its worker only the new blocks of a request, so rows
  keep retired blocks at the front, which no window reads. A table is complete again only when its
  request resumes after a preemption.
- `state-shift-race` (vllm 50729): a state is shifted by the number of accepted tokens, inside its
  own block, by copies that overlap. Here the state after each draft has a block of its own, so a
  replay shifts nothing. The kernel that moves bytes is raced in its own tests, and
  `state-update-race` is the same mistake where a replay can make it.
)";

// Formats `text` after `marker`, broken at 100 columns and indented to the end of the marker.
std::string list_item(const std::string& marker, const std::string& text) {
  constexpr std::size_t kColumns = 100;
  std::string item = marker;
  std::size_t column = marker.size();
  std::istringstream words(text);
  std::string word;
  for (bool first = true; words >> word; first = false) {
    if (!first && column + 1 + word.size() > kColumns) {
      item += "\n" + std::string(marker.size(), ' ');
      column = marker.size();
    } else if (!first) {
      item += ' ';
      ++column;
    }
    item += word;
    column += word.size();
  }
  return item + "\n";
}

}  // namespace

// Starts a section at each change of site: the catalogue is ordered by it.
std::string mutants_markdown() {
  std::string page(kHead);
  const Mutant* before = nullptr;
  for (const Mutant& mutant : mutant_catalogue()) {
    if (before == nullptr || before->site != mutant.site)
      page += fmt::format("\n## {}\n{}\n\n", name_of(mutant.site), text_of(mutant.site).about);
    before = &mutant;
    page +=
        list_item("- ", fmt::format("`{}` ({}): {}.", mutant.id, mutant.source, mutant.mechanism));
    page += list_item("  - ", fmt::format("Shows with: {}.", mutant.exposed_by));
    page += list_item("  - ", fmt::format("Found by: `{}`.", fmt::join(mutant.caught_by, "`, `")));
  }
  page += kTail;
  return page;
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kRequestsMax = 3;  // requests of a case that a person can follow
// Failing cases that are tried for a smaller one.
constexpr int kFurtherCases = 20;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

SavedCase without_defect(SavedCase saved) {
  saved.mutants.clear();
  return saved;
}

// The search in generated cases, which run in one child after another.
//
// Invariants
// (1) report_ holds the smallest case so far, and the counts of all rounds.
// (2) A case counts as caught only if it agrees without the defect.
class CaseSearch {
 public:
  CaseSearch(const Mutant& mutant, const MutantBench& bench, const MutantSearchOptions& options)
      : mutant_(mutant),
        bench_(bench),
        options_(options),
        judged_by_{.backend = bench.backend},
        judging_([this](const auto& saved) { return judge(saved, judged_by_); }),
        child_(options.case_time_limit) {
    if (bench.decider) judged_by_.decisions = bench.decider->decisions;
  }

  MutantReport run() {
    report_.mutant = &mutant_;
    search();
    for (int i = 0; i < kFurtherCases && is_large(); ++i) search_smaller();
    return std::move(report_);
  }

 private:
  // Searches from the seed after the last judged one, and shrinks the case that it finds.
  void search() {
    const auto begin = Clock::now();
    while (report_.cases < options_.cases_max && !report_.caught && !stop_requested())
      try_seed(options_.first_seed + static_cast<std::uint64_t>(report_.cases));
    report_.seconds += seconds_since(begin);
    if (report_.caught) make_small();
  }

  // Without shrinking, every case is large, and further ones would not help.
  bool is_large() const {
    return report_.caught && options_.shrink_evaluations_max > 0 &&
           report_.size.requests > kRequestsMax;
  }

  // Searches for another failing case, and keeps whichever is smaller. A minimal case may still
  // have many requests: shrinking only removes, and another seed may reach the defect by a shorter
  // way.
  void search_smaller() {
    MutantReport large = report_;
    report_.caught = false;
    search();
    if (report_.caught && report_.size.requests < large.size.requests) return;
    static_cast<MutantCounts&>(large) = report_;
    report_ = std::move(large);
  }

  // Judges the case in the child. With another engine every case gets a new one. A planted defect
  // leaves the process intact: decisions are only wrong, and kernels write inside the executor's
  // reserved memory, which goes with the case.
  Result<Failure> judged_by_child(const SavedCase& saved) {
    if (is_shrinking_) {
      if (seconds_since(last_beat_) > 1) {
        child_.beat();
        last_beat_ = Clock::now();
      }
      return judge_here(saved, judging_);
    }
    auto failure = judge_in_child(saved, judging_, child_);
    if (bench_.decider || !failure) child_.end();
    // A child that did not answer, or an engine that failed, has left the engine's process in an
    // unknown state.
    const bool is_whole = failure && failure->kind != "crash" && failure->kind != "hang" &&
                          !failure->check.starts_with("engine.");
    if (bench_.decider && !is_whole) bench_.decider->restart();
    return failure;
  }

  // Treats a case that cannot be judged as refused: it is neither caught nor flawed.
  Failure judged(const SavedCase& saved) {
    auto failure = judged_by_child(saved);
    if (failure) return std::move(*failure);
    return {.kind = "refused", .check = {}, .request = {}, .what = failure.error().message};
  }

  // Judges the case of one seed, and a failing one again without the defect.
  void try_seed(std::uint64_t seed) {
    SavedCase saved = mutant_case(mutant_, seed, bench_.decider ? &*bench_.decider : nullptr);
    if (options_.layout) {
      saved.layout = *options_.layout;
      report_.in_an_order = true;
    }
    ++report_.cases;
    Failure failure = judged(saved);
    if (!failure.failed()) {
      if (failure.kind == "refused" && ++report_.refused == 1) report_.refusal = failure.what;
      return;
    }
    if (judged(without_defect(saved)).kind != "agreed") {
      ++report_.flawed;
      return;
    }
    report_.caught = true;
    report_.seed = seed;
    report_.failure = std::move(failure);
    report_.steps = report_.failure.steps;
    report_.size = size_of(saved);
    report_.smallest = std::move(saved);
  }

  // Shrinks the caught case. A smaller case counts only if it fails in the same way and agrees
  // without the defect: otherwise shrinking could end at a different defect.
  void make_small() {
    if (options_.shrink_evaluations_max == 0) return;
    const auto begin = Clock::now();
    const StillFails planted =
        fails_like(report_.failure, [this](const auto& saved) { return judged_by_child(saved); });
    const StillFails by_the_defect = [&](const SavedCase& saved,
                                         std::int64_t steps_max) -> std::optional<std::int64_t> {
      if (saved.mutants.empty()) return std::nullopt;
      // One step more: some failures are found between the last step and the next.
      judged_by_.steps_max = steps_max == 0 ? 0 : steps_max + 1;
      const auto steps = planted(saved, steps_max);
      judged_by_.steps_max = 0;
      if (!steps || (steps_max > 0 && *steps > steps_max)) return steps;
      if (judged(without_defect(saved)).kind != "agreed") return std::nullopt;
      return steps;
    };
    const auto shrunk = [&] {
      return shrink(*report_.smallest, by_the_defect,
                    {.evaluations_max = options_.shrink_evaluations_max, .progress = {}});
    };
    auto result = bench_.decider ? shrunk() : shrunk_in_child(shrunk);
    if (result) {
      report_.smallest = result->smallest;
      report_.steps = result->steps;
      report_.size = size_of(result->smallest);
      report_.is_minimal = result->is_minimal;
      // The smallest case may fail in another step, so its failure is read again, in a new child:
      // the one that shrank has judged many failures.
      child_.end();
      report_.failure = judged(result->smallest);
    }
    report_.shrink_seconds += seconds_since(begin);
  }

  // Shrinks in one piece of work of the child, so that this process does not repeat what the
  // shrinker does between two cases. If a candidate crashes or hangs, which few do, this process
  // shrinks again and judges each candidate in a child.
  template <class Shrink>
  std::optional<ShrinkResult> shrunk_in_child(const Shrink& shrunk) {
    const auto answer = child_.run([&] {
      is_shrinking_ = true;
      const auto result = shrunk();
      is_shrinking_ = false;
      if (!result) return std::string();
      return fmt::format("{} {}\n{}", result->steps, int{result->is_minimal},
                         saved_case_to_text(result->smallest));
    });
    if (!answer || answer->end != ChildAnswer::End::answered) return shrunk();
    std::istringstream text(answer->text);
    ShrinkResult result;
    if (!(text >> result.steps >> result.is_minimal)) return std::nullopt;
    const std::size_t line = answer->text.find('\n') + 1;
    result.smallest = *saved_case_from_text(std::string(mutant_.id), answer->text.substr(line));
    return result;
  }

  const Mutant& mutant_;
  const MutantBench& bench_;
  const MutantSearchOptions& options_;
  JudgeOptions judged_by_;
  const Judging judging_;
  FollowingChild child_;
  bool is_shrinking_ = false;  // in the child: cases are judged in this process
  Clock::time_point last_beat_;
  MutantReport report_;
};

// Searches in cases that need no child: judge(case, defect) returns the outcome, and describe(case,
// check) the text of the smallest case that still fails `check`. The defects are in code that only
// computes.
template <class Generate, class Judge, class Describe>
MutantReport search_seeds(const Mutant& mutant, const MutantSearchOptions& options,
                          const Generate& generate, const Judge& judge, const Describe& describe) {
  MutantReport report;
  report.mutant = &mutant;
  const auto begin = Clock::now();
  while (report.cases < options.cases_max && !report.caught && !stop_requested()) {
    const std::uint64_t seed = options.first_seed + static_cast<std::uint64_t>(report.cases);
    SeededChoices choices(seed);
    const auto one = generate(choices);
    ++report.cases;
    const auto outcome = judge(one, mutant.id);
    if (!outcome.failed()) continue;
    if (judge(one, std::string_view()).failed()) {
      ++report.flawed;
      continue;
    }
    report.caught = true;
    report.seed = seed;
    report.failure = {
        .kind = "violation", .check = outcome.check, .request = {}, .what = outcome.what};
    report.seconds = seconds_since(begin);
    // describe() may judge again; its time counts as shrinking.
    report.plan = describe(one, outcome.check);
    report.shrink_seconds = seconds_since(begin) - report.seconds;
  }
  if (!report.caught) report.seconds = seconds_since(begin);
  return report;
}

// Searches with memory plans. Site views compares addresses, site planner compares figures.
MutantReport search_plans(const Mutant& mutant, const PlanSuspect& suspect,
                          const MutantSearchOptions& options) {
  return search_seeds(
      mutant, options,
      [&](ChoiceSource& choices) {
        return generate_plan(choices, std::get<PlanBias>(mutant.bias));
      },
      [&](const PlanCase& plan, std::string_view defect) {
        return mutant.site == MutantSite::views ? judge_views(plan, suspect, defect)
                                                : judge_figures(plan, defect);
      },
      [](const PlanCase& plan, const std::string&) { return describe(plan); });
}

MutantReport search_transfers(const Mutant& mutant, const MutantBench& bench,
                              const MutantSearchOptions& options) {
  return search_seeds(
      mutant, options,
      [&](ChoiceSource& choices) {
        return generate_transfer(choices, std::get<TransferBias>(mutant.bias));
      },
      [&](const TransferCase& transfer, std::string_view defect) {
        return judge_transfer(transfer, defect, bench.backend);
      },
      [&](const TransferCase& transfer, const std::string& check) {
        return describe(shortest_failing(transfer, mutant.id, check, bench.backend));
      });
}

}  // namespace

bool MutantReport::as_expected() const {
  return caught && std::ranges::find(mutant->caught_by, failure.check) != mutant->caught_by.end();
}

std::string why_not_below(const MutantDecider& decider, const Mutant& mutant) {
  if (mutant.site != MutantSite::backend)
    return fmt::format("it is a defect of the site {}, and another engine decides",
                       name_of(mutant.site));
  if (decider.never.has_any_of(mutant.cases().always))
    return "it needs cases of a kind that this engine does not support";
  const auto format_of = [](const std::string& engine) {
    return engine_profile(engine).release->page_format;
  };
  const std::string& engine = mutant.cases().engine;
  // A bias that names an older release needs that release's page format.
  if (!engine.empty() && engine != newest_release() &&
      format_of(engine) != format_of(decider.engine))
    return fmt::format("it is a defect of pages as they are in {}", engine);
  return {};
}

// Excludes features that no defect needs by default: ranks, faults and quantized rows slow a search
// down and make failures harder to read. `always` of the row takes precedence.
SavedCase mutant_case(const Mutant& mutant, std::uint64_t seed, const MutantDecider* decider) {
  GeneratorOptions bias = mutant.cases();
  if (decider != nullptr) {
    bias.engine = decider->engine;
    bias.never.add(decider->never);
  }
  bias.never.add(kRankFeatures);
  bias.never.add({Feature::faults, Feature::same_instant, Feature::scaled_rows,
                  Feature::uniform_type, Feature::connector_peers, Feature::host_tier});
  bias.never.remove(bias.always);
  SavedCase saved = generate_case(seed, bias);
  if (mutant.reshape != nullptr) mutant.reshape(saved);
  saved.mutants = {std::string(mutant.id)};
  return saved;
}

MutantReport search_mutant(const Mutant& mutant, const MutantBench& bench,
                           const MutantSearchOptions& options) {
  if (mutant.site == MutantSite::views || mutant.site == MutantSite::planner)
    return search_plans(mutant, bench.plans, options);
  if (mutant.site == MutantSite::transfer) return search_transfers(mutant, bench, options);
  return CaseSearch(mutant, bench, options).run();
}

}  // namespace lockstep
