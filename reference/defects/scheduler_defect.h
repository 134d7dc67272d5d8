// Defects that can be planted in the scheduler, its managers and its pool: defects that engines had
// or could have in the same place, each enabled by name. They prove the harness: a check that no
// defect fails is useless. docs/reference/mutants.md describes them; properties/mutants runs them.
//
// Invariants
// (1) A healthy scheduler has `none` and does not depend on this file.
// (2) At most one defect is enabled, from the scheduler's creation to its end.
// (3) PlantedParts plants them from outside: schedulers and caches contain no planted defects.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/names.h"
#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

enum class SchedulerDefect : std::uint8_t {
  none,
  // The content that a block's hash stands for: keys, tokens or lookahead are missing from it, or
  // it outlives the content.
  hash_extra_keys,
  hash_cp_granularity,
  hash_next_token,
  hash_stale,
  // Tokens that count as computed although they are not: hits too long, too early, or unprotected.
  hit_same_step,
  hit_untouched_evicted,
  hit_one_group_truncated,
  hit_longest_group,
  hit_whole_prompt,
  hit_window_short,
  // Allocation and release of blocks: too early, twice, in the wrong order, or never.
  free_optimistic,
  free_in_flight,
  free_twice,
  free_forward_order,
  free_by_id,
  free_window_early,
  free_preempted_lost,
  // States of Mamba and linear attention: saved at a wrong position, freed too early, or leaked.
  state_wrong_boundary,
  state_partial_block,
  state_leak_null_gap,
  state_spec_blocks,
  state_freed_early,
  // Admission, drafts, stale output, and the block lists that the worker receives.
  admission_uncapped,
  drafts_kept,
  drafts_outlive_preemption,
  stale_output_taken,
  resume_appended,
  common_prefix_overcount,
  // Requests that are refused, or that end while others still use their blocks.
  refused_hit_kept,
  abort_twice,
  abort_in_flight_kept,
  // Encoders, sinks, reference windows.
  encoder_skipped_on_resume,
  cross_blocks_short,
  sinks_given_away,
  rswa_window_short,
  // Host pages.
  page_host_held_twice,
  page_copy_unheld,
  page_last_untold,
  page_loss_untold,
  page_loss_forgotten,
  page_copy_stale,
  page_restore_dropped,
  page_mirror_short,
  page_without_hot_region,
  page_all_resident,
  // Replicated caches counted as sharded over context parallel ranks.
  whole_blocks_shared,
};
// Ids are written with '-': "hash-extra-keys".
template <>
inline constexpr char kWordJoint<SchedulerDefect> = '-';

// Schedulers and caches with a defect: each part is the usual one with one step done wrong.
//
// Invariants
// (1) At most one part differs from those of SchedulerParts: the one that the defect names.
// (2) A part does not change after it was created; the defect is the same for the whole run.

class PlantedParts final : public SchedulerParts {
 public:
  explicit PlantedParts(SchedulerDefect defect) : defect_(defect) {}
  std::unique_ptr<BlockPool> pool(std::int64_t num_blocks, bool enable_caching,
                                  FreedBlocks freed_blocks) const override;
  std::unique_ptr<GroupManager> manager(const KVCacheSpec& spec, std::int32_t group,
                                        const EngineConfig& config, BlockSizes sizes,
                                        BlockPool& pool) const override;
  std::unique_ptr<HostPageCoordinator> host_pages(const EngineConfig& config,
                                                  std::unique_ptr<BlockPool> host,
                                                  BlockPool& device) const override;
  std::unique_ptr<KVCacheCoordinator> coordinator(const EngineConfig& config,
                                                  std::span<const KVCacheGroupSpec> groups,
                                                  BlockSizes sizes,
                                                  std::int64_t num_blocks) const override;
  std::unique_ptr<Scheduler::Impl> scheduler(const EngineConfig& engine,
                                             const std::vector<KVCacheGroupSpec>& groups,
                                             BlockSizes sizes, std::int64_t num_blocks,
                                             const KVTransfer& transfer) const override;

 private:
  SchedulerDefect defect_;
};

}  // namespace lockstep
