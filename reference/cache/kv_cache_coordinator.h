// All KV cache groups of one engine together: how much of a request the prefix cache holds in every
// group at once, and whether the pool has the blocks of a step. Source of the rules:
// vllm/v1/core/kv_cache_coordinator.py and kv_cache_manager.py.
//
// Invariants
// (1) The hit of find_longest_cache_hit() covers the same tokens in every group, at most all tokens
//     except the last.
// (2) allocate_slots() changes nothing unless every group gets its blocks.
// (3) free() releases every reference that the request holds, in all groups.
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

// Makes the parts of a cache: the seam where a pool, a manager or a coordinator of another make
// goes in. Planted defects are of another make (reference/defects/).

class BlockPool;
class GroupManager;
class HostPageCoordinator;
class KVCacheCoordinator;

struct CacheParts {
  virtual ~CacheParts() = default;
  virtual std::unique_ptr<BlockPool> pool(std::int64_t num_blocks, bool enable_caching,
                                          FreedBlocks freed_blocks) const;
  virtual std::unique_ptr<GroupManager> manager(const KVCacheSpec& spec, std::int32_t group,
                                                const EngineConfig& config, BlockSizes sizes,
                                                BlockPool& pool) const;
  // REQUIRES: `device` outlives it.
  virtual std::unique_ptr<HostPageCoordinator> host_pages(const EngineConfig& config,
                                                          std::unique_ptr<BlockPool> host,
                                                          BlockPool& device) const;
  virtual std::unique_ptr<KVCacheCoordinator> coordinator(const EngineConfig& config,
                                                          std::span<const KVCacheGroupSpec> groups,
                                                          BlockSizes sizes,
                                                          std::int64_t num_blocks) const;
};

// A prefix hit: the table of every group, and how many tokens it covers.
struct PrefixHit {
  std::vector<std::vector<BlockId>> blocks;  // per group
  std::int32_t num_tokens = 0;
  // Of these, computed again: the window of groups that are not cached (bounded replay).
  std::int32_t num_replayed_tokens = 0;
  // Beyond them, what a KV connector loads: into new blocks, and published only once it is there
  // when the load takes longer than the step.
  std::int32_t num_external_tokens = 0;
  bool loads_async = false;
  std::int64_t num_blocks_left_free = 0;  // blocks that a load leaves free for in-flight requests
  // Where a longer prefix ends that some groups hold and others do not; 0: nowhere.
  std::int32_t shared_prefix_boundary = 0;

  bool any_blocks() const;
  bool fills_tables() const { return num_external_tokens > 0 || any_blocks(); }
  void clear(std::size_t num_groups);
};

// Blocks that were taken from a request, in table order: of the device's pool, and of the host's.
struct TakenBlocks {
  std::vector<BlockId> device{};
  std::vector<BlockId> host{};
};

class KVCacheCoordinator {
 public:
  KVCacheCoordinator(const EngineConfig& config, std::span<const KVCacheGroupSpec> groups,
                     BlockSizes block_sizes, std::int64_t num_blocks,
                     const CacheParts& parts = CacheParts{});
  virtual ~KVCacheCoordinator() = default;

  void begin_step() {
    for (const auto& manager : managers_) manager->begin_step();
  }

  BlockPool& pool() { return *pool_; }
  const BlockPool& pool() const { return *pool_; }
  // Null: the engine has no such groups.
  HostPageCoordinator* host_pages() { return host_pages_.get(); }
  // False: some block of a pool is in use; another pool may have been reset.
  bool reset_prefix_cache();
  std::int32_t num_groups() const { return static_cast<std::int32_t>(managers_.size()); }

  // Whether a hit may find the block: as a whole, or as a part where hits may end inside blocks.
  bool can_hit(BlockId block) const {
    if (!pool_->is_cached(block)) return false;
    const PrefixCache& cache = pool_->cache();
    return block_sizes_.hits_parts_of_blocks ||
           cache.num_tokens_of(block) % managers_[cache.group_of(block)]->block_size() == 0;
  }

  // What the prefix cache holds of the request, at most all tokens but the last (its logits are
  // needed). `hit` keeps its memory from call to call.
  void find_longest_cache_hit(const Request& request, PrefixHit& hit) const;
  // The hit of full attention in an engine with states, for a connector that can load the states:
  // each group's own hit. True: some group has a shorter hit. Absent: another group has a longer
  // hit, or no such pair of groups exists; then all groups must agree.
  std::optional<bool> find_hit_of_attention(const Request& request, PrefixHit& hit) const;
  // Cuts the hit to `num_tokens`, whole blocks of every group; states may have less.
  void cut_hit(PrefixHit& hit, std::int32_t num_tokens) const;
  // Trims the page source to what the hit and the load after it cover together.
  void cut_source(PrefixHit& hit) const;

  // Gives the request slots for num_new_tokens more (none: they are all computed again), and
  // lookahead; takes `hit` (null: a running
  // request) into its tables. False: the pool cannot serve it, and nothing was taken. first_new[g]
  // is the place of the first table entry that is new to the worker.
  virtual bool allocate_slots(Request& request, std::int32_t num_new_tokens,
                              std::int32_t num_lookahead_tokens, const PrefixHit* hit,
                              bool full_sequence_must_fit, std::span<std::size_t> first_new);

  // Blocks that the request still needs for all its tokens and `num_slots_behind` more, after
  // taking `hit` (null: none). `is_capped`: windows free some blocks meanwhile.
  std::int64_t num_blocks_to_finish(const Request& request, const PrefixHit* hit,
                                    std::int32_t num_slots_behind, bool is_capped) const;
  // Blocks of `num_tokens` in all groups except state groups.
  std::int64_t num_attention_blocks(std::int32_t num_tokens) const;

  // Whether allocate_slots for a running request would do nothing at all: it has the slots, and no
  // block of any group goes or becomes full. So are most decode steps (14 of 16 with blocks of 16
  // tokens and a sliding window), and they cost three comparisons instead of four calls a group.
  bool is_at_rest(const Request& request, std::int32_t num_new_tokens,
                  std::int32_t num_lookahead_tokens) const;

  // Publishes what is computed up to num_computed_tokens.
  void cache_blocks(Request& request, std::int32_t num_computed_tokens);
  // Frees the blocks that attention past num_computed_tokens no longer reads.
  void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens);
  void free(Request& request);
  // Detaches the request's blocks, group by group in table order, without freeing them.
  TakenBlocks take_table(Request& request);
  // The worker zeroes the request's blocks from this token on, where it zeroes a group's new ones.
  void record_again(const Request& request, std::int32_t first_token);
  // True if some group has freed blocks that attention past num_computed_tokens reads.
  bool lacks_window(const Request& request, std::int32_t num_computed_tokens) const;
  // Unpublishes the request's blocks from num_computed_tokens onward.
  void withdraw(const Request& request, std::int32_t num_computed_tokens);

  // Blocks that all `num_requests` requests with blocks share, per group, seen from one of them.
  void num_common_prefix_blocks(const Request& request, std::int32_t num_requests,
                                std::vector<std::int32_t>& out) const;
  void take_new_block_ids(std::vector<BlockId>& out);
  // Collects the block copies that the step makes first. Each block in `held` has one more
  // reference until the caller releases it.
  void take_copies(std::vector<KVCacheBlockCopy>& out, std::vector<BlockId>& held);

 protected:
  // Groups of equal specs are looked up together.
  struct AttentionGroup {
    std::vector<std::int32_t> groups;
    bool is_full = false;
    bool grows = true;  // the search, by the block that EAGLE drops
    bool drops_last_block = false;
  };
  // The longest hit that the request may have: the logits of its last token are needed.
  virtual std::int32_t max_hit_tokens(const Request& request) const {
    return request.num_tokens() - 1;
  }
  virtual void cut_full_groups(PrefixHit& hit) const;
  virtual void take_hit_of_group(std::size_t group, Request& request, const PrefixHit& hit,
                                 const SlotDemand& demand);
  // Tokens that retirement may count on.
  virtual std::int32_t num_left_behind(const Request& request,
                                       std::int32_t num_computed_tokens) const;

  std::unique_ptr<BlockPool> pool_;
  std::vector<std::unique_ptr<GroupManager>> managers_;
  std::vector<AttentionGroup> attention_groups_;  // full attention first

 private:
  // Tokens of a request that enters that its first step does not compute.
  std::int32_t num_not_computed(const Request& request, std::int32_t num_computed_tokens) const;
  // With state groups a request never rests: the last allocation also decides which states it
  // frees.
  void note_rest(Request& request, std::int32_t num_left_behind) const;
  std::unique_ptr<GroupManager> make_manager(const KVCacheGroupSpec& spec, std::int32_t group,
                                             const CacheParts& parts);
  bool is_source(std::int32_t group) const { return group == source_group_; }
  void split_eagle_groups(std::span<const KVCacheGroupSpec> groups);
  void allocate_load(Request& request, const PrefixHit& hit, GroupManager& manager) const;
  void take_hit(Request& request, const PrefixHit& hit, const SlotDemand& demand);
  void find_hybrid(const Request& request, std::int32_t max_length, PrefixHit& hit) const;
  void replay_window(PrefixHit& hit) const;
  std::int32_t prefill_end(const Request& request) const;
  std::int32_t num_cacheable_tokens(std::int32_t num_computed_tokens,
                                    const GroupManager& manager) const;
  bool has_room_behind_load(const Request& request, const SlotDemand& demand,
                            std::int64_t num_blocks);
  std::int64_t num_blocks_to_allocate(const Request& request, const PrefixHit* hit,
                                      const SlotDemand& demand) const;

  EngineConfig config_;
  std::unique_ptr<HostPageCoordinator> host_pages_;
  std::int32_t source_group_ = -1;
  const EngineProfile& profile_;
  BlockSizes block_sizes_;
  bool has_states_ = false;
  std::int32_t prefix_replay_tokens_ = 0;
  // Tokens at the end of a request that several modules of MTP compute again.
  std::int32_t num_reprefillable_tokens_ = 0;
};

}  // namespace lockstep
