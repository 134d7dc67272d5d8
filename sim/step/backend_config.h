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

// Rows, widths and tokens as the engine's options say.
BackendConfig make_backend_config(
    const EngineConfig& engine, KVCacheConfig plan,
    AttentionBackend attention_backend = AttentionBackend::flash_attn);
// Ranks with their own memory: pipeline stages, in each the ranks of prefill context parallelism,
// in each the tensor parallel ranks, over which decode context parallelism shards tokens. If a plan
// describes one rank (tp_size 1): only the context parallel ranks.
std::int32_t num_ranks(const BackendConfig& config);
BackendConfig config_of_rank(const BackendConfig& config, std::int32_t rank);
// What engine, plan and ranks say, for the table of compatibility.h.
RunFacts facts_of(const EngineConfig& engine, const BackendConfig& config);
// Refused: degrees that the plan cannot be cut into.
Result<void> check_ranks(const BackendConfig& config);

struct RankModel {
  BackendConfig config;  // as config_of_rank() says, but with the plan of the rank alone
  MemoryModel model;
};
// Refused: degrees that the plan cannot be cut into, and what the model cannot follow.
Result<RankModel> rank_model(const BackendConfig& config, std::int32_t rank);

// flash_attn where it takes the plan's blocks; any_size for smaller ones, as in some recordings.
AttentionBackend attention_backend_for(const KVCacheConfig& plan);
// A backend's name that is a library of kernels: "./kernels.so".
bool is_plugin(std::string_view backend);
// A Python class: "kernels:my/kernels.py:Class"; on a GPU "cuda_kernels:my/kernels.py:Class".
bool is_kernel_class(std::string_view backend);
// A plugin or a class, in place of the CUDA backend's cache writes and attention.
bool is_user_kernels(std::string_view backend);
// Names of backends that are an engine's own worker: "vllm", "vllm:DIR", "worker:COMMAND". It
// shapes its caches as vLLM's Triton backend does.
bool is_engine_worker(std::string_view backend);
AttentionBackend worker_attention_backend(const KVCacheConfig& plan);
// A plan for the groups of a recording: one tensor per place in the group, pages padded to the
// largest so that all groups draw from one pool.
Result<KVCacheConfig> plan_for_groups(std::vector<KVCacheGroupSpec> groups,
                                      std::int64_t num_blocks);

// Of groups that have no such plan (several layers a page): one tensor of all layers, for runs
// without a backend, in which no page has a place.
KVCacheConfig unplaced_plan(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks);

// To how many tokens a batch is padded where CUDA graphs are captured, by vLLM's rule: sizes 1, 2
// and 4, multiples of 8 below 256, multiples of 16 from there on, all of them up to
// max_cudagraph_capture_size, and the largest step itself where that is not above it
// (vllm/config/vllm.py, _set_cudagraph_sizes). The backend has its own list of sizes.

// The size of the graph that takes `num_tokens`; 0: none does, the step runs without one.
// REQUIRES: num_tokens >= 0.
std::int64_t captured_batch(std::int64_t num_tokens, std::int64_t max_capture_size,
                            std::int64_t max_tokens_per_step);

}  // namespace lockstep
