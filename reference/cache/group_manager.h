// One manager per KV cache group: how many blocks a request needs, which of them it may free, and
// how much of a prompt the prefix cache holds. The cache kinds differ in exactly these three.
// Source of the rules: vllm/v1/core/single_type_kv_cache_manager.py.
//
// Invariants
// (1) A request's blocks are in table order. Entry i covers its tokens [i * block_size, (i + 1) *
//     block_size), or is the null block. State groups in mode align also use entries for
//     speculative blocks (group_managers.h).
// (2) Every non-null entry is one reference in the pool.
// (3) num_blocks_to_allocate() returns at least what the allocation of the same demand takes, hits
//     in the free queue included: an allocation that has started cannot fail. The exception is a
//     state group with a load, which the coordinator counts itself (has_room_behind_load()).
// (4) num_cached_blocks entries of a table were offered to the prefix cache. It is -1 until the
//     request has its hit.
//
// Not checked here: whether the pool has the blocks, and whether hits of several groups agree
// (kv_cache_coordinator.h).
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

// Checkpoints: a prefill may export a state from inside its last chunk, so that a resend of the
// prompt finds it. The chunk then need not end there. Source of the rules:
// vllm/v1/kv_cache_interface.py (get_mamba_prefill_checkpoint_position,
// is_mamba_prefill_checkpoint_valid).

// The last position in a prefix of num_tokens tokens at which a hit can end: a multiple of
// `alignment`, followed by one token for the logits, or by as many tokens as its hash covers. EAGLE
// that drops a block of each hit needs no token after it, but ends one block earlier. Example with
// alignment 16: 48 tokens give 32, 49 give 48; if EAGLE drops a block, 48 give 32.
constexpr std::int32_t prefill_checkpoint_position(std::int32_t num_tokens, std::int32_t alignment,
                                                   bool drops_last_block,
                                                   std::int32_t num_hash_lookahead_tokens) {
  const std::int32_t proven =
      drops_last_block ? num_tokens : num_tokens - std::max(1, num_hash_lookahead_tokens);
  const std::int32_t last = std::max(proven, 0) / alignment * alignment;
  return drops_last_block ? std::max(last - alignment, 0) : last;
}

// The positions at which an engine's hits end, and at which it therefore keeps states.
struct HitEnd {
  bool drops_last_block = false;  // EAGLE without lookahead hashes
  std::int32_t num_hash_lookahead_tokens = 0;
  // Releases before 0.32.0 count boundaries up to the prompt's length (at_length), later ones up to
  // the last position that a resend can hit.
  PromptEnds prompt_ends = PromptEnds::before_last_token;
  bool parts_leave_dropped_hash = true;

  // prefill_checkpoint_position() with the engine's rule.
  constexpr std::int32_t last_position(std::int32_t num_tokens, std::int32_t alignment) const {
    return prefill_checkpoint_position(num_tokens, alignment, drops_last_block,
                                       num_hash_lookahead_tokens);
  }
  // The position of the last state in num_tokens tokens that fills a block.
  constexpr std::int32_t last_state(std::int32_t num_tokens, std::int32_t block_size) const {
    return prompt_ends == PromptEnds::before_last_token
               ? last_position(num_tokens, block_size)
               : last_boundary(num_tokens, block_size, drops_last_block);
  }
  // The same for a part of a block, which ends at a hash.
  constexpr std::int32_t last_part(std::int32_t num_tokens, std::int32_t hash_block_size) const {
    return prompt_ends == PromptEnds::before_last_token
               ? last_position(num_tokens, hash_block_size)
               : last_boundary(num_tokens, hash_block_size,
                               drops_last_block && parts_leave_dropped_hash);
  }

 private:
  // The last multiple of `unit`, one unit earlier if `leaves_one`, at least 0.
  static constexpr std::int32_t last_boundary(std::int32_t num_tokens, std::int32_t unit,
                                              bool leaves_one) {
    return std::max(num_tokens / unit * unit - (leaves_one ? unit : 0), 0);
  }
};
// The rule of an engine. The lookahead of hashes replaces EAGLE's drop, so at most one of the two
// is set.
inline HitEnd hit_end_of(const EngineConfig& config, const EngineProfile& profile) {
  const std::int32_t lookahead = hash_lookahead_of(config, profile);
  return {config.spec_method == SpecMethod::eagle && lookahead == 0, lookahead, profile.prompt_ends,
          profile.tails_leave_eagles_block};
}

// A prefill chunk [begin, end), and the state that it could export at `position`. All in tokens.
struct CheckpointQuery {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t position = 0;
  std::int32_t hash_block_size = 1;
  std::int32_t state_block_size = 1;
  // Of the position relative to `begin`, as the kernel needs it; 0: the kernel exports nothing.
  std::int32_t alignment = 0;
};

// True if the chunk's kernel can export the state at `position` into the table's second last entry.
// That entry must come after the one that holds the state before the chunk (first_entry), or the
// export would overwrite it.
constexpr bool exports_checkpoint(const CheckpointQuery& chunk) {
  if (chunk.alignment == 0) return false;
  const std::int32_t size = chunk.state_block_size;
  const std::int32_t first_entry = chunk.begin == 0 ? -1 : (chunk.begin - 1) / size;
  const std::int32_t entry = (chunk.end + size - 1) / size - 2;
  return chunk.begin % chunk.hash_block_size == 0 && entry > first_entry &&
         chunk.begin + chunk.hash_block_size <= chunk.position && chunk.begin < chunk.position &&
         chunk.position < chunk.end && (chunk.position - chunk.begin) % chunk.alignment == 0;
}

// The demand of one allocation. All in tokens, counted from the request's start.
struct SlotDemand {
  std::int32_t num_tokens = 0;                 // that need a slot in the end, lookahead included
  std::int32_t num_tokens_main_model = 0;      // the same without lookahead
  std::int32_t total_computed_tokens = 0;      // computed before, hits and loads included
  bool apply_admission_cap = false;            // true if the demand is the whole prompt
  std::int32_t num_local_computed_tokens = 0;  // of these, not loaded by a connector
  std::int32_t prefill_end = 0;  // chunks that end before it export no state; 0: all may
};

// One search of the prefix cache for groups of equal specs.
struct HitQuery {
  const BlockHashChain& hashes;
  std::int32_t max_length;  // tokens; a hit is not longer
  bool drop_last_block;     // EAGLE recomputes the last block of a hit
};

// The base class implements full attention's rules without a prefix search. Subclasses change what
// a request keeps, what it needs and what a hit is.
class GroupManager {
 public:
  // REQUIRES: config.engine names a profile.
  GroupManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
               BlockSizes sizes, BlockPool& pool);
  virtual ~GroupManager() = default;
  // The manager for the spec's kind (with_manager_of() in group_managers.h).
  static std::unique_ptr<GroupManager> create(const KVCacheSpec& spec, std::int32_t group,
                                              const EngineConfig& config, BlockSizes sizes,
                                              BlockPool& pool);

  const KVCacheSpec& spec() const { return spec_; }
  // Tokens that one table entry covers, over all context parallel ranks: block_size * dcp (* pcp in
  // releases that shard by it).
  std::int32_t block_size() const { return block_size_; }

  // Free blocks that the demand takes from the pool, hits that are in the free queue included. More
  // blocks than the pool owns: the request cannot run in this step. `new_computed_blocks`: the
  // group's hit, empty for a running request.
  virtual std::int64_t num_blocks_to_allocate(const Request& request,
                                              std::span<const BlockId> new_computed_blocks,
                                              const SlotDemand& demand) const;
  // Decides before the count what the next allocation does in addition to adding blocks: state
  // groups choose their checkpoint.
  virtual void prepare_allocation(Request&, const SlotDemand&) const {}
  // Adds a prefix hit to the request's table, one reference per block. Entries that attention after
  // `num_computed_tokens` (loads included) does not read become the null block. REQUIRES: an empty
  // table; or a running request and no hit.
  virtual void take_computed_blocks(Request& request, std::span<const BlockId> new_computed_blocks,
                                    std::int32_t num_computed_tokens);
  // Marks the last block of the hit as shared: the hit ends inside it, so the next allocation gives
  // the request a copy (copy on write). REQUIRES: take_computed_blocks() has added that block.
  void share_part(Request& request, std::int32_t num_local_computed_tokens);
  // True if attention past `num_computed_tokens` reads blocks that the request has freed. Happens
  // only when a failed load moves num_computed_tokens back.
  bool lacks_window(const Request& request, std::int32_t num_computed_tokens) const;
  // Reports the length of the hit (possibly 0) to groups that keep none of its blocks. Called once
  // per admitted request, after all earlier groups took their own hit.
  virtual void take_local_tokens(Request&, std::int32_t) {}
  // Allocates blocks after the hit for a connector's load of tokens up to num_computed_tokens.
  // `zeroes`: the worker zeroes them first, where it zeroes this group's blocks.
  virtual void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                                      bool zeroes);
  // Grows the table to the demand. Returns the index of the first entry that is new to the worker.
  // REQUIRES: the pool has num_blocks_to_allocate() free blocks.
  virtual std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand);
  // Frees the blocks that attention past `num_computed_tokens` no longer reads.
  virtual void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens);
  // Publishes the request's full blocks within its first num_tokens tokens, and ends of its prompt
  // inside a block. REQUIRES: the current step computes these tokens at the latest.
  virtual void cache_blocks(Request& request, std::int32_t num_tokens);
  // Forgets what only this step's hits had to avoid.
  virtual void begin_step() {}
  // Frees the request's blocks, its tail first, and clears its table.
  virtual void free(Request& request);
  // Detaches the request's blocks, in table order, without freeing them.
  virtual std::vector<BlockId> pop(Request& request);

  // The longest hit of all `groups` together (equal specs, this manager's group among them), in
  // tokens. hits[i] receives the table of groups[i]; all have the same length, with null blocks
  // where the kind needs no block. Changes nothing: the caller takes the hit or drops it.
  virtual std::int32_t find_longest_cache_hit(
      const HitQuery& query, std::span<const std::int32_t> groups,
      std::span<std::vector<BlockId>* const> hits) const = 0;

  // Narrows `rest` to the range in which nothing happens to the request's table of this group
  // (TableRest). REQUIRES: everything due for `num_left_behind` tokens has been done.
  virtual void narrow(const Request& request, std::int32_t num_left_behind, TableRest& rest) const;

  // Blocks at the head of the table that all running requests share, for cascade attention; 0 for
  // kinds that do not support it.
  virtual std::int32_t num_common_prefix_blocks(const Request&, std::int32_t) const { return 0; }

  // From now on the worker zeroes this group's new blocks.
  void record_new_blocks() { records_new_blocks_ = true; }
  // Has the worker zero the request's blocks from this token onward, if it zeroes this group's.
  // REQUIRES: the token begins a block.
  void record_again(const Request& request, std::int32_t first_token);
  // True if EAGLE drops the last block of this group's hits. False for groups without draft layers
  // if another group has some.
  bool drops_last_block() const { return drops_last_block_; }
  void keep_last_block() { drops_last_block_ = false; }
  // Appends the blocks to zero since the last call, in allocation order.
  void take_new_block_ids(std::vector<BlockId>& out);
  // Appends the copies that the worker makes before the step, in order. Both blocks of a copy carry
  // one extra reference, which the caller releases after the step.
  void take_copies(std::vector<KVCacheBlockCopy>& out);

 protected:
  // Tokens at the head of a request that attention no longer reads once num_computed_tokens are
  // computed. Rounded down to blocks by the callers.
  virtual std::int32_t num_skipped_tokens(std::int32_t) const { return 0; }
  // The token count above `num_left_behind` at which the next block is freed; kNever: none. Not
  // called for state groups, which are never at rest.
  virtual std::int32_t retires_at(std::int32_t) const { return kNever; }
  // True if some later request's hit can need full block `index`. Called only if
  // publishes_sparsely_.
  virtual bool is_reachable(const Request&, std::int32_t) const { return true; }
  // True if the full block `i` is offered to the prefix cache: it has content, and a hit can need
  // it.
  bool is_published(const Request& request, std::int32_t i) const;  // once it is full
  static constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
  // Publishes blocks [num_cached_blocks, num_full) that is_published() accepts, and reports them as
  // one event.
  void cache_full_blocks(Request& request, std::int32_t num_full);
  void announce_stored(const Request& request, std::int32_t first, std::int32_t num_full);
  // Publishes the part of a block in which the prompt's last hash ends.
  void cache_prompt_tail(const Request& request, std::int32_t num_tokens);
  // Publishes the first part of `block`, the end of a prefix of `num_tokens` tokens. False: it was
  // published. REQUIRES: num_tokens is a multiple of the hash block.
  bool cache_part(const Request& request, BlockId block, std::int32_t num_tokens, bool replaces);
  // Positions, in addition to the regular ones, at which a later request can resume: after a resend
  // of the prompt, after a continuation of it, at the end of a shared prefix, and one block before
  // that. Positions may coincide (vLLM 0.33.0, v1/core/kv_cache_coordinator.py,
  // replay_boundaries()).
  std::array<std::int32_t, 4> replay_boundaries(const Request& request) const;
  // Replaces the shared block that the request's hit ends in by its copy.
  void replace_part(GroupBlocks& held, BlockId copy);
  // True if a hit of `num_tokens` ends inside the last of these blocks.
  bool hits_part(std::span<const BlockId> new_computed_blocks, std::int32_t num_tokens) const {
    return sizes_.hits_parts_of_blocks && !new_computed_blocks.empty() &&
           num_tokens % block_size_ != 0;
  }
  // Frees table entries end - 1, end - 2, ... until the first null entry.
  void free_head(GroupBlocks& held, std::int64_t end) { free_range(held, 0, end); }
  // The same, but not before entry `begin`.
  void free_range(GroupBlocks& held, std::int64_t begin, std::int64_t end);

  // Appends new blocks until the table has num_blocks entries; a longer table stays as it is.
  void grow(std::vector<BlockId>& table, std::size_t num_blocks, bool zeroes = true);

  GroupBlocks& of(Request& request) const { return request.groups[group_]; }
  const GroupBlocks& of(const Request& request) const { return request.groups[group_]; }
  // Finds the cached block of every group for table entry `index`. False: some group misses it.
  bool find_block(const HitQuery& query, std::span<const std::int32_t> groups, std::int64_t index,
                  std::vector<BlockId>& found) const {
    return find_key(query.hashes[(index + 1) * (block_size_ / sizes_.hash_block_size) - 1], groups,
                    found);
  }
  // The same by key; found[i] belongs to groups[i]. False leaves `found` incomplete.
  bool find_key(const BlockKey& key, std::span<const std::int32_t> groups,
                std::vector<BlockId>& found) const;
  // The maximum number of blocks in a hit of the query: limited by its length and by the hashes
  // that exist.
  std::int64_t max_num_blocks(const HitQuery& query) const {
    return std::min<std::int64_t>(
        query.max_length / block_size_,
        std::ssize(query.hashes.keys()) / (block_size_ / sizes_.hash_block_size));
  }
  // Blocks that are in the free queue: a hit on one of them takes a free block.
  std::int64_t num_evictable(std::span<const BlockId> blocks) const;
  // Tokens of a hit that consists of full blocks.
  std::int32_t length_of(std::span<std::vector<BlockId>* const> hits) const {
    return static_cast<std::int32_t>(hits[0]->size()) * block_size_;
  }

  const EngineProfile& profile_;
  KVCacheSpec spec_;
  std::int32_t group_;
  std::int32_t block_size_;
  BlockSizes sizes_;
  HitEnd hit_end_;
  std::int32_t alignment_;       // tokens; hits of all groups end at multiples of it
  std::int32_t mask_alignment_;  // tokens; the same for the blocks worth publishing
  std::int32_t retention_interval_;
  BlockPool& pool_;
  // Blocks that one request holds at most, for kinds that free blocks while it runs; absent: no
  // bound. Admission of a whole prompt counts no more than this.
  std::optional<std::int64_t> admission_cap_;
  bool publishes_sparsely_ = false;  // is_reachable() may return false
  bool caches_prompt_tails_ = false;
  bool records_new_blocks_ = false;
  bool drops_last_block_;
  std::vector<BlockId> new_block_ids_;
  std::vector<BlockId> freed_;  // scratch of one call
  std::vector<KVCacheBlockCopy> copies_;
};

// a / b rounded up. REQUIRES: a >= 0, b > 0, a + b - 1 fits 32 bits.
constexpr std::int32_t ceil_div(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

}  // namespace lockstep
