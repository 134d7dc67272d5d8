// The managers of caches that keep something per token: full attention (and MLA, hidden states),
// sliding window, chunked local attention.
#pragma once

#include "reference/cache/group_manager.h"

namespace lockstep {

// Keeps every block until the request ends; a hit is the longest chain from the left.
class FullAttentionManager final : public GroupManager {
 public:
  FullAttentionManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                       BlockSizes sizes, BlockPool& pool);
  void find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                              std::span<std::vector<BlockId>* const> hits) const override;
  std::int32_t num_common_prefix_blocks(const Request& request,
                                        std::int32_t num_requests) const override;
};

// Keeps the last window - 1 tokens and the new ones; a hit is the right-most run of cached blocks
// that is long enough to fill the window, or a run from the very left.
class SlidingWindowManager final : public GroupManager {
 public:
  SlidingWindowManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                       BlockSizes sizes, BlockPool& pool);
  void find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                              std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override;
  std::int32_t retires_at(std::int32_t num_left_behind) const override;
  bool is_reachable(const Request& request, std::int32_t index) const override;

 private:
  // Tokens before the next one that its attention reads.
  std::int32_t num_kept() const {
    return window_ - 1 - (planted(SchedulerDefect::free_window_early) ? 1 : 0);
  }

  std::int32_t window_;
};

// Keeps the current chunk; blocks before it count as hit.
class ChunkedLocalManager final : public GroupManager {
 public:
  ChunkedLocalManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                      BlockSizes sizes, BlockPool& pool);
  void find_longest_cache_hit(const HitQuery& query, std::span<const std::int32_t> groups,
                              std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override;
  std::int32_t retires_at(std::int32_t num_left_behind) const override;

 private:
  std::int32_t chunk_;
};

}  // namespace lockstep
