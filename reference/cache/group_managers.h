// The managers of all cache kinds on the device: full attention (also MLA, hidden states), sliding
// windows, chunked local attention, circular buffers, sinks, reference windows, encoder rows, and
// recurrent states. Host pages have theirs in page_coordinator.h. Source of the rules:
// vllm/v1/core/single_type_kv_cache_manager.py, the class of the same name.
//
// Invariants, in addition to those of GroupManager
// (1) Full attention keeps every entry until the request ends.
// (2) A window or chunk manager frees an entry once no later token reads it, and sets it to null.
// (3) An UncachedManager publishes nothing and never has a hit.
// (4) In mode align a MambaManager frees every state before the previous one, as far as the profile
//     looks past null gaps (finding 20).
#pragma once

#include <optional>
#include <vector>

#include "base/check.h"
#include "reference/cache/group_manager.h"
#include "reference/types/cache_kinds.h"

namespace lockstep {

// Tokens that one request can have in flight at once: one batch, or two with asynchronous
// scheduling in releases that count both; at most max_model_len.
std::int32_t max_in_flight_tokens(const EngineConfig& config);

// Keeps every block until the request ends. A hit is the longest run of cached blocks from the
// left, because attention reads every earlier token. Where hits may end inside blocks, the longest
// cached part of the next block extends it.
class FullAttentionManager : public GroupManager {
 public:
  FullAttentionManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                       BlockSizes sizes, BlockPool& pool);
  std::int32_t find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                                      std::span<std::vector<BlockId>* const> hits) const override;
  std::int32_t num_common_prefix_blocks(const Request& request,
                                        std::int32_t num_requests) const override;

 private:
  std::int32_t extend_into_block(const HitQuery& query, std::span<const std::int32_t> groups,
                                 std::span<std::vector<BlockId>* const> hits) const;
  std::int32_t cut_dropped_hash(const HitQuery& query, std::int32_t length,
                                std::span<std::vector<BlockId>* const> hits) const;
};

// Keeps the last window - 1 tokens and the new ones. A hit is the right-most run of cached blocks
// that fills the window of the next token, or a run from the very left, however short. Blocks
// before the run are null in the hit's table.
class SlidingWindowManager : public GroupManager {
 public:
  SlidingWindowManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                       BlockSizes sizes, BlockPool& pool);
  std::int32_t find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                                      std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override;
  std::int32_t retires_at(std::int32_t num_left_behind) const override;
  bool is_reachable(const Request& request, std::int32_t index) const override;
  // Tokens before the next one that are kept for it: the window without the token itself, plus
  // those that several MTP modules compute again.
  virtual std::int32_t num_retained() const {
    return window_ - 1 + static_cast<std::int32_t>(spec_.extra_retained_tokens);
  }
  // Blocks that a hit needs. It ends at a block boundary, so window - 1 tokens before its end fill
  // ceil((window - 1) / block_size) blocks: with window 33 and block_size 16, 2.
  virtual std::int32_t num_blocks_of_window() const { return ceil_div(window_ - 1, block_size_); }

 private:
  std::int32_t window_;  // tokens, the current one included
};

// Keeps the current chunk. A hit counts all blocks before the chunk of its last token as hit (null
// blocks), then continues with cached blocks from the left.
class ChunkedLocalManager : public GroupManager {
 public:
  ChunkedLocalManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                      BlockSizes sizes, BlockPool& pool);
  std::int32_t find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                                      std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override;
  std::int32_t retires_at(std::int32_t num_left_behind) const override;

 private:
  std::int32_t chunk_;  // tokens
};

// A fixed number of blocks per request, allocated in its first step and freed at its end. They hold
// nothing that another request could use, so they are never shared and never published.
class UncachedManager : public GroupManager {
 public:
  using GroupManager::GroupManager;
  std::int64_t num_blocks_to_allocate(const Request& request,
                                      std::span<const BlockId> new_computed_blocks,
                                      const SlotDemand& demand) const override;
  void take_computed_blocks(Request&, std::span<const BlockId>, std::int32_t) override {}
  std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand) override;
  void remove_skipped_blocks(Request&, std::int32_t) override {}
  std::int32_t find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                                      std::span<std::vector<BlockId>* const> hits) const override;
  void narrow(const Request&, std::int32_t, TableRest&) const override {}

 protected:
  // Blocks of the request; constant from its first allocation on.
  virtual std::int32_t num_blocks_of(const Request& request) const = 0;
};

// A ring of keys that are not yet compressed: one block, which the tokens overwrite in turn.
class CircularBufferManager : public UncachedManager {
 public:
  using UncachedManager::UncachedManager;

 protected:
  std::int32_t num_blocks_of(const Request&) const override { return 1; }
};

// Rows of a request's encoder, as many as its items have. The count does not depend on tokens.
class CrossAttentionManager : public UncachedManager {
 public:
  using UncachedManager::UncachedManager;

 protected:
  std::int32_t num_blocks_of(const Request& request) const override {
    return ceil_div(request.num_encoder_rows, block_size_);
  }
};

// Full attention that also reads rows of the model itself, the sinks. Their blocks are allocated
// when the engine starts, never freed, and in no request's table.
class SinkAttentionManager : public FullAttentionManager {
 public:
  SinkAttentionManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                       BlockSizes sizes, BlockPool& pool);
};

// Keeps the prompt and the window over the generated tokens, and frees the blocks between them
// (vLLM's RSWAManager). The table keeps null entries in the gap.
class ReferenceWindowManager : public FullAttentionManager {
 public:
  using FullAttentionManager::FullAttentionManager;
  void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) override;
  void narrow(const Request& request, std::int32_t num_left_behind, TableRest& rest) const override;

 private:
  // The first block that holds only generated tokens. A block shared by prompt and output stays.
  std::int32_t gap_begin(const Request& request) const {
    return ceil_div(request.num_prompt_tokens(), block_size_);
  }
};

// The manager of state layers (Mamba, linear attention).
//
// - none: one block and the speculative ones for the whole request; a block is max_model_len tokens
//   long. No prefix cache.
// - all: one state per block_size tokens. The request reads only the last; earlier blocks are freed
//   and stay findable.
// - align: the running state is in the last entry before the speculative ones, saved states are at
//   block boundaries before it. A step that crosses a boundary gets a new block, and the worker
//   copies the state into it. The previous state's block is freed one step later.
//
// Example for align with blocks of 16 tokens and 1 speculative block. After 32 tokens the table is
// [null, A, B]: A holds the state, B is speculative. The step to token 40 appends C: [null, A, B,
// C]. The worker copies A's state to B, which becomes the running state, and C is speculative. Once
// no step reads A, its entry becomes null; A stays findable under the hash of 32 tokens.
//
// In mode align a prefill may also export one state from inside its last chunk, a checkpoint, into
// the entry before the last (group_manager.h). That entry then holds the state of the checkpoint's
// position, and is found under that position's hash, wherever it is in the block.

class MambaManager : public GroupManager {
 public:
  MambaManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
               BlockSizes sizes, BlockPool& pool);

  std::int64_t num_blocks_to_allocate(const Request& request,
                                      std::span<const BlockId> new_computed_blocks,
                                      const SlotDemand& demand) const override;
  void prepare_allocation(Request& request, const SlotDemand& demand) const override;
  std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand) override;
  void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) override;
  void cache_blocks(Request& request, std::int32_t num_tokens) override;
  void begin_step() override { cached_this_step_.clear(); }
  std::int32_t find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                                      std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  bool is_reachable(const Request& request, std::int32_t index) const override;
  // Only the state of the last computed token is read.
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override {
    return num_computed_tokens - 1;
  }
  // Frees the states of the first num_tokens tokens, null gaps between them included.
  virtual void free_retired_states(GroupBlocks& held, std::int32_t num_tokens);
  // First keys published since the step began. The worker has not computed those states yet, so a
  // hit on one waits for the next step.
  std::vector<BlockKey> cached_this_step_;

 private:
  std::int32_t num_speculative_blocks() const {
    return static_cast<std::int32_t>(spec_.num_speculative_blocks);
  }
  // The demand with one block more per speculative block: modes none and all store each draft's
  // state in a block of its own.
  SlotDemand with_speculative_blocks(const SlotDemand& demand, std::int64_t block_size) const;
  // Allocates in mode align; num_tokens is without lookahead. Returns the index of the first new
  // entry.
  std::size_t allocate_aligned(Request& request, std::int32_t num_tokens);
  // Moves the cache entries of a published part to a copy, since the next step overwrites the
  // block.
  void move_part(GroupBlocks& held, BlockId copy);
  // True if sparse retention keeps the state after num_tokens tokens.
  bool is_segment_end(std::int32_t num_tokens) const;
  // The position of the state that the demand's chunk exports; 0: none.
  std::int32_t checkpoint_position(const Request& request, const SlotDemand& demand) const;
  // Publish the exported state, or the running state at the prompt's end. Return the key if the
  // state is new in this step; absent: nothing was published, or it was known.
  std::optional<BlockKey> cache_checkpoint(const Request& request);
  std::optional<BlockKey> cache_prompt_state(Request& request, std::int32_t num_tokens);

  MambaCacheMode mode_;
  bool publishes_parts_;
};

// The manager class of each kind: the one list, for the engine and for planted defects.

// Calls make.template operator()<Manager>() with the manager class of `kind`. REQUIRES: a kind that
// keeps something and is not a host page.
template <class Make>
auto with_manager_of(CacheKind kind, Make make) {
  using enum CacheKind;
  switch (kind) {
    case full_attention:
    case mla:
    case hidden_state:
      return make.template operator()<FullAttentionManager>();
    case sink_full:
      return make.template operator()<SinkAttentionManager>();
    case rswa:
      return make.template operator()<ReferenceWindowManager>();
    case sliding_window:
    case sliding_window_mla:
      return make.template operator()<SlidingWindowManager>();
    case chunked_local:
      return make.template operator()<ChunkedLocalManager>();
    case mamba:
      return make.template operator()<MambaManager>();
    case circular_buffer:
      return make.template operator()<CircularBufferManager>();
    case cross_attention:
      return make.template operator()<CrossAttentionManager>();
    case encoder_only:
    default:  // host pages are created with their source
      break;
  }
  LS_CHECK(false, "no manager for {} groups", name_of(kind));
}

}  // namespace lockstep
