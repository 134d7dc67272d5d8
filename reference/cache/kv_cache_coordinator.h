// All KV cache groups of one engine: how much of a request the prefix cache holds in every group at
// once, and whether the pool has the blocks of a step. Source of the rules:
// vllm/v1/core/kv_cache_coordinator.py and kv_cache_manager.py.
//
// Invariants
// (1) The hit of find_longest_cache_hit() covers the same tokens in every group that takes part in
//     prefix caching, at most all tokens except the last.
// (2) allocate_slots() changes no table unless every group gets its blocks. It frees blocks that
//     attention no longer reads in either case.
// (3) free() releases every reference that the request holds, in all groups.
// (4) All groups on the device share one pool. A group of host pages has its own.
//
// Not checked here: the token budget and the order of requests (reference/schedule/).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reference/cache/block_pool.h"
#include "reference/cache/group_manager.h"
#include "reference/cache/page_coordinator.h"
#include "reference/cache/request.h"
#include "reference/plan/block_sizes.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// Creates the parts of a cache. Planted defects (reference/defects/) derive from it and replace one
// part; the rest of the engine stays the same.

class BlockPool;
class GroupManager;
class HostPageCoordinator;
class KVCacheCoordinator;

struct CacheParts {
  virtual ~CacheParts() = default;
  // The device pool, and the host pool where there is one.
  virtual std::unique_ptr<BlockPool> pool(std::int64_t num_blocks, bool enable_caching,
                                          FreedBlocks freed_blocks) const;
  // One per group, in the plan's order; not called for groups of host pages.
  virtual std::unique_ptr<GroupManager> manager(const KVCacheSpec& spec, std::int32_t group,
                                                const EngineConfig& config, BlockSizes sizes,
                                                BlockPool& pool) const;
  // Called for the source group. REQUIRES: `device` outlives the result.
  virtual std::unique_ptr<HostPageCoordinator> host_pages(const EngineConfig& config,
                                                          std::unique_ptr<BlockPool> host,
                                                          BlockPool& device) const;
  virtual std::unique_ptr<KVCacheCoordinator> coordinator(const EngineConfig& config,
                                                          std::span<const KVCacheGroupSpec> groups,
                                                          BlockSizes sizes,
                                                          std::int64_t num_blocks) const;
};

// A prefix hit: the table of every group, and the tokens that it covers.
struct PrefixHit {
  std::vector<std::vector<BlockId>> blocks;  // per group; null where the group needs no block
  std::int32_t num_tokens = 0;
  // Of these, tokens to compute again for groups that do not cache their window (bounded replay).
  std::int32_t num_replayed_tokens = 0;
  // Tokens after the hit that a KV connector loads into new blocks. A load that takes longer than
  // the step is published when it has completed.
  std::int32_t num_external_tokens = 0;
  bool loads_async = false;
  std::int64_t num_blocks_left_free = 0;  // blocks that a load leaves free for others
  // End of a longer prefix that some groups hold and others do not; 0: none. Sparse retention keeps
  // a state there, so that the next request with this prefix hits it.
  std::int32_t shared_prefix_boundary = 0;

  bool any_blocks() const;
  // True if taking the hit adds entries to a table.
  bool fills_tables() const { return num_external_tokens > 0 || any_blocks(); }
  // Empties the hit and keeps its memory.
  void clear(std::size_t num_groups);
};

// Blocks detached from a request, in table order: of the device pool, and of the host pool.
struct TakenBlocks {
  std::vector<BlockId> device{};
  std::vector<BlockId> host{};
};

// One coordinator for every combination of groups. vLLM has three classes: without prefix caching,
// with one group, and hybrid.
class KVCacheCoordinator {
 public:
  KVCacheCoordinator(const EngineConfig& config, std::span<const KVCacheGroupSpec> groups,
                     BlockSizes block_sizes, std::int64_t num_blocks,
                     const CacheParts& parts = CacheParts{});
  virtual ~KVCacheCoordinator() = default;

  // Forgets what only the previous step's hits had to avoid.
  void begin_step() {
    for (const auto& manager : managers_) manager->begin_step();
  }

  BlockPool& pool() { return *pool_; }
  const BlockPool& pool() const { return *pool_; }
  // Null: the engine has no groups of host pages.
  HostPageCoordinator* host_pages() { return host_pages_.get(); }
  // Resets the prefix cache of every pool. False: some block is in use; another pool may have been
  // reset.
  bool reset_prefix_cache();
  std::int32_t num_groups() const { return static_cast<std::int32_t>(managers_.size()); }

  // True if a hit can find the block: as a whole, or as a part where hits may end inside blocks.
  bool can_hit(BlockId block) const {
    if (!pool_->is_cached(block)) return false;
    const PrefixCache& cache = pool_->cache();
    return block_sizes_.hits_parts_of_blocks ||
           cache.num_tokens_of(block) % managers_[cache.group_of(block)]->block_size() == 0;
  }

  // Looks up how much of the request the prefix cache holds, at most all tokens except the last:
  // sampling needs its logits. Adds no reference. `hit` keeps its memory between calls.
  void find_longest_cache_hit(const Request& request, PrefixHit& hit) const;
  // Looks up every group's own hit and counts attention's, for a connector that can load states.
  // True: some group's hit is shorter, so the connector must bring its states. False: all agree.
  // Absent: some group's hit is longer, or the engine has no such groups; the caller then uses
  // find_longest_cache_hit() (vLLM 0.33.0, v1/core/kv_cache_manager.py,
  // get_computed_blocks_for_connector()).
  std::optional<bool> find_hit_of_attention(const Request& request, PrefixHit& hit) const;
  // Cuts the hit to `num_tokens`, which fill whole blocks in every group. State groups may have a
  // shorter table.
  void cut_hit(PrefixHit& hit, std::int32_t num_tokens) const;
  // Trims the table of the page source to the blocks that the hit and the load after it cover.
  // find_hybrid() leaves it longer: the host still has pages that the device has lost, and a load
  // may use them.
  void cut_source(PrefixHit& hit) const;

  // Gives the request slots for num_new_tokens more tokens and for lookahead, and adds `hit` to its
  // tables (null: a running request). num_new_tokens 0: every token of the step is a replayed one
  // of the hit, or the load is asynchronous. False: the pool lacks the blocks, and no table
  // changed. first_new[g] receives the index of the first table entry of group g that is new to the
  // worker. `full_sequence_must_fit`: also requires blocks for the whole request, which limits
  // admission (scheduler_reserve_full_isl).
  virtual bool allocate_slots(Request& request, std::int32_t num_new_tokens,
                              std::int32_t num_lookahead_tokens, const PrefixHit* hit,
                              bool full_sequence_must_fit, std::span<std::size_t> first_new);

  // Blocks that the request needs for all its tokens and `num_slots_behind` more, after taking
  // `hit` (null: none). `is_capped`: subtracts what windows free meanwhile.
  std::int64_t num_blocks_to_finish(const Request& request, const PrefixHit* hit,
                                    std::int32_t num_slots_behind, bool is_capped) const;
  // Blocks of `num_tokens` tokens in all groups except state groups.
  std::int64_t num_attention_blocks(std::int32_t num_tokens) const;

  // True if allocate_slots() would do nothing for a running request: it has the slots, and no block
  // of any group is freed or becomes full. Most decode steps are at rest (14 of 16 with blocks of
  // 16 tokens and a sliding window); they cost three comparisons instead of four calls per group.
  bool is_at_rest(const Request& request, std::int32_t num_new_tokens,
                  std::int32_t num_lookahead_tokens) const;

  // Publishes the blocks that num_computed_tokens tokens fill.
  void cache_blocks(Request& request, std::int32_t num_computed_tokens);
  // Frees the blocks that attention past num_computed_tokens no longer reads.
  void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens);
  void free(Request& request);
  // Detaches the request's blocks, group by group in table order, without freeing them. The caller
  // holds their references.
  TakenBlocks take_table(Request& request);
  // Has the worker zero the request's blocks from this token onward, in groups whose new blocks it
  // zeroes: a failed load left them unwritten.
  void record_again(const Request& request, std::int32_t first_token);
  // True if some group has freed blocks that attention past num_computed_tokens reads.
  bool lacks_window(const Request& request, std::int32_t num_computed_tokens) const;
  // Unpublishes the request's blocks from num_computed_tokens onward, including a block that is
  // only partly past it.
  void withdraw(const Request& request, std::int32_t num_computed_tokens);

  // Per group, the blocks at the head that all `num_requests` requests with blocks share; `request`
  // is any one of them.
  void num_common_prefix_blocks(const Request& request, std::int32_t num_requests,
                                std::vector<std::int32_t>& out) const;
  // Appends the blocks to zero in this step, group by group.
  void take_new_block_ids(std::vector<BlockId>& out);
  // Appends the block copies that the step makes first. Each block in `held` carries one extra
  // reference until the caller releases it.
  void take_copies(std::vector<KVCacheBlockCopy>& out, std::vector<BlockId>& held);

 protected:
  // KV cache groups of equal specs, looked up together: a hit must be in all of them.
  struct AttentionGroup {
    std::vector<std::int32_t> groups;
    bool is_full = false;
    bool grows = true;  // the search, by the block that EAGLE drops
    // True if EAGLE drops a block of hits in these groups.
    bool drops_last_block = false;
  };
  // The longest possible hit: the last token must be computed for its logits.
  virtual std::int32_t max_hit_tokens(const Request& request) const {
    return request.num_tokens() - 1;
  }
  // Cuts full attention's tables to the common length.
  virtual void cut_full_groups(PrefixHit& hit) const;
  // Adds one group's part of the hit to the request's table.
  virtual void take_hit_of_group(std::size_t group, Request& request, const PrefixHit& hit,
                                 const SlotDemand& demand);
  // Tokens that retirement may count on: all computed ones, or those whose output has arrived
  // (RetireBasis).
  virtual std::int32_t num_left_behind(const Request& request,
                                       std::int32_t num_computed_tokens) const;

  std::unique_ptr<BlockPool> pool_;
  std::vector<std::unique_ptr<GroupManager>> managers_;
  std::vector<AttentionGroup> attention_groups_;  // full attention first

 private:
  // Of a request that enters, computed tokens that its first step does not compute again.
  std::int32_t num_not_computed(const Request& request, std::int32_t num_computed_tokens) const;
  // Records until when the request is at rest. State groups and host pages never rest: each
  // allocation also decides which states are freed, or plans transfers.
  void note_rest(Request& request, std::int32_t num_left_behind) const;
  // The manager of group number `group`; creates the host pages with their source.
  std::unique_ptr<GroupManager> make_manager(const KVCacheGroupSpec& spec, std::int32_t group,
                                             const CacheParts& parts);
  bool is_source(std::int32_t group) const { return group == source_group_; }
  // Decides for each AttentionGroup whether EAGLE drops a block of its hits.
  void split_eagle_groups(std::span<const KVCacheGroupSpec> groups);
  // Allocates the blocks that a load fills, in one group.
  void allocate_load(Request& request, const PrefixHit& hit, GroupManager& manager) const;
  void take_hit(Request& request, const PrefixHit& hit, const SlotDemand& demand);
  std::int32_t num_hashed_tokens(const Request& request) const {
    return static_cast<std::int32_t>(request.hashes.size()) * block_sizes_.hash_block_size;
  }
  // Where the group's search for a hit of `length` tokens ends, at most at `end`, so that EAGLE's
  // drop leads back to that length.
  std::int32_t end_of_drop(const AttentionGroup& attention, std::int32_t length,
                           std::int32_t end) const;
  // The common hit of several groups.
  void find_hybrid(const Request& request, std::int32_t max_length, PrefixHit& hit) const;
  // Counts the end of the hit as tokens to compute again, for bounded replay.
  void replay_window(PrefixHit& hit) const;
  // Tokens at which the request's prefill ends, if only its last chunk exports a state; otherwise
  // 0.
  std::int32_t prefill_end(const Request& request) const;
  // Tokens whose blocks a later hit of this group can use.
  std::int32_t num_cacheable_tokens(std::int32_t num_computed_tokens,
                                    const GroupManager& manager) const;
  // True if the pool also has the second state block that a load with computed tokens after it
  // takes.
  bool has_room_behind_load(const Request& request, const SlotDemand& demand,
                            std::int64_t num_blocks);
  std::int64_t num_blocks_to_allocate(const Request& request, const PrefixHit* hit,
                                      const SlotDemand& demand) const;

  EngineConfig config_;
  std::unique_ptr<HostPageCoordinator> host_pages_;
  std::int32_t source_group_ = -1;  // the page source; -1: none
  const EngineProfile& profile_;
  BlockSizes block_sizes_;
  bool has_states_ = false;
  std::int32_t prefix_replay_tokens_ = 0;  // the window of bounded replay; 0: none
  // Tokens at the end of a request that several MTP modules compute again, so their rows are not
  // final.
  std::int32_t num_reprefillable_tokens_ = 0;
};

}  // namespace lockstep
