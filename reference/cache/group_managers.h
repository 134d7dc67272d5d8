// The managers of caches that store rows per token: full attention (and MLA, hidden states),
// sliding window, chunked local attention, circular buffers, sinks, reference windows, and the rows
// of an encoder.
//
// Invariants, in addition to those of GroupManager
// (1) Full attention keeps every entry until the request ends.
// (2) A window or chunk manager frees an entry once no later token reads it, and sets it to null.
// (3) An UncachedManager publishes nothing and never has a hit.
#pragma once

#include <optional>
#include <vector>

#include "base/check.h"
#include "reference/cache/group_manager.h"
#include "reference/types/cache_kinds.h"

namespace lockstep {

// Tokens that one request can have in flight at once.
std::int32_t max_in_flight_tokens(const EngineConfig& config);

// Keeps every block until the request ends; a hit is the longest chain from the left.
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

// Keeps the last window - 1 tokens and the new ones; a hit is the right-most run of cached blocks
// that is long enough to fill the window, or a run from the very left.
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
  // Tokens before the next one that are kept for it.
  virtual std::int32_t num_retained() const {
    return window_ - 1 + static_cast<std::int32_t>(spec_.extra_retained_tokens);
  }
  // Blocks that cover the window of a token after a hit, wherever the token is in its block.
  virtual std::int32_t num_blocks_of_window() const { return ceil_div(window_ - 1, block_size_); }

 private:
  std::int32_t window_;
};

// Keeps the current chunk; blocks before it count as hit.
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
  std::int32_t chunk_;
};

// A fixed number of blocks per request, from its first step to its end. They are never shared.
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
  virtual std::int32_t num_blocks_of(const Request& request) const = 0;
};

class CircularBufferManager : public UncachedManager {
 public:
  using UncachedManager::UncachedManager;

 protected:
  std::int32_t num_blocks_of(const Request&) const override { return 1; }
};

// Rows of a request's encoder.
class CrossAttentionManager : public UncachedManager {
 public:
  using UncachedManager::UncachedManager;

 protected:
  std::int32_t num_blocks_of(const Request& request) const override {
    return ceil_div(request.num_encoder_rows, block_size_);
  }
};

// Full attention that also reads rows of the model itself. Their blocks are allocated when the
// engine starts, never freed, and in no request's table.
class SinkAttentionManager : public FullAttentionManager {
 public:
  SinkAttentionManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                       BlockSizes sizes, BlockPool& pool);
};

// Keeps the prompt, and of what is generated the window; what lies between them goes.
class ReferenceWindowManager : public FullAttentionManager {
 public:
  using FullAttentionManager::FullAttentionManager;
  void remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) override;
  void narrow(const Request& request, std::int32_t num_left_behind, TableRest& rest) const override;

 private:
  // The first block after the prompt, and the first that the window needs.
  std::int32_t gap_begin(const Request& request) const {
    return ceil_div(request.num_prompt_tokens(), block_size_);
  }
};

// The manager of state layers (Mamba, linear attention).
//
// none:  one block (and the speculative ones) for the whole request; blocks are max_model_len long.
// all:   a block per block_size tokens, of which only the last is kept; the earlier ones stay
// findable. align: the running state lives in the last entry before the speculative ones, saved
// states at block
//        boundaries before it; a step that crosses a boundary gets a new block, and the worker
//        copies the state into it. Two blocks and the speculative ones are held at a time.
//
// In mode align a prefill may also export one state from inside its last chunk, a checkpoint, into
// the entry before the last (group_manager.h): the entry holds the state of the checkpoint's
// position and is found under the hash of it, wherever it lies in the block.

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
  virtual void free_retired_states(GroupBlocks& held, std::int32_t num_tokens);
  // First keys of what was published since the step began: the state is not there yet.
  std::vector<BlockKey> cached_this_step_;

 private:
  std::int32_t num_speculative_blocks() const {
    return static_cast<std::int32_t>(spec_.num_speculative_blocks);
  }
  SlotDemand with_speculative_blocks(const SlotDemand& demand, std::int64_t block_size) const;
  std::size_t allocate_aligned(Request& request, std::int32_t num_tokens);
  void move_part(GroupBlocks& held, BlockId copy);
  bool is_segment_end(std::int32_t num_tokens) const;
  // Where the chunk that `demand` asks for exports a state; 0: nowhere.
  std::int32_t checkpoint_position(const Request& request, const SlotDemand& demand) const;
  std::optional<BlockKey> cache_checkpoint(const Request& request);
  std::optional<BlockKey> cache_prompt_state(Request& request, std::int32_t num_tokens);

  MambaCacheMode mode_;
  bool publishes_parts_;
};

// Which manager serves the groups of a kind: the one list, for the engine and for planted defects.

// make.template operator()<Manager>(). REQUIRES: a kind whose groups are no host pages, and
// keep something.
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
