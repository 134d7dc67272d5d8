#include "properties/mutants/mutant_catalogue.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace lockstep {

std::string_view name_of(MutantSite site) {
  switch (site) {
    case MutantSite::scheduler:
      return "scheduler";
    case MutantSite::backend:
      return "backend";
    case MutantSite::views:
      return "views";
    case MutantSite::planner:
      return "planner";
    case MutantSite::transfer:
      return "transfer";
  }
  LS_CHECK(false, "site {}", static_cast<int>(site));
}

std::span<const Mutant> mutant_catalogue() {
  static const std::vector<Mutant> all = [] {
    std::vector<Mutant> mutants = mutants_of_scheduler();
    std::ranges::move(mutants_of_backend(), std::back_inserter(mutants));
    std::ranges::move(mutants_of_host_tier(), std::back_inserter(mutants));
    std::ranges::move(mutants_of_ranks(), std::back_inserter(mutants));
    std::ranges::move(mutants_of_plans(), std::back_inserter(mutants));
    std::ranges::move(mutants_of_transfers(), std::back_inserter(mutants));
    return mutants;
  }();
  return all;
}

const Mutant* find_mutant(std::string_view id) {
  const auto all = mutant_catalogue();
  const auto found = std::ranges::find(all, id, &Mutant::id);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace lockstep
