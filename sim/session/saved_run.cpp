#include "sim/session/saved_run.h"

#include <utility>

#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"

namespace lockstep {
namespace {

class MemoryTraceReader final : public TraceReader {
 public:
  explicit MemoryTraceReader(Trace trace) : trace_(std::move(trace)) {}
  const TraceHeader& header() const override { return trace_.header; }
  Result<bool> next(TraceRecord& record) override {
    if (at_ == trace_.records.size()) return false;
    record = trace_.records[at_++];
    return true;
  }

 private:
  Trace trace_;
  std::size_t at_ = 0;
};

// Plants the defect of that name where it belongs: in the scheduler, in a connector, in how an
// engine sets its connectors up, in data parallel ranks, in files of hidden states. Every other
// name is taken for one of the backend's, which refuses those that it does not know when it is
// made.
void plant(LockstepConfig& config, const std::string& mutant) {
  if (const auto defect = scheduler_defect_from_name(mutant))
    config.scheduler_defect = *defect;
  else if (const auto planted = connector_defect_from_name(mutant))
    config.connector.defect = *planted;
  else if (const auto of_start = multi_connector_defect_from_name(mutant))
    config.connector.setup_defect = *of_start;
  else if (const auto of_ranks = data_parallel_defect_from_name(mutant))
    config.data_parallel.defect = *of_ranks;
  else if (const auto of_files = hidden_state_defect_from_name(mutant))
    config.hidden_state_defect = *of_files;
  else
    config.device.mutant = mutant;
}

}  // namespace

SavedCase case_of(std::string name, const RunSpec& run, const RunSummary& summary) {
  SavedCase saved;
  static_cast<RunSpec&>(saved) = run;
  saved.recipe = {};
  saved.name = std::move(name);
  saved.backend = summary.backend.substr(0, summary.backend.find(' '));
  saved.kernel_block_sizes = config_of(run).device.kernel_block_sizes;
  if (summary.divergence)
    saved.expected = {.kind = std::string(name_of(summary.divergence->phase)),
                      .step = summary.divergence->step};
  else
    saved.expected = {.kind = std::string(name_of(summary.verdict)), .step = {}};
  return saved;
}

void keep_records(Trace& trace, std::int64_t count) {
  if (count < static_cast<std::int64_t>(trace.records.size()))
    trace.records.resize(static_cast<std::size_t>(count));
}

LockstepConfig config_of(const RunSpec& run) {
  LockstepConfig config;
  config.engine = run.engine;
  config.budget = run.budget;
  BackendConfig& device = config.device;
  device = make_backend_config(run.engine, run.cache, run.attention_backend);
  if (!run.kernel_block_sizes.empty()) device.kernel_block_sizes = run.kernel_block_sizes;
  device.layout = run.layout;
  device.layout_rule = run.layout_rule;
  device.queries_per_kv = run.queries_per_kv;
  device.num_streams = run.num_streams;
  device.delay_streams = run.delay_streams;
  device.max_cudagraph_capture_size = run.max_cudagraph_capture_size;
  device.numbers = run.numbers;
  device.parallel.tp_size = run.tensor_parallel_size;
  device.parallel.pp_size = run.pipeline_parallel_size;
  device.context.interleave = run.cp_kv_cache_interleave_size;
  device.check = run.check;
  device.seed = run.seed;
  config.data_parallel.dp_size = run.data_parallel_size;
  config.data_parallel.enforce_eager = run.enforce_eager;
  static_cast<ConnectorSpec&>(config.connector) = run.connector;
  if (!run.connector.parts.empty())
    device.num_host_blocks = num_host_blocks(config.connector, run.cache);
  if (!run.mutants.empty()) plant(config, run.mutants.front());
  return config;
}

LockstepConfig config_of(const SavedCase& saved) {
  LockstepConfig config = config_of(static_cast<const RunSpec&>(saved));
  if (saved.recording && saved.recording->header.connector) {
    config.connector.load_failure_policy =
        kv_transfer(saved.recording->header, nullptr).kv_load_failure_policy;
    config.device.num_host_blocks = num_host_blocks(config.connector, saved.cache);
  }
  return config;
}

std::vector<BlockId> free_order_of(const RunSpec& run) {
  if (run.block_order == 0) return {};
  std::vector<BlockId> order;
  for (std::int32_t block = 1; block < run.cache.num_blocks; ++block)
    order.push_back(BlockId{block});
  for (std::size_t left = order.size(); left > 1; --left)
    std::swap(order[left - 1], order[splitmix64(run.block_order << 32 | left) % left]);
  return order;
}

TraceWorkloadOptions workload_options_of(const RunSpec& run) {
  return {.step_time = run.step_time,
          .seed = run.seed,
          .num_spec_tokens = run.engine.num_spec_tokens,
          .draft_acceptance_percent = run.draft_acceptance_percent};
}

std::unique_ptr<TraceReader> trace_reader_of(Trace trace) {
  return std::make_unique<MemoryTraceReader>(std::move(trace));
}

std::unique_ptr<Workload> workload_of(const SavedCase& saved) {
  if (saved.recording) return make_recording_workload(*saved.recording);
  return make_trace_workload(trace_reader_of(saved.trace), workload_options_of(saved));
}

SessionParts parts_of(const SavedCase& saved) {
  SessionParts parts;
  parts.clients = workload_of(saved);
  parts.connector_seed = saved.seed;
  parts.faults = saved.faults;
  parts.free_order = free_order_of(saved);
  return parts;
}

Result<std::unique_ptr<Session>> open_undisturbed(const SavedCase& saved, LockstepConfig config,
                                                  BackendFactory backend, Attach attach) {
  if (config.data_parallel.dp_size > 1) config.connector.parts.clear();
  config.data_parallel.dp_size = 1;
  SessionParts parts = parts_of(saved);
  parts.faults.clear();
  parts.backend = std::move(backend);
  parts.attach = std::move(attach);
  return Session::open(config, std::move(parts));
}

}  // namespace lockstep
