// The auditor's inside: requests as a worker sees them, and the rules that are checked on them.
// audit.cpp takes the decisions in, audit_pool.cpp checks what holds over all requests of a step,
// audit_reads.cpp follows reads and writes of attention, audit_drafts.cpp those of a drafter,
// audit_states.cpp states, audit_hits.cpp what could be hit, audit_events.cpp what is told of it,
// audit_requests.cpp what becomes of requests, audit_late.cpp drafts and outputs that are no
// longer theirs, audit_transfers.cpp what a KV connector moves, audit_sessions.cpp input that comes
// in chunks, audit_inputs.cpp adapters, encoders, grammars and poolers, and audit_facts.cpp what an
// engine's worker says it did.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "properties/audit/audit.h"
#include "properties/audit/cache_index.h"
#include "properties/audit/memory_ledger.h"
#include "properties/audit/prompt_content.h"
#include "reference/plan/request_need.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/token_run.h"

namespace lockstep {

// What a KV connector does to a request that does not run.
enum class Transfer : std::uint8_t {
  none,
  loading,  // it writes into the request's blocks
  loaded,   // it has written them, and the request waits with them
};

// A live request as the worker sees it, or one that has left and whose blocks a transfer needs.
struct AuditedRequest {
  std::string name;
  KeyedRequest keyed;
  std::int32_t index = 0;
  std::vector<std::int32_t> tokens;          // prompt and everything sampled, in order
  std::uint64_t root = 0;                    // content id of the empty prefix, under its salt
  std::vector<std::uint64_t> contents;       // content id of each token in `tokens`
  std::vector<std::vector<BlockId>> tables;  // per group, as handed over
  std::vector<bool> wrong;                   // per group: reported, and what follows is not
  std::int32_t computed = 0;                 // after the last step it was scheduled in
  // Steps that sampled for it and whose output may be in flight, with its tokens before.
  std::vector<std::pair<std::int64_t, std::size_t>> sampled_in;
  // Steps whose output is not to be taken any more, and why.
  std::vector<std::pair<std::int64_t, std::string>> void_outputs;
  // Proposed since it was last scheduled, in which step; none where nothing was told.
  std::vector<std::int32_t> drafts;
  std::int64_t drafted_in = -1;
  std::int32_t scheduled_to = 0;   // in that step, drafts that were rejected included
  std::int64_t scheduled_in = -1;  // the step
  std::int64_t computed_in = -1;   // ... whose row set `computed`
  bool running = false;
  Transfer transfer = Transfer::none;
  bool has_ended = false;  // by its last output or its client; who waits for the news may be next
  bool has_left = false;
  bool is_sent = false;           // its blocks stay until they are sent
  std::int32_t first_loaded = 0;  // tokens before it were hit here
  std::vector<BlockId> invalid;   // that the load did not fill
  std::int64_t held_since = -1;   // step of the load
  std::int64_t void_step = -1;    // the last one that computed behind a lost block
  // From when on its tokens are past telling, and what is to be said once they are delivered.
  std::int64_t adrift_since = -1;
  std::string adrift;
  bool is_adrift() const { return adrift_since >= 0; }
  // Nobody else may write its blocks.
  bool keeps_blocks() const {
    return running || is_sent || is_between_chunks || transfer != Transfer::none;
  }
  // States, mode align: entry of the running state, and the accepted tokens of its last step.
  std::int32_t state_idx = -1;
  std::int32_t num_accepted = 1;
  // Bounded replay: tokens [first, last) of the hit are computed again for the windows' sake.
  std::int32_t first_replayed = 0;
  std::int32_t last_replayed = 0;
  // The last step that must have sampled a token for it and says of none; -1: none.
  std::int64_t unheard_step = -1;
  std::int64_t preempted_in = -1;
  std::int64_t first_step = 0;   // that may schedule it
  bool is_past_telling = false;  // a row of it was wrong: what it sampled is not known
  // When it ends: by so many tokens, or by one of these.
  std::int32_t num_prompt = 0;
  std::int32_t max_tokens = 0;
  std::int32_t priority = 0;
  bool has_min_tokens = false;
  std::optional<std::int32_t> eos_token;
  std::vector<std::int32_t> stop_token_ids;
  bool reads_cache = true;
  std::int64_t full_since = -1;     // the step that sampled the last token that it may have
  std::int64_t stopped_since = -1;  // ... a token that ends it
  bool detects_repetition = false;
  // A session's input comes in chunks; between two it waits and keeps its blocks.
  bool is_session = false;
  bool is_between_chunks = false;
  bool awaits_input = false;
  bool is_closed = false;  // no chunk comes behind those that are there
  std::vector<RequestSpec> chunks;
  std::int32_t first_max_tokens = 0;
  bool awaits_grammar = false;
  bool is_pooled = false;        // its pooled output is there
  std::int32_t reserved_to = 0;  // end of the tokens and draft slots that its table was filled for
  std::int64_t withdrawn_in = -1;  // the step that dropped output of it
  bool starts_over = false;        // reported: the engine computes its tokens again
};

// Whether a sampled token ends the request.
bool ends_it(const AuditedRequest& request, std::int32_t token);

// One scheduled request of the step at hand.
struct AuditRow {
  AuditedRequest* request = nullptr;
  std::int32_t first = 0;  // positions [first, last)
  std::int32_t last = 0;
  std::int32_t counted_to = 0;  // by the engine: drafts in flight that were rejected count
  std::int32_t num_spec = 0;
  std::vector<std::uint64_t> contents;  // of [first, last), drafts included
  bool is_void = false;                 // computed from a block that a load did not fill
  std::int32_t num_hit = 0;             // tokens before `first`, when it has just come in
  // Drafts whose state is kept apart until it is known whether they stand. A prompt's first chunk
  // keeps none: what it was padded with goes into its state.
  std::int32_t num_undone() const { return first == 0 ? 0 : num_spec; }
};

// Blocks that are in no table any more and were not given back.
struct Leak {
  std::size_t finding = 0;  // its number
  std::int64_t step = -1;
  std::string what;
  std::int64_t num_missing = 0;
  std::vector<BlockId> candidates;  // whoever had them let go of them since the total was right
};

// A finding that rests on an output that was not seen.
struct UnheardFinding {
  AuditFinding finding;
  std::int64_t step = -1;  // whose output
};

// What the model returned for a request of the step; nothing for a chunk of a prompt.
std::span<const std::int32_t> sampled_of(const RecordedStep& step, const std::string& name);

// Tokens after a hit that the engine's block hashes cover, so that the hit proves them; 0: none.
std::int32_t hash_lookahead_of(const RecordingHeader& header);
// Hits end at multiples of so many tokens.
std::int32_t hit_alignment_of(const RecordingHeader& header);

// Whether a step's drafts come with its own output, and are what the next one verifies.
bool makes_drafts_in_time(const RecordingHeader& header);
// Whether an option of a release of vLLM was written down.
bool is_given(const RecordingHeader& header, std::string_view option);
// Whether a session's next chunk comes behind all that its engine counts as computed.
bool sessions_keep_computed(const RecordingHeader& header);
// Per group, whether its new blocks must be zeroed before they are used.
std::vector<bool> zeroed_groups(const RecordingHeader& header);
// Slots behind the tokens of a step that the drafter writes: one for each draft of EAGLE, MTP and
// draft models; n-grams need none (vllm/config/speculative.py, v1/core/sched/scheduler.py).
std::int32_t draft_slots_of(const RecordingHeader& header);
// Older releases leave them out for requests without computed tokens.
bool has_draft_slots_at_once(const RecordingHeader& header);
// Whether blocks are let go of by what is scheduled, before it is known which drafts stand.
bool retires_by_scheduled_tokens(const RecordingHeader& header);

inline bool is_state(const KVCacheSpec& spec) { return spec.kind == CacheKind::mamba; }
// Slots of tokens by position, which attention reads.
inline bool keeps_tokens(const KVCacheSpec& spec) {
  return !is_state(spec) && !is_ring(spec) && spec.kind != CacheKind::cross_attention;
}

// Every token of a prefix, for as long as the request runs.
inline bool keeps_all_tokens(const KVCacheSpec& spec) {
  return (spec.kind == CacheKind::full_attention && spec.rswa_window == 0) ||
         spec.kind == CacheKind::mla || spec.kind == CacheKind::hidden_state;
}
CacheIndex index_of_events(const RecordingHeader& header,
                           const std::vector<std::int32_t>& block_sizes);

inline std::int32_t ceil_div32(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

// Beside some connectors blocks are held by nobody whose table is shown: by a store into a host
// tier of vLLM's own, by states that are being sent, and (0.33.0) by who waits for the output of a
// step in flight.
inline bool shows_all_holders(const RecordingHeader& header) {
  const EngineProfile* profile = find_engine_profile(header.engine.profile());
  const bool defers_frees =
      profile != nullptr && profile->defers_frees && header.options.config.async_scheduling;
  return !header.connector ||
         (!defers_frees && header.connector->name.empty() &&
          !header.connector->requires_kv_delivery &&
          std::ranges::none_of(header.groups,
                               [](const KVCacheGroupSpec& group) { return is_state(group.spec); }));
}

// Beside a connector some requests stand in none, and a live check leaves out who waits.
inline bool lists_all_queues(const RecordingHeader& header) {
  return !header.connector &&
         std::ranges::find(header.beyond_format, "live_check") == header.beyond_format.end();
}

class Auditor::Impl {
 public:
  Impl(const RecordingHeader& header, AuditScope scope, AuditedRules rules)
      : rules_(rules),
        config_(header.options.config),
        groups_(header.groups),
        drafts_in_flight_(header.options.config.async_scheduling &&
                          header.options.config.num_spec_tokens > 0),
        hash_lookahead_(hash_lookahead_of(header)),
        drops_last_block_(header.options.config.spec_method == SpecMethod::eagle &&
                          hash_lookahead_ == 0),
        hash_block_size_(
            static_cast<std::int32_t>(std::max<std::int64_t>(1, header.hash_block_size))),
        hit_alignment_(hit_alignment_of(header)),
        draft_slots_(draft_slots_of(header)),
        draft_slots_at_once_(has_draft_slots_at_once(header)),
        knows_hits_(find_engine_profile(header.engine.profile()) != nullptr),
        planned_blocks_(planned_blocks_of_request(header.options.config, header.groups)),
        checks_progress_(scope == AuditScope::whole_recording && !header.connector &&
                         planned_blocks_ < header.num_blocks),
        scope_(scope),
        checks_ends_(scope == AuditScope::whole_recording && knows_hits_),
        keeps_states_of_drafts_(retires_by_scheduled_tokens(header)),
        ledger_(header.num_blocks),
        lists_all_queues_(lists_all_queues(header)),
        has_connector_(header.connector.has_value()),
        has_events_(header.has_cache_events),
        checks_drafts_(makes_drafts_in_time(header)),
        knows_max_tokens_(is_given(header, "max_num_batched_tokens")),
        knows_max_requests_(is_given(header, "max_num_seqs")),
        counts_hits_(!has_connector_),
        places_(header.groups.size()),
        num_places_max_(header.groups.size(), 4096),
        inputs_(header.options.inputs),
        encoder_budget_(header.encoder_compute_budget),
        sessions_keep_computed_(sessions_keep_computed(header)),
        shows_all_holders_(shows_all_holders(header)),
        tells_copies_(!inputs_.max_loras && !encoder_budget_),
        is_zeroed_(zeroed_groups(header)) {
    for (const KVCacheGroupSpec& group : groups_) {
      // Ranks of a context share the tokens of attention that says so; each has its states whole.
      // No release shares out several groups over ranks of prefill context parallelism.
      const bool is_shared =
          groups_.size() > 1 && keeps_tokens(group.spec) && group.spec.dcp_sharded;
      block_sizes_.push_back(static_cast<std::int32_t>(group.spec.block_size) *
                             (is_shared ? config_.dcp : 1));
      if (group.spec.bounded_replay)
        num_replayed_ = static_cast<std::int32_t>(group.spec.sliding_window);
    }
    // Context parallelism needs a single group, and the engine says how many tokens of all ranks a
    // block of it covers: not every release shards it over the same ranks.
    has_cross_attention_ = std::ranges::any_of(groups_, [](const KVCacheGroupSpec& group) {
      return group.spec.kind == CacheKind::cross_attention;
    });
    if (groups_.size() == 1 && !is_state(groups_[0].spec))
      block_sizes_[0] = static_cast<std::int32_t>(header.scheduler_block_size);
    index_ = index_of_events(header, block_sizes_);
  }

  void step(const RecordedStep& step);
  void check_step(const RecordedStep& step);
  void end(const RecordingEnd& end);
  std::vector<AuditFinding> take() {
    num_taken_ += findings_.size();
    return std::exchange(findings_, {});
  }
  std::int64_t reads_checked() const { return reads_; }
  const HitTotals& hits() const { return hits_; }

 private:
  // Where content of a group lies, and where else it may lie; the number of resets before.
  struct ContentPlace {
    BlockId block = kNullBlock;
    BlockId block_before = kNullBlock;
    std::int64_t epoch = 0;
  };
  enum class Presence : std::uint8_t { never, evicted, cleared, there };
  // A block at `token` that was hit and that events do not have.
  struct UntoldHit {
    const AuditedRequest* request = nullptr;
    std::size_t group = 0;
    std::int32_t token = 0;
  };
  std::int32_t block_size(std::size_t group) const { return block_sizes_[group]; }
  void report(AuditRule rule, const AuditedRequest& request, std::size_t group, std::int64_t token,
              BlockId block, std::string what);
  // `cause`: what a request is accused of once, if it is more than the rule.
  void report(AuditRule rule, const std::string& request, std::string what,
              std::string_view cause = {});
  void tell(AuditFinding finding, std::string cause);
  std::string cause_of(AuditRule rule, const std::string& request, std::string_view detail) const;
  void name_holders(AuditFinding& finding) const;
  void report_leak(std::string what, std::int64_t num_missing, const std::set<BlockId>& held);
  std::string lost_text(const Leak& leak) const;
  void send_back_running();
  void take_events(const RecordedStep& step, const std::vector<RecordedEvent>& events);
  void add(const RecordedEvent& event);
  void take_ends(const RecordedStep& step);
  void leave(const RecordedStep& step, const std::string& name);
  void release_failed_loads(const RecordedStep& step);
  void begin_loads(const RecordedStep& step);
  bool is_dropped(const RecordedStep& step, const RecordedScheduled& scheduled,
                  AuditedRequest& request);
  void give_up(const RecordedStep& step);
  void take_outputs(const RecordedStep& step);
  void begin_load(const RecordedStep& step, const RecordedTable& loading);
  std::int32_t num_hit(const RecordedStep& step, const RecordedScheduled& scheduled,
                       const AuditedRequest& request) const;
  void write_loaded(const AuditedRequest& request, std::int32_t first, std::int32_t last,
                    std::span<const BlockId> invalid);
  void load_states(const AuditedRequest& request, std::size_t group, std::int32_t first,
                   std::int32_t end, std::span<const BlockId> invalid);
  std::int32_t first_invalid(const AuditedRequest& request, std::int32_t computed,
                             std::span<const BlockId> invalid) const;
  void void_rows(const RecordedStep& step, std::vector<AuditRow>& rows);
  void take_report(const RecordedWorker& worker);
  void check_standstill(const RecordedStep& last);
  void take_tables(const RecordedStep& step, const RecordedScheduled& scheduled,
                   AuditedRequest& request);
  std::size_t first_needed(const AuditedRequest& request, std::size_t group,
                           std::int32_t reached) const;
  bool is_hit(std::size_t group, std::size_t index, std::int32_t hit) const;
  const AuditedRequest* reader_of(BlockId block, const AuditedRequest* holder) const;
  void check_copies(const RecordedStep& step);
  void hand_out(const AuditedRequest& request, std::size_t group, std::size_t index, BlockId block);
  std::int32_t first_read(std::size_t group, std::int32_t position) const;
  std::int32_t gap_end(const AuditedRequest& request, std::size_t group,
                       std::int32_t position) const;
  bool make_row(const RecordedStep& step, const RecordedScheduled& scheduled, AuditRow& row);
  void check_computed(const AuditRow& row);
  void check_room(const AuditRow& row);
  void accuse_of_unknown_tokens(const AuditRow& row, const RecordedStep& step);
  void take_sampled(const RecordedStep& step, AuditRow& row);
  void write_tokens(const AuditRow& row, std::size_t group);
  void read_tokens(const AuditRow& row, std::size_t group);
  BlockId block_of(const AuditedRequest& request, std::size_t group, std::int32_t position) const;
  void use_ring(const AuditRow& row, std::size_t group);
  void finish_draft_rows(const AuditRow& row);
  void read_draft_rows(const AuditRow& row);
  void read_drafter_window(const AuditRow& row);
  const std::string& name_at(std::int32_t index) const;
  void forget_names();
  std::string why_nothing(BlockId block) const;
  std::string holds(const LedgerSlot& slot, BlockId block) const;
  std::string difference(const AuditedRequest& request, std::int32_t position,
                         const LedgerSlot& slot) const;
  std::string key_difference_to(const AuditedRequest& request, std::int32_t position,
                                std::uint64_t content, std::int32_t writer) const;
  bool state_block(const AuditRow& row, std::size_t group, std::int32_t entry, BlockId& block);
  void read_state(const AuditRow& row, std::size_t group, std::int32_t entry, std::int32_t accepted,
                  std::int32_t count);
  void write_inputs(const AuditRow& row, std::size_t group, std::int32_t entry,
                    std::int32_t first_count, std::int32_t last_count);
  void write_recurrent(const AuditRow& row, std::size_t group, std::int32_t entry,
                       std::int32_t count);
  void copy_state(const AuditRow& row, std::size_t group, std::int32_t from, std::int32_t accepted,
                  std::int32_t to);
  void prepare_states(AuditRow& row);
  void advance_states(const AuditRow& row, std::size_t group);
  void advance_in_every_block(const AuditRow& row, std::size_t group);
  void export_checkpoint(const AuditRow& row, std::size_t group, std::int32_t current);
  void settle_states(AuditRow& row, std::int32_t num_sampled);
  std::set<BlockId> kept_by_transfers(bool counts_drafts) const;
  void check_conservation(const RecordedStep& step);
  void check_common_prefix(const RecordedStep& step);
  void check_progress(const RecordedStep& step);
  void check_planned(const RecordedStep& step);
  void check_draft_slots(const RecordedScheduled& scheduled, const AuditRow& row, bool was_loaded);
  void check_drafts(const RecordedScheduled& scheduled, AuditedRequest& request);
  void take_drafts(const RecordedStep& step);
  void check_held_drafts(const RecordedStep& step);
  void take_stale_outputs(const RecordedStep& step, std::int64_t last_output_before);
  void take_stale_output(const RecordedStep& step, const RecordedStaleOutput& output,
                         AuditedRequest& request);
  void withdraw_output(AuditedRequest& request, std::size_t index, const std::string& why);
  void take_session_event(const RecordedEvent& event);
  void stop_session(std::int64_t last_output, AuditedRequest& session);
  void begin_chunk(AuditedRequest& session, const RequestSpec& chunk);
  void take_input_event(const RecordedEvent& event);
  void check_adapters(const RecordedStep& step);
  void run_encoder(const RecordedStep& step);
  void check_encoded(const AuditRow& row);
  void check_grammar(const AuditedRequest& request);
  void take_pooled(const RecordedStep& step);
  void use_encoder_rows(const AuditRow& row, std::size_t group, const RecordedStep& step);
  void check_queues(const RecordedStep& step);
  void check_batch(const RecordedStep& step);
  void check_tables(const RecordedStep& step);
  void check_order_of_outputs(const RecordedStep& step);
  void check_victims(const RecordedStep& step);
  void check_sampled(const RecordedStep& step, const AuditRow& row);
  void check_sampled_of_nobody(const RecordedStep& step);
  void note_limit(const RecordedStep& step, AuditedRequest& request);
  void check_limit(const AuditedRequest& request);
  void check_stopped(const RecordedStopped& stopped, const AuditedRequest& request);
  std::uint64_t content_at(const AuditRow& row, std::int32_t count) const;
  std::vector<UntoldHit> untold_hits(const std::vector<AuditRow>& rows) const;
  CacheIndex::StoredBlocks blocks_of_event(const RecordedCacheEvent& event,
                                           const RecordedStep& step);
  std::string why_not_described(const RecordedCacheEvent& event, const AuditedRequest& request,
                                std::int32_t first, std::string& cause, std::int32_t& token) const;
  void check_events(const RecordedStep& step, const std::vector<AuditRow>& rows);
  bool still_holds(BlockId block, std::size_t group, std::uint64_t content) const;
  void note_content(std::size_t group, std::uint64_t content, BlockId block);
  Presence presence_of(std::size_t group, std::uint64_t content) const;
  std::int32_t reach_of(const AuditedRequest& request, std::size_t group,
                        std::array<std::int64_t, kHitLosses>& gone) const;
  bool can_end(const AuditedRequest& request, std::size_t group, std::int32_t end) const;
  std::int32_t end_for_drafter(const AuditedRequest& request, std::int32_t end) const;
  void count_hit(const AuditedRequest& request, std::int32_t hit);
  void check_hits();
  void check_facts(const RecordedStep& step, const std::vector<AuditRow>& rows);
  void check_fact_rows(const RecordedStep& step, const WorkerStepFacts& facts);
  void check_zeroed(const RecordedStep& step, const WorkerStepFacts& facts);
  void check_fact_row(const WorkerStepFacts& facts, const AuditRow& row, std::size_t at,
                      std::size_t first);
  bool check_fact_table(const std::vector<BlockId>& said, const AuditRow& row, std::size_t group);
  void check_fact_slots(const std::vector<Slot>& said, const AuditRow& row, std::size_t group,
                        std::size_t first);
  void check_changed(const RecordedStep& step, const WorkerStepFacts& facts,
                     const std::vector<AuditRow>& rows);
  void check_written(BlockId block, std::int32_t slot, const WorkerStepFacts& facts,
                     const std::function<void(BlockId block, std::string what)>& tell_of);
  std::map<BlockId, std::map<std::int32_t, bool>> slots_to_write(
      const std::vector<AuditRow>& rows) const;
  bool may_change_as_a_whole(BlockId block, const std::vector<AuditRow>& rows) const;

  AuditedRules rules_;
  EngineConfig config_;
  std::vector<KVCacheGroupSpec> groups_;
  // Asynchronous scheduling with drafts: a step is decided before it is known how many drafts of
  // the one before were accepted.
  bool drafts_in_flight_;
  std::int32_t hash_lookahead_;
  bool drops_last_block_;
  std::int32_t hash_block_size_;
  std::int32_t hit_alignment_;
  std::int32_t draft_slots_;  // behind the tokens of a step, for drafts
  bool draft_slots_at_once_;  // also of a request that has just come in
  bool knows_hits_;           // the release's rules of what is hit
  std::int64_t planned_blocks_;
  // The pool holds what is planned, and nothing but the scheduler makes a request wait.
  bool checks_progress_;
  AuditScope scope_;
  bool checks_ends_;  // whoever ends is named, to its client and to the worker
  // Whether a request keeps as many states again as it has drafts, in case they are rejected.
  bool keeps_states_of_drafts_;
  std::int64_t in_flight_max_ = 0;         // steps without output when another one was decided
  std::int32_t num_replayed_ = 0;          // tokens that a hit computes again; 0: none
  std::vector<std::int32_t> block_sizes_;  // tokens that one table entry covers
  MemoryLedger ledger_;
  std::map<std::string, AuditedRequest> requests_;
  // By request index: of the live, and of those that the ledger still speaks of.
  std::map<std::int32_t, KeyedRequest> names_;
  std::int32_t num_requests_ = 0;
  std::size_t num_names_max_ = 4096;    // when they are looked through
  std::set<std::string> ends_to_come_;  // of requests whose name is another's by now
  std::vector<UnheardFinding> unheard_;
  PauseState pause_state_ = PauseState::unpaused;
  std::int64_t last_output_ = -1;  // the last step whose output has come in
  int num_idle_steps_ = 0;         // with requests waiting and all blocks free
  std::int64_t num_copied_ = 0;    // ends of copies that may not have run
  // A connector's recordings of 0.33.0 have queues that are not read.
  bool lists_all_queues_ = true;
  bool has_connector_;
  bool has_events_;
  bool checks_drafts_;  // drafts are proposed with the output of the step at hand
  bool are_drafts_told_ = false;
  bool knows_max_tokens_, knows_max_requests_;  // of a step, in a release that has such limits
  CacheIndex index_{{}};                        // what events tell
  bool tells_keys_ = false;                     // some event had a key that is not a salt
  bool counts_hits_;
  std::vector<std::unordered_map<std::uint64_t, ContentPlace>> places_;  // per group, by content
  std::vector<std::size_t> num_places_max_;  // per group, when they are looked through
  std::int64_t epoch_ = 0;                   // resets of the prefix cache
  HitTotals hits_;
  bool has_gap_of_facts_ = false;  // a step ran of which the worker said nothing
  AuditFinding first_lost_hit_;
  InputOptions inputs_;
  std::optional<std::int32_t> encoder_budget_;  // rows of a step; absent: no encoder
  bool sessions_keep_computed_;
  bool shows_all_holders_;
  // Recordings of adapters and encoders leave out what is copied where a hit ends inside a block.
  bool tells_copies_;
  bool has_cross_attention_ = false;
  std::set<std::string> encoded_;  // items whose rows the worker has
  std::vector<bool> is_zeroed_;    // per group: its new blocks are
  std::set<BlockId> zeroed_now_;   // in the step at hand
  std::set<BlockId> fresh_;        // of these, in nobody's table yet
  std::int64_t odd_total_ = -1;    // of blocks held and free, when it was last reported
  // Blocks that were held when the total was last right, or were handed out since.
  std::set<BlockId> in_use_;
  std::set<std::int32_t> starts_over_;  // by request index
  std::vector<Leak> leaks_;
  std::int64_t step_ = -1;
  RecordedStep last_;
  std::map<std::int64_t, RecordedWorker> reports_in_flight_;  // by step, not heard of yet
  std::int64_t reads_ = 0;
  std::vector<AuditFinding> findings_;
  std::size_t num_taken_ = 0;                // findings, so far
  std::map<std::string, std::size_t> told_;  // by cause, the number of the finding
};

}  // namespace lockstep
