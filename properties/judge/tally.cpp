#include "properties/judge/tally.h"

#include "base/check.h"

namespace lockstep {
namespace {

constexpr std::string_view kNames[] = {
    "engine_0_22_1",
    "engine_0_33_0",
    "two_block_pool",
    "padded_page",
    "packed_page",
    "several_groups",
    "different_block_sizes",
    "split_kernel_block",
    "scaled_rows",
    "uniform_type",
    "full_attention",
    "mla",
    "sliding_window",
    "chunked_local",
    "mamba_none",
    "mamba_align",
    "mamba_all",
    "hidden_state",
    "layout_nhd",
    "layout_hnd",
    "no_prefix_caching",
    "no_chunked_prefill",
    "no_full_isl_reserve",
    "async_scheduling",
    "async_drafts",
    "priority_policy",
    "ngram_drafts",
    "draft_model_drafts",
    "eagle_drafts",
    "context_parallel",
    "with_backend",
    "with_faults",
    "tensor_parallel",
    "replicated_heads",
    "pipeline_parallel",
    "data_parallel",
    "captured_graphs",
    "real_numbers",
    "real_states",
    "connector_peers",
    "host_tier",
    "load_failure_fails",
    "connector_hybrid",
    "multi_connector",
    "step",
    "idle_step",
    "batch_of_several",
    "chunked_prefill",
    "partial_block",
    "prefix_hit",
    "hit_full_attention",
    "hit_mla",
    "hit_sliding_window",
    "hit_chunked_local",
    "hit_mamba_align",
    "hit_mamba_all",
    "hit_hidden_state",
    "retired_block",
    "stored_block",
    "eviction",
    "full_pool",
    "preemption",
    "resume",
    "resume_with_hit",
    "accepted_draft",
    "rejected_draft",
    "placeholder_draft",
    "common_prefix",
    "zeroed_block",
    "abort_running",
    "abort_waiting",
    "abort_preempted",
    "abort_with_step_in_flight",
    "abort_first_chunk",
    "abort_mid_prefill",
    "abort_decode",
    "abort_again",
    "refused_allocation",
    "preemption_storm",
    "early_output",
    "late_output",
    "reset_done",
    "reset_refused",
    "salted_request",
    "same_instant",
    "session_resumed",
    "refused_request",
    "stop_token",
    "length_end",
    "external_hit",
    "partial_external_hit",
    "longer_load",
    "undetermined_answer",
    "lost_blocks",
    "recomputed_load",
    "load_failure_end",
    "held_without_room",
    "abort_loading",
    "delayed_free",
    "host_load",
    "host_store",
    "host_eviction",
    "idle_dp_rank",
    "dp_connector",
    "dp_graphs",
    "page_checked",
};
static_assert(std::size(kNames) == kNumReached);

}  // namespace

std::string_view name_of(Reached reached) {
  const auto index = static_cast<std::size_t>(reached);
  LS_CHECK(index < kNumReached, "class {} of {}", index, kNumReached);
  return kNames[index];
}

std::vector<Reached> classes_of_connectors() {
  std::vector<Reached> classes;
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    const bool is_configuration =
        reached >= Reached::connector_peers && reached <= Reached::multi_connector;
    const bool is_event = reached >= Reached::external_hit && reached <= Reached::host_eviction;
    if (is_configuration || is_event) classes.push_back(reached);
  }
  return classes;
}

Tally& Tally::operator+=(const Tally& other) {
  for (std::size_t i = 0; i < kNumReached; ++i) counts_[i] += other.counts_[i];
  return *this;
}

std::vector<std::string_view> Tally::missing() const {
  const bool any_backend = (*this)[Reached::with_backend] > 0;
  const auto is_device_mode = [](Reached reached) {
    return reached == Reached::dp_graphs ||
           (reached >= Reached::captured_graphs && reached <= Reached::real_states);
  };
  bool any_device_mode = false;
  for (std::size_t i = 0; i < kNumReached; ++i)
    any_device_mode |= counts_[i] > 0 && is_device_mode(static_cast<Reached>(i));
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    const bool of_ranks = reached >= Reached::tensor_parallel && reached <= Reached::data_parallel;
    const bool needs_backend =
        of_ranks || (reached >= Reached::idle_dp_rank && reached <= Reached::page_checked) ||
        reached == Reached::with_backend || reached == Reached::split_kernel_block;
    // Where nobody asks for them, none of the device's modes is drawn.
    const bool not_drawn = is_device_mode(reached) && !any_device_mode;
    if (counts_[i] == 0 && (any_backend || !needs_backend) && !not_drawn)
      names.push_back(kNames[i]);
  }
  return names;
}

}  // namespace lockstep
