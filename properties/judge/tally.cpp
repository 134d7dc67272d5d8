#include "properties/judge/tally.h"

#include <algorithm>
#include <set>
#include <utility>

#include "properties/shrink/case_parts.h"
#include "reference/plan/page_size.h"

namespace lockstep {

// Backends and device modes are excluded: `connector` classes are what a run with a connector must
// add.
std::vector<Reached> classes_of_connectors() {
  std::vector<Reached> classes;
  for (std::size_t i = 0; i < kNumReached; ++i)
    if (kReachedClasses[i].seen_with == SeenWith::connector)
      classes.push_back(static_cast<Reached>(i));
  return classes;
}

Tally& Tally::operator+=(const Tally& other) {
  for (std::size_t i = 0; i < kNumReached; ++i) counts_[i] += other.counts_[i];
  return *this;
}

// A device mode counts as requested if any case had one, because reports do not store the options.
std::vector<std::string_view> Tally::missing() const {
  const bool any_backend = (*this)[Reached::with_backend] > 0;
  bool any_device_mode = false;
  for (std::size_t i = 0; i < kNumReached; ++i)
    any_device_mode |= counts_[i] > 0 && kReachedClasses[i].seen_with == SeenWith::device_mode;
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto [name, seen_with] = kReachedClasses[i];
    const bool can_be_seen = seen_with == SeenWith::backend       ? any_backend
                             : seen_with == SeenWith::device_mode ? any_device_mode
                             : seen_with == SeenWith::no_backend  ? !any_backend
                                                                  : seen_with != SeenWith::worker;
    if (counts_[i] == 0 && can_be_seen) names.push_back(name);
  }
  return names;
}

namespace {

// The class of a kind of cache, and that of a hit in it.
struct KindClasses {
  Reached kind, hit;
};

// Returns the classes of a spec. Compressed rows, recomputed windows and the modes of states count
// as kinds of their own: their managers and kernels differ. For rings and reference windows, `hit`
// is the event that shows their special rule.
KindClasses classes_of(const KVCacheSpec& spec) {
  using enum CacheKind;
  switch (spec.kind) {
    case mla:
      if (shares_rows(spec.tokens_per_state))
        return {Reached::compressed_rows, Reached::hit_compressed_rows};
      return {Reached::mla, Reached::hit_mla};
    case circular_buffer:
      return {Reached::ring, Reached::ring_gone_round};
    case sliding_window:
    case sliding_window_mla:
      if (spec.bounded_replay) return {Reached::bounded_replay, Reached::replayed_window};
      return {Reached::sliding_window, Reached::hit_sliding_window};
    case chunked_local:
      return {Reached::chunked_local, Reached::hit_chunked_local};
    case hidden_state:
      return {Reached::hidden_state, Reached::hit_hidden_state};
    case mamba:
      if (spec.mamba_cache_mode == MambaCacheMode::align)
        return {Reached::mamba_align, Reached::hit_mamba_align};
      // Mode none has no hits, so its second class is never counted.
      return {
          spec.mamba_cache_mode == MambaCacheMode::none ? Reached::mamba_none : Reached::mamba_all,
          Reached::hit_mamba_all};
    case cross_attention:
      return {Reached::cross_attention, Reached::encoder_computed};
    case sink_full:
      return {Reached::sinks, Reached::hit_full_attention};
    case rswa:
      return {Reached::reference_window, Reached::gap_behind_prompt};
    default:
      return {Reached::full_attention, Reached::hit_full_attention};
  }
}

// Counts each class once per case, whatever the number of groups: hence the set.
void count_cache(const SavedCase& saved, Tally& tally) {
  std::set<Reached> kinds;
  const auto& groups = saved.cache.groups;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const KVCacheSpec& spec = groups[g].spec;
    kinds.insert(classes_of(spec).kind);
    if (page_size_bytes(spec) > unpadded_page_size_bytes(spec)) kinds.insert(Reached::padded_page);
    if (groups[g].layers_per_page > 1) kinds.insert(Reached::packed_page);
    if (spec.kv_quant_mode != KVQuantMode::none) kinds.insert(Reached::scaled_rows);
    for (const FurtherClass& further : kFurtherClasses)
      if (further.holds(saved.engine, spec)) kinds.insert(further.cache);
    if (groups[g].is_uniform_type()) kinds.insert(Reached::uniform_type);
    if (spec.block_size != groups[0].spec.block_size) kinds.insert(Reached::different_block_sizes);
    if (g < saved.kernel_block_sizes.size() && !is_state_kind(spec.kind) &&
        saved.kernel_block_sizes[g] < spec.block_size)
      kinds.insert(Reached::split_kernel_block);
  }
  if (saved.cache.num_blocks == 2) kinds.insert(Reached::two_block_pool);
  if (groups.size() > 1) kinds.insert(Reached::several_groups);
  for (const Reached kind : kinds) tally.count(kind);
}

// Counts the options of the engine. The two releases are those that the generator uses.
void count_engine(const SavedCase& saved, Tally& tally) {
  const EngineConfig& engine = saved.engine;
  const auto count_if = [&](bool holds, Reached reached) {
    if (holds) tally.count(reached);
  };
  count_if(engine.engine == connector_profile().name, Reached::engine_0_22_1);
  count_if(engine.engine == engine_profiles().back().name, Reached::engine_0_33_0);
  count_if(saved.layout == CacheLayout::NHD, Reached::layout_nhd);
  count_if(saved.layout == CacheLayout::HND, Reached::layout_hnd);
  constexpr std::array kOrders = {Reached::order_lbnhc, Reached::order_lbhnc, Reached::order_lhbnc,
                                  Reached::order_blnhc, Reached::order_blhnc, Reached::order_bhlnc};
  for (std::size_t i = 0; i < kOrders.size(); ++i)
    count_if(saved.layout == kOverlaidLayouts[i], kOrders[i]);
  count_if(!engine.enable_prefix_caching, Reached::no_prefix_caching);
  count_if(engine.prefix_match_unit != 0, Reached::match_unit);
  count_if(!engine.enable_chunked_prefill, Reached::no_chunked_prefill);
  count_if(!engine.scheduler_reserve_full_isl, Reached::no_full_isl_reserve);
  count_if(engine.async_scheduling, Reached::async_scheduling);
  count_if(engine.async_scheduling && engine.num_spec_tokens > 0, Reached::async_drafts);
  count_if(engine.policy == SchedulingPolicy::priority, Reached::priority_policy);
  count_if(engine.spec_method == SpecMethod::ngram, Reached::ngram_drafts);
  count_if(engine.spec_method == SpecMethod::draft_model, Reached::draft_model_drafts);
  count_if(engine.spec_method == SpecMethod::eagle, Reached::eagle_drafts);
  count_if(engine.dcp * engine.pcp > 1, Reached::context_parallel);
}

// Counts the connectors. HiSparse's page workers count as HiSparse and not as a connector of their
// own.
void count_connector(const SavedCase& saved, Tally& tally) {
  const std::vector<ConnectorKind>& parts = saved.connector.parts;
  if (parts.empty()) return;
  if (parts.size() > 1) tally.count(Reached::multi_connector);
  if (saved.engine.async_scheduling) tally.count(Reached::async_connector);
  if (saved.connector.has(ConnectorKind::page_workers)) {
    tally.count(Reached::hisparse);
    if (parts.size() > 1) tally.count(Reached::hisparse_peers);
    if (saved.engine.async_scheduling) tally.count(Reached::hisparse_async);
    if (saved.engine.num_spec_tokens > 0) tally.count(Reached::hisparse_drafts);
  }
  // Several peers in one case count several times.
  for (const ConnectorKind kind : parts)
    if (kind != ConnectorKind::page_workers)
      tally.count(kind == ConnectorKind::host ? Reached::host_tier : Reached::connector_peers);
  if (saved.connector.load_failure_policy == KVLoadFailurePolicy::fail)
    tally.count(Reached::load_failure_fails);
  if (saved.cache.groups.size() > 1) tally.count(Reached::connector_hybrid);
}

// Counts arrivals at equal times and turns of a conversation. Only absolute arrivals are compared:
// a follow-up's time depends on the run.
void count_arrivals(const SavedCase& saved, Tally& tally) {
  std::int64_t last_ns = -1;
  for (const TraceRecord& record : saved.trace.records) {
    const auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr) continue;
    if (!request->after.empty()) {
      tally.count(Reached::session_resumed);
      continue;
    }
    if (request->spec.arrival_ns == last_ns) tally.count(Reached::same_instant);
    last_ns = request->spec.arrival_ns;
  }
}

}  // namespace

void count_case(const SavedCase& saved, Tally& tally) {
  if (!saved.faults.empty()) tally.count(Reached::with_faults);
  count_cache(saved, tally);
  count_engine(saved, tally);
  count_connector(saved, tally);
  count_arrivals(saved, tally);
}

// Counts an abort by the state of the request. An abort of an unknown request, which has finished,
// is not counted here (count_faults() of the judge counts abort_again).
void TallyCounter::count_abort(const std::string& name) {
  const auto request = requests_.find(name);
  if (request == requests_.end()) return;
  switch (request->second.place) {
    case Place::waiting:
      tally_.count(Reached::abort_waiting);
      break;
    case Place::loading:
      tally_.count(Reached::abort_loading);
      break;
    case Place::running:
      count_abort_of_running(request->second);
      break;
    case Place::preempted:
      tally_.count(Reached::abort_preempted);
      break;
  }
  requests_.erase(request);
}

// A request is in its prompt until its computed tokens reach the prompt's length.
void TallyCounter::count_abort_of_running(const Request& request) {
  tally_.count(Reached::abort_running);
  if (steps_in_flight_ > 0) tally_.count(Reached::abort_with_step_in_flight);
  if (request.num_computed_tokens >= request.num_prompt_tokens)
    tally_.count(Reached::abort_decode);
  else
    tally_.count(request.num_steps > 1 ? Reached::abort_mid_prefill : Reached::abort_first_chunk);
}

// A reset that a running request prevents counts as refused.
void TallyCounter::count_events(const std::vector<RecordedEvent>& events) {
  for (const RecordedEvent& event : events) {
    switch (event.kind) {
      case RecordedEvent::Kind::add:
        requests_[event.request.name] = {.num_prompt_tokens = event.request.prompt.size(),
                                         .lists_its_end = !event.request.eos_token};
        if (!event.request.cache_salt.empty()) tally_.count(Reached::salted_request);
        break;
      case RecordedEvent::Kind::abort:
        count_abort(event.name);
        break;
      case RecordedEvent::Kind::reset_prefix_cache:
        tally_.count(event.reset_succeeded ? Reached::reset_done : Reached::reset_refused);
        if (event.resets_running) tally_.count(Reached::reset_preempts);
        break;
      case RecordedEvent::Kind::pause_state:
        if (event.pause_state != PauseState::unpaused) tally_.count(Reached::paused);
        break;
      default:
        break;
    }
  }
}

// Returns true if the request computes tokens again because a load did not fill its blocks. A
// running request then returns to an earlier position. A request that waited for its load starts
// before the loaded tokens; one token less is normal, since the last token of a fully loaded prompt
// is computed anyway.
bool TallyCounter::is_computed_again(const RecordedScheduled& scheduled,
                                     const Request& request) const {
  if (!scheduled.is_new) return scheduled.computed <= request.first_computed;
  return scheduled.computed + 1 < request.num_loaded_tokens;
}

// Counts the connector's answers. A request that is queried again although a load was in flight has
// lost the whole load.
void TallyCounter::count_answers(const RecordedStep& step) {
  if (!step.connector) return;
  for (const RecordedConnectorAnswer& answer : *step.connector) {
    Request& request = requests_[answer.id];
    if (request.num_loaded_tokens > 0) {  // the whole load was lost
      tally_.count(Reached::recomputed_load);
      request.num_loaded_tokens = 0;
      request.place = Place::waiting;
    }
    if (!answer.external) tally_.count(Reached::undetermined_answer);
  }
  // The answer is used only if the request was scheduled or its load started; otherwise it is
  // queried again later.
  const auto is_entered = [&](const RecordedConnectorAnswer& answer) {
    return std::ranges::find(step.scheduled, answer.id, &RecordedScheduled::id) !=
           step.scheduled.end();
  };
  const auto is_loading = [&](const RecordedConnectorAnswer& answer) {
    return step.loading &&
           std::ranges::find(*step.loading, answer.id, &RecordedTable::id) != step.loading->end();
  };
  for (const RecordedConnectorAnswer& answer : *step.connector) {
    if (answer.external.value_or(0) == 0 || (!is_entered(answer) && !is_loading(answer))) continue;
    tally_.count(Reached::external_hit);
    if (answer.local > 0) tally_.count(Reached::partial_external_hit);
    if (!is_loading(answer)) continue;
    // A load over several steps has its own queue entry; a load within the step does not.
    tally_.count(Reached::longer_load);
    requests_[answer.id].place = Place::loading;
    requests_[answer.id].num_loaded_tokens = answer.local + *answer.external;
  }
}

// Counts lost blocks, delayed frees, and loaded requests that hold blocks without running.
void TallyCounter::count_transfers(const RecordedStep& step) {
  if (step.worker) {
    const std::int64_t lost = std::ssize(step.worker->invalid_blocks);
    tally_.count(Reached::lost_blocks, lost);
    // The step that was decided after the loss is still in flight when the report arrives.
    if (saved_.engine.async_scheduling) tally_.count(Reached::lost_behind_a_step, lost);
  }
  tally_.count(Reached::delayed_free, std::ssize(step.held));
  // Some releases keep requests that hold blocks in a queue of their own.
  const auto& queue = step.transfers.kv_holding ? step.transfers.kv_holding : step.skipped;
  if (!queue) return;
  for (const RecordedSkipped& skipped : *queue) {
    const auto request = requests_.find(skipped.id);
    if (request != requests_.end() && request->second.num_loaded_tokens > 0 &&
        skipped.status != "WAITING_FOR_REMOTE_KVS")
      tally_.count(Reached::held_without_room);
  }
}

// Counts HiSparse's transfers. A transfer is in flight from its step until as many completions as
// enqueued parts were reported.
void TallyCounter::count_pages(const RecordedStep& step) {
  if (!step.pages) return;
  const RecordedPages& pages = *step.pages;
  for (const PageTransfer& transfer : pages.transfers) {
    copies_[transfer.id] = 0;
    tally_.count(transfer.restores ? Reached::page_restore : Reached::page_spill);
  }
  for (const auto& [name, mirrors] : pages.mirrors)
    tally_.count(Reached::row_mirror, std::ssize(mirrors));
  for (const auto& [name, update] : pages.residency) count_residency(step, name, update);
  if (!step.scheduled.empty() && !pages.all_resident) tally_.count(Reached::host_read);
  if (pages.free_host_blocks == 0) tally_.count(Reached::full_host_pool);
  for (const RecordedScheduled& scheduled : step.scheduled)
    for (std::size_t g = 0; scheduled.blocks && g < scheduled.blocks->size(); ++g)
      if (is_hot_pages(saved_.cache.groups[g].spec.kind))
        tally_.count(Reached::hot_region, (*scheduled.blocks)[g].empty() ? 0 : 1);
  if (!step.stopped.empty() && !copies_.empty()) tally_.count(Reached::end_with_copies);
  if (!step.worker) return;
  for (const auto& [id, count] : step.worker->enqueued) copies_[id] += count;
  for (const auto& [id, count] : step.worker->completed)
    if ((copies_[id] -= count) == 0) copies_.erase(id);
}

// Counts pages that left the device and remain only on the host, and pages of a hit that are still
// resident on the device. Both follow from the change of a page's block: from a block to null, or
// to a block although the page is part of the hit.
void TallyCounter::count_residency(const RecordedStep& step, const std::string& name,
                                   const ResidencyUpdate& update) {
  Request& request = requests_[name];
  const auto row = std::ranges::find(step.scheduled, name, &RecordedScheduled::id);
  const bool is_new = row != step.scheduled.end() && row->is_new;
  if (is_new) request.pages.clear();
  const std::int64_t num_hit =
      is_new ? row->computed / saved_.cache.groups.front().spec.block_size : 0;
  for (std::size_t i = 0; i < update.pages.size(); ++i) {
    const auto page = static_cast<std::size_t>(update.pages[i]);
    const BlockId block = update.blocks.front()[i];
    if (page >= request.pages.size()) request.pages.resize(page + 1, kNullBlock);
    if (block == kNullBlock && request.pages[page] != kNullBlock) tally_.count(Reached::lost_page);
    if (block != kNullBlock && update.pages[i] < num_hit) tally_.count(Reached::adopted_page);
    request.pages[page] = block;
  }
}

// Counts a hit in every group whose table starts with blocks of earlier requests. A group without
// such blocks (its window starts later) was not hit, although the request was.
void TallyCounter::count_hit(const RecordedStep& step, const RecordedScheduled& scheduled) {
  // The hit is what the cache had; a connector may have added tokens after it.
  std::int64_t found = scheduled.computed;
  if (step.connector) {
    const auto answer =
        std::ranges::find(*step.connector, scheduled.id, &RecordedConnectorAnswer::id);
    if (answer != step.connector->end()) found = std::min<std::int64_t>(found, answer->local);
  }
  if (found == 0) return;
  tally_.count(Reached::prefix_hit);
  if (std::ranges::any_of(saved_.cache.groups, [&](const KVCacheGroupSpec& group) {
        return is_prefix_cacheable(group.spec) && found % group.spec.block_size != 0;
      }))
    tally_.count(Reached::hit_inside_block);
  if (scheduled.resumed) tally_.count(Reached::resume_with_hit);
  if (!scheduled.blocks) return;
  for (std::size_t g = 0; g < saved_.cache.groups.size(); ++g) {
    const KVCacheSpec& spec = saved_.cache.groups[g].spec;
    if (spec.bounded_replay) tally_.count(Reached::replayed_window);
    if (!is_prefix_cacheable(spec)) continue;
    const auto& table = (*scheduled.blocks)[g];
    // Only whole blocks are hits: 20 tokens in blocks of 16 cover one.
    const auto covered = std::min<std::int64_t>(found / spec.block_size, std::ssize(table));
    if (std::any_of(table.begin(), table.begin() + covered,
                    [](BlockId block) { return block != kNullBlock; })) {
      tally_.count(classes_of(spec).hit);
      for (const FurtherClass& further : kFurtherClasses)
        if (further.holds(saved_.engine, spec)) tally_.count(further.hit);
    }
  }
}

// Counts continuing requests with fewer drafts than before, and among them steps that end before
// the previous one's end: their drafts were rejected and fewer new ones were proposed.
void TallyCounter::count_drafts(const RecordedScheduled& scheduled, Request& request) {
  const std::int64_t before = std::exchange(request.num_drafts, std::ssize(scheduled.spec));
  if (scheduled.is_new || before <= request.num_drafts) return;
  tally_.count(Reached::fewer_drafts);
  if (scheduled.computed + scheduled.tokens < request.num_computed_tokens)
    tally_.count(Reached::step_ends_sooner);
}

// Counts victims that precede a running request: they may already have been scheduled in the step
// that preempts them (docs/findings.md, 3).
void TallyCounter::count_victims(const RecordedStep& step) {
  const auto runs_on = [&](const std::string& name) { return step.runs(name); };
  for (const std::string& name : step.preempted) {
    const auto place = std::ranges::find(running_, name);
    if (place != running_.end() && std::any_of(place + 1, running_.end(), runs_on))
      tally_.count(Reached::preempted_before_others);
  }
  running_ = step.running;
}

// Counts what each scheduled request shows. Its previous state is read before it is updated.
void TallyCounter::count_scheduled(const RecordedStep& step) {
  if (step.scheduled.size() > 1) tally_.count(Reached::batch_of_several);
  for (const RecordedScheduled& scheduled : step.scheduled) {
    Request& request = requests_[scheduled.id];
    // Must precede the update of first_computed.
    if (is_computed_again(scheduled, request)) tally_.count(Reached::recomputed_load);
    const bool was_loaded = std::exchange(request.num_loaded_tokens, 0) > 0;
    count_drafts(scheduled, request);
    request.place = Place::running;
    request.first_computed = scheduled.computed;
    request.num_computed_tokens = scheduled.computed + scheduled.tokens;
    request.num_steps = scheduled.is_new ? 1 : request.num_steps + 1;
    if (scheduled.is_new && scheduled.resumed) {
      tally_.count(Reached::resume);
      for (const KVCacheGroupSpec& group : saved_.cache.groups)
        if (is_state_kind(group.spec.kind)) tally_.count(Reached::resumed_states);
    }
    // After a load, blocks in the table are the load's own and not hits.
    if (scheduled.is_new && !was_loaded) count_hit(step, scheduled);
    for (const KVCacheGroupSpec& group : saved_.cache.groups)
      // A ring is overwritten once the request has more tokens than the ring has entries.
      if (is_ring(group.spec) && request.num_computed_tokens > group.spec.block_size)
        tally_.count(Reached::ring_gone_round);
    if (!scheduled.encode.empty())
      tally_.count(scheduled.resumed ? Reached::encoder_computed_again : Reached::encoder_computed);
    for (const KVCacheGroupSpec& group : saved_.cache.groups)
      // Two blocks more than the window: the gap then spans at least one whole block.
      if (group.spec.rswa_window > 0 && request.num_computed_tokens > request.num_prompt_tokens +
                                                                          group.spec.rswa_window +
                                                                          2 * group.spec.block_size)
        tally_.count(Reached::gap_behind_prompt);
    if ((scheduled.computed + scheduled.tokens) % saved_.engine.block_size != 0)
      tally_.count(Reached::partial_block);
    // Nulls in the added blocks: the window of this step starts after them.
    if (scheduled.blocks && !scheduled.is_new)
      for (const std::vector<BlockId>& added : *scheduled.blocks)
        tally_.count(Reached::retired_block, std::ranges::count(added, kNullBlock));
    if (std::ranges::find(scheduled.spec, -1) != scheduled.spec.end())
      tally_.count(Reached::placeholder_draft);
    const auto sampled = std::ranges::find(step.sampled, scheduled.id, &RecordedTokens::id);
    // No output: the step ended inside the prompt.
    if (sampled == step.sampled.end()) {
      tally_.count(Reached::chunked_prefill);
      continue;
    }
    // The first sampled token is not a draft.
    const auto num_accepted = std::ssize(sampled->tokens) - 1;
    tally_.count(Reached::accepted_draft, num_accepted);
    tally_.count(Reached::rejected_draft, std::ssize(scheduled.spec) - num_accepted);
  }
}

// A storm preempts several requests at once and leaves at most one.
void TallyCounter::count_preempted(const RecordedStep& step) {
  std::int64_t num_preempted = 0;
  for (const std::string& name : step.preempted) {
    if (step.runs(name)) continue;
    ++num_preempted;
    requests_[name].place = Place::preempted;
  }
  tally_.count(Reached::preemption, num_preempted);
  if (num_preempted > 1 && step.running.size() <= 1) tally_.count(Reached::preemption_storm);
}

// Counts what the output changed. Ended requests are forgotten, so an abort of them is not counted.
void TallyCounter::count_outcome(const RecordedStep& step) {
  tally_.count(Reached::stored_block, step.stored);
  tally_.count(Reached::eviction, step.evicted);
  tally_.count(Reached::zeroed_block, std::ssize(step.zero));
  tally_.count(Reached::copy_on_write, std::ssize(step.copies));
  if (step.free_blocks == 0) tally_.count(Reached::full_pool);
  if (step.common_prefix_blocks &&
      std::ranges::any_of(*step.common_prefix_blocks, [](std::int32_t n) { return n > 0; }))
    tally_.count(Reached::common_prefix);
  for (const RecordedStopped& stopped : step.stopped) {
    tally_.count(stopped.reason == "stop"    ? Reached::stop_token
                 : stopped.reason == "error" ? Reached::load_failure_end
                                             : Reached::length_end);
    if (stopped.reason == "stop" && requests_[stopped.id].lists_its_end)
      tally_.count(Reached::listed_stop_token);
    requests_.erase(stopped.id);
  }
}

// Order matters: victims are compared with the previous step's queue, preemptions precede the
// schedule, and outcomes end requests.
void TallyCounter::step(const RecordedStep& step) {
  tally_.count(Reached::step);
  if (step.scheduled.empty()) tally_.count(Reached::idle_step);
  count_events(step.before);
  count_victims(step);
  count_preempted(step);
  count_answers(step);
  count_scheduled(step);
  count_transfers(step);
  count_pages(step);
  count_outcome(step);
  count_events(step.during);
  // Without asynchronous scheduling each step's output is processed before the next step.
  if (!step.scheduled.empty()) ++steps_in_flight_;
  const bool comes_in = step.output_of_step || !saved_.engine.async_scheduling;
  if (comes_in && steps_in_flight_ > 0) --steps_in_flight_;
}

}  // namespace lockstep
