#include "reference/profiles/policies.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "base/check.h"
#include "reference/profiles/releases.h"

namespace lockstep {

namespace {

// Words of values. A bool has no and yes; an enum has its enumerators, except where users already
// had other words.
constexpr std::array kNoYes = std::to_array<PolicyValue>({{"no", 0}, {"yes", 1}});

constexpr std::array kLoadsLeaveRoom =
    std::to_array<PolicyValue>({{"no", 0}, {"yes", 1}, {"to_all", 2}});
constexpr std::array kSyncRows = std::to_array<PolicyValue>({{"4", 4}, {"6", 6}, {"7", 7}});

// The enumerators of E in order, each with its spelling (base/names.h).
template <class E>
constexpr auto kValues = [] {
  std::array<PolicyValue, kWords<E>.size()> values{};
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = {kWords<E>[i], static_cast<std::int64_t>(i)};
  return values;
}();

// The words of a field's type.
template <class T>
std::span<const PolicyValue> values_of() {
  if constexpr (std::is_same_v<T, bool>)
    return kNoYes;
  else if constexpr (std::is_same_v<T, LoadsLeaveRoom>)
    return kLoadsLeaveRoom;
  else if constexpr (std::is_enum_v<T>)
    return kValues<T>;
  else
    return kSyncRows;
}

// The value of the oldest release, and the changes since. Example: {false, {{"vllm-0.31.0", true}}}
// is false before 0.31.0 and true since.
template <class T>
struct History {
  struct Change {
    std::string_view release;
    T value;
    std::int32_t pull_request = 0;
  };
  T first;
  std::vector<Change> changes;
};

// Only its return type is used: the type of the field that a pointer to member names.
template <class T>
T member_type(T EngineProfile::*);

// Builds the row of one field. Values are stored as integers, so that one table holds bools, enums
// and counts.
template <auto member>
Policy row(std::string_view name, std::string_view chapter,
           History<decltype(member_type(member))> history, std::string_view effect,
           std::string_view shown_by) {
  using T = decltype(member_type(member));
  const auto number = [](T value) { return static_cast<std::int64_t>(value); };
  Policy policy{
      .name = name,
      .chapter = chapter,
      .values = values_of<T>(),
      .history = {{releases().front().name, number(history.first)}},
      .effect = effect,
      .shown_by = shown_by,
      .get = [](const EngineProfile& p) { return static_cast<std::int64_t>(p.*member); },
      .set = [](EngineProfile& p, std::int64_t value) { p.*member = static_cast<T>(value); }};
  for (const auto& [release, value, pull_request] : history.changes) {
    LS_CHECK(find_release(release) != nullptr, "{}: no release {}", name, release);
    policy.history.push_back({release, number(value), pull_request});
  }
  return policy;
}

// Headings of docs/reference/releases.md.
constexpr std::string_view kBlocks = "Blocks";
constexpr std::string_view kCache = "Prefix cache";
constexpr std::string_view kRanks = "Context parallelism";
constexpr std::string_view kCaches = "Caches";
constexpr std::string_view kScheduler = "Scheduler";
constexpr std::string_view kConnector = "KV connectors";
constexpr std::string_view kRepairs = "Repairs";
constexpr std::string_view kDataParallelism = "Data parallelism";
constexpr std::string_view kNoRecording = "data parallelism, which no recording shows";

// A row whose name is the field's.
#define LS_POLICY(field, ...) row<&EngineProfile::field>(#field, __VA_ARGS__)

// Allocation, release and zeroing of blocks.
std::vector<Policy> of_blocks() {
  return {
      LS_POLICY(freed_blocks, kBlocks,
                {FreedBlocks::append,
                 {{"vllm-0.23.0", FreedBlocks::unhashed_behind_windows_first},
                  {"vllm-0.24.0", FreedBlocks::unhashed_first},
                  {"vllm-0.27.1", FreedBlocks::unhashed_first_if_caching},
                  {"vllm-0.28.0", FreedBlocks::unhashed_first}}},
                "Freed blocks without a hash are reused first: cached content lives longer, and "
                "stale content shows earlier.",
                "requests that end"),
      LS_POLICY(retire_basis, kBlocks,
                {RetireBasis::scheduled, {{"vllm-0.26.0", RetireBasis::processed}}},
                "Windows and states keep what a step in flight may still read, one step longer.",
                "drafts or asynchronous scheduling, with windows or states"),
      LS_POLICY(zeroed_blocks, kBlocks,
                {ZeroedBlocks::full_attention,
                 {{"vllm-0.23.0", ZeroedBlocks::full_and_latent_attention},
                  {"vllm-0.24.0", ZeroedBlocks::every_full_attention},
                  {"vllm-0.28.0", ZeroedBlocks::attention}}},
                "Recycled bytes of another dtype are no longer read as numbers (NaN).",
                "windows, latent heads or hidden states with states"),
      LS_POLICY(zeroes_mixed_dtypes, kBlocks, {false, {{"vllm-0.27.1", true}}},
                "The same in models without states whose caches differ in dtype.",
                "caches of several dtypes"),
      LS_POLICY(retires_beyond_null_gaps, kBlocks, {false, {{"vllm-0.30.0", true}}},
                "States before a gap in the table are freed at once, not when the request ends.",
                "states in mode align with drafts"),
      LS_POLICY(starts_with_sinks, kBlocks, {true, {{"vllm-0.23.0", false}}},
                "Models with attention sinks do not start.", "attention sinks"),
      LS_POLICY(admission_counts_batches_in_flight, kBlocks, {false, {{"vllm-0.26.0", true}}},
                "With a step in flight a request is admitted only if a second batch fits as well.",
                "asynchronous scheduling with windows in a small pool"),
  };
}

// What a hit is, and which blocks are published.
std::vector<Policy> of_prefix_cache() {
  return {
      LS_POLICY(eagle_hits, kCache,
                {EagleHits::drop_last_block, {{"vllm-0.33.0", EagleHits::lookahead_hash}}},
                "A hit with EAGLE or MTP is a block longer.", "EAGLE or MTP with equal prefixes"),
      LS_POLICY(cuts_every_full_group, kCache, {false, {{"vllm-0.29.0", true}}},
                "A second full-attention group no longer keeps blocks beyond the common hit.",
                "several full-attention groups, hidden states for one, with equal prefixes"),
      LS_POLICY(joins_hashes_of_long_blocks, kCache, {true, {{"vllm-0.24.0", false}}},
                "Cache events name a long block by its last hash, not by all of them.",
                "blocks of several sizes"),
      LS_POLICY(publishes_reachable_blocks_only, kCache, {false, {{"vllm-0.22.1", true}}},
                "Blocks that no hit can need are not cached, which leaves room for others.",
                "blocks of several sizes"),
      LS_POLICY(publishes_dropped_blocks, kCache, {false, {{"vllm-0.23.0", true}}},
                "With blocks of several sizes EAGLE finds the block after a hit that it drops: "
                "hits are a whole common block longer.",
                "EAGLE or MTP with blocks of several sizes and equal prefixes"),
      LS_POLICY(searches_states_within_hit, kCache, {false, {{"vllm-0.26.0", true}}},
                "With EAGLE, a hit of states is no longer than that of attention.",
                "EAGLE or MTP with states and equal prefixes"),
      LS_POLICY(
          tags_extra_keys, kCache, {false, {{"vllm-0.31.0", true}}},
          "A salt is no longer mistaken for an adapter's name; hashes of salted prompts change.",
          "block hashes, which no schedule holds"),
      LS_POLICY(masks_windows_at_block_alignment, kCache, {false, {{"vllm-0.23.0", true}}},
                "Blocks that no hit can need are not cached; a window of one token never hits.",
                "windows of a token or two, with equal prefixes"),
      LS_POLICY(
          masks_at_hit_alignment, kCache, {false, {{"vllm-0.29.0", true}}},
          "Where hits end inside blocks, sparse retention keeps the state that a resend hits.",
          "hits inside blocks with prefix_cache_retention_interval"),
      LS_POLICY(state_hashing, kCache,
                {StateHashing::of_equal_blocks, {{"vllm-0.28.0", StateHashing::of_aligned_mode}}},
                "With states in mode align, attention of finer blocks keeps finer hashes.",
                "states of longer blocks than attention"),
      LS_POLICY(hits_parts_of_blocks, kCache, {false, {{"vllm-0.26.0", true}}},
                "A hit may end inside a state block, which is then copied.",
                "states in mode align of longer blocks than attention, with equal prefixes"),
      LS_POLICY(parts_with_context_parallelism, kCache, {false, {{"vllm-0.29.0", true}}},
                "Hits end inside state blocks with decode context parallelism, too.",
                "states in mode align with decode context parallelism and equal prefixes"),
      LS_POLICY(groups_agree_on_parts, kCache, {false, {{"vllm-0.28.0", true}}},
                "Windows of longer blocks than hashes no longer stop an engine that hits parts of "
                "state blocks; with decode context parallelism prompts are cut once less.",
                "states in mode align of longer blocks than hashes, with windows or decode context "
                "parallelism"),
  };
}

// Which states, windows and ends of prompts are kept for later hits.
std::vector<Policy> of_kept_prefixes() {
  return {
      LS_POLICY(prompt_ends, kCache,
                {PromptEnds::at_length, {{"vllm-0.32.0", PromptEnds::before_last_token}}},
                "A prompt of whole blocks that is sent again hits all but its last block.",
                "states in mode align, prompts of whole blocks"),
      LS_POLICY(tails_leave_eagles_block, kCache, {false, {{"vllm-0.30.0", true}}},
                "With EAGLE, the state inside a block that is kept is the one that a resend hits.",
                "EAGLE or MTP with hits inside blocks"),
      LS_POLICY(republishes_states, kCache, {true, {{"vllm-0.33.0", false}}},
                "A hit on the state that another request's prompt ended with waits no step for it.",
                "states in mode align with equal prefixes at a time"),
      LS_POLICY(caches_prompt_tails, kCache, {false, {{"vllm-0.26.0", true}}},
                "The end of a prompt inside a long block is registered as well.",
                "blocks of several sizes"),
      LS_POLICY(retains_sparsely, kCache, {false, {{"vllm-0.29.0", true}}},
                "States and windows can be kept at intervals only, which leaves room for more.",
                "prefix_cache_retention_interval"),
      LS_POLICY(retains_for_eagle, kCache, {false, {{"vllm-0.30.0", true}}},
                "With EAGLE, sparse retention keeps what a resend of the prompt hits.",
                "EAGLE or MTP with prefix_cache_retention_interval"),
      LS_POLICY(
          retains_before_junctions, kCache, {false, {{"vllm-0.33.0", true}}},
          "Where EAGLE drops a block, the end of a shared prefix is kept a block earlier too.",
          "EAGLE and a connector with prefix_cache_retention_interval"),
      LS_POLICY(eagle_searches_whole_prompt, kCache, {false, {{"vllm-0.32.0", true}}},
                "With EAGLE, a hybrid's prompt of whole blocks hits a block more when sent again.",
                "EAGLE or MTP with several groups and prompts of whole blocks"),
      LS_POLICY(caches_states_in_mode_all, kCache, {true, {{"vllm-0.32.0", false}}},
                "States can no longer be cached at every block.", "states in mode all"),
      LS_POLICY(group_blocks_divide_scheduler_block, kCache, {false, {{"vllm-0.23.0", true}}},
                "A single group's block size is the scheduler's.", "a single group of states"),
      LS_POLICY(hybrids_of_one_spec, kCache, {false, {{"vllm-0.29.0", true}}},
                "Several groups of one spec start with prefix caching.",
                "several groups of one spec"),
  };
}

// Which engines start with context parallelism, and how long their blocks are.
std::vector<Policy> of_context_parallelism() {
  return {
      LS_POLICY(shards_by_pcp, kRanks, {true, {{"vllm-0.26.0", false}}},
                "Prefill context parallelism no longer makes blocks longer.",
                "prefill context parallelism"),
      LS_POLICY(context_parallel_hybrids, kRanks, {false, {{"vllm-0.26.0", true}}},
                "Hybrids start with decode context parallelism.",
                "decode context parallelism with several groups"),
  };
}

// Caches and options that are modelled in a release: earlier ones may have them, but were not
// recorded with them (prefix_match_unit is in vLLM since 0.26.0). They refuse runs
// (compatibility.cpp) and decide nothing else.
std::vector<Policy> of_caches() {
  return {
      LS_POLICY(has_rings, kCaches, {false, {{"vllm-0.33.0", true}}},
                "An indexer that pools keys holds the last of them in one block per request.",
                "circular_buffer groups"),
      LS_POLICY(has_recomputed_windows, kCaches, {false, {{"vllm-0.33.0", true}}},
                "A window is computed again after a hit instead of cached.", "bounded_replay"),
      LS_POLICY(has_reference_windows, kCaches, {false, {{"vllm-0.33.0", true}}},
                "Attention sees the prompt and the last generated tokens.", "rswa_window"),
      LS_POLICY(has_replicated_caches, kCaches, {false, {{"vllm-0.33.0", true}}},
                "Some layers are replicated over context parallel ranks.",
                "dcp_sharded false with context parallelism"),
      LS_POLICY(has_draft_modules, kCaches, {false, {{"vllm-0.33.0", true}}},
                "Several modules of MTP each read one token further ahead.",
                "num_prefill_lookahead_tokens above 1"),
      LS_POLICY(has_prefix_match_unit, kCaches, {false, {{"vllm-0.33.0", true}}},
                "Block hashes can cover fewer tokens than a block.", "prefix_match_unit"),
      row<&EngineProfile::has_host_pages>("has_hisparse", kCaches, {false, {{"vllm-0.33.0", true}}},
                                          "Rows of sparse attention are stored in host memory.",
                                          "HiSparse groups"),
  };
}

// Which requests a step schedules, and with how many tokens.
std::vector<Policy> of_scheduler() {
  return {
      LS_POLICY(state_chunks, kScheduler,
                {StateChunks::whole_blocks,
                 {{"vllm-0.24.0", StateChunks::whole_blocks_and_shared_prefixes},
                  {"vllm-0.26.0", StateChunks::block_boundary_before_last_state},
                  {"vllm-0.27.1", StateChunks::block_boundary}}},
                "Prefills of hybrids end at block boundaries and where shared prefixes end: more "
                "states to hit.",
                "states in mode align with long prompts"),
      LS_POLICY(in_flight_accounting, kScheduler,
                {InFlightAccounting::placeholders, {{"vllm-0.27.1", InFlightAccounting::tokens}}},
                "Output in flight at a preemption is delivered and counts for nothing else.",
                "asynchronous scheduling with preemptions or drafts"),
      LS_POLICY(publishes_with_output, kScheduler, {false, {{"vllm-0.33.0", true}}},
                "Blocks that accepted drafts fill are found one step earlier.",
                "drafts with equal answers"),
      LS_POLICY(draft_slots, kScheduler,
                {DraftSlots::of_max_num_seqs, {{"vllm-0.28.0", DraftSlots::of_scheduled_requests}}},
                "A draft model reduces the token budget for scheduled requests only: larger "
                "prefill chunks.",
                "draft models or parallel drafting with a full token budget"),
      LS_POLICY(lookahead_in_first_step, kScheduler, {false, {{"vllm-0.23.0", true}}},
                "Slots of drafts are taken in a request's first step, not in its second.",
                "EAGLE, MTP or draft models"),
      LS_POLICY(long_prefill_only_in_company, kScheduler, {false, {{"vllm-0.31.0", true}}},
                "A long prompt that runs alone is not split: fewer steps to its first token.",
                "long_prefill_token_threshold"),
      LS_POLICY(pads_new_decodes, kScheduler,
                {PadsNewDecodes::never,
                 {{"vllm-0.25.1", PadsNewDecodes::beside_running_or_waits},
                  {"vllm-0.29.0", PadsNewDecodes::beside_running},
                  {"vllm-0.30.0", PadsNewDecodes::beside_running_or_after_hit}}},
                "A request that enters with one token left decodes with the batch's shape.",
                "drafts with prompts of one token more than a hit"),
      LS_POLICY(passes_over_unencoded, kScheduler, {false, {{"vllm-0.33.0", true}}},
                "A request whose encoder input does not fit no longer blocks the queue.",
                "encoder-decoder models"),
      LS_POLICY(counts_states_exactly, kScheduler, {false, {{"vllm-0.31.0", true}}},
                "A request no longer waits for a state block that it would not take.",
                "states with hits inside blocks in a small pool"),
      LS_POLICY(scan_follows_every_victim, kScheduler, {false, {{"vllm-0.28.0", true}}},
                "After a preemption no running request is passed over in that step.",
                "policy priority in a small pool"),
      LS_POLICY(scan_survives_self_preemption, kScheduler, {false, {{"vllm-0.33.0", true}}},
                "A request that preempts itself no longer ends the step for those after it.",
                "policy priority in a small pool"),
      LS_POLICY(reports_common_prefix_blocks, kScheduler, {true, {{"vllm-0.32.0", false}}},
                "No more common prefix blocks for cascade attention.", "every step"),
      LS_POLICY(serves_checkpoints, kScheduler, {false, {{"vllm-0.33.0", true}}},
                "States are saved within a prefill, which is no longer split.",
                "Mamba2, gated delta nets, KDA in mode align"),
      LS_POLICY(min_tokens_hold_every_end, kScheduler, {true, {{"vllm-0.29.0", false}}},
                "A request that reaches its length ends there, whatever its min_tokens.",
                "min_tokens near the longest length"),
      LS_POLICY(sessions_keep_computed, kScheduler, {true, {{"vllm-0.31.0", false}}},
                "A session's next chunk has its own limit, and output in flight at a stop is lost.",
                "sessions, which no profile decides"),
      LS_POLICY(zeroes_embedded_tokens, kScheduler, {false, {{"vllm-0.29.0", true}}},
                "Prompts of embeddings have tokens 0 in place of what a client sent.",
                "embeddings and tokens in one prompt, and the hashes of their blocks"),
  };
}

// Decisions that only a KV connector causes.
std::vector<Policy> of_connectors() {
  return {
      LS_POLICY(defers_frees, kConnector, {false, {{"vllm-0.24.0", true}}},
                "With a step in flight, blocks of an ended request are freed one step later.",
                "clients that disconnect, with a connector and asynchronous scheduling"),
      LS_POLICY(
          holders_come_first, kConnector, {false, {{"vllm-0.31.0", true}}},
          "Requests that have loaded their blocks no longer wait after those that do not fit.",
          "asynchronous loads in a small pool"),
      LS_POLICY(loads_leave_room, kConnector,
                {LoadsLeaveRoom::no, {{"vllm-0.23.0", LoadsLeaveRoom::to_those_under_way}}},
                "A load starts only if all requests in flight can still finish.",
                "asynchronous loads in a small pool"),
      LS_POLICY(
          draft_room, kConnector,
          {DraftRoom::none,
           {{"vllm-0.31.0", DraftRoom::own_blocks}, {"vllm-0.32.0", DraftRoom::behind_the_tokens}}},
          "A load also leaves blocks free for drafts of requests in flight.",
          "asynchronous loads with drafts in a small pool"),
      LS_POLICY(waits_for_frees, kConnector, {false, {{"vllm-0.30.0", true}}},
                "Requests whose blocks an in-flight step still uses are not preempted, nor any "
                "while sends end.",
                "small pools with a connector and asynchronous scheduling"),
      LS_POLICY(drops_output_of_victims, kConnector, {false, {{"vllm-0.27.1", true}}},
                "Output in flight of a request to be sent is dropped at a preemption.",
                "preemptions with a sending connector and asynchronous scheduling"),
      LS_POLICY(loads_states, kConnector, {false, {{"vllm-0.23.0", true}}},
                "Hybrids with states can load prompts.", "loads in models with states"),
      LS_POLICY(asks_for_whole_blocks, kConnector, {false, {{"vllm-0.27.1", true}}},
                "A load may replace a hit inside a block by a longer one.",
                "loads after hits that end inside blocks"),
      LS_POLICY(offers_divergent_hits, kConnector, {false, {{"vllm-0.28.0", true}}},
                "A hit of attention whose state was evicted is kept, and its state is loaded.",
                "loads in models with states in a small pool"),
      LS_POLICY(skips_loads_too, kConnector, {false, {{"vllm-0.31.0", true}}},
                "Requests that do not read the prefix cache load nothing either.",
                "skip_reading_prefix_cache with a connector"),
      LS_POLICY(zeroes_loads, kConnector, {true, {{"vllm-0.26.0", false}}},
                "Zeroing no longer races with a load into the same blocks.",
                "asynchronous loads in models with states"),
      LS_POLICY(takes_hits_of_all_groups_first, kConnector, {false, {{"vllm-0.24.0", true}}},
                "Blocks for a load no longer evict what another group has hit.",
                "loads with several groups"),
  };
}

// Repairs that no release has, and one count that no schedule shows.
std::vector<Policy> repairs() {
  return {
      LS_POLICY(state_hits_drop_a_block, kRepairs, {false, {}},
                "With EAGLE, a hit of states loses its last block as that of attention does.",
                "EAGLE or MTP with states and equal prefixes"),
      LS_POLICY(withdraws_what_is_undone, kRepairs, {false, {}},
                "What a victim published in the step that preempts it is withdrawn.",
                "policy priority with equal prefixes"),
      LS_POLICY(holders_stand_aside, kRepairs, {false, {}},
                "A request that holds blocks but does not fit lets the next one try.",
                "asynchronous loads in a small pool"),
      LS_POLICY(publishes_loads_late, kRepairs, {false, {}},
                "Tokens loaded within a step are published when the step has completed.",
                "synchronous loads with equal prefixes"),
      LS_POLICY(caps_windows_where_they_begin, kRepairs, {false, {}},
                "Tokens loaded after a window count as needed blocks.",
                "asynchronous loads of windows"),
      LS_POLICY(keeps_window_of_last_token, kRepairs, {false, {}},
                "A fully loaded prompt keeps the window of its last token.",
                "whole prompts loaded into windows"),
      LS_POLICY(restarts_behind_windows, kRepairs, {false, {}},
                "A request that goes back to a lost block and has no window before it starts over.",
                "loads that fail, with windows"),
      LS_POLICY(restores_loads_within_a_step, kRepairs, {false, {}},
                "A load within a step also fills HiSparse's last page on the device.",
                "synchronous loads with HiSparse's groups"),
  };
}

// Several engines of one server.
std::vector<Policy> of_data_parallelism() {
  return {
      LS_POLICY(dp_load, kDataParallelism,
                {DpLoad::four_per_waiting, {{"vllm-0.27.1", DpLoad::in_flight, 49204}}},
                "Data parallel ranks share a burst of requests evenly.", kNoRecording),
      LS_POLICY(rotates_dp_ties, kDataParallelism, {false, {{"vllm-0.25.1", true, 47420}}},
                "Equally loaded data parallel ranks get requests in turn: a later request of a "
                "session may miss the prefix cache.",
                kNoRecording),
      LS_POLICY(
          dp_votes, kDataParallelism,
          {DpVotes::every_32_steps, {{"vllm-0.30.0", DpVotes::first_and_every_16_steps, 52957}}},
          "Data parallel ranks without requests pause earlier.", kNoRecording),
      LS_POLICY(dp_sync_rows, kDataParallelism, {4, {{"vllm-0.30.0", 6}, {"vllm-0.33.0", 7}}},
                "Data parallel ranks exchange more numbers before a step.", kNoRecording),
  };
}

// This order is the order in profiles' names and in the page of releases.
std::vector<Policy> make_policies() {
  std::vector<Policy> all;
  for (auto* const chapter :
       {&of_blocks, &of_prefix_cache, &of_kept_prefixes, &of_context_parallelism, &of_caches,
        &of_scheduler, &of_connectors, &repairs, &of_data_parallelism})
    std::ranges::copy(chapter(), std::back_inserter(all));
  return all;
}

#undef LS_POLICY

// {finding, needs, repairs, needs_connector}. A repair may itself need another finding's repair:
// profile_without(..., 0) repeats until none is left.
const std::vector<FindingPolicies>& all_finding_policies() {
  static const std::vector<FindingPolicies> kFindings{
      {1,
       {{"eagle_hits", "drop_last_block"},
        {"state_hits_drop_a_block", "no"},
        {"state_chunks", "block_boundary", true}},
       {{"state_hits_drop_a_block", "yes"}}},
      {2, {{"cuts_every_full_group", "no"}}, {{"cuts_every_full_group", "yes"}}},
      {3, {{"withdraws_what_is_undone", "no"}}, {{"withdraws_what_is_undone", "yes"}}},
      {4, {{"retire_basis", "scheduled"}}, {{"retire_basis", "processed"}}},
      {5, {{"retire_basis", "processed"}}, {}},
      {6, {}, {}},
      {7,
       {{"holders_come_first", "no"}},
       {{"holders_come_first", "yes"}, {"holders_stand_aside", "yes"}},
       true},
      {8,
       {{"loads_leave_room", "to_all", true}},
       {{"loads_leave_room", "to_all"}, {"caps_windows_where_they_begin", "yes"}},
       true},
      {9, {{"publishes_loads_late", "no"}}, {{"publishes_loads_late", "yes"}}, true},
      {11, {}, {}},
      {12,
       {{"takes_hits_of_all_groups_first", "no"}},
       {{"takes_hits_of_all_groups_first", "yes"}},
       true},
      {13, {{"keeps_window_of_last_token", "no"}}, {{"keeps_window_of_last_token", "yes"}}, true},
      {14, {{"restarts_behind_windows", "no"}}, {{"restarts_behind_windows", "yes"}}, true},
      {16, {{"serves_checkpoints", "yes"}}, {}},
      {17, {{"has_prefix_match_unit", "yes"}, {"hits_parts_of_blocks", "yes"}}, {}},
      {18, {{"has_prefix_match_unit", "yes"}, {"hits_parts_of_blocks", "yes"}}, {}},
      {19, {{"pads_new_decodes", "never", true}}, {}},
      {20,
       {{"retires_beyond_null_gaps", "no"}, {"retire_basis", "processed"}},
       {{"retires_beyond_null_gaps", "yes"}}},
      {21,
       {{"pads_new_decodes", "beside_running_or_waits"}},
       {{"pads_new_decodes", "beside_running"}}},
      {35,
       {{"draft_room", "none", true}, {"loads_leave_room", "yes"}},
       {{"draft_room", "none"}},
       true},
      {36, {{"loads_leave_room", "yes"}}, {{"loads_leave_room", "to_all"}}, true},
      {38, {{"starts_with_sinks", "no"}}, {{"starts_with_sinks", "yes"}}},
      {45, {{"has_hisparse", "yes"}}, {}, true},
      {46,
       {{"has_hisparse", "yes"}, {"restores_loads_within_a_step", "no"}},
       {{"restores_loads_within_a_step", "yes"}},
       true},
  };
  return kFindings;
}

// REQUIRES: the table has the policy and the word.
std::int64_t value_of(const PolicyIs& is) {
  const Policy* policy = find_policy(is.policy);
  LS_CHECK(policy != nullptr, "no policy {}", is.policy);
  const auto value = std::ranges::find(policy->values, is.word, &PolicyValue::word);
  LS_CHECK(value != policy->values.end(), "{} is never {}", is.policy, is.word);
  return value->value;
}

// True if the profile meets the condition.
bool is_so(const EngineProfile& profile, const PolicyIs& is) {
  return (find_policy(is.policy)->get(profile) == value_of(is)) != is.is_other;
}

}  // namespace

std::string_view Policy::word(std::int64_t value) const {
  const auto found = std::ranges::find(values, value, &PolicyValue::value);
  LS_CHECK(found != values.end(), "{} is never {}", name, value);
  return found->word;
}

std::span<const Policy> policies() {
  static const std::vector<Policy> kPolicies = make_policies();
  return kPolicies;
}

const Policy* find_policy(std::string_view name) {
  const auto found = std::ranges::find(policies(), name, &Policy::name);
  return found == policies().end() ? nullptr : &*found;
}

const EngineProfile& with_policy(const EngineProfile& profile, const Policy& policy,
                                 std::int64_t value) {
  const EngineProfile& other =
      engine_profile(fmt::format("{},{}={}", profile.name, policy.name, policy.word(value)));
  LS_CHECK(policy.get(other) == value, "{} has another {}", other.name, policy.name);
  return other;
}

std::vector<const Policy*> differences(const EngineProfile& one, const EngineProfile& other) {
  std::vector<const Policy*> different;
  for (const Policy& policy : policies())
    if (policy.get(one) != policy.get(other)) different.push_back(&policy);
  return different;
}

std::span<const FindingPolicies> finding_policies() { return all_finding_policies(); }

bool is_possible(const EngineProfile& profile, const FindingPolicies& finding) {
  return std::ranges::all_of(finding.needs,
                             [&](const PolicyIs& need) { return is_so(profile, need); });
}

// A finding of loads needs a release whose connectors are modelled.
bool can_show(const EngineProfile& profile, const FindingPolicies& finding) {
  return is_possible(profile, finding) &&
         (!finding.needs_connector || profile.release->models_connectors);
}

// An unchanged name means that the profile does not have the finding.
std::string profile_without(std::string_view description, int finding) {
  const EngineProfile* profile = find_engine_profile(description);
  if (profile == nullptr) return {};
  const EngineProfile* repaired = find_engine_profile(
      fmt::format("{},without={}", profile->name, finding == 0 ? "all" : std::to_string(finding)));
  return repaired == nullptr || repaired->name == profile->name ? std::string() : repaired->name;
}

}  // namespace lockstep
