#include "properties/shrink/case_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"
#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/page_size.h"
#include "sim/session/session.h"
#include "traces/formats/request_trace.h"

namespace lockstep {
namespace {

using Names = std::set<std::string>;

// Returns the trace with the kept records. A request that waited only for removed ones arrives with
// the latest kept arrival instead; its abort must not precede that.
Trace trace_with(const Trace& trace, const std::vector<bool>& keep) {
  Trace kept{.header = trace.header, .records = {}};
  Names there;
  std::int64_t t_ns = 0;
  for (std::size_t i = 0; i < trace.records.size(); ++i) {
    if (!keep[i]) continue;
    TraceRecord record = trace.records[i];
    if (auto* request = std::get_if<TraceRequest>(&record)) {
      const bool waited = !request->after.empty();
      std::erase_if(request->after, [&](const auto& name) { return !there.contains(name); });
      if (waited && request->after.empty()) {
        request->spec.arrival_ns = t_ns;
        request->delay_ns = 0;
        if (request->abort && request->abort->t_ns)
          request->abort->t_ns = std::max(*request->abort->t_ns, t_ns);
      }
      there.insert(request->spec.name);
    }
    if (const std::int64_t* own = time_of(record)) t_ns = *own;
    kept.records.push_back(std::move(record));
  }
  return kept;
}

// An abort is part of its request's record.
bool is_record(const RecordedEvent& event) { return event.kind != RecordedEvent::Kind::abort; }

// Removes the removed requests from the decisions, queues and tables of a step, and the events that
// `drop` selects. Numbered transfers and the connectors' own JSON stay.
template <class Drop>
void cut_step(RecordedStep& step, const Names& gone, const Drop& drop) {
  std::erase_if(step.before, drop);
  std::erase_if(step.during, drop);
  const auto is_gone = [&](const std::string& name) { return gone.contains(name); };
  const auto names_gone = [&](const auto& entry) { return gone.contains(entry.id); };
  std::erase_if(step.scheduled, names_gone);
  std::erase_if(step.sampled, names_gone);
  std::erase_if(step.stopped, names_gone);
  if (step.drafts) std::erase_if(*step.drafts, names_gone);
  if (step.tables) std::erase_if(*step.tables, names_gone);
  if (step.loading) std::erase_if(*step.loading, names_gone);
  if (step.skipped) std::erase_if(*step.skipped, names_gone);
  if (step.connector) std::erase_if(*step.connector, names_gone);
  std::erase_if(step.held_drafts, names_gone);
  std::erase_if(step.stale_outputs, names_gone);
  if (step.transfers.kv_holding) std::erase_if(*step.transfers.kv_holding, names_gone);
  std::erase_if(step.inputs.blocked, names_gone);
  std::vector<std::vector<std::string>*> lists = {
      &step.preempted, &step.finished,       &step.running,           &step.waiting,
      &step.held,      &step.inputs.holding, &step.transfers.deferred};
  if (step.worker)
    lists.insert(lists.end(), {&step.worker->received, &step.worker->sent, &step.worker->failed});
  for (RecordedPartReport& report : step.transfers.parts_worker)
    lists.insert(lists.end(), {&report.received, &report.sent});
  for (std::vector<std::string>* names : lists) std::erase_if(*names, is_gone);
}

// Returns the recording with the kept records. If the recorded decisions are followed, the free
// blocks no longer match: the blocks of removed requests are in use and belong to none. They become
// unknown (-1), and so do common prefix blocks.
Recording recording_with(const Recording& recording, const std::vector<bool>& keep,
                         Decides decide) {
  Recording kept = recording;
  Names gone;
  std::size_t at = 0;
  for (RecordedStep& step : kept.steps) {
    if (decide == Decides::recording) {
      step.free_blocks = -1;
      step.common_prefix_blocks.reset();
    }
    // Events are visited twice, first to decide and then to remove: a request's addition precedes
    // all other mentions of it.
    std::vector<bool> drops;
    for (const auto* events : {&step.before, &step.during})
      for (const RecordedEvent& event : *events) {
        const bool drop = is_record(event) ? !keep[at++] : gone.contains(event.name);
        if (drop && event.kind == RecordedEvent::Kind::add) gone.insert(event.request.name);
        drops.push_back(drop);
      }
    std::size_t seen = 0;
    cut_step(step, gone, [&](const RecordedEvent&) { return drops[seen++]; });
  }
  std::erase_if(kept.end.unfinished, [&](const auto& name) { return gone.contains(name); });
  return kept;
}

template <class Request, class Case>
std::vector<Request> collect_requests(Case& saved) {
  std::vector<Request> requests;
  if (!saved.recording) {
    for (auto& record : saved.trace.records)
      if (auto* request = std::get_if<TraceRequest>(&record)) requests.push_back(&request->spec);
    return requests;
  }
  for (auto& step : saved.recording->steps)
    for (auto* events : {&step.before, &step.during})
      for (auto& event : *events)
        if (event.kind == RecordedEvent::Kind::add) requests.push_back(&event.request);
  return requests;
}

}  // namespace

// Aborts are not records of their own.
std::size_t num_records(const SavedCase& saved) {
  if (!saved.recording) return saved.trace.records.size();
  std::int64_t count = 0;
  for (const RecordedStep& step : saved.recording->steps)
    count += std::ranges::count_if(step.before, is_record) +
             std::ranges::count_if(step.during, is_record);
  return static_cast<std::size_t>(count);
}

SavedCase with_records(const SavedCase& saved, const std::vector<bool>& keep) {
  LS_CHECK(keep.size() == num_records(saved), "{} of {} records", keep.size(), num_records(saved));
  SavedCase kept = saved;
  if (saved.recording)
    kept.recording = recording_with(*saved.recording, keep, saved.decide);
  else
    kept.trace = trace_with(saved.trace, keep);
  return kept;
}

std::vector<RequestSpec*> requests_of(SavedCase& saved) {
  return collect_requests<RequestSpec*>(saved);
}
std::vector<const RequestSpec*> requests_of(const SavedCase& saved) {
  return collect_requests<const RequestSpec*>(saved);
}

std::vector<TraceRequest*> trace_requests_of(SavedCase& saved) {
  std::vector<TraceRequest*> requests;
  if (saved.recording) return requests;
  for (TraceRecord& record : saved.trace.records)
    if (auto* request = std::get_if<TraceRequest>(&record)) requests.push_back(request);
  return requests;
}

// The group's own spec follows its first layer. A module of the draft model without layers
// disappears.
SavedCase without_layer(const SavedCase& saved, std::size_t group, std::size_t layer) {
  SavedCase smaller = saved;
  KVCacheGroupSpec& of = smaller.cache.groups[group];
  LS_CHECK(layer < of.layer_names.size(), "layer {} of {}", layer, of.layer_names.size());
  const std::string name = of.layer_names[layer];
  const auto place = static_cast<std::ptrdiff_t>(layer);
  of.layer_names.erase(of.layer_names.begin() + place);
  if (of.is_uniform_type()) {
    of.layer_specs.erase(of.layer_specs.begin() + place);
    if (!of.layer_specs.empty()) of.spec = of.layer_specs.front();
  }
  for (KVCacheTensor& tensor : smaller.cache.tensors) std::erase(tensor.shared_by, name);
  for (std::vector<std::string>& module : smaller.cache.draft_modules) std::erase(module, name);
  std::erase_if(smaller.cache.draft_modules, [](const auto& module) { return module.empty(); });
  std::erase_if(smaller.cache.tensors,
                [](const KVCacheTensor& tensor) { return tensor.shared_by.empty(); });
  return smaller;
}

// Literal runs keep their order, so each receives the next position of the new list.
void drop_unused_tokens(Prompt& prompt) {
  std::vector<std::int32_t> used;
  for (TokenRun& run : prompt.runs) {
    if (run.kind != TokenRun::Kind::literal) continue;
    const auto begin = prompt.tokens.begin() + run.first;
    run.first = static_cast<std::uint32_t>(used.size());
    used.insert(used.end(), begin, begin + run.count);
  }
  prompt.tokens = std::move(used);
}

SavedCase without_group(const SavedCase& saved, std::size_t group) {
  SavedCase smaller = saved;
  while (!smaller.cache.groups[group].layer_names.empty())
    smaller = without_layer(smaller, group, smaller.cache.groups[group].layer_names.size() - 1);
  const auto place = static_cast<std::ptrdiff_t>(group);
  smaller.cache.groups.erase(smaller.cache.groups.begin() + place);
  smaller.kernel_block_sizes.erase(smaller.kernel_block_sizes.begin() + place);
  return smaller;
}

bool has_connector(const SavedCase& saved) { return !saved.connector.parts.empty(); }

bool may_lose_blocks(const SavedCase& saved) {
  const ConnectorSpec& connector = saved.connector;
  // vLLM assigns lost blocks to requests only with one group: with several, none are reported.
  if (saved.cache.groups.size() != 1) return false;
  const bool has_peers =
      connector.has(ConnectorKind::peers) || connector.has(ConnectorKind::one_group_peers);
  return connector.load_failed_percent.value_or(has_peers ? 1 : 0) > 0 && !connector.parts.empty();
}

// The specs of all layers change in the same way, or the group would no longer be one.
void change_specs(SavedCase& saved, std::size_t group,
                  const std::function<void(KVCacheSpec&)>& change) {
  KVCacheGroupSpec& of = saved.cache.groups[group];
  change(of.spec);
  for (KVCacheSpec& spec : of.layer_specs) change(spec);
}

void without_checkpoints(SavedCase& saved) {
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    change_specs(saved, g, [](KVCacheSpec& spec) {
      spec.num_prefill_checkpoint_blocks = spec.prefill_checkpoint_alignment = 0;
    });
}

// Padding of old pages is dropped; the planner adds what the new pages need.
bool plan_again(SavedCase& saved) {
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  for (KVCacheGroupSpec& group : groups) {
    group.spec.page_size_padded.reset();
    for (KVCacheSpec& spec : group.layer_specs) spec.page_size_padded.reset();
  }
  Result<KVCacheConfig> plan = plan_for_groups(std::move(groups), saved.cache.num_blocks);
  if (!plan) return false;
  plan->draft_modules = std::move(saved.cache.draft_modules);
  saved.cache = std::move(*plan);
  return true;
}

bool set_num_blocks(SavedCase& saved, std::int64_t num_blocks) {
  const std::int64_t before = saved.cache.num_blocks;
  if (before < 1 || num_blocks < 1) return false;
  // A tensor that is not a whole number of pages would change the size of its pages.
  for (const KVCacheTensor& tensor : saved.cache.tensors)
    if (tensor.size_bytes % before != 0) return false;
  saved.cache = with_num_blocks(saved.cache, num_blocks);
  return true;
}

namespace {

// vLLM 0.33.0, config/scheduler.py, verify_max_model_len(), refuses both at start.
bool step_has_room(const SavedCase& saved) {
  const EngineConfig& engine = saved.engine;
  if (engine.max_num_batched_tokens < engine.max_num_seqs) return false;
  return engine.enable_chunked_prefill || engine.max_num_batched_tokens >= engine.max_model_len;
}

bool long_prefills_are_below(const SavedCase& saved) {
  return saved.engine.long_prefill_token_threshold <= saved.engine.max_model_len;
}

bool pool_holds_the_longest(const SavedCase& saved) {
  return 1 + planned_blocks_of_request(saved.engine, saved.cache.groups) <= saved.cache.num_blocks;
}

// A longer request is refused by the front end; its case would fail without deciding anything.
bool requests_fit(const SavedCase& saved) {
  return std::ranges::all_of(requests_of(saved), [&](const RequestSpec* request) {
    return request->prompt.size() + request->max_tokens <= saved.engine.max_model_len;
  });
}

// State groups without a block per draft would have no slot for the draft's state.
bool drafts_have_a_method(const SavedCase& saved) {
  const bool drafts = saved.engine.num_spec_tokens > 0;
  if (drafts != (saved.engine.spec_method != SpecMethod::none)) return false;
  return std::ranges::all_of(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
    return !is_state_kind(group.spec.kind) ||
           group.spec.num_speculative_blocks == saved.engine.num_spec_tokens;
  });
}

// In mode none one block holds the state of a whole request, so it is as long as max_model_len.
bool states_have_one_mode(const SavedCase& saved) {
  if (!has_states(saved.cache.groups)) return true;
  const bool saves = saved.engine.mamba_cache_mode != MambaCacheMode::none;
  if (saves != saved.engine.enable_prefix_caching) return false;
  return std::ranges::all_of(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
    if (!is_state_kind(group.spec.kind)) return true;
    return group.spec.mamba_cache_mode == saved.engine.mamba_cache_mode &&
           (saves || group.spec.block_size >= saved.engine.max_model_len);
  });
}

// A step, or the long-prefill threshold, must reach from one block boundary to the next.
bool aligned_steps_reach_a_block(const SavedCase& saved) {
  if (!has_states(saved.cache.groups) || saved.engine.mamba_cache_mode != MambaCacheMode::align)
    return true;
  const std::int64_t threshold = saved.engine.long_prefill_token_threshold;
  return saved.engine.enable_chunked_prefill &&
         std::ranges::all_of(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
           return group.spec.block_size <= saved.engine.max_num_batched_tokens &&
                  (threshold == 0 || group.spec.block_size <= threshold);
         });
}

// A window of one token reads only itself; its group would never need an earlier block.
bool windows_are_tokens(const SavedCase& saved) {
  return std::ranges::all_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
    const bool window = is_sliding_window(group.spec.kind);
    const bool chunk = is_chunked(group.spec.kind);
    return (!window || group.spec.sliding_window > 1) &&
           (!chunk || group.spec.attention_chunk_size > 0);
  });
}

// A worker keeps one slot per request for its running states: vLLM 0.33.0 asserts that all groups
// share the scheduling of states (v1/worker/mamba_utils.py, MambaCopyBuffers.create()). Their
// drafts and mode are those of the engine: drafts_have_a_method() and states_have_one_mode().
bool states_have_one_block_size(const SavedCase& saved) {
  std::set<std::int64_t> sizes;
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    if (is_state_kind(group.spec.kind)) sizes.insert(group.spec.block_size);
  return sizes.size() <= 1;
}

// A state tensor is a view of whole elements: each begins a multiple of its element after the last.
bool states_are_elements(const SavedCase& saved) {
  return std::ranges::all_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
    return std::ranges::all_of(group.spec.states, [&](const StateTensorSpec& state) {
      return page_size_bytes(group.spec) % itemsize_bytes(state.dtype) == 0;
    });
  });
}

// Bit i of BrokenRules is rule i.
constexpr std::array kRules = {step_has_room,
                               long_prefills_are_below,
                               pool_holds_the_longest,
                               requests_fit,
                               drafts_have_a_method,
                               states_have_one_mode,
                               aligned_steps_reach_a_block,
                               windows_are_tokens,
                               states_have_one_block_size,
                               states_are_elements};

}  // namespace

BrokenRules broken_rules(const SavedCase& saved) {
  BrokenRules broken = 0;
  for (std::size_t i = 0; i < kRules.size(); ++i)
    if (!kRules[i](saved)) broken |= BrokenRules{1} << i;
  return broken;
}

// A plan that the model cannot lay out still serves to follow recorded decisions: pages have no
// positions then.
Result<SavedCase> case_of(std::string name, Recording recording, Decides decide) {
  if (recording.header.connector && decide == Decides::model)
    return fail(name + ": a recording of a KV connector, whose loads the model does not decide");
  auto plan = plan_for_groups(recording.header.groups, recording.header.num_blocks);
  if (!plan && decide == Decides::recording)
    plan = unplaced_plan(recording.header.groups, recording.header.num_blocks);
  if (!plan) return tl::unexpected(plan.error());
  SavedCase saved;
  saved.name = std::move(name);
  saved.engine = recording.header.options.config;
  saved.kernel_block_sizes = make_backend_config(saved.engine, *plan).kernel_block_sizes;
  saved.cache = *std::move(plan);
  saved.backend = "none";
  saved.check = CheckMode::fast;
  saved.decide = decide;
  saved.trace.header.source = {.kind = "recording", .name = recording.header.family, .seed = {}};
  saved.recording = std::move(recording);
  return saved;
}

// The clock of the new trace is that of the recording, one step per 10 ms, so requests arrive in
// the same steps as long as no engine idles.
Result<SavedCase> on_a_clock(const SavedCase& saved) {
  constexpr std::int64_t kStepNs = 10'000'000;
  LS_ASSIGN_OR_RETURN(auto trace, trace_of(*saved.recording, kStepNs));
  SavedCase other = saved;
  other.trace = std::move(trace);
  other.recording.reset();
  other.step_time = {.base_ns = kStepNs, .per_token_ns = 0};
  return other;
}

namespace {

// `hunt` counts twice: as an option and by the count here, because `check` is simpler than `hunt`
// and also not the simplest.
std::int64_t options_set(const SavedCase& saved) {
  std::int64_t count = saved.check == CheckMode::hunt ? 1 : 0;
  for (const RunField& field : run_fields())
    if (counts_as_set(field) && !field.is_equal(saved, simplest_run())) ++count;
  return count + (saved.trace.header.engine ? 1 : 0);
}

// Counts ranks beyond one of every kind, and the numbers of a connector above their lowest.
std::int64_t ranks_and_transfers(const SavedCase& saved) {
  std::int64_t sum = saved.engine.dcp + saved.engine.pcp - 2;
  for (const RunField& field : run_fields())
    if (field.shrinks == Shrinks::lowered && !field.is_default(saved))
      sum += field.number(saved) - field.lowest + 1;
  return sum + std::ssize(saved.connector.parts);
}

// Counts properties of a request beyond its tokens.
std::int64_t trimmings(const RequestSpec& spec) {
  std::int64_t count = spec.priority == 0 ? 0 : 1;
  count += spec.eos_token ? 1 : 0;
  count += std::ssize(spec.stop_token_ids);
  return count + (spec.cache_salt.empty() ? 0 : 1);
}
std::int64_t trimmings(const TraceRequest& request) {
  std::int64_t count = trimmings(request.spec) + std::ssize(request.after);
  count += request.abort ? 1 : 0;
  return count + (request.output.tokens.empty() ? 0 : 1) + (request.output.fill ? 1 : 0);
}

struct Requests {
  std::int64_t runs = 0;
  std::int64_t trimmings = 0;
  std::int64_t arrivals = 0;  // number of different arrival times
  std::int64_t time = 0;      // latest arrival or abort, in ns
  std::int64_t untidy = 0;    // names and seeds that are not the first ones available
};

// Recorded requests arrive in steps, so times do not count for them.
Requests requests_in(const SavedCase& saved) {
  Requests in;
  std::set<std::int64_t> arrivals;
  std::int64_t ordinal = 0;
  for (const RequestSpec* request : requests_of(saved)) {
    in.runs += std::ssize(request->prompt.runs);
    for (const TokenRun& run : request->prompt.runs)
      in.untidy += run.first == 0 && run.kind == TokenRun::Kind::seeded && run.seed < 256 ? 0 : 1;
    in.untidy += request->name == fmt::format("r{}", ordinal++) ? 0 : 1;
    if (saved.recording) in.trimmings += trimmings(*request);
  }
  if (saved.recording) return in;
  for (const TraceRecord& record : saved.trace.records) {
    std::int64_t t_ns = 0;
    if (const auto* request = std::get_if<TraceRequest>(&record)) {
      in.trimmings += trimmings(*request);
      t_ns = request->after.empty() ? request->spec.arrival_ns : request->delay_ns;
      if (request->abort && request->abort->t_ns)
        in.time = std::max(in.time, *request->abort->t_ns);
    } else {
      t_ns = std::get<TraceControl>(record).t_ns;
    }
    arrivals.insert(t_ns);
    in.time = std::max(in.time, t_ns);
  }
  in.arrivals = std::ssize(arrivals);
  return in;
}

// Sums the sizes of rows and states over all layers: heads, elements, bytes per element, padding.
std::int64_t elements(const KVCacheConfig& plan) {
  std::int64_t sum = 0;
  for (const KVCacheGroupSpec& group : plan.groups) {
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      const KVCacheSpec& spec = group.layer_spec(i);
      sum += spec.num_kv_heads + spec.head_size + spec.head_size_v;
      sum += itemsize_bytes(spec.dtype) + spec.page_size_padded.value_or(0);
      for (const StateTensorSpec& state : spec.states)
        for (const std::int64_t dim : state.dims) sum += dim;
      sum += std::ssize(spec.states) + spec.num_speculative_blocks;
      sum += spec.num_prefill_checkpoint_blocks + spec.prefill_checkpoint_alignment;
    }
    sum += group.layers_per_page;
  }
  return sum;
}

// Sums the tokens of blocks, windows and chunks, and the kernel blocks per block.
std::int64_t block_tokens(const SavedCase& saved) {
  std::int64_t sum = saved.engine.block_size + saved.engine.mamba_block_size;
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    sum += group.spec.block_size + group.spec.sliding_window + group.spec.attention_chunk_size;
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g)
    sum += saved.cache.groups[g].spec.block_size / saved.kernel_block_sizes[g];
  return sum;
}

// Sums the steps and arguments of all faults.
std::int64_t fault_numbers(const SavedCase& saved) {
  std::int64_t sum = 0;
  for (const Fault& fault : saved.faults) {
    sum += fault.step;
    for (const auto& [name, value] : fault.arguments) sum += value;
  }
  return sum;
}

// Counts the steps of a recording and the decisions recorded in them, at least 1: a case with a
// recording is always larger than one without.
std::int64_t recorded_entries(const Recording& recording) {
  std::int64_t count = 1;
  for (const RecordedStep& step : recording.steps)
    count += 1 + std::ssize(step.scheduled) + std::ssize(step.running) + std::ssize(step.waiting) +
             std::ssize(step.finished) + std::ssize(step.stopped) + (step.tables ? 1 : 0);
  return count;
}

}  // namespace

bool counts_as_set(const RunField& field) {
  return field.saved_in != SavedIn::nowhere &&
         (field.shrinks == Shrinks::reset || field.shrinks == Shrinks::lowered);
}

// A recording has no planned outputs; max_tokens stands for them.
CaseSize size_of(const SavedCase& saved) {
  CaseSize size;
  for (const RequestSpec* request : requests_of(saved)) {
    ++size.requests;
    size.tokens += request->prompt.size();
    if (saved.recording) size.tokens += request->max_tokens;
  }
  if (!saved.recording)
    for (const TraceRecord& record : saved.trace.records)
      if (const auto* request = std::get_if<TraceRequest>(&record))
        size.tokens += request->output.length;
  size.groups = std::ssize(saved.cache.groups);
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    size.layers += std::ssize(group.layer_names);
  size.blocks = saved.cache.num_blocks;
  size.options = options_set(saved);
  return size;
}

CaseRank rank_of(const SavedCase& saved, std::int64_t steps) {
  const CaseSize size = size_of(saved);
  const Requests requests = requests_in(saved);
  const EngineConfig& engine = saved.engine;
  // The number of different arrivals weighs more than any time: 2^40 ns is 18 minutes.
  return {
      saved.recording ? recorded_entries(*saved.recording) : 0,
      static_cast<std::int64_t>(num_records(saved)) + std::ssize(saved.faults) +
          std::ssize(saved.mutants),
      size.groups,
      size.layers,
      steps,
      size.tokens,
      requests.runs + requests.trimmings,
      size.options,
      elements(saved.cache),
      size.blocks,
      block_tokens(saved),
      std::int64_t{engine.max_num_seqs} + engine.max_num_batched_tokens + engine.max_model_len +
          ranks_and_transfers(saved),
      requests.arrivals * (std::int64_t{1} << 40) + std::min(requests.time, std::int64_t{1} << 40),
      requests.untidy + fault_numbers(saved)};
}

}  // namespace lockstep
