#include "properties/shrink/case_size.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

std::int64_t options_set(const SavedCase& saved) {
  std::int64_t count = saved.check == CheckMode::hunt ? 1 : 0;  // twice: check is simpler
  for (const RunField& field : run_fields())
    if (counts_as_set(field) && !field.is_equal(saved, simplest_run())) ++count;
  return count + (saved.trace.header.engine ? 1 : 0);
}

// Ranks beyond one, of every kind, and what a connector counts.
std::int64_t ranks_and_transfers(const SavedCase& saved) {
  std::int64_t sum = saved.engine.dcp + saved.engine.pcp - 2;
  for (const RunField& field : run_fields())
    if (field.shrinks == Shrinks::lowered && !field.is_default(saved))
      sum += field.number(saved) - field.lowest + 1;
  return sum + std::ssize(saved.connector.parts);
}

// Properties of a request beyond its tokens.
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
  std::int64_t arrivals = 0;  // different ones
  std::int64_t time = 0;      // the latest arrival or abort
  std::int64_t untidy = 0;    // names and seeds that are not the first ones there are
};

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

// Elements of a token or a state, and tokens of blocks, windows and chunks, over all groups.
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

std::int64_t block_tokens(const SavedCase& saved) {
  std::int64_t sum = saved.engine.block_size + saved.engine.mamba_block_size;
  for (const KVCacheGroupSpec& group : saved.cache.groups)
    sum += group.spec.block_size + group.spec.sliding_window + group.spec.attention_chunk_size;
  for (const std::int64_t size : saved.kernel_block_sizes) sum += size;
  return sum;
}

// When faults begin, how long they last, and their other numbers.
std::int64_t fault_numbers(const SavedCase& saved) {
  std::int64_t sum = 0;
  for (const Fault& fault : saved.faults) {
    sum += fault.step;
    for (const auto& [name, value] : fault.arguments) sum += value;
  }
  return sum;
}

// Steps of a recording, and the decisions that it shows in them.
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
