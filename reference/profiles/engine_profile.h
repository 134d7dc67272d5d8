// The differences between the engines that the model decides as: one policy per field. Behaviour
// that all of them share is in the scheduler and the managers; no other code checks the release.
//
// Each field names its file of vLLM (paths below vllm/); values are in the order of the releases.
// policies.h has the table of policies: words, history, effect. releases.h has the releases.
//
// Invariants
// (1) A profile is a release, and at most a few policies that differ from it. Its name lists
//     exactly those.
// (2) A policy changes one decision. Two releases that make the same decisions have equal policies.
// (3) A value that no release has is a repair of a finding: the field's comment states it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/types/engine_config.h"

namespace lockstep {

// Position at which a block joins the free queue when its last reference goes
// (v1/core/block_pool.py, free_blocks).
enum class FreedBlocks : std::uint8_t {
  append,  // at the back of the queue, in the order freed
  // As unhashed_first for blocks that a request's window has left, and for all blocks of a window
  // group when the request ends; all others are appended.
  unhashed_behind_windows_first,
  // Without cached content at the front, to be reused at once; with cached content at the back.
  unhashed_first,
  // As unhashed_first; as append without prefix caching.
  unhashed_first_if_caching,
};

// How a hit leaves EAGLE's draft model the token after it, which its first draft needs
// (config/vllm.py, num_hash_lookahead_tokens).
enum class EagleHits : std::uint8_t {
  // The hit is one block shorter, and that block is computed again.
  drop_last_block,
  // A block's hash also covers the token after the block, and exists once that token is known. No
  // block is dropped.
  lookahead_hash,
};

// The tokens that a request has certainly left behind, so that blocks before their window can be
// freed (v1/core/kv_cache_manager.py, allocate_slots).
enum class RetireBasis : std::uint8_t {
  // All tokens passed to the worker. State groups subtract drafts that may be rejected.
  scheduled,
  processed,  // tokens whose output has arrived
};

// New blocks that the worker zeroes (v1/kv_cache_interface.py, needs_kv_cache_zeroing).
enum class ZeroedBlocks : std::uint8_t {
  full_attention,             // of full attention to K/V pairs
  full_and_latent_attention,  // also of MLA, but not of hidden states
  every_full_attention,       // also of hidden states
  attention,                  // of every attention-like group
};

// The position at which a prefill chunk of a model with states ends (v1/core/sched/scheduler.py,
// _mamba_block_aligned_split).
enum class StateChunks : std::uint8_t {
  // A multiple of the block size from the chunk's start, and the last state that can be hit.
  whole_blocks,
  // Also, in the step that looks the prefix up, the end of a prefix that other requests share.
  whole_blocks_and_shared_prefixes,
  // As block_boundary up to the last state that can be hit; anywhere after it.
  block_boundary_before_last_state,
  // A block boundary wherever the chunk began, the last state that can be hit, and the end of a
  // prefix that other requests share.
  block_boundary,
};

// Position of the last state of a prompt that is kept, and of the last part of its block
// (v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position; before 0.32.0
// v1/core/sched/scheduler.py, _mamba_block_aligned_split).
enum class PromptEnds : std::uint8_t {
  at_length,          // the last boundary of all its tokens
  before_last_token,  // the last one that a resend hits: it computes the last token again
};

// Condition under which a request that enters with one token left gets placeholder drafts, so that
// it decodes in the shape of the others (v1/core/sched/scheduler.py, schedule).
enum class PadsNewDecodes : std::uint8_t {
  never,
  // With a running decode. If the drafts do not fit, the request waits. All drafts stay when its
  // tokens are cut.
  beside_running_or_waits,
  // With a running decode, if max_model_len leaves positions for the drafts.
  beside_running,
  // Also without a running decode, after a prefix hit.
  beside_running_or_after_hit,
};

// Accounting of tokens whose output is in flight (v1/core/sched/scheduler.py, update_from_output).
enum class InFlightAccounting : std::uint8_t {
  placeholders,  // by output placeholders, which outlive a preemption
  // By scheduled tokens. A preemption makes their output stale: delivered, but not counted.
  tokens,
};

// Blocks that a long load must leave free (v1/core/sched/scheduler.py,
// _inflight_prefill_reserved_blocks).
enum class LoadsLeaveRoom : std::uint8_t {
  no,
  to_those_under_way,  // blocks that in-flight prefills and loads still need
  to_all,              // also those that the load's own request has; no release does this
};

// Blocks for drafts among those that a load leaves free (v1/core/sched/scheduler.py,
// _spec_decode_step_blocks).
enum class DraftRoom : std::uint8_t {
  none,
  own_blocks,  // blocks of their own, counted apart from the tokens
  // Slots after the tokens of in-flight requests, and blocks of the load's own request in each
  // group.
  behind_the_tokens,
};

// Slots that a draft model needs in addition to the scheduled tokens (config/vllm.py,
// _set_max_num_scheduled_tokens).
enum class DraftSlots : std::uint8_t {
  of_max_num_seqs,        // subtracted from every step's token budget
  of_scheduled_requests,  // subtracted as requests are scheduled
};

// Condition for block hashes that are finer than a hit's alignment in models with states
// (v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).
enum class StateHashing : std::uint8_t {
  of_equal_blocks,  // if state blocks are as long as the configuration's
  of_aligned_mode,  // in mode `align`
};

struct Release;

// Load of a data parallel rank, which decides where a new request goes (v1/engine/core_client.py,
// get_core_engine_for_request).
enum class DpLoad : std::uint8_t {
  four_per_waiting,  // running requests, and four for each waiting one
  // Requests in flight. With more than half of the blocks in use, each waiting one counts up to
  // three more.
  in_flight,
};

// Steps of a wave in which data parallel ranks exchange whether any has requests left
// (v1/engine/core.py, _has_global_unfinished_reqs).
enum class DpVotes : std::uint8_t {
  every_32_steps,
  first_and_every_16_steps,  // dp_sync_interval, by default
};

// The policies of one engine, in the order of policies(). A bool is true if the engine does what
// its comment states.
struct EngineProfile {
  // "vllm-0.28.0", or with differences from the release: "vllm-0.28.0,freed_blocks=append".
  std::string name;
  const Release* release = nullptr;  // the release that it is or starts from

  // Blocks.
  FreedBlocks freed_blocks;
  RetireBasis retire_basis;
  ZeroedBlocks zeroed_blocks;
  // Zeroes also where caches have several dtypes (v1/kv_cache_interface.py,
  // has_mixed_precision_kv_cache); otherwise only in models with state layers.
  bool zeroes_mixed_dtypes;
  // Looks for retired states past null entries (v1/core/single_type_kv_cache_manager.py,
  // MambaManager._remove_blocks_in_range). Otherwise an older state stays until the request ends
  // (finding 20).
  bool retires_beyond_null_gaps;
  // A request may hold blocks of every batch that can be in flight (config/vllm.py,
  // max_in_flight_tokens); otherwise of one.
  bool admission_counts_batches_in_flight;

  // Prefix cache.
  EagleHits eagle_hits;
  // Cuts a hit to the common length in every full-attention group (v1/core/kv_cache_coordinator.py,
  // find_longest_cache_hit); otherwise only in groups of the first spec (finding 2).
  bool cuts_every_full_group;
  // In events, the name of a block with several hashes is all of them, not the last
  // (v1/core/kv_cache_utils.py, BlockHashListWithBlockSize).
  bool joins_hashes_of_long_blocks;
  // Keeps blocks that no hit can need out of the cache: those after the last position at which the
  // hits of all groups can end, and blocks of windows in between
  // (HybridKVCacheCoordinator.cache_blocks).
  bool publishes_reachable_blocks_only;
  // With EAGLE that drops a block of each hit, publishes the block after that position, which will
  // be dropped; of a window, the blocks that such a hit needs.
  bool publishes_dropped_blocks;
  // With EAGLE, states are searched only within the candidate hit: they drop no block
  // (HybridKVCacheCoordinator.find_longest_cache_hit).
  bool searches_states_within_hit;
  // Hashes a salt as (cache_salt, value), adapters and embeddings likewise
  // (generate_block_hash_extra_keys).
  bool tags_extra_keys;
  // Leaves blocks of a window out of the cache even if hits may end at any of its blocks
  // (v1/core/single_type_kv_cache_manager.py, SlidingWindowManager.reachable_block_mask).
  bool masks_windows_at_block_alignment;
  // Aligns what is kept of windows and states as hits, which may end inside blocks
  // (v1/core/kv_cache_coordinator.py, cache_hit_alignment_tokens); otherwise as the scheduler's
  // blocks.
  bool masks_at_hit_alignment;
  StateHashing state_hashing;
  // A hit may end inside a block, whose content is then copied (partial_hash_hits_enabled).
  bool hits_parts_of_blocks;
  // Such hits also exist with decode context parallelism (v1/core/kv_cache_coordinator.py).
  bool parts_with_context_parallelism;
  // Turns such hits off for all groups if a window has longer blocks than the hashes, and ends a
  // chunk at the prompt's last hash only where they are on (kv_cache_coordinator.py). Otherwise
  // such a window stops the engine at an assertion, and a chunk ends there wherever states have
  // longer blocks.
  bool groups_agree_on_parts;
  PromptEnds prompt_ends;
  // Keeps the last part of a state block one hash earlier if EAGLE drops a block of hits
  // (_mamba_block_aligned_split).
  bool tails_leave_eagles_block;
  // The last state of a prompt counts as published again whenever blocks of the request are
  // published, and a hit on it waits a step (MambaManager._cache_partial_tail_block).
  bool republishes_states;
  // Publishes the end of a prompt inside a full-attention block, whether or not a hit can end there
  // (FullAttentionManager._cache_partial_tail_block).
  bool caches_prompt_tails;
  // Can keep states and windows at intervals only (config/cache.py,
  // prefix_cache_retention_interval).
  bool retains_sparsely;
  // With EAGLE that drops a block, sparse retention keeps what a resend and a continuation of the
  // prompt can hit (v1/core/kv_cache_coordinator.py, replay_boundaries); otherwise the position
  // before the last token.
  bool retains_for_eagle;
  // ... and also the block before the end of a prefix that other requests share
  // (v1/core/single_type_kv_cache_manager.py, cache_blocks).
  bool retains_before_junctions;
  // Searches a hybrid's group whose hit EAGLE shortens to the end of the prompt's hashes
  // (v1/core/kv_cache_coordinator.py, find_longest_cache_hit); otherwise to before its last token.
  bool eagle_searches_whole_prompt;
  // Caches states in mode `all` (later, MambaManager.__init__ asserts against it).
  bool caches_states_in_mode_all;
  // Requires that a single group's block size divides the scheduler's
  // (KVCacheCoordinator.__init__).
  bool group_blocks_divide_scheduler_block;
  // Accepts several groups of one spec (HybridKVCacheCoordinator.verify_and_split_kv_cache_groups).
  bool hybrids_of_one_spec;

  // Context parallelism (v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).
  bool shards_by_pcp;  // a block covers dcp * pcp * block_size tokens, not dcp * block_size
  bool context_parallel_hybrids;  // accepts decode context parallelism with several groups

  // Caches and options that the release has (v1/kv_cache_interface.py, config/cache.py).
  bool has_rings;               // circular_buffer
  bool has_recomputed_windows;  // bounded_replay
  bool has_reference_windows;   // rswa_window
  bool has_replicated_caches;   // dcp_sharded false: replicated on every context parallel rank
  bool has_draft_modules;       // num_prefill_lookahead_tokens above 1, extra_retained_tokens
  bool has_prefix_match_unit;
  bool has_host_pages;

  // Scheduler (v1/core/sched/scheduler.py).
  StateChunks state_chunks;
  InFlightAccounting in_flight_accounting;
  // Publishes the blocks that an output confirms with that output, those of accepted drafts
  // included. Otherwise the request's next step publishes them, or, with asynchronous scheduling,
  // the output up to the placeholders (v1/core/sched/scheduler.py, update_from_output).
  bool publishes_with_output;
  DraftSlots draft_slots;
  bool lookahead_in_first_step;  // lookahead slots also for a request without computed tokens
  // The long-prefill threshold does not limit a request that is alone.
  bool long_prefill_only_in_company;
  PadsNewDecodes pads_new_decodes;
  // Counts the blocks that a request with states takes; otherwise, if it takes any, one, one for a
  // copy, and at first the speculative ones (v1/core/single_type_kv_cache_manager.py,
  // MambaManager.get_num_blocks_to_allocate).
  bool counts_states_exactly;
  // A victim that was passed over in this step also moves the scan back by one, like one that was
  // scheduled.
  bool scan_follows_every_victim;
  // The scan continues after a request has preempted itself (policy `priority`).
  bool scan_survives_self_preemption;
  bool reports_common_prefix_blocks;  // for cascade attention
  // Prefills export states from inside a chunk (MambaSpec.num_prefill_checkpoint_blocks).
  bool serves_checkpoints;
  // Before min_tokens nothing ends a request, not even its length; otherwise min_tokens only delays
  // the end by repetition (v1/core/sched/utils.py, check_stop).
  bool min_tokens_hold_every_end;
  // A session keeps its computed tokens and its first chunk's limit when the next chunk arrives
  // (_update_request_as_session).
  bool sessions_keep_computed;
  bool zeroes_embedded_tokens;  // embedded prompts have tokens 0, which are hashed

  // Waiting requests that hold blocks have their own queue, served first. Other requests that were
  // passed over return to the head of their queue.
  bool holders_come_first;
  LoadsLeaveRoom loads_leave_room;
  DraftRoom draft_room;
  // With a step in flight, an ended request's blocks stay allocated until that step has completed
  // (Scheduler.defer_block_free).
  bool defers_frees;
  // Does not preempt requests whose blocks would stay allocated
  // (Scheduler._request_blocks_can_be_freed), nor any request while the connector is about to free
  // blocks (has_pending_block_frees).
  bool waits_for_frees;
  // Drops a preempted request's in-flight output if the connector forwards its blocks
  // (requires_kv_delivery).
  bool drops_output_of_victims;
  bool loads_states;  // accepts connectors in models with states
  // Passes the local hit to a connector up to its last whole scheduler block. A longer load
  // replaces the rest of the hit.
  bool asks_for_whole_blocks;
  // Passes attention's hit to a connector that can load states (get_computed_blocks_for_connector).
  bool offers_divergent_hits;
  bool skips_loads_too;  // a request that skips the prefix cache loads nothing either
  // Zeroes the blocks that an asynchronous load writes; otherwise only those that it failed to
  // write (record_blocks_for_zeroing).
  bool zeroes_loads;
  // Takes the hits of all groups before it allocates blocks for a load
  // (v1/core/kv_cache_coordinator.py, allocate_new_computed_blocks; finding 12).
  bool takes_hits_of_all_groups_first;

  // A request whose encoder input does not fit returns to its queue and does not block it;
  // otherwise all requests after it wait (Scheduler._try_schedule_encoder_inputs).
  bool passes_over_unencoded;
  // Starts with sinks; otherwise their manager rejects an argument
  // (v1/core/single_type_kv_cache_manager.py, SinkFullAttentionManager; finding 38).
  bool starts_with_sinks;

  // Repairs that no release has: docs/findings.md, 1, 3, 7 to 9, 13, 14 and 46 (profile_without()).
  bool state_hits_drop_a_block;   // with EAGLE, as hits of attention do
  bool withdraws_what_is_undone;  // unpublishes what the step that preempts a request published
  bool holders_stand_aside;       // a request with blocks that does not fit lets the next one try
  // Publishes tokens that a step loads only when that step has completed.
  bool publishes_loads_late;
  // A window's maximum counts from its first block, not from the head of the table. Otherwise a
  // load after a window seems to need no blocks.
  bool caps_windows_where_they_begin;
  // Keeps the window of the last token of a fully loaded prompt: that token is computed here.
  bool keeps_window_of_last_token;
  // Restarts requests that go back to a lost block and lack the window before it.
  bool restarts_behind_windows;
  bool restores_loads_within_a_step;  // the last host page that such a load fills

  DpLoad dp_load;
  // The rank with which the search for the least loaded one starts, and which wins ties, advances
  // with each request; otherwise it is rank 0 (v1/engine/core_client.py).
  bool rotates_dp_ties;
  DpVotes dp_votes;
  // Numbers that data parallel ranks exchange before a step: those of model runner V1
  // (v1/worker/dp_utils.py), since 0.29.0 of V2 (v1/worker/gpu/dp_utils.py), the defaults of most
  // models with experts (config/vllm.py, use_v2_model_runner).
  std::int64_t dp_sync_rows;
};

// The profile that a description names: RELEASE[,POLICY=VALUE]...[,without=FINDING]. `without` is
// the number of a finding of docs/findings.md that a policy repairs, or `all` of them. Equal
// descriptions give the same object, which lives as long as the process. Thread-safe. Errors: an
// unknown release, policy, value or finding.
Result<const EngineProfile*> parse_engine(std::string_view description);
// Null: the description names no profile.
const EngineProfile* find_engine_profile(std::string_view description);
// REQUIRES: find_engine_profile(description) != nullptr.
const EngineProfile& engine_profile(std::string_view description);

// Tokens after a block that its hash also covers: the configuration's value, or the engine core's
// without a KV connector. Called once per scheduler.
std::int32_t hash_lookahead_of(const EngineConfig& config, const EngineProfile& profile);
// The configuration as the engine core changes it with a connector: blocks that may come from
// elsewhere are hashed without lookahead tokens, and EAGLE drops a block of every hit.
EngineConfig beside_connector(EngineConfig config);

}  // namespace lockstep
