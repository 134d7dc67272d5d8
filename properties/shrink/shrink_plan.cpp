#include <algorithm>
#include <functional>
#include <vector>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrink_trial.h"

namespace lockstep {
namespace {

using Change = std::function<void(SavedCase&)>;

// A change of the plan, with new tensors for it; where that loses the failure, with the tensors as
// they were.
bool attempt_plan(ShrinkTrial& trial, const Change& change) {
  SavedCase candidate = trial.best();
  change(candidate);
  SavedCase planned = candidate;
  return (plan_again(planned) && trial.attempt(planned)) || trial.attempt(candidate);
}

// As ShrinkTrial::lower, for a number in the specs of a group; `set` may change others along.
void lower_in_plan(ShrinkTrial& trial, std::int64_t least,
                   const std::function<std::int64_t(const SavedCase&)>& get,
                   const std::function<void(SavedCase&, std::int64_t)>& set) {
  for (bool went = true; went;) {
    went = false;
    const std::int64_t value = get(trial.best());
    for (std::int64_t gap = value - least; gap > 0 && !went; gap /= 2)
      went = attempt_plan(trial, [&](SavedCase& saved) { set(saved, value - gap); });
  }
}

void lower_spec(ShrinkTrial& trial, std::size_t group, std::int64_t least,
                std::int64_t KVCacheSpec::*number) {
  lower_in_plan(
      trial, least, [&](const SavedCase& saved) { return saved.cache.groups[group].spec.*number; },
      [&](SavedCase& saved, std::int64_t value) {
        change_specs(saved, group, [&](KVCacheSpec& spec) { spec.*number = value; });
      });
}

void remove_layers(ShrinkTrial& trial) {
  for (std::size_t g = trial.best().cache.groups.size(); g-- > 0;) {
    const auto attempt = [&](const SavedCase& candidate) {
      SavedCase planned = candidate;
      return (plan_again(planned) && trial.attempt(planned)) || trial.attempt(candidate);
    };
    if (trial.best().cache.groups.size() > 1 && attempt(without_group(trial.best(), g))) continue;
    for (std::size_t i = trial.best().cache.groups[g].layer_names.size(); i-- > 0;)
      if (trial.best().cache.groups[g].layer_names.size() > 1)
        attempt(without_layer(trial.best(), g, i));
  }
}

// The block with its kernel block and, of the first group, the engine's own block size. A kernel
// block goes along as the whole block, or as the largest power of two that divides it.
void lower_block_size(ShrinkTrial& trial, std::size_t group) {
  const auto get = [&](const SavedCase& saved) {
    return saved.cache.groups[group].spec.block_size;
  };
  const auto set = [&](SavedCase& saved, std::int64_t size) {
    const std::int64_t before = get(saved);
    change_specs(saved, group, [&](KVCacheSpec& spec) { spec.block_size = size; });
    if (saved.engine.block_size == before)
      saved.engine.block_size = static_cast<std::int32_t>(size);
    if (saved.engine.mamba_block_size == before)
      saved.engine.mamba_block_size = static_cast<std::int32_t>(size);
    std::int64_t& kernel = saved.kernel_block_sizes[group];
    if (size % kernel != 0) kernel = size;
  };
  lower_in_plan(trial, 1, get, set);
  // Blocks of states are as long as the longest request: they go down with it.
  trial.attempt_with([&](SavedCase& saved) {
    const auto longest = std::min<std::int64_t>(get(saved), saved.engine.max_model_len);
    change_specs(saved, group, [&](KVCacheSpec& spec) { spec.block_size = longest; });
    saved.kernel_block_sizes[group] = longest;
  });
}

void shrink_states(ShrinkTrial& trial, std::size_t group) {
  const auto states = [&](SavedCase& saved) -> std::vector<StateTensorSpec>& {
    return saved.cache.groups[group].spec.states;
  };
  for (std::size_t i = trial.best().cache.groups[group].spec.states.size(); i-- > 0;) {
    const bool removed = attempt_plan(trial, [&](SavedCase& saved) {
      if (states(saved).size() > 1)
        states(saved).erase(states(saved).begin() + static_cast<std::ptrdiff_t>(i));
    });
    if (removed) continue;
    const std::size_t dims = trial.best().cache.groups[group].spec.states[i].dims.size();
    for (std::size_t d = 0; d < dims; ++d)
      lower_in_plan(
          trial, 1,
          [&](const SavedCase& saved) { return saved.cache.groups[group].spec.states[i].dims[d]; },
          [&](SavedCase& saved, std::int64_t value) { states(saved)[i].dims[d] = value; });
  }
}

// Rows of a word: shorter ones would be equal, and their content could not be distinguished.
std::int64_t least_head_size(const KVCacheSpec& spec) {
  return std::min(spec.head_size, 8 / itemsize_bytes(spec.dtype));
}

void shrink_group(ShrinkTrial& trial, std::size_t group) {
  attempt_plan(trial, [&](SavedCase& saved) { saved.cache.groups[group].layers_per_page = 1; });
  attempt_plan(trial, [&](SavedCase& saved) {
    change_specs(saved, group, [](KVCacheSpec& spec) { spec.head_size_v = 0; });
  });
  if (!is_state_kind(trial.best().cache.groups[group].spec.kind)) {
    lower_spec(trial, group, 1, &KVCacheSpec::num_kv_heads);
    lower_spec(trial, group, least_head_size(trial.best().cache.groups[group].spec),
               &KVCacheSpec::head_size);
  }
  if (trial.best().cache.groups[group].spec.sliding_window > 0)
    lower_spec(trial, group, 1, &KVCacheSpec::sliding_window);
  if (trial.best().cache.groups[group].spec.attention_chunk_size > 0)
    lower_spec(trial, group, 1, &KVCacheSpec::attention_chunk_size);
  shrink_states(trial, group);
  lower_block_size(trial, group);
}

}  // namespace

void shrink_plan(ShrinkTrial& trial) {
  remove_layers(trial);
  attempt_plan(trial, [](SavedCase&) {});
  for (std::size_t g = 0; g < trial.best().cache.groups.size(); ++g) shrink_group(trial, g);
  trial.lower_with(
      2, [](SavedCase& saved) { return saved.cache.num_blocks; },
      [](SavedCase& saved, std::int64_t blocks) { set_num_blocks(saved, blocks); });
}

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
    if (!request->output.tokens.empty()) request->output.tokens.resize(request->output.length);
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
