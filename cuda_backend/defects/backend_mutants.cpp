#include "cuda_backend/defects/backend_mutants.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep {
namespace {

using cuda::Needs;
using cuda::PlantedDefect;

std::vector<PlantedDefect> planted_defects() {
  std::vector<PlantedDefect> all;
  for (const auto& part :
       {cuda::defects_of_programs(), cuda::defects_of_launches(), cuda::defects_of_plans()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

// The part of `needs` that the configuration lacks; empty: none.
std::string missing(const PlantedDefect& entry, const BackendConfig& config) {
  switch (entry.needs) {
    case Needs::streams:
      if (config.num_streams < 2)
        return "mutant: copy-unordered needs at least two streams; set num_streams";
      break;
    case Needs::graphs:
      if (config.max_cudagraph_capture_size == 0)
        return fmt::format("mutant: {} needs captured graphs; set max_cudagraph_capture_size",
                           entry.id);
      break;
    case Needs::numbers:
      if (config.numbers != Numbers::real)
        return fmt::format("mutant: {} needs real numbers; set numbers to real", entry.id);
      break;
    case Needs::words:
      if (config.numbers == Numbers::real)
        return fmt::format("mutant: {} needs words; set numbers to words", entry.id);
      break;
    case Needs::nothing:
      break;
  }
  return {};
}

}  // namespace

std::vector<std::string_view> backend_defect_names() {
  std::vector<std::string_view> names;
  for (const PlantedDefect& defect : planted_defects()) names.push_back(defect.id);
  return names;
}

Result<cuda::Seams> cuda::planted_seams(const BackendConfig& config) {
  if (config.mutant.empty()) return Seams{};
  static const std::vector<PlantedDefect> all = planted_defects();  // a case opens many backends
  const auto entry = std::ranges::find(all, config.mutant, &PlantedDefect::id);
  if (entry == all.end())
    return fail("mutant: '{}' is not planted in this backend; known: {}", config.mutant,
                fmt::join(backend_defect_names(), ", "));
  if (std::string why = missing(*entry, config); !why.empty()) return fail(std::move(why));
  return entry->make(config);
}

}  // namespace lockstep
