#include "properties/judge/judge.h"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "base/check.h"
#include "base/number_text.h"
#include "properties/audit/auditor.h"
#include "properties/invariants/host_pages.h"
#include "properties/invariants/invariants.h"
#include "properties/judge/forwarding_backend.h"
#include "sim/conform/conform.h"
#include "sim/recording/run_recorder.h"
#include "sim/step/program_builder.h"

namespace lockstep {
namespace {

// Makes an outcome of an error that no engine caused: a setup that nothing supports.
Outcome refusal(const Error& error) {
  Outcome outcome;
  outcome.kind = OutcomeKind::refused;
  outcome.what = error.message;
  return outcome;
}

// The observers of one engine's run: recorder, coverage, audit, invariants, comparison with the
// model, and the caller's own observer. A hook that returns false ends the run.
//
// Invariants
// (1) The first failure stays in outcome_; later ones are ignored.
// (2) The caller's observer sees every step, the failing one included, and the recording ends with
//     it.
// (3) With several engines, all benches share outcome_, and dp_rank_ tells their failures apart.
class Bench final : public StepObserver {
 public:
  Bench(const SavedCase& saved, std::int32_t dp_rank, Workload& workload,
        const JudgeOptions& options, Outcome& outcome)
      : options_(options),
        dp_rank_(dp_rank),
        observer_(is_observed(dp_rank, options) ? options.observer : nullptr),
        recording_(is_observed(dp_rank, options) ? options.recording : nullptr),
        followed_(follows_recording(saved, options.decisions) ? &*saved.recording : nullptr),
        outcome_(outcome),
        invariants_(saved.engine, saved.cache),
        pages_(saved.cache.groups),
        num_host_blocks_(saved.engine.host_pool_num_blocks),
        tally_(saved, outcome.tally),
        recorder_(workload, [this](const RecordedStep& step) { take(step); }) {}

  // Opens the checks that need the deciding engine, which exists only after the session is open.
  // Errors: conform is requested and the model does not support the configuration.
  Result<void> begin(const SavedCase& saved, const LockstepConfig& config,
                     const DecisionSource& decisions) {
    model_ = options_.invariants ? decisions.model() : nullptr;
    const RecordingHeader header =
        recorder_.header(saved.engine, saved.cache.groups, saved.cache.num_blocks, decisions,
                         config.connector.load_failure_policy);
    if (recording_ != nullptr) recording_->header = header;
    RecordingHeader audited = followed_ != nullptr ? followed_->header : header;
    if (why_not_audited(audited).empty()) {
      // An engine without a release profile must not be audited by the rules of a release.
      if (const auto name = decisions.name_without_profile(); followed_ == nullptr && !name.empty())
        audited.engine = {.name = std::string(name), .version = "1"};
      auditor_ = std::make_unique<Auditor>(
          audited, followed_ != nullptr ? AuditScope::whole_recording : options_.scope,
          options_.rules);
    }
    // The model is not compared with itself.
    if (!options_.conforms || decisions.model() != nullptr) return {};
    LS_ASSIGN_OR_RETURN(live_, LiveConform::open(header));
    take_mismatch();
    return {};
  }

  // The recorder wraps the workload, so that it sees events and samples on their way to the loop.
  Workload& workload() { return recorder_; }

  // Records the decision, then checks it. Recording comes first: the failing step must be in the
  // recording.
  bool decided(const StepView& view) override {
    recorder_.decided(view);
    if (recording_ != nullptr) recording_->steps.push_back(recorder_.step());
    if (live_ != nullptr && !live_->decided(recorder_.step())) take_mismatch();
    const auto& answers = recorder_.step().connector;
    if (model_ != nullptr) {
      invariants_.decided(view, answers ? *answers : std::span<const RecordedConnectorAnswer>());
      pages_.decided(view, recorder_.step());
    }
    // A followed recording is audited by its own step, which has fields that the run does not
    // repeat. The audit then precedes the execution of the step.
    if (followed_ != nullptr && auditor_ != nullptr) {
      auditor_->step(followed_->steps[static_cast<std::size_t>(view.decision.step)]);
      take_findings();
    }
    const bool go_on = observer_ == nullptr || observer_->decided(view);
    return settle() && go_on;
  }

  // Invariants after a failure would report its consequences. The hash is kept in any case, so that
  // two runs can be compared up to the failing step.
  bool finished(const StepView& view) override {
    if (options_.hashes != nullptr) options_.hashes->push_back(view.state_hash);
    recorder_.finished(view);
    if (!outcome_.failed() && model_ != nullptr) {
      pages_.finished(view, recorder_.step());
      invariants_.finished(view);
    }
    keep_recorded();
    const bool go_on = observer_ == nullptr || observer_->finished(view);
    return settle() && go_on;
  }

  // Replaces the last recorded step by what is known of it now: output and reports arrive after the
  // decision.
  void keep_recorded() {
    if (recording_ == nullptr || recording_->steps.empty()) return;
    RecordedStep& last = recording_->steps.back();
    if (last.step == recorder_.step().step) last = recorder_.step();
    // A run that follows no recording has all tokens that end a request.
    for (auto* events : {&last.before, &last.during})
      for (RecordedEvent& event : *events)
        event.has_no_stop_tokens |= followed_ == nullptr &&
                                    event.kind == RecordedEvent::Kind::add &&
                                    event.request.stop_token_ids.empty();
    recording_->end = recorder_.end();
    recording_->end.steps = std::ssize(recording_->steps);
  }

  // Returns why the model cannot follow the engine any further; null: it can. That is not a finding
  // about the engine.
  const Error* conform_error() const {
    return live_ != nullptr && live_->error() ? &*live_->error() : nullptr;
  }

  // Runs the checks about the end: blocks that stay allocated, requests that never finish. Only
  // after a run without a failure; after a failure, what is left over proves nothing.
  void end() {
    if (model_ != nullptr) {
      invariants_.end(*model_);
      pages_.end(*model_, num_host_blocks_);
    }
    if (auditor_ != nullptr && settle()) {
      auditor_->end(followed_ != nullptr ? followed_->end : recorder_.end());
      take_findings();
    }
  }

 private:
  // dp_rank < 0: there is one engine, which is always observed.
  static bool is_observed(std::int32_t dp_rank, const JudgeOptions& options) {
    return dp_rank < 0 || dp_rank == options.observed_dp_rank;
  }

  // Receives a completed step from the recorder. Without a followed recording, this is where it is
  // audited.
  void take(const RecordedStep& step) {
    count(step);
    if (live_ != nullptr && !live_->finished(step)) return take_mismatch();
    if (auditor_ == nullptr || followed_ != nullptr) return;
    auditor_->step(step);
    take_findings();
  }

  // Marks need the coverage of this step only, so the counts before the step are copied.
  void count(const RecordedStep& step) {
    if (options_.marks == nullptr) return tally_.step(step);
    const Tally before = outcome_.tally;
    tally_.step(step);
    options_.marks->step(step, before, outcome_.tally);
  }

  void take_mismatch() {
    if (const auto& mismatch = live_->mismatch())
      fail_with(mismatch->check, mismatch->step, {}, mismatch->what);
  }

  // Fails the run with the first finding, and passes all findings of that step to the caller.
  void take_findings() {
    std::vector<AuditFinding> findings = auditor_->take_findings();
    if (options_.findings != nullptr && !findings.empty() && !outcome_.failed())
      *options_.findings = findings;
    for (AuditFinding& finding : findings)
      fail_with(fmt::format("audit.{}", name_of(finding.rule)), finding.step,
                std::move(finding.request), std::move(finding.what));
  }

  // Records a violation of the invariants as the failure. Returns false if the run must end.
  bool settle() {
    for (const auto* violation : {&invariants_.violation(), &pages_.violation()})
      if (const auto& found = *violation)
        fail_with(fmt::format("invariant.{}", found->name), found->step, found->request,
                  found->what);
    return !outcome_.failed() && conform_error() == nullptr;
  }

  // Sets the failure, unless the run has failed before.
  void fail_with(std::string check, std::int64_t step, std::string request, std::string what) {
    if (outcome_.failed()) return;
    outcome_.kind = OutcomeKind::violation;
    outcome_.check = std::move(check);
    outcome_.step = step;
    outcome_.dp_rank = dp_rank_;
    outcome_.request = std::move(request);
    outcome_.what = on_one_line(what);
  }

  const JudgeOptions& options_;
  const std::int32_t dp_rank_;
  StepObserver* const observer_;
  Recording* const recording_;
  const Recording* const followed_;  // its decisions are executed; null: none
  Outcome& outcome_;
  Invariants invariants_;
  RunPages pages_;
  const std::int64_t num_host_blocks_;
  const Scheduler* model_ = nullptr;  // null: no invariants
  TallyCounter tally_;
  RunRecorder recorder_;
  std::unique_ptr<Auditor> auditor_;
  std::unique_ptr<LiveConform> live_;
};

// The backends of all ranks of a session's engines, in order of creation. broken_off() finds the
// failed one.
using Watched = std::vector<const WatchedBackend*>;

// Returns the traits that the case adds to its configuration: a recorded connector, and decisions
// that are not the model's.
RunTraits traits_of(const SavedCase& saved, const JudgeOptions& options) {
  RunTraits traits;
  const bool follows = follows_recording(saved, options.decisions);
  traits.add_if(saved.recording && saved.recording->header.connector, RunTrait::connector);
  traits.add_if(options.decisions || follows, RunTrait::other_engine);
  traits.add_if(bool{options.decisions}, RunTrait::live_engine);
  return traits;
}

// Returns a factory for watched backends. It returns null where the case runs without a backend,
// and an error if a mutant is planted in that missing backend: such a case would agree for the
// wrong reason.
BackendFactory watched_backends(const SavedCase& saved, const LockstepConfig& config,
                                const JudgeOptions& options, Watched& watched) {
  const auto sound = supported_with_memory(facts_of(config).with(traits_of(saved, options)));
  const bool runs = options.backend && saved.backend != "none" && sound;
  return [=, &options, &watched](const BackendConfig& own) -> Result<std::unique_ptr<Backend>> {
    if (!runs && own.mutant.empty()) return std::unique_ptr<Backend>();
    if (!runs)
      return fail("mutant {} is planted in a backend, but the case runs without one: {}",
                  own.mutant, sound ? "none was given" : sound.error().message);
    auto backend = options.backend(own);
    if (!backend) return backend;
    auto watching = std::make_unique<WatchedBackend>(std::move(*backend));
    watched.push_back(watching.get());
    return watching;
  };
}

// Counts what the case reaches by running on a backend at all. Replicated heads are counted once,
// whatever the number of groups.
void count_ranks(const BackendConfig& backend, Tally& tally) {
  tally.count(Reached::with_backend);
  if (backend.parallel.tp_size > 1) tally.count(Reached::tensor_parallel);
  if (backend.parallel.pp_size > 1) tally.count(Reached::pipeline_parallel);
  if (backend.max_cudagraph_capture_size > 0) tally.count(Reached::captured_graphs);
  if (backend.numbers == Numbers::real) {
    tally.count(Reached::real_numbers);
    if (std::ranges::any_of(backend.plan.groups, [](const KVCacheGroupSpec& group) {
          return is_state_kind(group.spec.kind);
        }))
      tally.count(Reached::real_states);
  }
  for (const KVCacheGroupSpec& group : backend.plan.groups)
    if (!is_state_kind(group.spec.kind) && backend.parallel.tp_size > group.spec.num_kv_heads)
      return tally.count(Reached::replicated_heads);
}

// Copies the counts of the run's summary.
void take_counts(const RunSummary& summary, Outcome& outcome) {
  outcome.steps = summary.steps;
  outcome.bytes_checked = summary.bytes_checked;
  outcome.state_hash = summary.state_hash;
  outcome.tally.count(Reached::page_checked, summary.pages_checked);
  outcome.tally.count(Reached::refused_request, summary.refused_requests);
  outcome.tally.count(Reached::refused_allocation, summary.refused_allocations);
  outcome.tally.count(Reached::host_load, summary.blocks_loaded);
  outcome.tally.count(Reached::host_store, summary.blocks_stored);
  outcome.tally.count(Reached::host_eviction, summary.host_evictions);
}

// Copies the verdict of the run's summary.
void take_verdict(const RunSummary& summary, Outcome& outcome) {
  const auto& failed = summary.violation ? summary.violation : summary.mismatch;
  if (failed) {
    outcome.kind = OutcomeKind::violation;
    outcome.check = failed->check;
    outcome.step = failed->step;
    outcome.request = failed->request;
    outcome.what = failed->what;
  } else if (summary.divergence) {
    outcome.kind = OutcomeKind::divergence;
    outcome.check = name_of(summary.divergence->phase);
    outcome.step = summary.divergence->step;
    outcome.dp_rank = summary.divergence->dp_rank;
    outcome.request = summary.divergence->request;
    outcome.what = summary.divergence->message;
  } else if (const auto& failure = summary.engine_failure) {
    const bool is_harness = failure->is_harness();
    outcome.kind = is_harness ? OutcomeKind::harness : OutcomeKind::violation;
    outcome.check = is_harness ? failure->kind : fmt::format("engine.{}", failure->kind);
    // An exception of the harness has no step of the engine.
    if (!is_harness) outcome.step = summary.steps;
    outcome.what = is_harness ? failure->what + "\n" + failure->trace : failure->what;
  } else if (summary.verdict == Verdict::liveness) {
    outcome.kind = OutcomeKind::stuck;
    // The check distinguishes two known deadlocks. In a cycle whose first request has loaded a
    // part, that request holds blocks that others need (docs/findings.md, 8). Otherwise it only
    // blocks the queue (7).
    outcome.check = summary.wait_cycle.empty()        ? "liveness"
                    : summary.cycle_head_holds_blocks ? "liveness.partial_load"
                                                      : "liveness.head_of_line";
    outcome.step = summary.steps;
    outcome.dp_rank = summary.stuck_dp_rank;
    LS_CHECK(!summary.stuck.empty(), "stuck in step {}, and no request waits", summary.steps);
    outcome.request = summary.stuck.front().name;
    outcome.what = summary.wait_cycle.empty()
                       ? fmt::format("request {} {}", outcome.request, summary.stuck.front().why)
                       : summary.wait_cycle;
  }
  if (outcome.kind != OutcomeKind::harness) outcome.what = on_one_line(outcome.what);
}

// Counts faults that a recorded step does not show: an output that was early or late, an abort of a
// request that had just ended.
void count_faults(const FaultyWorkload* workload, Tally& tally) {
  if (workload == nullptr) return;
  tally.count(Reached::early_output, workload->num_effects(FaultKind::early_output));
  tally.count(Reached::late_output, workload->num_effects(FaultKind::late_output));
  tally.count(Reached::abort_again, workload->num_effects(FaultKind::abort_again));
}

// Classifies a run that returned an error. A failed backend is a violation `device`, in the step
// that it executed last. Any other error is a refusal: the case cannot run here.
Outcome broken_off(const Watched& watched, const Error& error, Outcome outcome) {
  for (const WatchedBackend* rank : watched) {
    if (!rank->has_failed()) continue;
    outcome.kind = OutcomeKind::violation;
    outcome.check = "device";
    outcome.step = rank->last_step();
    outcome.what = error.message;
    return outcome;
  }
  return refusal(error);
}

// Counts what several engines reach together. Their collectives are checked by the session.
void count_data_parallel(const LockstepConfig& config, const RunSummary& summary, Tally& tally) {
  tally.count(Reached::data_parallel);
  if (!config.connector.parts.empty()) tally.count(Reached::dp_connector);
  if (config.backend.max_cudagraph_capture_size > 0) tally.count(Reached::dp_graphs);
  tally.count(Reached::idle_dp_rank, summary.idle_rank_steps);
}

// Runs the session with one bench per engine and collects the outcome. Order matters: benches begin
// after the session is open and before it runs, and end only if nothing failed.
Outcome judge_session(const SavedCase& saved, const LockstepConfig& config,
                      const JudgeOptions& options) {
  const bool is_parallel = config.data_parallel.dp_size > 1;
  // A recording holds the decisions of one engine, which cannot be shared among ranks.
  if (is_parallel && saved.recording)
    return refusal({"data_parallel_size: a recording is one engine's"});
  Outcome outcome;
  count_case(saved, outcome.tally);
  // A deque: benches are referenced by the session and must not move.
  std::deque<Bench> benches;
  Watched watched;
  SessionParts parts = parts_of(saved, options.decisions);
  if (options.clients) parts.clients = options.clients();
  parts.backend = watched_backends(saved, config, options, watched);
  parts.attach = [&](std::int32_t dp_rank, Workload* workload) {
    Bench& bench =
        benches.emplace_back(saved, is_parallel ? dp_rank : -1, *workload, options, outcome);
    return Onlooker{.workload = &bench.workload(), .observer = &bench};
  };
  const auto session = Session::open(config, std::move(parts));
  if (!session) return refusal(session.error());
  const auto engines = (*session)->engines();
  const auto not_held = [](const Error& error) { return refusal({"--conform: " + error.message}); };
  for (std::size_t i = 0; i < engines.size(); ++i)
    if (const auto begun = benches[i].begin(saved, config, *engines[i].decisions); !begun)
      return not_held(begun.error());
  if (!watched.empty()) count_ranks(config.backend, outcome.tally);
  const auto report = (*session)->run();
  if (!report) return broken_off(watched, report.error(), std::move(outcome));
  for (const Bench& bench : benches)
    if (const Error* error = bench.conform_error()) return not_held(*error);
  if (is_parallel) count_data_parallel(config, report->summary, outcome.tally);
  take_counts(report->summary, outcome);
  // A violation that a bench found takes precedence, because the run ended there.
  if (!outcome.failed()) take_verdict(report->summary, outcome);
  // After a divergence the loop stops before finished(), so the recorder's last step is saved here.
  if (outcome.kind == OutcomeKind::divergence && (!is_parallel || outcome.dp_rank >= 0))
    benches[is_parallel ? static_cast<std::size_t>(outcome.dp_rank) : 0].keep_recorded();
  for (const SessionEngine& engine : engines) count_faults(engine.faulty, outcome.tally);
  if (options.summary != nullptr) *options.summary = report->summary;
  const bool is_cut = options.steps_max > 0 && outcome.steps >= options.steps_max;
  for (std::size_t i = 0; i < engines.size(); ++i)
    if (outcome.kind == OutcomeKind::agreed && !is_cut) benches[i].end();
  // Failures of one rank name it, since the same request name may exist on all of them.
  if (is_parallel && outcome.failed() && outcome.dp_rank >= 0)
    outcome.what = fmt::format("data parallel rank {}: {}", outcome.dp_rank, outcome.what);
  return outcome;
}

}  // namespace

Outcome judge(const SavedCase& saved, const JudgeOptions& options) {
  if (saved.mutants.size() > 1)
    return refusal({fmt::format("mutants: {}; a case has at most one", saved.mutants.size())});
  LockstepConfig config = config_of(saved);
  config.steps_max = options.steps_max;
  if (auto sound = check_setup(config, traits_of(saved, options)); !sound)
    return refusal(sound.error());
  return judge_session(saved, config, options);
}

Outcome outcome_of(const RunSummary& summary) {
  Outcome outcome;
  take_counts(summary, outcome);
  take_verdict(summary, outcome);
  return outcome;
}

Outcome judge(const SavedCase& saved, const BackendFactory& backend) {
  JudgeOptions options;
  options.backend = backend;
  return judge(saved, options);
}

}  // namespace lockstep
