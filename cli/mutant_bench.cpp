#include "cli/mutant_bench.h"

#include "cuda_backend/defects/planted_views.h"
#include "cuda_backend/simt_backend.h"

namespace lockstep {
namespace {

// REQUIRES: the empty name, or that of a view defect.
cuda::ViewDefect view_defect(std::string_view name) {
  return name.empty() ? cuda::ViewDefect::none : *cuda::view_defect_from_name(name);
}

Result<PoolViews> planted_views(const KVCacheConfig& plan, AttentionBackend backend,
                                CacheLayout layout, std::string_view defect) {
  return cuda::planted_views(plan,
                             {.backend = backend, .layout = layout, .rule = LayoutRule::isolated},
                             view_defect(defect));
}

std::int64_t planted_offset(const TensorView& view, std::span<const std::int64_t> index,
                            std::string_view defect) {
  return cuda::planted_byte_offset(view, index, view_defect(defect));
}

Result<PlanFigures> planted_figures(const KVCacheConfig& plan, const PlanOptions& options,
                                    std::string_view defect) {
  const cuda::RequestLimits limits{.max_model_len = options.max_model_len,
                                   .max_num_batched_tokens = options.max_num_batched_tokens,
                                   .context_ranks = options.dcp * options.pcp,
                                   .max_num_seqs = options.max_num_seqs.value_or(1)};
  const auto planted =
      defect.empty() ? cuda::CapacityDefect::none : *defect_from_name<cuda::CapacityDefect>(defect);
  LS_ASSIGN_OR_RETURN(const auto capacity, cuda::planted_capacity(plan, limits, planted));
  return PlanFigures{.capacity_tokens = capacity.capacity_tokens,
                     .slot_buffer_rows = capacity.slot_buffer_rows,
                     .max_num_seqs = capacity.max_num_seqs,
                     .hit_step_tokens = capacity.hit_step_tokens};
}

}  // namespace

MutantBench mutant_bench() {
  return {
      .backend = make_simt_backend,
      .plans = {.views = planted_views, .byte_offset = planted_offset, .figures = planted_figures}};
}

}  // namespace lockstep
