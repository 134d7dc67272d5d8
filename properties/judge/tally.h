// Coverage of generated cases: what they consist of and what they reached, counted by class. Cases
// that never see a preemption prove nothing about preemptions. A run of many cases with an empty
// class therefore fails, whatever the cases' verdicts.
//
// Invariants
// (1) An event class counts occurrences; a configuration class counts cases.
// (2) The counts of the parts of a run add up to those of the run.
// (3) Configuration classes come first, and Reached::step is the first event class (marks.cpp
//     depends on it).
//
// Not checked: that a rare class is reached often enough. One occurrence suffices.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "reference/profiles/engine_profile.h"
#include "reference/profiles/releases.h"
#include "traces/formats/recording.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// X(class, the kind of case that can see it). Names appear in reports: renaming one makes older
// reports unreadable.
#define LOCKSTEP_REACHED(X)              \
  /* Configurations, once a case. */     \
  X(engine_0_22_1, anything)             \
  X(engine_0_33_0, anything)             \
  X(two_block_pool, anything)            \
  X(padded_page, anything)               \
  X(packed_page, anything)               \
  X(several_groups, anything)            \
  X(different_block_sizes, anything)     \
  X(split_kernel_block, backend)         \
  X(scaled_rows, anything)               \
  X(uniform_type, anything)              \
  X(full_attention, anything)            \
  X(mla, anything)                       \
  X(sliding_window, anything)            \
  X(chunked_local, anything)             \
  X(mamba_none, anything)                \
  X(mamba_align, anything)               \
  X(mamba_all, anything)                 \
  X(hidden_state, anything)              \
  X(bounded_replay, anything)            \
  X(ring, anything)                      \
  X(compressed_rows, anything)           \
  X(cross_attention, anything)           \
  X(sinks, anything)                     \
  X(reference_window, anything)          \
  X(layout_nhd, anything)                \
  X(layout_hnd, anything)                \
  X(order_lbnhc, backend)                \
  X(order_lbhnc, backend)                \
  X(order_lhbnc, backend)                \
  X(order_blnhc, backend)                \
  X(order_blhnc, backend)                \
  X(order_bhlnc, backend)                \
  X(no_prefix_caching, anything)         \
  X(no_chunked_prefill, anything)        \
  X(no_full_isl_reserve, anything)       \
  X(async_scheduling, anything)          \
  X(async_drafts, anything)              \
  X(priority_policy, anything)           \
  X(ngram_drafts, anything)              \
  X(draft_model_drafts, anything)        \
  X(eagle_drafts, anything)              \
  X(context_parallel, anything)          \
  X(whole_cache, anything)               \
  X(several_rows, anything)              \
  X(larger_states, worker)               \
  X(match_unit, anything)                \
  X(with_backend, backend)               \
  X(with_faults, anything)               \
  X(tensor_parallel, backend)            \
  X(replicated_heads, backend)           \
  X(pipeline_parallel, backend)          \
  X(data_parallel, backend)              \
  X(captured_graphs, device_mode)        \
  X(real_numbers, device_mode)           \
  X(real_states, device_mode)            \
  X(connector_peers, connector)          \
  X(host_tier, connector)                \
  X(load_failure_fails, connector)       \
  X(connector_hybrid, connector)         \
  X(multi_connector, connector)          \
  X(async_connector, connector)          \
  /* Events. */                          \
  X(step, anything)                      \
  X(idle_step, anything)                 \
  X(batch_of_several, anything)          \
  X(chunked_prefill, anything)           \
  X(partial_block, anything)             \
  X(prefix_hit, anything)                \
  X(hit_full_attention, anything)        \
  X(hit_mla, anything)                   \
  X(hit_sliding_window, anything)        \
  X(hit_chunked_local, anything)         \
  X(hit_mamba_align, anything)           \
  X(hit_mamba_all, anything)             \
  X(hit_hidden_state, anything)          \
  X(hit_compressed_rows, anything)       \
  X(hit_whole_cache, anything)           \
  X(hit_several_rows, anything)          \
  X(hit_larger_states, worker)           \
  X(hit_inside_block, anything)          \
  X(copy_on_write, anything)             \
  X(replayed_window, anything)           \
  X(ring_gone_round, anything)           \
  X(encoder_computed, anything)          \
  X(encoder_computed_again, anything)    \
  X(gap_behind_prompt, anything)         \
  X(retired_block, anything)             \
  X(stored_block, anything)              \
  X(eviction, anything)                  \
  X(full_pool, anything)                 \
  X(preemption, anything)                \
  X(preempted_before_others, anything)   \
  X(resume, anything)                    \
  X(resume_with_hit, anything)           \
  X(resumed_states, worker)              \
  X(accepted_draft, anything)            \
  X(rejected_draft, anything)            \
  X(placeholder_draft, anything)         \
  X(fewer_drafts, anything)              \
  X(step_ends_sooner, anything)          \
  X(common_prefix, anything)             \
  X(zeroed_block, anything)              \
  X(abort_running, anything)             \
  X(abort_waiting, anything)             \
  X(abort_preempted, anything)           \
  X(abort_with_step_in_flight, anything) \
  X(abort_first_chunk, anything)         \
  X(abort_mid_prefill, anything)         \
  X(abort_decode, anything)              \
  X(abort_again, anything)               \
  X(refused_allocation, anything)        \
  X(preemption_storm, anything)          \
  X(early_output, anything)              \
  X(late_output, anything)               \
  X(reset_done, anything)                \
  X(reset_refused, anything)             \
  X(reset_preempts, anything)            \
  X(paused, anything)                    \
  X(salted_request, anything)            \
  X(same_instant, anything)              \
  X(session_resumed, anything)           \
  X(refused_request, anything)           \
  X(stop_token, anything)                \
  X(listed_stop_token, anything)         \
  X(length_end, anything)                \
  X(external_hit, connector)             \
  X(partial_external_hit, connector)     \
  X(longer_load, connector)              \
  X(undetermined_answer, connector)      \
  X(lost_blocks, connector)              \
  X(lost_behind_a_step, no_backend)      \
  X(recomputed_load, connector)          \
  X(load_failure_end, connector)         \
  X(held_without_room, connector)        \
  X(abort_loading, connector)            \
  X(delayed_free, connector)             \
  X(host_load, connector)                \
  X(host_store, connector)               \
  X(host_eviction, connector)            \
  X(hisparse, anything)                  \
  X(hisparse_peers, anything)            \
  X(hisparse_async, anything)            \
  X(hisparse_drafts, anything)           \
  X(page_spill, anything)                \
  X(page_restore, anything)              \
  X(lost_page, anything)                 \
  X(row_mirror, anything)                \
  X(host_read, anything)                 \
  X(hot_region, anything)                \
  X(adopted_page, anything)              \
  X(end_with_copies, anything)           \
  X(full_host_pool, anything)            \
  X(idle_dp_rank, backend)               \
  X(dp_connector, backend)               \
  X(dp_graphs, device_mode)              \
  X(page_checked, backend)

// The cases that can see a class. A class that no case of a run can see is not missing.
enum class SeenWith : std::uint8_t {
  anything,
  backend,
  device_mode,  // with a backend, in a run that generates captured graphs and real numbers
  connector,    // a KV connector
  no_backend,   // a failing load with a step in flight: unsupported by backends
  worker,       // an engine's own worker, in runs too short to see every class
};

enum class Reached : std::uint8_t {
#define LOCKSTEP_REACHED_NAME(name, seen_with) name,
  LOCKSTEP_REACHED(LOCKSTEP_REACHED_NAME)
#undef LOCKSTEP_REACHED_NAME
};

struct ReachedClass {
  std::string_view name;
  SeenWith seen_with;
};
inline constexpr ReachedClass kReachedClasses[] = {
#define LOCKSTEP_REACHED_ROW(name, seen_with) {#name, SeenWith::seen_with},
    LOCKSTEP_REACHED(LOCKSTEP_REACHED_ROW)
#undef LOCKSTEP_REACHED_ROW
};
inline constexpr std::size_t kNumReached = std::size(kReachedClasses);

// Classes for properties that caches of several kinds may have, and for hits in such caches.
struct FurtherClass {
  // The class of a case with such a cache, and of a hit in it.
  Reached cache, hit;
  // Returns true if the spec has the property.
  bool (*holds)(const EngineConfig& engine, const KVCacheSpec& spec);
  // True if the release has such caches; else unreachable.
  bool (*of)(const EngineProfile& profile);
};
inline constexpr FurtherClass kFurtherClasses[] = {
    {Reached::whole_cache, Reached::hit_whole_cache,
     [](const EngineConfig& engine, const KVCacheSpec& spec) {
       return engine.dcp > 1 && !spec.dcp_sharded;
     },
     [](const EngineProfile& profile) { return profile.has_replicated_caches; }},
    {Reached::several_rows, Reached::hit_several_rows,
     [](const EngineConfig&, const KVCacheSpec& spec) {
       return has_several_rows(spec.tokens_per_state);
     },
     [](const EngineProfile& profile) { return overlays_groups(*profile.release); }},
    {Reached::larger_states, Reached::hit_larger_states,
     [](const EngineConfig& engine, const KVCacheSpec& spec) {
       return is_state_kind(spec.kind) && spec.mamba_cache_mode == MambaCacheMode::align &&
              spec.block_size > engine.block_size;
     },
     [](const EngineProfile&) { return false; }},
};

constexpr std::string_view name_of(Reached reached) {
  return kReachedClasses[static_cast<std::size_t>(reached)].name;
}
// Returns the classes that only cases with a KV connector reach.
std::vector<Reached> classes_of_connectors();

// Counts per class. The coverage of several cases is the sum of theirs.
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

  // Returns the names of classes that many cases should have reached and none did. Classes that
  // need a backend or a device mode are included only if some case had one; classes of workers
  // never.
  std::vector<std::string_view> missing() const;

 private:
  std::array<std::int64_t, kNumReached> counts_{};
};

// Counts what a case consists of, once per case and before it runs.
void count_case(const SavedCase& saved, Tally& tally);

// Counts what one engine reaches, from its steps as a recorder writes them. It follows each
// request's position and progress, because a step does not state, for example, that an aborted
// request was in mid-prefill.
class TallyCounter {
 public:
  // Both must outlive the counter.
  TallyCounter(const SavedCase& saved, Tally& tally) : saved_(saved), tally_(tally) {}

  // Counts one complete step. Must be called for every step, in order.
  void step(const RecordedStep& step);

 private:
  // Where a live request is: a loading request has blocks and waits, a preempted one has none.
  enum class Place : std::uint8_t { waiting, loading, running, preempted };
  struct Request {
    Place place = Place::waiting;
    // 0: its arrival was not seen
    std::int64_t num_prompt_tokens = 0;
    std::int64_t num_computed_tokens = 0;  // tokens after the last step that scheduled it
    std::int64_t num_steps = 0;            // steps that scheduled it since its admission
    std::int64_t first_computed = 0;       // computed tokens before the last step that scheduled it
    std::int64_t num_loaded_tokens = 0;    // tokens after its load in flight; 0: none
    std::int64_t num_drafts = 0;           // drafts in the last step that scheduled it
    // HiSparse: its pages' blocks in the first resident group
    std::vector<BlockId> pages{};
    bool lists_its_end = false;  // true if only listed stop tokens end it before its length
  };

  void count_events(const std::vector<RecordedEvent>& events);
  void count_abort(const std::string& name);
  void count_abort_of_running(const Request& request);
  void count_drafts(const RecordedScheduled& scheduled, Request& request);
  void count_victims(const RecordedStep& step);
  void count_scheduled(const RecordedStep& step);
  void count_hit(const RecordedStep& step, const RecordedScheduled& scheduled);
  void count_preempted(const RecordedStep& step);
  void count_outcome(const RecordedStep& step);
  void count_answers(const RecordedStep& step);
  void count_transfers(const RecordedStep& step);
  void count_pages(const RecordedStep& step);
  void count_residency(const RecordedStep& step, const std::string& name,
                       const ResidencyUpdate& update);
  bool is_computed_again(const RecordedScheduled& scheduled, const Request& request) const;

  const SavedCase& saved_;
  Tally& tally_;
  std::map<std::string, Request> requests_;  // live requests, by name
  // Decided steps whose output has not been processed.
  std::int64_t steps_in_flight_ = 0;
  std::vector<std::string> running_;  // in queue order
  // Copies of pages in flight: completions that are missing, by transfer; 0: their number is not
  // known yet.
  std::map<std::int64_t, std::int32_t> copies_;
};

}  // namespace lockstep
