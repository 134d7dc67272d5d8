// The engine options that influence the scheduler's decisions. Names and defaults are vLLM's
// (vllm/config/{scheduler,cache,parallel,speculative}.py), so a vLLM command line maps to them one
// by one. Plain types: the checks of their combinations are in reference/profiles/compatibility.h,
// the limits of single values in reference/plan/limits.h.
#pragma once

#include <cstdint>
#include <string>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// One rank of context, tensor and pipeline parallelism, as plain numbers. The reference
// (reference/plan/rank_plan.h) and a backend each derive from them which tokens and which part of
// the model's cache the rank holds, independently of each other.

// A context parallel rank. A request's tokens are sharded over the ranks in runs of `interleave`:
// with num_ranks 2 and interleave 1, rank 0 holds tokens 0, 2, 4, ...
struct ContextRank {
  std::int32_t num_ranks = 1;
  std::int32_t rank = 0;
  std::int32_t interleave = 1;  // tokens; divides the block size (cp_kv_cache_interleave_size)
  bool operator==(const ContextRank&) const = default;
};

// A rank of the model: its tensor parallel share of each layer, and its pipeline stage.
struct ParallelRank {
  std::int32_t tp_size = 1;  // tensor_parallel_size: ranks that share the heads of a layer
  std::int32_t tp_rank = 0;
  std::int32_t pp_size = 1;  // pipeline_parallel_size: stages that share the layers
  std::int32_t pp_rank = 0;
  // decode_context_parallel_size: tensor parallel ranks that shard tokens among each other and
  // compute the same query heads. REQUIRES: it divides tp_size.
  std::int32_t dcp_size = 1;

  // True if the rank holds every head of every layer.
  bool is_whole() const { return tp_size == 1 && pp_size == 1; }
  bool operator==(const ParallelRank&) const = default;
};

// How a draft model with its own cache runs after the model's layers: plain values for the model
// and for backends. Rule (24) of sim/protocol/backend.h defines them.
//
// L is the last accepted position of a request's step: the tokens after it were drafts and have
// been rejected. The token at L + 1 was sampled in this step, or is the next one of the prompt.

// The tokens that a draft model's row at position p depends on. A prefix hit is valid for the draft
// model only if its hash covers all of them (num_hash_lookahead_tokens).
enum class DraftShape : std::uint8_t {
  none,        // no draft model, or its rows are not modelled
  one_by_one,  // EAGLE, MTP of one module: tokens up to p + 1. A pass over the step's tokens, then
               // one for each further draft, at L + 1, L + 2 and so on
  standalone,  // a draft model: tokens up to p. The same passes, each a position further
  modules,     // MTP of several modules: module m depends on tokens up to p + 1 + m. Each module
               // runs over the step's tokens, and over earlier ones whose rows used rejected drafts
};

// vLLM's model runner that runs the draft model: V1 (vllm/v1/spec_decode/llm_base_proposer.py) or
// V2 (vllm/v1/worker/gpu/spec_decode). They differ after chunks of a prompt, after rejected drafts
// and near max_model_len.
enum class DraftRunner : std::uint8_t { unknown, first, second };

// The draft model of a run, as the memory model and the backends need it. The default describes a
// run without one.
struct DrafterConfig {
  DraftShape shape = DraftShape::none;
  DraftRunner runner = DraftRunner::unknown;
  std::int32_t num_drafts = 0;     // proposed per step; the draft model runs that many passes
  std::int32_t max_model_len = 0;  // tokens; drafts past it are written at the last position
  bool operator==(const DrafterConfig&) const = default;
};

enum class SchedulingPolicy : std::uint8_t { fcfs, priority };
// Source of the drafts. none: no drafts. ngram: drafts need no slots. draft_model: lookahead slots.
// eagle (also MTP): lookahead slots, and a hit must leave the draft model the token after it
// (EngineProfile::eagle_hits).
enum class SpecMethod : std::uint8_t { none, ngram, draft_model, eagle };
// The function that makes block hashes. `content` is the model's own 128-bit chain: the same
// decisions at a fraction of the cost. The other two equal vLLM's bit for bit; cache events need
// them.
enum class HashAlgorithm : std::uint8_t { content, sha256_cbor, xxhash_cbor };

// Values that mean "not set": every state and window stays in the prefix cache; the engine derives
// the lookahead.
inline constexpr std::int32_t kDenseRetention = -1;
inline constexpr std::int32_t kEngineHashLookahead = -1;

// The configuration of one engine. Token counts are per step (max_num_batched_tokens), per request
// (max_model_len), or per block; 0 means "derived" only where the field's comment states it.
struct EngineConfig {
  std::string engine = "vllm-0.33.0";  // profile name (engine_profile.h)
  std::int32_t max_num_seqs = 256;
  std::int32_t max_num_batched_tokens = 8192;
  std::int32_t max_model_len = 32768;
  std::int32_t block_size = 16;       // tokens; the cache configuration's. Groups have their own
  std::int32_t mamba_block_size = 0;  // tokens; 0: from the groups
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool async_scheduling = false;
  bool scheduler_reserve_full_isl = true;
  std::int32_t long_prefill_token_threshold = 0;  // tokens per chunk; 0: no limit
  SchedulingPolicy policy = SchedulingPolicy::fcfs;
  MambaCacheMode mamba_cache_mode = MambaCacheMode::none;
  std::int32_t num_spec_tokens = 0;
  SpecMethod spec_method = SpecMethod::none;
  std::int32_t dcp = 1;  // decode context parallel ranks
  std::int32_t pcp = 1;  // prefill context parallel ranks
  HashAlgorithm hash_algorithm = HashAlgorithm::content;
  // Tokens after a block that its hash also covers. Not an option of vLLM: the engine core derives
  // it, as hash_lookahead_of() does (engine_profile.h) unless this field states it. A stated value
  // must equal the engine's (resolve_block_sizes).
  std::int32_t num_hash_lookahead_tokens = kEngineHashLookahead;
  // Tokens between the states and windows that stay findable; 0: only where a prompt or a shared
  // prefix ends. REQUIRES: kDenseRetention, 0, or a multiple of the scheduler's block size (vLLM
  // 0.33.0, v1/core/kv_cache_coordinator.py, _validate_prefix_cache_retention_interval()).
  // Recordings were made without the option; vllm serve passes 0 since it exists.
  std::int32_t prefix_cache_retention_interval = kDenseRetention;
  // Tokens after a chunk that the draft model reads: one per MTP module. A prefill chunk does not
  // end within this distance of the prompt's end, and a hash covers this many tokens after its
  // block.
  std::int32_t num_prefill_lookahead_tokens = 1;
  std::int32_t prefix_match_unit = 0;  // tokens per block hash; 0: from the groups
  // With cross attention groups: rows that the encoder computes per step, and rows that its cache
  // holds. 0: max_num_batched_tokens.
  std::int32_t encoder_compute_budget = 0;
  std::int32_t encoder_cache_size = 0;
  // Blocks of the host pool, null block included; 0: no host pool. Not an option of vLLM, which
  // derives it from the pool's size in bytes.
  std::int64_t host_pool_num_blocks = 0;
  bool operator==(const EngineConfig&) const = default;
};

// Slots that a running request gets past its tokens, for drafts that the draft model also stores.
// N-gram drafts have rows only in the model's own cache, within the scheduled tokens.
constexpr std::int32_t num_lookahead_tokens(const EngineConfig& engine) {
  const bool drafts_need_slots =
      engine.spec_method == SpecMethod::eagle || engine.spec_method == SpecMethod::draft_model;
  return drafts_need_slots ? engine.num_spec_tokens : 0;
}

// Rows of an encoder that one step can compute, and therefore the maximum per request.
constexpr std::int32_t max_encoder_rows(const EngineConfig& engine) {
  return engine.encoder_compute_budget > 0 ? engine.encoder_compute_budget
                                           : engine.max_num_batched_tokens;
}

}  // namespace lockstep
