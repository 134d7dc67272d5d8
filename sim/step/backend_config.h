// Configurations of backends: of an engine and a plan, of one rank, and that rank's part.
//
// Invariants
// (1) Every rank of a plan is configured here, so the ranks of a run and the readers of another
//     engine's transfers split the whole model's plan the same way.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/memory/memory_model.h"
#include "reference/profiles/compatibility.h"
#include "reference/types/engine_config.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// Returns the configuration that the engine's options define: rows, table widths, tokens per step.
// The other members keep their defaults.
BackendConfig make_backend_config(
    const EngineConfig& engine, KVCacheConfig plan,
    AttentionBackend attention_backend = AttentionBackend::flash_attn);
// Returns the number of ranks with their own memory: pipeline stages, in each the ranks of prefill
// context parallelism, in each the tensor parallel ranks, over which decode context parallelism
// shards tokens. If a plan describes one rank (tp_size 1): only the context parallel ranks.
// Example: pp 2, pcp 2, tp 4 with dcp 2 are 16 ranks, and 4 of them share a sequence.
std::int32_t num_ranks(const BackendConfig& config);
BackendConfig config_of_rank(const BackendConfig& config, std::int32_t rank);
// Returns what engine, plan and ranks state, for the table of compatibility.h.
RunFacts facts_of(const EngineConfig& engine, const BackendConfig& config);
// Refuses degrees that cannot divide the plan.
Result<void> check_ranks(const BackendConfig& config);

struct RankModel {
  BackendConfig config;  // config_of_rank(), but with the rank's own plan
  MemoryModel model;
};
// Returns one rank's memory model. Errors: degrees that cannot divide the plan, and plans that the
// model does not support.
Result<RankModel> rank_model(const BackendConfig& config, std::int32_t rank);

// Returns flash_attn if it supports the plan's block sizes; any_size for smaller ones, as in some
// recordings.
AttentionBackend attention_backend_for(const KVCacheConfig& plan);
// Returns true for a library of kernels: "./kernels.so".
bool is_plugin(std::string_view backend);
// Returns true for a Python class: "kernels:my/kernels.py:Class"; on a GPU
// "cuda_kernels:my/kernels.py:Class".
bool is_kernel_class(std::string_view backend);
// Returns true for both: their kernels replace the CUDA backend's cache writes and attention.
bool is_user_kernels(std::string_view backend);
// Returns true for an engine's own worker: "vllm", "vllm:DIR", "worker:COMMAND". It shapes its
// caches as vLLM's Triton backend does.
bool is_engine_worker(std::string_view backend);
AttentionBackend worker_attention_backend(const KVCacheConfig& plan);
// Returns a plan for the groups of a recording: one tensor per position in the group, pages padded
// to the largest so that all groups share one pool.
Result<KVCacheConfig> plan_for_groups(std::vector<KVCacheGroupSpec> groups,
                                      std::int64_t num_blocks);

// Returns a plan for groups without such a plan (several layers per page): one tensor of all
// layers. Only for runs without a backend, since no page has a position in it.
KVCacheConfig unplaced_plan(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks);

// Returns the size of the CUDA graph that takes `num_tokens`; 0: none, the step runs without a
// graph. vLLM captures sizes 1, 2 and 4, multiples of 8 below 256, and multiples of 16 from 256,
// all up to max_cudagraph_capture_size; also the largest step, if it is not above that
// (vllm/config/vllm.py, _set_cudagraph_sizes()). The backend has its own list. Examples: 3 gives 4,
// 9 gives 16, 260 gives 272. REQUIRES: num_tokens >= 0.
std::int64_t captured_batch(std::int64_t num_tokens, std::int64_t max_capture_size,
                            std::int64_t max_tokens_per_step);

}  // namespace lockstep
