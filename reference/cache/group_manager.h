// One manager per KV cache group: how many blocks a request needs, which of them it may free, and
// how much of a prompt the prefix cache holds. The cache kinds differ in exactly these. Source of
// the rules: vllm/v1/core/single_type_kv_cache_manager.py.
//
// Invariants
// (1) A request's blocks are in table order. Entry i covers its tokens [i * block_size, (i + 1) *
//     block_size), or is the null block.
// (2) Every non-null entry is one reference in the pool.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reference/cache/block_pool.h"
#include "reference/cache/request.h"
#include "reference/plan/block_sizes.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// Where a prefill exports a state from inside its last chunk, so that a resend of the prompt finds
// it: the chunk then need not end there. Source of the rules: vllm/v1/kv_cache_interface.py
// (get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid).

// The last place before the end of num_tokens tokens that a hit can end at: a multiple of
// `alignment`, with a token behind it for the logits, or as many as its hash covers. EAGLE that
// drops a block of each hit proves the tokens itself and needs one block before.
constexpr std::int32_t prefill_checkpoint_position(std::int32_t num_tokens, std::int32_t alignment,
                                                   bool drops_last_block,
                                                   std::int32_t num_hash_lookahead_tokens) {
  const std::int32_t proven =
      drops_last_block ? num_tokens : num_tokens - std::max(1, num_hash_lookahead_tokens);
  const std::int32_t last = std::max(proven, 0) / alignment * alignment;
  return drops_last_block ? std::max(last - alignment, 0) : last;
}

// How an engine's hits end, and where what they resume from is kept.
struct HitEnd {
  bool drops_last_block = false;  // EAGLE without lookahead hashes
  std::int32_t num_hash_lookahead_tokens = 0;
  PromptEnds prompt_ends = PromptEnds::before_last_token;
  bool parts_leave_dropped_hash = true;

  constexpr std::int32_t last_position(std::int32_t num_tokens, std::int32_t alignment) const {
    return prefill_checkpoint_position(num_tokens, alignment, drops_last_block,
                                       num_hash_lookahead_tokens);
  }
  // Of num_tokens tokens, the place of the last state that fills a block.
  constexpr std::int32_t last_state(std::int32_t num_tokens, std::int32_t block_size) const {
    return prompt_ends == PromptEnds::before_last_token
               ? last_position(num_tokens, block_size)
               : last_boundary(num_tokens, block_size, drops_last_block);
  }
  // The same of a part of a block, which ends at a hash.
  constexpr std::int32_t last_part(std::int32_t num_tokens, std::int32_t hash_block_size) const {
    return prompt_ends == PromptEnds::before_last_token
               ? last_position(num_tokens, hash_block_size)
               : last_boundary(num_tokens, hash_block_size,
                               drops_last_block && parts_leave_dropped_hash);
  }

 private:
  static constexpr std::int32_t last_boundary(std::int32_t num_tokens, std::int32_t unit,
                                              bool leaves_one) {
    return std::max(num_tokens / unit * unit - (leaves_one ? unit : 0), 0);
  }
};
inline HitEnd hit_end_of(const EngineConfig& config, const EngineProfile& profile) {
  const std::int32_t lookahead = hash_lookahead_of(config, profile);
  return {config.spec_method == SpecMethod::eagle && lookahead == 0, lookahead, profile.prompt_ends,
          profile.tails_leave_eagles_block};
}

// One chunk, and what can be exported from it. All in tokens.
struct CheckpointQuery {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t position = 0;
  std::int32_t hash_block_size = 1;
  std::int32_t state_block_size = 1;
  // of the position, relative to the start; 0: the kernel exports nothing
  std::int32_t alignment = 0;
};

// True if the kernel of the chunk can export the state at `position` into the table's second last
// entry, which must come after the entry of the chunk's first state.
constexpr bool exports_checkpoint(const CheckpointQuery& chunk) {
  if (chunk.alignment == 0) return false;
  const std::int32_t size = chunk.state_block_size;
  const std::int32_t first_entry = chunk.begin == 0 ? -1 : (chunk.begin - 1) / size;
  const std::int32_t entry = (chunk.end + size - 1) / size - 2;
  return chunk.begin % chunk.hash_block_size == 0 && entry > first_entry &&
         chunk.begin + chunk.hash_block_size <= chunk.position && chunk.begin < chunk.position &&
         chunk.position < chunk.end && (chunk.position - chunk.begin) % chunk.alignment == 0;
}

// What one allocation asks for.
struct SlotDemand {
  std::int32_t num_tokens = 0;             // tokens that need a slot in the end, lookahead included
  std::int32_t num_tokens_main_model = 0;  // the same without lookahead
  std::int32_t total_computed_tokens = 0;  // computed before, prefix hits included
  bool apply_admission_cap = false;        // the question is about the whole prompt
  std::int32_t num_local_computed_tokens = 0;  // of these, computed here
  std::int32_t prefill_end = 0;  // a chunk that ends before it exports no state; 0: all may
};

// One search of the prefix cache for groups of equal specs.
struct HitQuery {
  const BlockHashChain& hashes;
  std::int32_t max_length;  // tokens
  bool drop_last_block;     // EAGLE recomputes the last block of a hit
};

class GroupManager {
 public:
  // REQUIRES: config.engine names a profile.
  GroupManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
               BlockSizes sizes, BlockPool& pool);
  virtual ~GroupManager() = default;
  static std::unique_ptr<GroupManager> create(const KVCacheSpec& spec, std::int32_t group,
                                              const EngineConfig& config, BlockSizes sizes,
                                              BlockPool& pool);

  const KVCacheSpec& spec() const { return spec_; }
  // Tokens that one entry of the block table covers, over all context-parallel ranks.
  std::int32_t block_size() const { return block_size_; }

  // Blocks that the pool must have free; more than it owns when the request cannot be served in
  // this step.
  virtual std::int64_t num_blocks_to_allocate(const Request& request,
                                              std::span<const BlockId> new_computed_blocks,
                                              const SlotDemand& demand) const;
  // Decides what the next allocation does in addition to adding blocks.
  virtual void prepare_allocation(Request&, const SlotDemand&) const {}
  // Takes a prefix hit into the request's table, and nothing that attention after
  // `num_computed_tokens`, those that are loaded included, does not read.
  virtual void take_computed_blocks(Request& request, std::span<const BlockId> new_computed_blocks,
                                    std::int32_t num_computed_tokens);
  // The hit that was taken ends inside its last block, which others share: the next allocation
  // gives the request a copy of it.
  void share_part(Request& request, std::int32_t num_local_computed_tokens);
  // True if attention past `num_computed_tokens` reads blocks that the request has freed.
  bool lacks_window(const Request& request, std::int32_t num_computed_tokens) const;
  // Takes the number of tokens of the hit (possibly 0), for groups that keep none of its blocks.
  // Called once per admitted request, after all previous groups took their own hit.
  virtual void take_local_tokens(Request&, std::int32_t) {}
  // Allocates blocks after the hit for a connector's load. `zeroes`: the worker zeroes them first.
  virtual void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                                      bool zeroes);
  // Grows the table to the demand. Returns the place of the first entry that is new to the worker.
  virtual std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand);
  // Frees the blocks that attention past `num_computed_tokens` no longer reads.
  virtual void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens);
  // Publishes full blocks up to num_tokens.
  virtual void cache_blocks(Request& request, std::int32_t num_tokens);
  virtual void begin_step() {}
  virtual void free(Request& request);
  // Detaches the request's blocks, in table order, without freeing them.
  virtual std::vector<BlockId> pop(Request& request);

  // Longest hit of all `groups` together (equal specs, this manager's among them); hits[i] receives
  // the table of groups[i], all of one length. Returns the tokens of the hit.
  virtual std::int32_t find_longest_cache_hit(
      const HitQuery& query, std::span<const std::int32_t> groups,
      std::span<std::vector<BlockId>* const> hits) const = 0;

  // Narrows `rest` to where nothing happens to the request in this group, after all has been done
  // for it with `num_left_behind`.
  virtual void narrow(const Request& request, std::int32_t num_left_behind, TableRest& rest) const;

  virtual std::int32_t num_common_prefix_blocks(const Request&, std::int32_t) const { return 0; }

  // From now on new blocks are to be zeroed by the worker.
  void record_new_blocks() { records_new_blocks_ = true; }
  // ... and so are these of the request. REQUIRES: the token begins a block.
  void record_again(const Request& request, std::int32_t first_token);
  // Whether EAGLE drops the last block of this group's hits: not where another has the drafter.
  bool drops_last_block() const { return drops_last_block_; }
  void keep_last_block() { drops_last_block_ = false; }
  // Blocks to be zeroed since the last call, in order; appended to `out`.
  void take_new_block_ids(std::vector<BlockId>& out);
  // Copies that the worker makes before the step, since the last call, in order; appended to `out`.
  // Both blocks of each have one holder more.
  void take_copies(std::vector<KVCacheBlockCopy>& out);

 protected:
  // Tokens at the head of a request that attention no longer reads.
  virtual std::int32_t num_skipped_tokens(std::int32_t) const { return 0; }
  // Token count above `num_left_behind` below which no further block is freed. Never called for
  // state groups.
  virtual std::int32_t retires_at(std::int32_t) const { return kNever; }
  // Whether full block `index` is worth publishing: a hit that some later request may have needs
  // it.
  virtual bool is_reachable(const Request&, std::int32_t) const { return true; }
  bool is_published(const Request& request, std::int32_t i) const;  // once it is full
  static constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
  void cache_full_blocks(Request& request, std::int32_t num_full);
  void announce_stored(const Request& request, std::int32_t first, std::int32_t num_full);
  void cache_prompt_tail(const Request& request, std::int32_t num_tokens);
  // Makes the first part of `block` findable, which ends a prefix of `num_tokens`: a multiple of
  // the hash block. False: it was.
  bool cache_part(const Request& request, BlockId block, std::int32_t num_tokens, bool replaces);
  // Positions, besides the regular ones, where a later request can resume: after a resend, after a
  // continuation of this prompt, and at the end of a shared prefix.
  std::array<std::int32_t, 4> replay_boundaries(const Request& request) const;
  // Puts `copy` in the place of the shared block that the request's hit ends in.
  void replace_part(GroupBlocks& held, BlockId copy);
  // True if a hit of `num_tokens` ends inside the last of these blocks.
  bool hits_part(std::span<const BlockId> new_computed_blocks, std::int32_t num_tokens) const {
    return sizes_.hits_parts_of_blocks && !new_computed_blocks.empty() &&
           num_tokens % block_size_ != 0;
  }
  // Frees table entries from the right, from place `end` - 1 on, up to the first null one.
  void free_head(GroupBlocks& held, std::int64_t end) { free_range(held, 0, end); }
  // ... and not before place `begin`.
  void free_range(GroupBlocks& held, std::int64_t begin, std::int64_t end);

  // Appends new blocks until the table has num_blocks entries.
  void grow(std::vector<BlockId>& table, std::size_t num_blocks, bool zeroes = true);

  GroupBlocks& of(Request& request) const { return request.groups[group_]; }
  const GroupBlocks& of(const Request& request) const { return request.groups[group_]; }
  // The cached block of every group for block `index`; false: some group misses.
  bool find_block(const HitQuery& query, std::span<const std::int32_t> groups, std::int64_t index,
                  std::vector<BlockId>& found) const {
    return find_key(query.hashes[(index + 1) * (block_size_ / sizes_.hash_block_size) - 1], groups,
                    found);
  }
  bool find_key(const BlockKey& key, std::span<const std::int32_t> groups,
                std::vector<BlockId>& found) const;
  // Blocks that a hit of the query can have at most.
  std::int64_t max_num_blocks(const HitQuery& query) const {
    return std::min<std::int64_t>(
        query.max_length / block_size_,
        std::ssize(query.hashes.keys()) / (block_size_ / sizes_.hash_block_size));
  }
  std::int64_t num_evictable(std::span<const BlockId> blocks) const;
  // Tokens of full blocks.
  std::int32_t length_of(std::span<std::vector<BlockId>* const> hits) const {
    return static_cast<std::int32_t>(hits[0]->size()) * block_size_;
  }

  const EngineProfile& profile_;
  KVCacheSpec spec_;
  std::int32_t group_;
  std::int32_t block_size_;
  BlockSizes sizes_;
  HitEnd hit_end_;
  std::int32_t alignment_;       // tokens; of hits
  std::int32_t mask_alignment_;  // tokens; of what is worth publishing
  std::int32_t retention_interval_;
  BlockPool& pool_;
  // Blocks one request can hold at once, when that is bounded.
  std::optional<std::int64_t> admission_cap_;
  bool publishes_sparsely_ = false;  // is_reachable() may say no
  bool caches_prompt_tails_ = false;
  bool records_new_blocks_ = false;
  bool drops_last_block_;
  std::vector<BlockId> new_block_ids_;
  std::vector<BlockId> freed_;  // of one call
  std::vector<KVCacheBlockCopy> copies_;
};

constexpr std::int32_t ceil_div(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

}  // namespace lockstep
