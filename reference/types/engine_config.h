// The options of an engine that decide what its scheduler does. Names and defaults are vLLM's
// (vllm/config/{scheduler,cache,parallel,speculative}.py).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

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
  // Blocks of HiSparse's host pool, its null block included; 0: there is none. No option of vLLM:
  // it works them out of the pool's size.
  std::int64_t hisparse_host_num_blocks = 0;
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
