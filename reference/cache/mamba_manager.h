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
#pragma once

#include <optional>
#include <vector>

#include "reference/cache/group_manager.h"

namespace lockstep {

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

}  // namespace lockstep
