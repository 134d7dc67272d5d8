#include <algorithm>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrink_passes.h"

namespace lockstep {
namespace {

template <class T>
T half(T count) {
  return count > 1 ? (count + 1) / 2 : count;
}

// A failure that needs three blocks needs three blocks of any size: prompts, blocks and limits go
// down together where each alone would lose it.
void halve(SavedCase& saved) {
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    change_specs(saved, g, [](KVCacheSpec& spec) {
      spec.block_size = half(spec.block_size);
      spec.sliding_window = half(spec.sliding_window);
      spec.attention_chunk_size = half(spec.attention_chunk_size);
    });
    saved.kernel_block_sizes[g] = half(saved.kernel_block_sizes[g]);
  }
  EngineConfig& engine = saved.engine;
  for (std::int32_t* limit :
       {&engine.block_size, &engine.mamba_block_size, &engine.max_num_batched_tokens,
        &engine.max_model_len, &engine.long_prefill_token_threshold})
    *limit = half(*limit);
  for (RequestSpec* request : requests_of(saved)) {
    for (TokenRun& run : request->prompt.runs) run.count = half(run.count);
    drop_unused_tokens(request->prompt);
  }
  for (TraceRequest* request : trace_requests_of(saved)) {
    request->output.length = half(request->output.length);
    if (!request->output.tokens.empty())
      request->output.tokens.resize(static_cast<std::size_t>(request->output.length));
    request->spec.max_tokens = half(request->spec.max_tokens);
    if (request->abort && request->abort->after_tokens)
      *request->abort->after_tokens = half(*request->abort->after_tokens);
  }
}

}  // namespace

void shrink_scale(ShrinkTrial& trial) {
  for (bool went = true; went;) {
    went = trial.attempt_with([](SavedCase& saved) {
      halve(saved);
      plan_again(saved);
    });
  }
}

}  // namespace lockstep
