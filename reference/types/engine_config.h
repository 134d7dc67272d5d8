// The options of an engine that decide what its scheduler does. Names and defaults are vLLM's
// (vllm/config/{scheduler,cache,parallel,speculative}.py).
#pragma once

#include <cstdint>
#include <string>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// One rank of context, tensor and pipeline parallelism: plain numbers. What a rank keeps of tokens
// (reference/plan/rank_plan.h) and of the model's cache (reference/plan/rank_plan.h) is worked
// out by the reference and by a backend, each for itself.

// A request's tokens are sharded over the ranks in runs of `interleave`.
struct ContextRank {
  std::int32_t num_ranks = 1;
  std::int32_t rank = 0;
  std::int32_t interleave = 1;  // tokens; divides the block size (cp_kv_cache_interleave_size)
  bool operator==(const ContextRank&) const = default;
};

struct ParallelRank {
  std::int32_t tp_size = 1;  // tensor_parallel_size: ranks that share the heads of a layer
  std::int32_t tp_rank = 0;
  std::int32_t pp_size = 1;  // pipeline_parallel_size: stages that share the layers
  std::int32_t pp_rank = 0;
  // decode_context_parallel_size: tensor parallel ranks that shard tokens among each other and
  // answer for the same query heads. REQUIRES: it divides tp_size.
  std::int32_t dcp_size = 1;

  // Whether the rank holds every head of every layer.
  bool is_whole() const { return tp_size == 1 && pp_size == 1; }
  bool operator==(const ParallelRank&) const = default;
};

// How a drafter with a cache of its own runs behind the model's layers: plain words for the model
// and for backends, rule (24) of sim/protocol/backend.h.
//
// Of a request's step, L is the last position that stands: the tokens behind it were drafts and
// have been rejected. The token at L + 1 was just sampled, or is the next one of the prompt.

// What a drafter's row at position p is made of.
enum class DraftShape : std::uint8_t {
  none,        // there is no drafter, or its rows are not followed
  one_by_one,  // EAGLE, MTP of one module: tokens up to p + 1. A pass over the step's tokens, then
               // one for each further draft, at L + 1, L + 2 and so on
  standalone,  // a draft model: tokens up to p. The same passes, each a position further
  modules,     // MTP of several modules: of module m tokens up to p + 1 + m. A pass of each module
               // over the step's tokens, and over those before whose rows rejected drafts went into
};

// vLLM's model runner that runs the draft model: V1 (vllm/v1/spec_decode/llm_base_proposer.py) or
// V2 (vllm/v1/worker/gpu/spec_decode). They differ after chunks of a prompt, after rejected drafts
// and near max_model_len.
enum class DraftRunner : std::uint8_t { unknown, first, second };

struct DrafterConfig {
  DraftShape shape = DraftShape::none;
  DraftRunner runner = DraftRunner::unknown;
  std::int32_t num_drafts = 0;     // that it proposes in a step, and runs as many passes for
  std::int32_t max_model_len = 0;  // tokens: drafts behind it take the last one's place
  bool operator==(const DrafterConfig&) const = default;
};

enum class SchedulingPolicy : std::uint8_t { fcfs, priority };
// none: no drafts. ngram: drafts need no slots. draft_model: lookahead slots. eagle (and MTP):
// lookahead slots, and a hit leaves the drafter the token after it (EngineProfile::eagle_hits).
enum class SpecMethod : std::uint8_t { none, ngram, draft_model, eagle };
// What a block hash is made with. `content` is the model's own 128-bit chain: the same decisions at
// a fraction of the cost; the other two are bit for bit vLLM's, for cache events.
enum class HashAlgorithm : std::uint8_t { content, sha256_cbor, xxhash_cbor };

inline constexpr std::int32_t kDenseRetention = -1;
inline constexpr std::int32_t kEngineHashLookahead = -1;

struct EngineConfig {
  std::string engine = "vllm-0.33.0";  // a profile's name; engine_profile.h
  std::int32_t max_num_seqs = 256;
  std::int32_t max_num_batched_tokens = 8192;
  std::int32_t max_model_len = 32768;
  std::int32_t block_size = 16;       // of the cache configuration; groups carry their own
  std::int32_t mamba_block_size = 0;  // 0: as the groups say
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  bool async_scheduling = false;
  bool scheduler_reserve_full_isl = true;
  std::int32_t long_prefill_token_threshold = 0;  // 0: no limit
  SchedulingPolicy policy = SchedulingPolicy::fcfs;
  MambaCacheMode mamba_cache_mode = MambaCacheMode::none;
  std::int32_t num_spec_tokens = 0;
  SpecMethod spec_method = SpecMethod::none;
  std::int32_t dcp = 1;  // decode context parallel ranks
  std::int32_t pcp = 1;  // prefill context parallel ranks
  HashAlgorithm hash_algorithm = HashAlgorithm::content;
  // Tokens after a block that its hash covers too. No option of vLLM: its engine core works it out,
  // and so does hash_lookahead_of (engine_profile.h) unless it is stated here. A stated one must be
  // what the engine takes (resolve_block_sizes).
  std::int32_t num_hash_lookahead_tokens = kEngineHashLookahead;
  // Tokens between the states and windows that are kept findable; 0: only where a prompt or a
  // shared prefix ends. vllm serve takes 0 since it has the option; its recordings were made
  // without it.
  std::int32_t prefix_cache_retention_interval = kDenseRetention;
  // Tokens after a chunk that the draft model reads: one per module (MTP). A prefill chunk does not
  // end within this distance of the prompt's end, and a hash covers this many tokens after its
  // block.
  std::int32_t num_prefill_lookahead_tokens = 1;
  std::int32_t prefix_match_unit = 0;  // tokens to a block hash; 0: as the groups say
  // With groups of cross attention: rows that the encoder computes in one step, and that its cache
  // holds. 0: max_num_batched_tokens.
  std::int32_t encoder_compute_budget = 0;
  std::int32_t encoder_cache_size = 0;
  // Blocks of the host pool, its null block included; 0: there is none. No option of vLLM:
  // it works them out of the pool's size.
  std::int64_t host_pool_num_blocks = 0;
  bool operator==(const EngineConfig&) const = default;
};

// Slots that a running request is given beyond its tokens, for drafts that the cache holds too.
constexpr std::int32_t num_lookahead_tokens(const EngineConfig& engine) {
  const bool drafts_need_slots =
      engine.spec_method == SpecMethod::eagle || engine.spec_method == SpecMethod::draft_model;
  return drafts_need_slots ? engine.num_spec_tokens : 0;
}

// Rows of an encoder that one step computes, and so those of one request.
constexpr std::int32_t max_encoder_rows(const EngineConfig& engine) {
  return engine.encoder_compute_budget > 0 ? engine.encoder_compute_budget
                                           : engine.max_num_batched_tokens;
}

}  // namespace lockstep
