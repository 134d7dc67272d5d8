// The table of findings: what permits each, the checks by which it shows, and its repair.
#include "properties/judge/known_findings.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"
#include "properties/shrink/case_parts.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/policies.h"

namespace lockstep {
namespace {

const EngineProfile& profile_of(const SavedCase& saved) {
  return engine_profile(saved.engine.engine);
}

// Counts the groups whose kind satisfies the predicate.
template <class Predicate>
auto count_groups(const SavedCase& saved, Predicate predicate) {
  return std::ranges::count_if(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
    return predicate(group.spec.kind);
  });
}

// The conditions below are necessary, not sufficient: a case that meets one and fails is judged
// again with the repair. Too wide a condition costs time, too narrow a one misses a finding.
//
// 1: EAGLE drops the last block of an attention hit but not of a state hit.
bool state_hit_is_longer(const SavedCase& saved) {
  const EngineProfile& profile = profile_of(saved);
  return saved.engine.enable_prefix_caching && saved.engine.spec_method == SpecMethod::eagle &&
         profile.eagle_hits == EagleHits::drop_last_block && !profile.state_hits_drop_a_block &&
         has_states(saved.cache.groups);
}

// 2: the common hit is cut for the first full-attention group only.
bool second_full_group_is_not_cut(const SavedCase& saved) {
  return saved.engine.enable_prefix_caching && !profile_of(saved).cuts_every_full_group &&
         count_groups(saved, is_full_attention) > 1;
}

// 3: under policy priority the victim of a preemption may already be scheduled in the same step.
// Its blocks were published when they were allocated and are never computed.
bool preempts_in_own_step(const SavedCase& saved) {
  return saved.engine.policy == SchedulingPolicy::priority && saved.engine.enable_prefix_caching &&
         !profile_without(saved.engine.engine, 3).empty();
}

bool has_windows(const SavedCase& saved) { return count_groups(saved, is_windowed) > 0; }

// 6: drafts need slots in the window, which the plan does not count.
bool plans_windows_without_lookahead(const SavedCase& saved) {
  return num_lookahead_tokens(saved.engine) > 0 && has_windows(saved);
}

// 4: windows are retired by the scheduled count, which includes drafts that are rejected later.
bool frees_windows_by_drafts(const SavedCase& saved) {
  return profile_of(saved).retire_basis == RetireBasis::scheduled &&
         saved.engine.async_scheduling && saved.engine.num_spec_tokens > 0 && has_windows(saved);
}

// 5: with a step in flight a state is freed a step later; a long prefill holds one too many.
bool plans_too_few_states(const SavedCase& saved) {
  return profile_of(saved).retire_basis == RetireBasis::processed &&
         saved.engine.async_scheduling && saved.engine.mamba_cache_mode == MambaCacheMode::align &&
         has_states(saved.cache.groups);
}

// Checkpoints are exported only into blocks that groups have for them.
bool exports_checkpoints(const SavedCase& saved) {
  return saved.engine.enable_prefix_caching &&
         std::ranges::any_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
           return group.spec.num_prefill_checkpoint_blocks > 0;
         });
}

// 16: with sparse retention the scheduler reserves a checkpoint block for the last chunk only. The
// worker also exports from other chunks, into a block that a draft's block left in its row.
bool exports_over_running_states(const SavedCase& saved) {
  return exports_checkpoints(saved) && saved.engine.num_spec_tokens > 0 &&
         saved.engine.prefix_cache_retention_interval == 0;
}

// 17: after a hit inside a block, the state of that block is published although it was never
// written. 18: such a request needs one state block and one attention block more than planned.
bool hits_parts_of_states(const SavedCase& saved) {
  return exports_checkpoints(saved) && saved.engine.prefix_match_unit > 0;
}

// 20: retirement stops at the first null entry, so a state before a gap stays allocated.
bool keeps_states_before_gaps(const SavedCase& saved) {
  const EngineProfile& profile = profile_of(saved);
  return profile.retire_basis == RetireBasis::processed && !profile.retires_beyond_null_gaps &&
         saved.engine.async_scheduling && saved.engine.mamba_cache_mode == MambaCacheMode::align &&
         has_states(saved.cache.groups);
}

// 21: a decode is padded to 1 + drafts, and then cut to one token without its drafts.
bool pads_what_is_cut(const SavedCase& saved) {
  return profile_of(saved).pads_new_decodes == PadsNewDecodes::beside_running_or_waits &&
         saved.engine.num_spec_tokens > 0;
}

// 19: a prompt of one token looks like a decode and is padded with drafts, which enter its state.
bool pads_prompts_of_one_token(const SavedCase& saved) {
  return profile_of(saved).pads_new_decodes != PadsNewDecodes::never &&
         saved.engine.num_spec_tokens > 0 && has_states(saved.cache.groups) &&
         std::ranges::any_of(requests_of(saved), [](const RequestSpec* request) {
           return request->prompt.size() == 1;
         });
}

// 11: two equal requests preempt each other forever. Prefix caching does not exclude that: states
// saved at block boundaries do not restore what was computed.
bool has_equals(const SavedCase& saved) {
  if (saved.engine.policy != SchedulingPolicy::priority) return false;
  std::set<std::pair<std::int64_t, std::int64_t>> seen;
  return !std::ranges::all_of(requests_of(saved), [&](const RequestSpec* request) {
    return seen.emplace(request->priority, request->arrival_ns).second;
  });
}

// 13: after a load of a whole prompt the last token is computed again. Its window starts one token
// earlier than the loaded blocks.
bool loads_into_windows(const SavedCase& saved) {
  return has_connector(saved) && has_windows(saved);
}

// 14: a request returns to its first lost block, but the window before that block was freed or
// never loaded. With policy `fail` no request returns.
bool computes_lost_blocks_of_windows(const SavedCase& saved) {
  return may_lose_blocks(saved) && has_windows(saved) &&
         saved.connector.load_failure_policy == KVLoadFailurePolicy::recompute;
}

// 15: the step in flight was decided before the loss is known; its output is kept.
bool loses_blocks_behind_a_step(const SavedCase& saved) {
  return saved.engine.async_scheduling && may_lose_blocks(saved);
}

// 12: allocating blocks for a load evicts blocks that another group has hit.
bool loads_beside_hits(const SavedCase& saved) {
  return has_connector(saved) && saved.cache.groups.size() > 1 &&
         saved.engine.enable_prefix_caching;
}

// 35: a load waits for blocks for drafts that the pool never has. Releases with DraftRoom::none
// require none.
bool loads_beside_drafts(const SavedCase& saved) {
  return has_connector(saved) && saved.engine.num_spec_tokens > 0 &&
         profile_of(saved).draft_room != DraftRoom::none;
}

// 36: a request whose load failed must leave blocks free for in-flight requests, itself included.
bool loads_again(const SavedCase& saved) {
  return may_lose_blocks(saved) &&
         profile_of(saved).loads_leave_room == LoadsLeaveRoom::to_those_under_way;
}

// 22: a reset counts the output to drop in placeholders, which are one per token, not per output.
bool drops_output_after_resets(const SavedCase& saved) {
  return saved.engine.async_scheduling && saved.engine.num_spec_tokens > 0 &&
         profile_of(saved).in_flight_accounting == InFlightAccounting::placeholders &&
         std::ranges::any_of(saved.trace.records, [](const TraceRecord& record) {
           const auto* control = std::get_if<TraceControl>(&record);
           return control != nullptr && control->preempts_running;
         });
}

// 45 and 46: HiSparse's page workers together with another connector that loads.
bool loads_into_host_pages(const SavedCase& saved) {
  return saved.connector.has(ConnectorKind::page_workers) && saved.connector.parts.size() > 1;
}

// Returns the case under a profile in which the finding is repaired. Unchanged if the profile has
// no such variant: its release has already repaired the finding.
template <int finding>
SavedCase with_the_rule_repaired(const SavedCase& saved) {
  SavedCase repaired = saved;
  const std::string without = profile_without(saved.engine.engine, finding);
  if (!without.empty()) repaired.engine.engine = without;
  return repaired;
}

// Returns the case with a larger pool: the repair of findings about plans that are too small.
SavedCase with_more_blocks(const SavedCase& saved, std::int64_t num_blocks) {
  SavedCase larger = saved;
  LS_CHECK(set_num_blocks(larger, saved.cache.num_blocks + num_blocks), "a plan of broken pages");
  return larger;
}

// Adds what a step in flight keeps per state group: a state, and the checkpoints of its chunk.
SavedCase with_states_in_flight_planned(const SavedCase& saved) {
  std::int64_t num_blocks = count_groups(saved, is_state_kind);
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    num_blocks += group.spec.num_prefill_checkpoint_blocks;
  return with_more_blocks(saved, num_blocks);
}

// Adds the blocks of the draft slots in each window. Slots may start inside a block: hence 1 more.
SavedCase with_lookahead_planned(const SavedCase& saved) {
  std::int64_t num_blocks = 0;
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    if (is_windowed(group.spec.kind))
      num_blocks += 1 + cdiv(saved.engine.num_spec_tokens, group.spec.block_size);
  return with_more_blocks(saved, num_blocks);
}

// Adds a hit block and its copy per state group, and one attention block.
SavedCase with_partial_hits_planned(const SavedCase& saved) {
  return with_more_blocks(saved, 2 * count_groups(saved, is_state_kind) + 1);
}

// Returns the case without prefill checkpoints; prefills then end where a state is saved.
SavedCase with_prefills_cut(const SavedCase& saved) {
  SavedCase cut = saved;
  without_checkpoints(cut);
  return cut;
}

// The schedule changes as little as possible.
SavedCase with_prompts_of_two_tokens(const SavedCase& saved) {
  SavedCase longer = saved;
  for (RequestSpec* request : requests_of(longer))
    if (request->prompt.size() == 1) request->prompt.append({TokenRun::Kind::seeded, 1, 0, 1});
  return longer;
}

// No rule repairs this one: the loss is not known when the next step is decided.
SavedCase with_no_loads_lost(const SavedCase& saved) {
  SavedCase whole = saved;
  whole.connector.load_failed_percent = 0;
  return whole;
}

// Separates equal arrivals by 1 ns.
SavedCase with_arrivals_apart(const SavedCase& saved) {
  SavedCase apart = saved;
  std::int64_t last_ns = -1;
  for (RequestSpec* request : requests_of(apart)) {
    if (request->arrival_ns <= last_ns) request->arrival_ns = last_ns + 1;
    last_ns = request->arrival_ns;
  }
  return apart;
}

SavedCase with_running_requests_kept(const SavedCase& saved) {
  SavedCase kept = saved;
  for (TraceRecord& record : kept.trace.records)
    if (auto* control = std::get_if<TraceControl>(&record)) control->preempts_running = false;
  return kept;
}

// Gives the host pool blocks for all requests at once, so no load waits for another.
SavedCase with_room_for_all_on_the_host(const SavedCase& saved) {
  SavedCase larger = saved;
  const std::int64_t pages =
      2 + cdiv(saved.engine.max_model_len, saved.cache.groups.front().spec.block_size);
  larger.engine.host_pool_num_blocks += std::ssize(requests_of(saved)) * pages;
  return larger;
}

// Checks by which a finding shows. Several findings share a list, since a wrong hit may first be
// seen as a read, as a write into a shared block, or as a decision that memory cannot execute.
constexpr std::string_view kWrongHit[] = {"audit.attention_read",  "audit.state_read",
                                          "audit.token_write",     "invariant.one_writer",
                                          "invariant.queue_front", "decide"};
constexpr std::string_view kSharedBeyondHit[] = {"audit.handed_out",
                                                 "audit.attention_read",
                                                 "audit.state_read",
                                                 "audit.token_write",
                                                 "invariant.one_writer",
                                                 "invariant.queue_front",
                                                 "audit.zeroing",
                                                 "decide",
                                                 "reuse"};
// Published blocks that were not computed: the audit reports them when a request hits them.
constexpr std::string_view kNotComputed[] = {"invariant.published", "audit.attention_read",
                                             "audit.state_read", "decide"};
constexpr std::string_view kFreedInFlight[] = {"audit.handed_out", "audit.attention_read",
                                               "audit.token_write"};
constexpr std::string_view kLiveness[] = {"liveness"};
constexpr std::string_view kKeptStates[] = {"invariant.planned_blocks", "liveness"};
constexpr std::string_view kCutDrafts[] = {"audit.scheduled_tokens"};
constexpr std::string_view kDroppedOutput[] = {"audit.sampled", "audit.scheduled_tokens",
                                               "audit.stale_output", "liveness", "decide"};
constexpr std::string_view kWrongState[] = {"audit.state_read", "decide"};

// With windows the number of missing blocks is an estimate, so some cycles are plain "liveness".
constexpr std::string_view kBehindLarge[] = {"liveness.head_of_line", "liveness.partial_load",
                                             "liveness", "audit.standstill"};
constexpr std::string_view kHalfLoaded[] = {"liveness.partial_load", "liveness",
                                            "audit.standstill"};
constexpr std::string_view kEmptyPage[] = {"invariant.read_page", "invariant.clean_page"};
// A request that is cut back to before a lost block writes the block again, even if other requests
// rely on it.
constexpr std::string_view kLostBlock[] = {"audit.attention_read", "audit.handed_out",
                                           "invariant.one_writer", "decide"};
constexpr std::string_view kNoWindow[] = {"audit.token_write", "audit.attention_read", "decide"};
constexpr std::string_view kInFlightBehindLost[] = {
    "audit.sampled",    "audit.attention_read", "audit.scheduled_tokens", "audit.token_write",
    "audit.handed_out", "invariant.one_writer", "invariant.limits",       "decide"};
constexpr std::string_view kEvictedHit[] = {"audit.handed_out",
                                            "audit.attention_read",
                                            "audit.token_write",
                                            "invariant.one_group",
                                            "invariant.hash_to_block",
                                            "invariant.hit",
                                            "invariant.one_writer",
                                            "decide",
                                            "reuse"};

// Tried in this order. Repairs by more blocks come last, since they help against other findings.
constexpr KnownFinding kFindings[] = {
    {1, "with EAGLE, a state hit is longer than the attention hit", state_hit_is_longer, kWrongHit,
     with_the_rule_repaired<1>},
    {2, "a second full-attention group keeps blocks beyond the common hit",
     second_full_group_is_not_cut, kSharedBeyondHit, with_the_rule_repaired<2>},
    {3, "a request preempted in its own step leaves blocks that were not computed",
     preempts_in_own_step, kNotComputed, with_the_rule_repaired<3>},
    {4, "a window is retired by a count that includes rejected drafts", frees_windows_by_drafts,
     kFreedInFlight, with_the_rule_repaired<4>},
    {35, "a load waits for draft slots that the pool never has", loads_beside_drafts, kBehindLarge,
     with_the_rule_repaired<35>},
    {36, "a request whose load failed reserves blocks for itself", loads_again, kBehindLarge,
     with_no_loads_lost},
    {7, "a loaded request is queued after one that does not fit", has_connector, kBehindLarge,
     with_the_rule_repaired<7>},
    {8, "two requests have loaded parts, and each needs what the other holds", has_connector,
     kHalfLoaded, with_the_rule_repaired<8>},
    {9, "a request that relies on another to compute a lost block is left without it",
     may_lose_blocks, kLostBlock, with_the_rule_repaired<9>},
    {12, "the blocks of a load evict what another group has hit", loads_beside_hits, kEvictedHit,
     with_the_rule_repaired<12>},
    {13, "a fully loaded prompt lacks the window of its last token", loads_into_windows, kNoWindow,
     with_the_rule_repaired<13>},
    {14, "a request sent back to a lost block has freed the window before it",
     computes_lost_blocks_of_windows, kNoWindow, with_the_rule_repaired<14>},
    {15, "output in flight after a lost block is kept", loses_blocks_behind_a_step,
     kInFlightBehindLost, with_no_loads_lost},
    {16, "a checkpoint is exported over the running state", exports_over_running_states,
     kWrongState, with_prefills_cut},
    {17, "the state of a hit is published under a longer prefix", hits_parts_of_states, kWrongState,
     with_prefills_cut},
    {19, "a prompt of one token takes the drafts that pad it into its state",
     pads_prompts_of_one_token, kWrongState, with_prompts_of_two_tokens},
    {20, "a state before a gap in the table is kept until the request ends",
     keeps_states_before_gaps, kKeptStates, with_the_rule_repaired<20>},
    {21, "a padded request that is cut to one token keeps its drafts", pads_what_is_cut, kCutDrafts,
     with_the_rule_repaired<21>},
    {22, "a reset that preempts drops output of the steps after it", drops_output_after_resets,
     kDroppedOutput, with_running_requests_kept},
    {5, "with a step in flight a request holds more states than its pool is planned for",
     plans_too_few_states, kLiveness, with_states_in_flight_planned},
    {18, "a hit of a part of a block needs more than the pool is planned for", hits_parts_of_states,
     kLiveness, with_partial_hits_planned},
    {6, "a window's pool is planned without the slots of drafts", plans_windows_without_lookahead,
     kLiveness, with_lookahead_planned},
    {11, "requests of one priority and arrival preempt each other forever", has_equals, kLiveness,
     with_arrivals_apart},
    {46, "a load within a step leaves HiSparse's last page empty", loads_into_host_pages,
     kEmptyPage, with_the_rule_repaired<46>},
    {45, "loads fill HiSparse's host pool", loads_into_host_pages, kBehindLarge,
     with_room_for_all_on_the_host},
};

// 10: after rejected drafts, a step with fewer drafts may end before a block boundary that the
// previous step passed. The manager then asserts (vLLM 0.22.1).
bool steps_may_end_sooner(const SavedCase& saved) {
  return saved.engine.num_spec_tokens > 0 && has_states(saved.cache.groups) &&
         saved.engine.mamba_cache_mode == MambaCacheMode::align;
}

// 21: later releases assert instead of continuing with the wrong drafts.
bool pads_new_decodes(const SavedCase& saved) {
  return profile_of(saved).pads_new_decodes != PadsNewDecodes::never &&
         saved.engine.num_spec_tokens > 0;
}

constexpr std::string_view kStops[] = {"engine.exception"};
constexpr std::string_view kMiscounts[] = {"engine.exception", "audit.conservation",
                                           "conform.free_blocks"};
constexpr EngineFinding kEngineFindings[] = {
    {{10, "a step with fewer drafts stops the engine", steps_may_end_sooner, kStops},
     "num_required_blocks",
     Reached::step_ends_sooner},
    {{21, "a padded request that is cut to one token stops the engine", pads_new_decodes, kStops},
     "num_new_tokens == 1 + self.num_spec_tokens",
     Reached::step},
    {{23, "a load shorter than another group's hit makes the pool miscount",
      second_full_group_is_not_cut, kMiscounts},
     "",
     Reached::external_hit},
};

// Findings of an engine's worker. Its host recognises the cause and names the finding in its
// message, so they need neither condition nor repair.
constexpr KnownFinding kWorkerFindings[] = {
    {26, "a short convolution keeps rejected drafts", nullptr, {}, nullptr},
    {27, "padded rows are cleared by the first group's table", nullptr, {}, nullptr},
    {28, "a padded hidden state goes to the last block", nullptr, {}, nullptr},
    {48, "a step without drafts continues from an earlier state", nullptr, {}, nullptr},
    {49, "a prompt of one token continues a recycled state", nullptr, {}, nullptr},
    {50, "MLA reads rejected drafts as context", nullptr, {}, nullptr},
    {51, "a table of states has no room for the blocks of drafts", nullptr, {}, nullptr},
    {52, "accepted drafts of a row that moved are looked up twice", nullptr, {}, nullptr},
    {53, "a request that a step leaves out forgets its accepted drafts", nullptr, {}, nullptr},
    {54, "tokens of a resumed request are verified as drafts", nullptr, {}, nullptr},
};

}  // namespace

std::span<const KnownFinding> known_findings() { return kFindings; }
std::span<const EngineFinding> engine_findings() { return kEngineFindings; }
std::span<const KnownFinding> worker_findings() { return kWorkerFindings; }

SavedCase with_all_rules_repaired(const SavedCase& saved) {
  return with_the_rule_repaired<0>(saved);
}

}  // namespace lockstep
