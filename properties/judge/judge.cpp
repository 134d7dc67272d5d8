#include "properties/judge/judge.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "properties/audit/audit.h"
#include "properties/invariants/invariants.h"
#include "properties/judge/tally_counter.h"
#include "properties/judge/watched_backend.h"
#include "reference/plan/page_size.h"
#include "sim/engine/faulty_workload.h"
#include "sim/engine/run_recorder.h"
#include "sim/engine/saved_run.h"
#include "sim/ranks/data_parallel.h"
#include "sim/step/program_builder.h"

namespace lockstep {
namespace {

Outcome refusal(const Error& error) {
  Outcome outcome;
  outcome.kind = OutcomeKind::refused;
  outcome.what = error.message;
  return outcome;
}

// Everything that looks on while an engine runs. False from a hook ends the run.
class Bench final : public StepObserver {
 public:
  Bench(const SavedCase& saved, std::int32_t dp_rank, Workload& workload,
        const JudgeOptions& options, Outcome& outcome)
      : options_(options),
        dp_rank_(dp_rank),
        observer_(is_observed(dp_rank, options) ? options.observer : nullptr),
        recorded_(is_observed(dp_rank, options) ? options.recorded : nullptr),
        outcome_(outcome),
        invariants_(saved.engine, saved.cache),
        tally_(saved, outcome.tally),
        recorder_(workload, [this](const RecordedStep& step) { take(step); }) {}

  void begin(const SavedCase& saved, const LockstepConfig& config,
             const DecisionSource& decisions) {
    RecordingHeader header =
        recording_header(saved.engine, saved.cache.groups, saved.cache.num_blocks, decisions);
    if (recorder_.connector() != nullptr)
      header.connector.emplace().fail_on_load_error =
          config.connector.load_failure_policy == KVLoadFailurePolicy::fail;
    if (why_not_audited(header).empty()) auditor_ = std::make_unique<Auditor>(header);
  }

  Workload& workload() { return recorder_; }

  bool decided(const StepView& view) override {
    recorder_.decided(view);
    if (recorded_ != nullptr) recorded_->push_back(recorder_.step());
    const auto& answers = recorder_.step().connector;
    invariants_.decided(view, answers ? *answers : std::span<const RecordedConnectorAnswer>());
    const bool go_on = observer_ == nullptr || observer_->decided(view);
    return settle() && go_on;
  }

  bool finished(const StepView& view) override {
    if (options_.hashes != nullptr) options_.hashes->push_back(view.state_hash);
    recorder_.finished(view);
    if (!outcome_.failed()) invariants_.finished(view);
    keep_recorded();
    const bool go_on = observer_ == nullptr || observer_->finished(view);
    return settle() && go_on;
  }

  // What is known of the step at hand by now.
  void keep_recorded() {
    if (recorded_ != nullptr && !recorded_->empty() &&
        recorded_->back().step == recorder_.step().step)
      recorded_->back() = recorder_.step();
  }

  // After the last step of a run in which nothing else failed.
  void end(const DecisionSource& decisions) {
    invariants_.end(decisions);
    if (auditor_ != nullptr && settle()) {
      auditor_->end(recorder_.end());
      take_findings();
    }
  }

 private:
  static bool is_observed(std::int32_t dp_rank, const JudgeOptions& options) {
    return dp_rank < 0 || dp_rank == options.observed_dp_rank;
  }

  void take(const RecordedStep& step) {
    tally_.step(step);
    if (auditor_ == nullptr) return;
    auditor_->step(step);
    take_findings();
  }

  void take_findings() {
    std::vector<AuditFinding> findings = auditor_->take_findings();
    if (options_.findings != nullptr && !findings.empty() && !outcome_.failed())
      *options_.findings = findings;
    for (AuditFinding& finding : findings)
      fail_with(fmt::format("audit.{}", name_of(finding.rule)), finding.step,
                std::move(finding.request), std::move(finding.what));
  }

  // False: something has failed.
  bool settle() {
    if (const auto& violation = invariants_.violation())
      fail_with(fmt::format("invariant.{}", violation->name), violation->step, violation->request,
                violation->what);
    return !outcome_.failed();
  }

  void fail_with(std::string check, std::int64_t step, std::string request, std::string what) {
    if (outcome_.failed()) return;
    outcome_.kind = OutcomeKind::violation;
    outcome_.check = std::move(check);
    outcome_.step = step;
    outcome_.dp_rank = dp_rank_;
    outcome_.request = std::move(request);
    outcome_.what = std::move(what);
  }

  const JudgeOptions& options_;
  const std::int32_t dp_rank_;
  StepObserver* const observer_;
  std::vector<RecordedStep>* const recorded_;
  Outcome& outcome_;
  Invariants invariants_;
  TallyCounter tally_;
  RunRecorder recorder_;
  std::unique_ptr<Auditor> auditor_;
};

// One for each rank; none: decisions alone.
using Ranks = std::vector<std::unique_ptr<WatchedBackend>>;

std::vector<Backend*> pointers(const Ranks& ranks) {
  std::vector<Backend*> backends;
  for (const auto& rank : ranks) backends.push_back(rank.get());
  return backends;
}

Result<Ranks> make_ranks(const SavedCase& saved, const LockstepConfig& config,
                         const JudgeOptions& options) {
  Ranks ranks;
  const auto why_not = ProgramBuilder::why_not_supported(config.engine, config.device.plan);
  if (options.backend && saved.backend != "none" && !why_not) {
    for (std::int32_t rank = 0; rank < num_ranks(config.device); ++rank) {
      auto backend = options.backend(device_of_rank(config.device, rank));
      if (!backend) return tl::unexpected(backend.error());
      ranks.push_back(std::make_unique<WatchedBackend>(std::move(*backend)));
    }
    return ranks;
  }
  if (config.device.mutant.empty()) return ranks;
  return fail(fmt::format("mutant {} is planted in a backend, and the case runs without one: {}",
                          config.device.mutant, why_not.value_or("none was given")));
}

void count_ranks(const BackendConfig& device, Tally& tally) {
  tally.count(Reached::with_backend);
  if (device.parallel.tp_size > 1) tally.count(Reached::tensor_parallel);
  if (device.parallel.pp_size > 1) tally.count(Reached::pipeline_parallel);
  if (device.max_cudagraph_capture_size > 0) tally.count(Reached::captured_graphs);
  if (device.numbers == Numbers::real) {
    tally.count(Reached::real_numbers);
    if (std::ranges::any_of(device.plan.groups, [](const KVCacheGroupSpec& group) {
          return is_state_kind(group.spec.kind);
        }))
      tally.count(Reached::real_states);
  }
  for (const KVCacheGroupSpec& group : device.plan.groups)
    if (!is_state_kind(group.spec.kind) && device.parallel.tp_size > group.spec.num_kv_heads)
      return tally.count(Reached::replicated_heads);
}

void take_verdict(const RunSummary& summary, Outcome& outcome) {
  outcome.steps = summary.steps;
  outcome.bytes_checked = summary.bytes_checked;
  outcome.state_hash = summary.state_hash;
  outcome.tally.count(Reached::page_checked, summary.pages_checked);
  outcome.tally.count(Reached::refused_request, summary.refused_requests);
  outcome.tally.count(Reached::refused_allocation, summary.refused_allocations);
  outcome.tally.count(Reached::host_load, summary.blocks_loaded);
  outcome.tally.count(Reached::host_store, summary.blocks_stored);
  outcome.tally.count(Reached::host_eviction, summary.host_evictions);
  if (outcome.failed()) return;
  if (summary.divergence) {
    outcome.kind = OutcomeKind::divergence;
    outcome.check = name_of(summary.divergence->phase);
    outcome.step = summary.divergence->step;
    outcome.dp_rank = summary.divergence->dp_rank;
    outcome.request = summary.divergence->request;
    outcome.what = summary.divergence->message;
  } else if (summary.verdict == Verdict::liveness) {
    outcome.kind = OutcomeKind::stuck;
    outcome.check = summary.wait_cycle.empty()        ? "liveness"
                    : summary.cycle_head_holds_blocks ? "liveness.partial_load"
                                                      : "liveness.head_of_line";
    outcome.step = summary.steps;
    outcome.dp_rank = summary.stuck_dp_rank;
    LS_CHECK(!summary.stuck.empty(), "stuck in step {}, and nobody waits", summary.steps);
    outcome.request = summary.stuck.front().name;
    outcome.what = summary.wait_cycle.empty()
                       ? fmt::format("request {} {}", outcome.request, summary.stuck.front().why)
                       : summary.wait_cycle;
  }
}

// Those that do not show in the steps as they are recorded.
void count_faults(const FaultyWorkload& workload, Tally& tally) {
  tally.count(Reached::early_output, workload.num_effects(FaultKind::early_output));
  tally.count(Reached::late_output, workload.num_effects(FaultKind::late_output));
  tally.count(Reached::abort_again, workload.num_effects(FaultKind::abort_again));
}

}  // namespace

std::string_view name_of(OutcomeKind kind) {
  switch (kind) {
    case OutcomeKind::agreed:
      return "agreed";
    case OutcomeKind::divergence:
      return "divergence";
    case OutcomeKind::violation:
      return "violation";
    case OutcomeKind::stuck:
      return "stuck";
    case OutcomeKind::refused:
      return "refused";
  }
  LS_CHECK(false, "outcome kind {}", static_cast<int>(kind));
}

namespace {

// An engine of a case: the faults that it meets, who decides, its ranks, and who looks on.
struct JudgedEngine {
  std::unique_ptr<FaultyWorkload> workload;
  std::unique_ptr<Bench> bench;
  std::unique_ptr<DecisionSource> decisions;
  Ranks ranks;
};

Result<JudgedEngine> make_engine(const SavedCase& saved, const LockstepConfig& config,
                                 const JudgeOptions& options, std::unique_ptr<Workload> workload,
                                 std::int32_t dp_rank, Outcome& outcome) {
  JudgedEngine engine;
  auto faulty = make_faulty_workload(std::move(workload), saved.faults);
  if (!faulty) return tl::unexpected(faulty.error());
  engine.workload = std::move(*faulty);
  engine.bench = std::make_unique<Bench>(saved, dp_rank, *engine.workload, options, outcome);
  const KVTransfer transfer{engine.bench->workload().connector(),
                            config.connector.load_failure_policy};
  auto decisions =
      make_reference_decisions(saved.engine, saved.cache.groups, saved.cache.num_blocks, transfer,
                               config.scheduler_defect, free_order_of(saved));
  if (!decisions) return tl::unexpected(decisions.error());
  engine.decisions = std::move(*decisions);
  engine.bench->begin(saved, config, *engine.decisions);
  engine.workload->watch(*engine.decisions);
  auto ranks = make_ranks(saved, config, options);
  if (!ranks) return tl::unexpected(ranks.error());
  engine.ranks = std::move(*ranks);
  return engine;
}

// A run that came to no end: its device failed, or the case was not to be run.
Outcome broken_off(const std::vector<const Ranks*>& engines, const Error& error, Outcome outcome) {
  for (const Ranks* ranks : engines)
    for (const auto& rank : *ranks) {
      if (!rank->has_failed()) continue;
      outcome.kind = OutcomeKind::violation;
      outcome.check = "device";
      outcome.step = rank->last_step();
      outcome.what = error.message;
      return outcome;
    }
  return refusal(error);
}

Outcome judge_one_engine(const SavedCase& saved, const LockstepConfig& config,
                         const JudgeOptions& options) {
  Outcome outcome;
  count_case(saved, outcome.tally);
  const auto engine = make_engine(saved, config, options, workload_of(saved), -1, outcome);
  if (!engine) return refusal(engine.error());
  const std::vector<Backend*> backends = pointers(engine->ranks);
  if (!backends.empty()) count_ranks(config.device, outcome.tally);
  const auto report = run_lockstep(config, *engine->decisions, engine->bench->workload(),
                                   std::span<Backend* const>(backends), engine->bench.get());
  if (!report) return broken_off({&engine->ranks}, report.error(), std::move(outcome));
  take_verdict(report->summary, outcome);
  if (outcome.kind == OutcomeKind::divergence) engine->bench->keep_recorded();
  count_faults(*engine->workload, outcome.tally);
  if (options.summary != nullptr) *options.summary = report->summary;
  if (outcome.kind == OutcomeKind::agreed) engine->bench->end(*engine->decisions);
  return outcome;
}

// Several engines side by side, each with faults, a bench and ranks of its own; their meetings too
// are looked at.
Outcome judge_data_parallel(const SavedCase& saved, const LockstepConfig& config,
                            const JudgeOptions& options) {
  if (saved.recording) return refusal({"data_parallel_size: a recording is one engine's"});
  Outcome outcome;
  count_case(saved, outcome.tally);
  const std::unique_ptr<Workload> workload = workload_of(saved);
  std::vector<JudgedEngine> engines;
  std::vector<EngineParts> parts;
  for (std::int32_t rank = 0; rank < config.data_parallel.dp_size; ++rank) {
    auto dealt = std::make_unique<DealtWorkload>(*workload);
    EngineParts& part = parts.emplace_back();
    part.dealt = dealt.get();
    auto connected = connect(std::move(dealt), config.connector, config.engine, config.device.plan,
                             config.device.context.num_ranks, connector_seed(saved.seed, rank));
    auto engine = make_engine(saved, config, options, std::move(connected), rank, outcome);
    if (!engine) return refusal(engine.error());
    part.decisions = engine->decisions.get();
    part.ranks = pointers(engine->ranks);
    part.workload = &engine->bench->workload();
    part.observer = engine->bench.get();
    engines.push_back(std::move(*engine));
  }
  if (!engines.front().ranks.empty()) count_ranks(config.device, outcome.tally);
  const auto report = run_data_parallel(config, parts, *workload);
  if (!report) {
    std::vector<const Ranks*> all;
    for (const JudgedEngine& engine : engines) all.push_back(&engine.ranks);
    return broken_off(all, report.error(), std::move(outcome));
  }
  outcome.tally.count(Reached::data_parallel);
  if (!config.connector.parts.empty()) outcome.tally.count(Reached::dp_connector);
  if (config.device.max_cudagraph_capture_size > 0) outcome.tally.count(Reached::dp_graphs);
  outcome.tally.count(Reached::idle_dp_rank, report->summary.idle_rank_steps);
  take_verdict(report->summary, outcome);
  if (outcome.kind == OutcomeKind::divergence && outcome.dp_rank >= 0)
    engines[static_cast<std::size_t>(outcome.dp_rank)].bench->keep_recorded();
  for (const JudgedEngine& engine : engines) count_faults(*engine.workload, outcome.tally);
  if (options.summary != nullptr) *options.summary = report->summary;
  for (const JudgedEngine& engine : engines)
    if (outcome.kind == OutcomeKind::agreed) engine.bench->end(*engine.decisions);
  if (outcome.failed() && outcome.dp_rank >= 0)
    outcome.what = fmt::format("data parallel rank {}: {}", outcome.dp_rank, outcome.what);
  return outcome;
}

}  // namespace

Outcome judge(const SavedCase& saved, const JudgeOptions& options) {
  if (saved.mutants.size() > 1)
    return refusal(
        {fmt::format("mutants: {} of them; a case has one at most", saved.mutants.size())});
  const LockstepConfig config = config_of(saved);
  if (auto sound = check_ranks(config); !sound) return refusal(sound.error());
  if (auto sound = check_connector(config.connector, config.device.plan); !sound)
    return refusal(sound.error());
  return config.data_parallel.dp_size > 1 ? judge_data_parallel(saved, config, options)
                                          : judge_one_engine(saved, config, options);
}

Outcome judge(const SavedCase& saved, const BackendFactory& backend) {
  JudgeOptions options;
  options.backend = backend;
  return judge(saved, options);
}

}  // namespace lockstep
