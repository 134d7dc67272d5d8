#include "properties/mutants/mutant_catalogue.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>

#include "properties/mutants/mutant_parts.h"

namespace lockstep {

namespace {

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

struct Part {
  MutantSite site;
  std::vector<Mutant> (*mutants)();
};
constexpr Part kParts[] = {
    {MutantSite::scheduler, hash_mutants},
    {MutantSite::scheduler, hit_mutants},
    {MutantSite::scheduler, free_mutants},
    {MutantSite::scheduler, state_mutants},
    {MutantSite::scheduler, schedule_mutants},
    {MutantSite::scheduler, fault_mutants},
    {MutantSite::scheduler, page_decision_mutants},
    {MutantSite::backend, page_row_mutants},
    {MutantSite::backend, row_mutants},
    {MutantSite::backend, table_mutants},
    {MutantSite::backend, backend_state_mutants},
    {MutantSite::backend, graph_mutants},
    {MutantSite::backend, further_cache_mutants},
    {MutantSite::backend, encoder_and_sink_mutants},
    {MutantSite::scheduler, encoder_mutants},
    {MutantSite::backend, number_mutants},
    {MutantSite::backend, view_mutants},
    {MutantSite::backend, host_tier_mutants},
    {MutantSite::backend, rank_mutants},
    {MutantSite::backend, drafter_mutants},
    {MutantSite::views, address_mutants},
    {MutantSite::planner, figure_mutants},
    {MutantSite::transfer, protocol_mutants},
    {MutantSite::transfer, staging_mutants},
    {MutantSite::transfer, holding_mutants},
    {MutantSite::transfer, connector_mutants},
    {MutantSite::backend, share_mutants},
    {MutantSite::scheduler, share_decision_mutants},
};

}  // namespace

std::string_view name_of(MutantSite site) { return text_of(site).name; }

std::span<const Mutant> mutant_catalogue() {
  static const std::vector<Mutant> all = [] {
    std::vector<Mutant> mutants;
    for (const Part& part : kParts)
      for (Mutant& mutant : part.mutants()) {
        mutant.site = part.site;
        mutants.push_back(std::move(mutant));
      }
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
for each with generated cases until a check fails, makes the case small, and runs it again without
the defect, which must agree.

```
lockstep mutants --list               what there is
lockstep mutants                      search for all of them
lockstep mutants table-width --save cases
lockstep replay cases/table-width.case.jsonl
```

"Found by" lists the checks that may see it first: phases of the comparison with the model
(`page_written`, ...), rules of the audit, invariants of the scheduler, liveness, or proofs of a
memory plan. `crash` is a check inside the scheduler that stops the program.

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

// `text` behind `marker`, indented as far, on lines of at most 100 columns.
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

}  // namespace lockstep
