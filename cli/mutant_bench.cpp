#include "cli/mutant_bench.h"

#include "cuda_backend/backends.h"
#include "cuda_backend/defects/planted_views.h"

namespace lockstep {
namespace {

// Returns the set with this defect; the empty set for the empty name. REQUIRES: a view defect's
// name, or empty.
cuda::ViewDefects view_defects(std::string_view name) {
  if (name.empty()) return {};
  return {*defect_from_name<cuda::ViewDefect>(name)};
}

// LayoutRule::isolated: the rule of a correct layout, so that only the planted defect breaks it.
Result<PoolViews> planted_views(const KVCacheConfig& plan, AttentionBackend backend,
                                CacheLayout layout, std::string_view defect) {
  return cuda::planted_views(plan,
                             {.backend = backend, .layout = layout, .rule = LayoutRule::isolated},
                             view_defects(defect));
}

std::int64_t planted_offset(const TensorView& view, std::span<const std::int64_t> index,
                            std::string_view defect) {
  return cuda::planted_byte_offset(view, index, view_defects(defect));
}

}  // namespace

MutantBench mutant_bench() {
  return {.backend = make_simt_backend,
          .plans = {.views = planted_views, .byte_offset = planted_offset}};
}

}  // namespace lockstep
