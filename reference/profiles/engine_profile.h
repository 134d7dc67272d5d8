// The differences between the engines that the model decides as: one policy per field. Common
// behaviour is in the scheduler and the managers; no other code checks the release.
//
// Each field names its file of vLLM (paths below vllm/; values in the order of the releases).
// policies.h has the table of policies: words, history, effect; releases.h the releases.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/types/engine_config.h"

namespace lockstep {

// Where a block joins the free queue when its last reference goes (v1/core/block_pool.py,
// free_blocks).
enum class FreedBlocks : std::uint8_t {
  append,  // to the back of the queue, in the order freed
  // As unhashed_first for blocks that a request's window has left, and for all blocks of a window
  // when its request ends; all others are appended.
  unhashed_behind_windows_first,
  unhashed_first,  // without cached content to the front, to be reused at once; with it to the back
  unhashed_first_if_caching,  // to the back without prefix caching
};

// How a hit leaves EAGLE's drafter the token after it (config/vllm.py, num_hash_lookahead_tokens).
enum class EagleHits : std::uint8_t {
  drop_last_block,  // one block fewer is hit, and recomputed
  lookahead_hash,   // a block's hash covers the token after the block too and is there once that
                    // token is known; no block is dropped
};

// Up to which token a request has surely left its past behind (v1/core/kv_cache_manager.py,
// allocate_slots).
enum class RetireBasis : std::uint8_t {
  scheduled,  // all tokens passed to the worker; state layers subtract possible drafts
              // rejected
  processed,  // those whose output has come back
};

// Which new blocks the worker zeroes (v1/kv_cache_interface.py, needs_kv_cache_zeroing).
enum class ZeroedBlocks : std::uint8_t {
  full_attention,             // of full attention without a latent head
  full_and_latent_attention,  // with a latent head as well, but not of hidden states
  every_full_attention,       // and of hidden states
  attention,                  // of every attention-like group
};

// Where a prefill chunk of a model with states ends (v1/core/sched/scheduler.py,
// _mamba_block_aligned_split).
enum class StateChunks : std::uint8_t {
  whole_blocks,  // a multiple of the block size long, and at the last state that can be hit
  // So, and in the step that looks the prefix up at the end of one that other requests share.
  whole_blocks_and_shared_prefixes,
  // As block_boundary up to the last state that can be hit; behind it anywhere.
  block_boundary_before_last_state,
  block_boundary,  // at a block boundary wherever it began, at the last state that can be hit, and
                   // at the end of a prefix that other requests share
};

// Where the last state of a prompt is kept, and the last part of a block of it
// (v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position; before: v1/core/sched/
// scheduler.py, _mamba_block_aligned_split).
enum class PromptEnds : std::uint8_t {
  at_length,          // at the last boundary of all its tokens
  before_last_token,  // at the last one that a resend can hit, whose last token is computed again
};

// When a request that enters with one token left is given placeholder drafts, so that it decodes
// in the shape of the others (v1/core/sched/scheduler.py, schedule).
enum class PadsNewDecodes : std::uint8_t {
  never,
  // with a running decode; without capacity for the drafts it waits, and so do the drafts
  beside_running_or_waits,
  // stay when its tokens are cut
  beside_running,
  beside_running_or_after_hit,
};

// How tokens whose output is still in flight are counted (v1/core/sched/scheduler.py,
// update_from_output).
enum class InFlightAccounting : std::uint8_t {
  placeholders,  // by output placeholders, which outlive a preemption
  tokens,  // by scheduled tokens; a preemption makes their output stale: delivered, but not counted
};

// The blocks that a longer load must leave free (v1/core/sched/scheduler.py,
// _inflight_prefill_reserved_blocks).
enum class LoadsLeaveRoom : std::uint8_t {
  no,
  to_those_under_way,  // what in-flight prefills and loads still need
  to_all,              // and what the load's own request has: no release does
};

// The drafts of the requests for which a load leaves room
// (v1/core/sched/scheduler.py, _spec_decode_step_blocks).
enum class DraftRoom : std::uint8_t {
  none,
  own_blocks,         // blocks of their own
  behind_the_tokens,  // slots after the tokens, and of the load's own request blocks in each group
};

// The slots that a draft model needs in addition to the scheduled tokens (config/vllm.py,
// _set_max_num_scheduled_tokens).
enum class DraftSlots : std::uint8_t {
  of_max_num_seqs,        // subtracted from the token budget of every step
  of_scheduled_requests,  // subtracted as requests are scheduled
};

// When block hashes are finer than a hit's alignment in models with states
// (v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).
enum class StateHashing : std::uint8_t {
  of_equal_blocks,  // when state blocks are as long as the configuration's
  of_aligned_mode,  // in mode `align`
};

struct Release;

struct EngineProfile {
  // "vllm-0.28.0", or what differs from it as well: "vllm-0.28.0,freed_blocks=append".
  std::string name;
  const Release* release = nullptr;  // that it is, or starts from

  // Blocks.
  FreedBlocks freed_blocks;
  RetireBasis retire_basis;
  ZeroedBlocks zeroed_blocks;
  // They are zeroed also where caches have several dtypes (v1/kv_cache_interface.py,
  // has_mixed_precision_kv_cache); otherwise in models with state layers only.
  bool zeroes_mixed_dtypes;
  // Retired states are looked for beyond a null entry (v1/core/single_type_kv_cache_manager.py,
  // MambaManager._remove_blocks_in_range). Otherwise an older state stays until the request ends.
  bool retires_beyond_null_gaps;
  // A request may hold blocks of as many batches as are in flight at once (config/vllm.py,
  // max_in_flight_tokens); otherwise of one.
  bool admission_counts_batches_in_flight;

  // Prefix cache.
  EagleHits eagle_hits;
  // A hit is cut to the common length in every full-attention group
  // (v1/core/kv_cache_coordinator.py, find_longest_cache_hit); otherwise in those of the first spec
  // only.
  bool cuts_every_full_group;
  // In events, the name of a block of several hashes is all of them, not the last
  // (v1/core/kv_cache_utils.py, BlockHashListWithBlockSize).
  bool joins_hashes_of_long_blocks;
  // Blocks that no hit can need stay out of the cache: behind the last place where the hits of all
  // groups can end, and windows' blocks in between (HybridKVCacheCoordinator.cache_blocks).
  bool publishes_reachable_blocks_only;
  // With EAGLE that drops a block of each hit, the block that will be dropped is published behind
  // that place, and a window's blocks before it are those that such a hit needs.
  bool publishes_dropped_blocks;
  // With EAGLE states, which drop no block of a hit, are not searched for beyond it
  // (HybridKVCacheCoordinator.find_longest_cache_hit).
  bool searches_states_within_hit;
  bool tags_extra_keys;  // a salt is hashed as (cache_salt, value) (generate_block_hash_extra_keys)
  // Blocks of a window are left out of the cache also when hits may end at any of its blocks
  // (v1/core/single_type_kv_cache_manager.py, SlidingWindowManager.reachable_block_mask).
  bool masks_windows_at_block_alignment;
  // What is kept of windows and states is aligned as hits are, which may end inside blocks
  // (v1/core/kv_cache_coordinator.py, cache_hit_alignment_tokens); otherwise as the scheduler's
  // blocks.
  bool masks_at_hit_alignment;
  StateHashing state_hashing;
  // A hit may end inside a block of a longer chain, whose tail is then copied
  // (partial_hash_hits_enabled).
  bool hits_parts_of_blocks;
  // Such hits are possible with decode context parallelism (v1/core/kv_cache_coordinator.py).
  bool parts_with_context_parallelism;
  // Such hits are off for all where a window has longer blocks than the hashes, and a prompt is cut
  // at its last hash only where they are on (kv_cache_coordinator.py). Otherwise such a window ends
  // the engine at an assertion, and a prompt is cut wherever its states have longer blocks.
  bool groups_agree_on_parts;
  PromptEnds prompt_ends;
  // The last part of a state block is kept one hash earlier if EAGLE drops a block of hits
  // (_mamba_block_aligned_split).
  bool tails_leave_eagles_block;
  // The last state of a prompt counts as published, and a hit on it waits a step, whenever blocks
  // of the request are published again (MambaManager._cache_partial_tail_block).
  bool republishes_states;
  // A prompt that ends inside a full-attention block is registered there too, found or not
  // (FullAttentionManager._cache_partial_tail_block).
  bool caches_prompt_tails;
  // States and windows may be kept at intervals only (config/cache.py,
  // prefix_cache_retention_interval).
  bool retains_sparsely;
  // With EAGLE that drops a block, what a resend and a continuation of the prompt can hit is kept
  // (v1/core/kv_cache_coordinator.py, replay_boundaries); otherwise the place before the last
  // token.
  bool retains_for_eagle;
  // ... and, where EAGLE drops a block, the block before the end of a prefix that others share
  // (v1/core/single_type_kv_cache_manager.py, cache_blocks).
  bool retains_before_junctions;
  // A group of a hybrid whose hit EAGLE shortens is searched to the end of the prompt's hashes
  // (v1/core/kv_cache_coordinator.py, find_longest_cache_hit); otherwise to before its last token.
  bool eagle_searches_whole_prompt;
  // States can be cached in mode `all` (MambaManager.__init__ asserts against it).
  bool caches_states_in_mode_all;
  // The block of a single group divides the scheduler's (KVCacheCoordinator.__init__ asserts it).
  bool group_blocks_divide_scheduler_block;
  // Several groups may all be of one spec
  // (HybridKVCacheCoordinator.verify_and_split_kv_cache_groups).
  bool hybrids_of_one_spec;

  // Context parallelism (v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes).
  bool shards_by_pcp;  // a block covers dcp * pcp * block_size tokens, not dcp * block_size
  bool context_parallel_hybrids;  // decode context parallelism with several groups

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
  // What an output makes sure is published with it, drafts that were accepted among it; otherwise
  // that is published when the request is scheduled next, or, with asynchronous scheduling, by
  // output placeholders (v1/core/sched/scheduler.py, update_from_output).
  bool publishes_with_output;
  DraftSlots draft_slots;
  bool lookahead_in_first_step;       // lookahead slots also for a request without computed tokens
  bool long_prefill_only_in_company;  // the threshold does not bind a request that is alone
  PadsNewDecodes pads_new_decodes;
  // A request with states is counted the blocks that it takes; otherwise one, one for a copy and at
  // first the speculative ones if it takes any (v1/core/single_type_kv_cache_manager.py,
  // MambaManager.get_num_blocks_to_allocate).
  bool counts_states_exactly;
  // A victim that was passed over in this step moves the scan back by one, as one that was
  // scheduled does.
  bool scan_follows_every_victim;
  // The scan continues after the current request preempted itself (policy `priority`).
  bool scan_survives_self_preemption;
  bool reports_common_prefix_blocks;  // cascade attention
  // Prefills export states from inside a chunk (MambaSpec.num_prefill_checkpoint_blocks).
  bool serves_checkpoints;
  // Before min_tokens nothing ends a request, its length included; else only repetition does not
  // (v1/core/sched/utils.py, check_stop).
  bool min_tokens_hold_every_end;
  // A session keeps what it counted as computed when its next chunk comes, and its first chunk's
  // limit (_update_request_as_session).
  bool sessions_keep_computed;
  bool zeroes_embedded_tokens;  // where a prompt is embeddings its tokens are 0, and hashed so

  // With a KV connector.
  // Waiting requests that hold blocks have a queue of their own, served first. Others that were
  // passed over go back to the head of the queue.
  bool holders_come_first;
  LoadsLeaveRoom loads_leave_room;
  DraftRoom draft_room;
  // With a step in flight, an ended request's blocks stay allocated until that step has completed
  // (Scheduler.defer_block_free).
  bool defers_frees;
  // Requests whose blocks would stay allocated are not preempted
  // (Scheduler._request_blocks_can_be_freed), and no request is preempted while the connector is
  // about to free some (has_pending_block_frees).
  bool waits_for_frees;
  // A preempted request's output in flight is dropped where the connector forwards its blocks
  // (requires_kv_delivery).
  bool drops_output_of_victims;
  bool loads_states;  // with states, anything can be loaded
  // A connector receives the local hit up to its last whole scheduler block. A longer load replaces
  // what is hit after it.
  bool asks_for_whole_blocks;
  // A connector that can load states receives attention's hit (get_computed_blocks_for_connector).
  bool offers_divergent_hits;
  bool skips_loads_too;  // a request that skips the prefix cache loads nothing
  // Blocks that a longer load writes are zeroed; otherwise those alone that it failed to write
  // (record_blocks_for_zeroing).
  bool zeroes_loads;
  // The hits of all groups are taken before blocks are given to what is loaded
  // (v1/core/kv_cache_coordinator.py, allocate_new_computed_blocks).
  bool takes_hits_of_all_groups_first;

  // Encoders and sinks.
  // A request whose encoder input does not fit returns to its queue and no longer blocks it;
  // otherwise all requests after it wait (Scheduler._try_schedule_encoder_inputs).
  bool passes_over_unencoded;
  // The engine core starts with sinks; otherwise their manager refuses an argument, and takes no
  // blocks (v1/core/single_type_kv_cache_manager.py, SinkFullAttentionManager).
  bool starts_with_sinks;

  // What no release does: repairs of docs/findings.md, 1, 3, 7 to 9, 13, 14 and 46
  // (profile_without()).
  bool state_hits_drop_a_block;   // with EAGLE, like those of attention
  bool withdraws_what_is_undone;  // what a victim published in the step that preempts it
  bool holders_stand_aside;       // one that holds blocks and has no room lets the next try
  // tokens loaded within a step are published when the step has completed
  bool publishes_loads_late;
  // A window's maximum counts from its first block, not from the head of the table: otherwise a
  // load after a window seems to need no blocks.
  bool caps_windows_where_they_begin;
  bool keeps_window_of_last_token;  // of a prompt that is loaded whole: it is computed here
  // requests that return to a lost block and lack the window before it
  bool restarts_behind_windows;
  bool restores_loads_within_a_step;  // the last host page that such a load fills
  // What data parallel ranks tell one another before a step, in numbers (v1/worker/dp_utils.py).
  std::int64_t dp_sync_rows;
};

// The profile that a description names: RELEASE[,POLICY=VALUE]...[,without=FINDING]. `without` is
// what repairs the finding of docs/findings.md with that number, or `all` that a policy repairs.
// The same description always gives the same object; it lives as long as the process.
Result<const EngineProfile*> parse_engine(std::string_view description);
// Null: it describes none.
const EngineProfile* find_engine_profile(std::string_view description);
// REQUIRES: find_engine_profile(description) != nullptr.
const EngineProfile& engine_profile(std::string_view description);

// Tokens after a block that its hash covers too: as the configuration states, or what the engine
// core takes that has no KV connector. Asked once, when a scheduler is made.
std::int32_t hash_lookahead_of(const EngineConfig& config, const EngineProfile& profile);
// What the engine core takes with a connector: blocks that may come from elsewhere are hashed
// without the tokens behind them, and EAGLE drops a block of every hit.
EngineConfig beside_connector(EngineConfig config);

}  // namespace lockstep
