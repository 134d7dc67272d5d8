// What a user chooses before a plan is made, and the layers that a plan is made of. Plain types.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// A layer and what it keeps. spec.block_size == 0: the engine chooses it (planner.h).
struct NamedSpec {
  std::string name;
  KVCacheSpec spec;
  bool is_draft = false;        // of the drafter
  std::int64_t index_topk = 0;  // rows that its indexer chooses; 0: it has none
  std::string backend = {};     // of placement/cache_backends.h; empty: as the options say
  bool operator==(const NamedSpec&) const = default;
};
using LayerSpecs = std::vector<NamedSpec>;  // in the order of the model's layers

// Names and defaults are vLLM's where it has them.
struct PlanOptions {
  AttentionBackend backend = AttentionBackend::flash_attn;
  std::int64_t tp = 1;   // tensor parallel ranks; every rank has the same plan
  std::int64_t pp = 1;   // pipeline stages; each holds a run of layers
  std::int64_t dcp = 1;  // decode context parallel ranks
  std::int64_t pcp = 1;  // prefill context parallel ranks
  DType kv_dtype = DType::bf16;
  KVQuantMode kv_quant_mode = KVQuantMode::none;  // of K/V pairs
  std::optional<DType> ssm_dtype = {};            // absent: as the model says
  MambaCacheMode mamba_cache_mode = MambaCacheMode::none;
  std::int64_t num_spec = 0;     // speculative tokens, and speculative state blocks
  bool has_drafter = false;      // the drafter's own layers are there too
  std::int64_t mtp_modules = 1;  // of the drafter; of several each reads a token further ahead
  std::int64_t max_model_len = 32768;
  std::int64_t max_num_batched_tokens = 8192;
  std::int64_t max_num_encoder_input_tokens = 0;  // 0: max_num_batched_tokens
  std::int64_t default_block_size = 16;
  std::optional<std::int64_t> block_size = {};  // the user's; hybrids may still need a longer one
  std::optional<std::int64_t> mamba_block_size =
      {};                               // mode all: the chunk that states are aligned to
  std::int64_t mamba_chunk_size = 256;  // the model's, where the option above is absent
  std::int64_t attn_pack = 1;           // attention layers that share one page
  std::int64_t memory_bytes = std::int64_t{40} << 30;  // of each worker, for the cache alone
  std::optional<std::int64_t> num_gpu_blocks_override = {};
  std::optional<std::int64_t> max_num_seqs = {};  // absent: not checked against the pool
  bool disable_hybrid_kv_cache_manager = false;
  // Bytes of the pool of host pages, and rows of a request's hot region in each layer. 0: none.
  std::int64_t host_pool_bytes = 0;
  std::optional<std::int64_t> device_buffer_rows = {};  // absent: as the engine chooses
};

}  // namespace lockstep
