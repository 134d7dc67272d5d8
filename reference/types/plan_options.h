// A user's choices before the engine plans its memory, and the layers that it plans for. Plain
// types; reference/plan/planner.h derives block sizes, groups and num_blocks from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// One layer and what its cache keeps. spec.block_size 0: the engine chooses it (planner.h).
struct NamedSpec {
  std::string name;
  KVCacheSpec spec;
  bool is_draft = false;        // belongs to the draft model
  std::int64_t index_topk = 0;  // rows that its indexer selects; 0: no indexer
  std::string backend = {};     // of placement/cache_backends.h; empty: PlanOptions::backend
  bool operator==(const NamedSpec&) const = default;
};
using LayerSpecs = std::vector<NamedSpec>;  // in the order of the model's layers

// Options of the planner. Names and defaults are vLLM's where vLLM has the option.
struct PlanOptions {
  AttentionBackend backend = AttentionBackend::flash_attn;
  std::int64_t tp = 1;   // tensor parallel ranks; every rank has the same plan
  std::int64_t pp = 1;   // pipeline stages; each holds a run of layers
  std::int64_t dcp = 1;  // decode context parallel ranks
  std::int64_t pcp = 1;  // prefill context parallel ranks
  DType kv_dtype = DType::bf16;
  KVQuantMode kv_quant_mode = KVQuantMode::none;  // of K/V pairs
  std::optional<DType> ssm_dtype = {};            // absent: the model's own
  MambaCacheMode mamba_cache_mode = MambaCacheMode::none;
  std::int64_t num_spec = 0;           // speculative tokens, and so speculative state blocks
  bool has_drafter = false;            // true if the draft model's layers are also planned
  bool overlays_groups = false;        // the shapes of states are those of vllm-0.33.0
  std::int64_t mtp_modules = 1;        // of the draft model; module m reads m + 1 tokens ahead
  std::int64_t num_hidden_layers = 0;  // the model's, which pp cuts; 0: up to the last cache
  std::int64_t max_model_len = 32768;
  std::int64_t max_num_batched_tokens = 8192;
  // A further batch is scheduled while the stages compute, and windows keep its blocks too.
  bool async_scheduling = false;
  std::int64_t max_num_encoder_input_tokens = 0;  // 0: max_num_batched_tokens
  std::int64_t default_block_size = 16;
  std::optional<std::int64_t> block_size = {};  // the user's; hybrids may need a longer one
  std::optional<std::int64_t> mamba_block_size =
      {};                               // mode all: the chunk that states are aligned to
  std::int64_t mamba_chunk_size = 256;  // the model's; used where mamba_block_size is absent
  std::int64_t attn_pack = 1;           // attention layers that share one page
  std::int64_t memory_bytes = std::int64_t{40} << 30;  // per worker, for the cache only
  std::optional<std::int64_t> num_gpu_blocks_override = {};
  std::optional<std::int64_t> max_num_seqs = {};  // absent: not checked against the pool
  bool disable_hybrid_kv_cache_manager = false;
  // Bytes of the host pool (0: none), and rows of a request's hot region per layer.
  std::int64_t host_pool_bytes = 0;
  std::optional<std::int64_t> device_buffer_rows = {};  // absent: the engine's choice
};

}  // namespace lockstep
