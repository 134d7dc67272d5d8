// What generated cases were made of and what they reached, counted by class. Cases that never see a
// preemption say nothing about preemptions: a run of many cases in which a class stays empty is a
// failure, whatever became of the cases.
//
// 1. A class counts occurrences, or cases where its name is that of a configuration.
// 2. Tallies of parts of a run add up to the tally of the run.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace lockstep {

enum class Reached : std::uint8_t {
  // Configurations, once a case.
  engine_0_22_1,
  engine_0_33_0,
  two_block_pool,
  padded_page,
  packed_page,
  several_groups,
  different_block_sizes,
  split_kernel_block,
  scaled_rows,
  uniform_type,
  full_attention,
  mla,
  sliding_window,
  chunked_local,
  mamba_none,
  mamba_align,
  mamba_all,
  hidden_state,
  layout_nhd,
  layout_hnd,
  no_prefix_caching,
  no_chunked_prefill,
  no_full_isl_reserve,
  async_scheduling,
  async_drafts,
  priority_policy,
  ngram_drafts,
  draft_model_drafts,
  eagle_drafts,
  context_parallel,
  with_backend,
  with_faults,
  tensor_parallel,
  replicated_heads,
  pipeline_parallel,
  data_parallel,
  captured_graphs,
  real_numbers,
  real_states,
  connector_peers,
  host_tier,
  load_failure_fails,
  connector_hybrid,
  multi_connector,
  // Events.
  step,
  idle_step,
  batch_of_several,
  chunked_prefill,
  partial_block,
  prefix_hit,
  hit_full_attention,
  hit_mla,
  hit_sliding_window,
  hit_chunked_local,
  hit_mamba_align,
  hit_mamba_all,
  hit_hidden_state,
  retired_block,
  stored_block,
  eviction,
  full_pool,
  preemption,
  resume,
  resume_with_hit,
  accepted_draft,
  rejected_draft,
  placeholder_draft,
  common_prefix,
  zeroed_block,
  abort_running,
  abort_waiting,
  abort_preempted,
  abort_with_step_in_flight,
  abort_first_chunk,
  abort_mid_prefill,
  abort_decode,
  abort_again,
  refused_allocation,
  preemption_storm,
  early_output,
  late_output,
  reset_done,
  reset_refused,
  salted_request,
  same_instant,
  session_resumed,
  refused_request,
  stop_token,
  length_end,
  external_hit,
  partial_external_hit,
  longer_load,
  undetermined_answer,
  lost_blocks,
  recomputed_load,
  load_failure_end,
  held_without_room,
  abort_loading,
  delayed_free,
  host_load,
  host_store,
  host_eviction,
  idle_dp_rank,
  dp_connector,
  dp_graphs,
  page_checked,
};
inline constexpr std::size_t kNumReached = static_cast<std::size_t>(Reached::page_checked) + 1;

std::string_view name_of(Reached reached);
// Those that only cases with a KV connector reach.
std::vector<Reached> classes_of_connectors();

class Tally {
 public:
  void count(Reached reached, std::int64_t times = 1) {
    counts_[static_cast<std::size_t>(reached)] += times;
  }
  std::int64_t operator[](Reached reached) const {
    return counts_[static_cast<std::size_t>(reached)];
  }
  Tally& operator+=(const Tally& other);
  bool operator==(const Tally&) const = default;

  // Classes that many cases should have seen and none did, by name; those that need a backend only
  // when there was one.
  std::vector<std::string_view> missing() const;

 private:
  std::array<std::int64_t, kNumReached> counts_{};
};

}  // namespace lockstep
