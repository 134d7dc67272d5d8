#include "reference/defects/scheduler_defect.h"

#include <algorithm>
#include <array>
#include <utility>

namespace lockstep {
namespace {

using enum SchedulerDefect;

constexpr std::array kNames = std::to_array<std::pair<SchedulerDefect, std::string_view>>({
    {hash_extra_keys, "hash-extra-keys"},
    {hash_cp_granularity, "hash-cp-granularity"},
    {hash_next_token, "hash-next-token"},
    {hash_stale, "hash-stale"},
    {hit_same_step, "hit-same-step"},
    {hit_untouched_evicted, "hit-untouched-evicted"},
    {hit_one_group_truncated, "hit-one-group-truncated"},
    {hit_longest_group, "hit-longest-group"},
    {hit_whole_prompt, "hit-whole-prompt"},
    {hit_window_short, "hit-window-short"},
    {free_optimistic, "free-optimistic"},
    {free_in_flight, "free-in-flight"},
    {free_twice, "free-twice"},
    {free_forward_order, "free-forward-order"},
    {free_by_id, "free-by-id"},
    {free_window_early, "free-window-early"},
    {free_preempted_lost, "free-preempted-lost"},
    {state_wrong_boundary, "state-wrong-boundary"},
    {state_partial_block, "state-partial-block"},
    {state_leak_null_gap, "state-leak-null-gap"},
    {state_spec_blocks, "state-spec-blocks"},
    {state_freed_early, "state-freed-early"},
    {admission_uncapped, "admission-uncapped"},
    {drafts_kept, "drafts-kept"},
    {drafts_outlive_preemption, "drafts-outlive-preemption"},
    {stale_output_taken, "stale-output-taken"},
    {resume_appended, "resume-appended"},
    {common_prefix_overcount, "common-prefix-overcount"},
    {refused_hit_kept, "refused-hit-kept"},
    {abort_twice, "abort-twice"},
    {abort_in_flight_kept, "abort-in-flight-kept"},
    {encoder_skipped_on_resume, "encoder-skipped-on-resume"},
    {cross_blocks_short, "cross-blocks-short"},
    {sinks_given_away, "sinks-given-away"},
    {rswa_window_short, "rswa-window-short"},
    {page_host_held_twice, "page-host-held-twice"},
    {page_copy_unheld, "page-copy-unheld"},
    {page_last_untold, "page-last-untold"},
    {page_loss_untold, "page-loss-untold"},
    {page_loss_forgotten, "page-loss-forgotten"},
    {page_copy_stale, "page-copy-stale"},
    {page_restore_dropped, "page-restore-dropped"},
    {page_mirror_short, "page-mirror-short"},
    {page_without_hot_region, "page-without-hot-region"},
    {page_all_resident, "page-all-resident"},
    {whole_blocks_shared, "whole-blocks-shared"},
});

constexpr std::array kDefects = [] {
  std::array<SchedulerDefect, kNames.size()> defects{};
  std::ranges::transform(kNames, defects.begin(), [](const auto& entry) { return entry.first; });
  return defects;
}();

}  // namespace

std::span<const SchedulerDefect> scheduler_defects() { return kDefects; }

std::string_view name_of(SchedulerDefect defect) {
  const auto entry = std::ranges::find(kNames, defect, [](const auto& e) { return e.first; });
  return entry == kNames.end() ? "none" : entry->second;
}

std::optional<SchedulerDefect> scheduler_defect_from_name(std::string_view name) {
  const auto entry = std::ranges::find(kNames, name, [](const auto& e) { return e.second; });
  if (entry == kNames.end()) return std::nullopt;
  return entry->first;
}

}  // namespace lockstep
