#include "sim/session/saved_run.h"

#include <algorithm>
#include <utility>

#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"

namespace lockstep {
namespace {

std::string_view word_of(CheckMode mode) {
  switch (mode) {
    case CheckMode::fast:
      return "fast";
    case CheckMode::check:
      return "check";
    case CheckMode::hunt:
      return "hunt";
  }
  return "check";
}

CheckMode check_mode_of(std::string_view word) {
  if (word == "fast") return CheckMode::fast;
  return word == "hunt" ? CheckMode::hunt : CheckMode::check;
}

// The numbers of a run that a saved case keeps by name, with where they go.
struct Settings {
  CheckBudget budget;
  StepTimeModel step_time;
  std::int64_t queries_per_kv = 1;
  std::int64_t num_streams = 1;
  std::int64_t delay_streams = 0;
  std::int64_t max_cudagraph_capture_size = 0;
  std::int64_t real_numbers = 0;
  std::int64_t tp = 1;
  std::int64_t pp = 1;
  std::int64_t dp = 1;
  std::int64_t enforce_eager = 0;
  std::int64_t cp_interleave = 1;
  std::int64_t draft_acceptance_percent = 60;
  std::int64_t connector = 0;  // its parts, a digit each
  std::int64_t host_blocks = 0;
  std::int64_t load_failed_percent = -1;  // the connector's own
  std::int64_t transfer_delay_steps = 3;
  std::int64_t load_failure_fails = 0;

  std::vector<std::pair<std::string, std::int64_t*>> by_name() {
    return {{"probe_rows", &budget.probe_rows},
            {"query_rows", &budget.query_rows},
            {"untouched_pages", &budget.untouched_pages},
            {"queries_per_kv", &queries_per_kv},
            {"num_streams", &num_streams},
            {"delay_streams", &delay_streams},
            {"max_cudagraph_capture_size", &max_cudagraph_capture_size},
            {"real_numbers", &real_numbers},
            {"tensor_parallel_size", &tp},
            {"pipeline_parallel_size", &pp},
            {"data_parallel_size", &dp},
            {"enforce_eager", &enforce_eager},
            {"cp_kv_cache_interleave_size", &cp_interleave},
            {"step_base_ns", &step_time.base_ns},
            {"step_token_ns", &step_time.per_token_ns},
            {"draft_acceptance_percent", &draft_acceptance_percent},
            {"connector", &connector},
            {"host_blocks", &host_blocks},
            {"load_failed_percent", &load_failed_percent},
            {"transfer_delay_steps", &transfer_delay_steps},
            {"load_failure_fails", &load_failure_fails}};
  }
};

Settings settings_of(const SavedCase& saved) {
  Settings settings;
  for (const auto& [name, target] : settings.by_name())
    for (const auto& [key, value] : saved.settings)
      if (key == name) *target = value;
  return settings;
}

bool fails_requests(const ConnectorConfig& connector) {
  return connector.load_failure_policy == KVLoadFailurePolicy::fail;
}

ConnectorConfig connector_of(const Settings& settings) {
  std::optional<std::int32_t> failed;
  if (settings.load_failed_percent >= 0)
    failed = static_cast<std::int32_t>(settings.load_failed_percent);
  return {.parts = connector_parts_from_number(settings.connector),
          .num_host_blocks = settings.host_blocks,
          .load_failed_percent = failed,
          .delay_steps_max = static_cast<std::int32_t>(settings.transfer_delay_steps),
          .load_failure_policy = settings.load_failure_fails != 0 ? KVLoadFailurePolicy::fail
                                                                  : KVLoadFailurePolicy::recompute};
}

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

}  // namespace

SavedCase save_case(std::string name, const LockstepConfig& config,
                    const TraceWorkloadOptions& options, const RunSummary& summary) {
  SavedCase saved;
  saved.name = std::move(name);
  saved.engine = config.engine;
  saved.cache = config.device.plan;
  saved.layout = config.device.layout;
  saved.layout_rule = config.device.layout_rule;
  saved.attention_backend = config.device.attention_backend;
  saved.kernel_block_sizes = config.device.kernel_block_sizes;
  saved.backend = summary.backend.substr(0, summary.backend.find(' '));
  saved.check = word_of(config.device.check);
  if (std::string mutant = mutant_of(config); !mutant.empty()) saved.mutants = {std::move(mutant)};
  saved.seed = options.seed;
  Settings settings{.budget = config.budget,
                    .step_time = options.step_time,
                    .queries_per_kv = config.device.queries_per_kv,
                    .num_streams = config.device.num_streams,
                    .delay_streams = config.device.delay_streams ? 1 : 0,
                    .max_cudagraph_capture_size = config.device.max_cudagraph_capture_size,
                    .real_numbers = config.device.numbers == Numbers::real ? 1 : 0,
                    .tp = config.device.parallel.tp_size,
                    .pp = config.device.parallel.pp_size,
                    .dp = config.data_parallel.dp_size,
                    .enforce_eager = config.data_parallel.enforce_eager ? 1 : 0,
                    .cp_interleave = config.device.context.interleave,
                    .draft_acceptance_percent = options.draft_acceptance_percent,
                    .connector = connector_parts_number(config.connector.parts),
                    .host_blocks = config.connector.num_host_blocks,
                    .load_failed_percent = config.connector.load_failed_percent.value_or(-1),
                    .transfer_delay_steps = config.connector.delay_steps_max,
                    .load_failure_fails = fails_requests(config.connector) ? 1 : 0};
  for (const auto& [key, value] : settings.by_name()) saved.settings.emplace_back(key, *value);
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

LockstepConfig config_of(const SavedCase& saved) {
  const Settings settings = settings_of(saved);
  LockstepConfig config;
  config.engine = saved.engine;
  config.budget = settings.budget;
  config.device = make_backend_config(saved.engine, saved.cache, saved.attention_backend);
  if (!saved.kernel_block_sizes.empty())
    config.device.kernel_block_sizes = saved.kernel_block_sizes;
  config.device.layout = saved.layout;
  config.device.layout_rule = saved.layout_rule;
  config.device.queries_per_kv = static_cast<std::int32_t>(settings.queries_per_kv);
  config.device.num_streams = static_cast<std::int32_t>(settings.num_streams);
  config.device.delay_streams = settings.delay_streams != 0;
  config.device.max_cudagraph_capture_size =
      static_cast<std::int32_t>(settings.max_cudagraph_capture_size);
  config.device.numbers = settings.real_numbers != 0 ? Numbers::real : Numbers::words;
  config.device.parallel.tp_size = static_cast<std::int32_t>(settings.tp);
  config.device.parallel.pp_size = static_cast<std::int32_t>(settings.pp);
  config.data_parallel.dp_size = static_cast<std::int32_t>(settings.dp);
  config.data_parallel.enforce_eager = settings.enforce_eager != 0;
  config.device.context.interleave = static_cast<std::int32_t>(settings.cp_interleave);
  config.device.check = check_mode_of(saved.check);
  config.device.seed = saved.seed;
  config.connector = connector_of(settings);
  const bool is_connected = !config.connector.parts.empty();
  if (saved.recording && saved.recording->header.connector)
    config.connector.load_failure_policy =
        kv_transfer(saved.recording->header, nullptr).kv_load_failure_policy;
  if (is_connected || (saved.recording && saved.recording->header.connector))
    config.device.num_host_blocks = num_host_blocks(config.connector, saved.cache);
  if (!saved.mutants.empty()) plant(config, saved.mutants.front());
  return config;
}

std::string mutant_of(const LockstepConfig& config) {
  if (config.connector.defect != ConnectorDefect::none)
    return std::string(name_of(config.connector.defect));
  if (config.connector.setup_defect != MultiConnectorDefect::none)
    return std::string(name_of(config.connector.setup_defect));
  if (config.scheduler_defect != SchedulerDefect::none)
    return std::string(name_of(config.scheduler_defect));
  if (config.data_parallel.defect != DataParallelDefect::none)
    return std::string(name_of(config.data_parallel.defect));
  if (config.hidden_state_defect != HiddenStateDefect::none)
    return std::string(name_of(config.hidden_state_defect));
  return config.device.mutant;
}

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

std::vector<BlockId> free_order_of(const SavedCase& saved) {
  const auto set =
      std::ranges::find(saved.settings, "block_order", [](const auto& s) { return s.first; });
  if (set == saved.settings.end() || set->second == 0) return {};
  std::vector<BlockId> order;
  for (std::int32_t block = 1; block < saved.cache.num_blocks; ++block)
    order.push_back(BlockId{block});
  for (std::size_t left = order.size(); left > 1; --left)
    std::swap(order[left - 1],
              order[splitmix64(static_cast<std::uint64_t>(set->second) << 32 | left) % left]);
  return order;
}

TraceWorkloadOptions workload_options_of(const SavedCase& saved) {
  const Settings settings = settings_of(saved);
  return {.step_time = settings.step_time,
          .seed = saved.seed,
          .num_spec_tokens = saved.engine.num_spec_tokens,
          .draft_acceptance_percent = static_cast<std::int32_t>(settings.draft_acceptance_percent)};
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
