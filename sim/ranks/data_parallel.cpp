#include "sim/ranks/data_parallel.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "base/check.h"
#include "base/stopwatch.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

// "all_reduce of [4, 2] (what each rank is about to run)".
std::string text_of(const Collective& call) {
  return fmt::format("{} of [{}] ({})", name_of(call.kind), fmt::join(call.shape, ", "), call.what);
}

// Returns why a call fails by itself, whatever the other ranks call: a reduce_scatter whose tokens
// the ranks cannot share equally (6 tokens over 4 ranks), or an all_gather whose sizes contradict
// the rank's own tokens.
std::optional<std::string> why_impossible(const Collective& call, std::size_t rank) {
  if (call.kind == CollectiveKind::reduce_scatter && call.shape.front() % call.cut_over != 0)
    return fmt::format("{} cannot be divided among {} ranks: {} % {} is {}", text_of(call),
                       call.cut_over, call.shape.front(), call.cut_over,
                       call.shape.front() % call.cut_over);
  if (call.kind == CollectiveKind::all_gather &&
      (rank >= call.shape.size() || call.shape[rank] != call.own))
    return fmt::format("{}: the rank brings {}", text_of(call), call.own);
  return std::nullopt;
}

// Returns true if two ranks' calls match. Calls inside tensor parallel groups never involve the
// other data parallel rank: only their order matters, so their shapes may differ.
bool meets(const Collective& one, const Collective& other) {
  if (one.is_own && other.is_own) return one.kind == other.kind;
  return one.kind == other.kind && one.is_own == other.is_own && one.shape == other.shape;
}

}  // namespace

// Goes through the calls in order, since a mismatch invalidates all calls after it. Within one call
// the lowest rank is the reference.
std::optional<UnmetCollective> first_unmet(std::span<const std::vector<Collective>> calls) {
  std::size_t longest = 0;
  for (const auto& of_rank : calls) longest = std::max(longest, of_rank.size());
  for (std::size_t i = 0; i < longest; ++i) {
    // The first rank that makes an i-th call waits in it for the others.
    const auto waiting = std::ranges::find_if(
        calls, [&](const std::vector<Collective>& of_rank) { return i < of_rank.size(); });
    const auto waits = static_cast<std::int32_t>(waiting - calls.begin());
    const Collective& call = (*waiting)[i];
    for (std::size_t rank = 0; rank < calls.size(); ++rank) {
      const auto number = static_cast<std::int32_t>(rank);
      if (i >= calls[rank].size())
        return UnmetCollective{
            .hangs = true,
            .rank = number,
            .other = waits,
            .call = static_cast<std::int64_t>(i),
            .what = fmt::format("rank {} waits in call {}, {}, and rank {} makes none", waits, i,
                                text_of(call), number)};
      const Collective& own = calls[rank][i];
      if (!meets(own, call))
        return UnmetCollective{.rank = number,
                               .other = waits,
                               .call = static_cast<std::int64_t>(i),
                               .what = fmt::format("call {} of rank {} is {}, and rank {} makes {}",
                                                   i, waits, text_of(call), number, text_of(own))};
      if (auto why = why_impossible(own, rank))
        return UnmetCollective{.rank = number,
                               .other = number,
                               .call = static_cast<std::int64_t>(i),
                               .what = fmt::format("call {} of rank {}, {}", i, number, *why)};
    }
  }
  return std::nullopt;
}

bool is_vote_step(DpVotes votes, std::int64_t step_of_wave) {
  if (votes == DpVotes::every_32_steps) return step_of_wave % 32 == 0;
  return step_of_wave == 1 || step_of_wave % 16 == 0;
}

namespace {

// In floating point, in the engine's order: rounding decides between nearly equal loads.
double number_of(const RankLoad& rank, DpLoad rule) {
  if (rule == DpLoad::four_per_waiting) return static_cast<double>(4 * rank.waiting + rank.running);
  const std::int64_t requests = std::max(rank.in_flight, rank.waiting + rank.running);
  return static_cast<double>(requests) +
         static_cast<double>(rank.waiting) * 6.0 * std::max(0.0, rank.cache_usage - 0.5);
}

}  // namespace

std::size_t LoadBalancer::next(std::span<const RankLoad> loads) {
  std::size_t least = first_;
  for (std::size_t i = 1; i < loads.size(); ++i) {
    const std::size_t rank = (first_ + i) % loads.size();
    if (number_of(loads[rank], profile_.dp_load) < number_of(loads[least], profile_.dp_load))
      least = rank;
  }
  if (profile_.rotates_dp_ties) first_ = (first_ + 1) % loads.size();
  return least;
}

DataParallelRank::DataParallelRank(const DataParallelOptions& options, std::int32_t rank,
                                   const RankSizes& sizes)
    : options_(options), rank_(rank), sizes_(sizes) {}

// Returns 0 if tp does not divide the size: sequence parallelism could not split the graph's
// tokens.
std::int64_t DataParallelRank::graph_size(std::int64_t tokens) const {
  if (sizes_.max_capture_size == 0) return 0;
  const std::int64_t size =
      captured_batch(tokens, sizes_.max_capture_size, sizes_.max_tokens_per_step);
  return size % sizes_.tp_size == 0 ? size : 0;
}

std::int64_t DataParallelRank::own_tokens(std::int64_t scheduled) const {
  // An idle rank runs one token (a dummy batch), padded as any other batch.
  const bool idle = scheduled == 0;
  if (idle && options_.defect == DataParallelDefect::sp_padding) return 1;
  const std::int64_t tokens = idle ? 1 : scheduled;
  const std::int64_t padded = (tokens + sizes_.tp_size - 1) / sizes_.tp_size * sizes_.tp_size;
  const std::int64_t size = graph_size(padded);
  return size > 0 ? size : padded;
}

AgreedBatch DataParallelRank::agreed_batch(std::span<const std::int64_t> own_tokens) const {
  LS_CHECK(std::ssize(own_tokens) == options_.dp_size, "{} ranks", own_tokens.size());
  const bool pads = pads_to_largest(own_tokens);
  const std::int64_t own = own_tokens[rank_];
  const std::int64_t tokens = pads ? std::ranges::max(own_tokens) : own;
  // A rank without a graph for its tokens is eager also if it captures graphs for other sizes.
  return {.num_tokens = static_cast<std::int32_t>(tokens),
          .is_eager = sizes_.max_capture_size > 0 && !pads && !replays_alone(own_tokens)};
}

// Planted defect: ignores that another rank has no graph.
bool DataParallelRank::replays_alone(std::span<const std::int64_t> own_tokens) const {
  return options_.defect == DataParallelDefect::dp_graph_alone && sizes_.max_capture_size > 0 &&
         !pads_to_largest(own_tokens) && has_graph(own_tokens[rank_]);
}

// max_capture_size 0 without enforce_eager means that graphs run but are not simulated: the engine
// still pads. Otherwise all ranks need a graph, as vLLM takes the minimum of their cudagraph modes
// (v1/worker/dp_utils.py, _post_process_cudagraph_mode()).
bool DataParallelRank::pads_to_largest(std::span<const std::int64_t> own_tokens) const {
  if (options_.enforce_eager) return false;
  if (sizes_.max_capture_size == 0) return true;
  return std::ranges::all_of(own_tokens, [this](std::int64_t tokens) { return has_graph(tokens); });
}

// One exchange of token counts per step, then per layer a gather of tokens for the experts and a
// scatter of their results inside the tensor parallel group, then the vote. Every layer counts as
// an expert layer: more calls find the same mismatches.
std::vector<Collective> DataParallelRank::calls(std::int64_t scheduled,
                                                std::span<const std::int64_t> own_tokens,
                                                bool votes) const {
  const bool idle = scheduled == 0;
  if (idle && options_.defect == DataParallelDefect::dp_idle_skips) return {};
  const bool other_tensor = idle && options_.defect == DataParallelDefect::dp_sync_shape;
  std::vector<Collective> calls;
  calls.push_back({.kind = CollectiveKind::all_reduce,
                   .what = "what each rank is about to run",
                   .shape = {other_tensor ? 2 : sizes_.sync_rows, options_.dp_size}});
  const std::int64_t tokens = agreed_batch(own_tokens).num_tokens;
  std::vector<std::int64_t> of_all(own_tokens.begin(), own_tokens.end());
  // The calls of a graph have the sizes of its capture, when all ranks ran its size.
  if (pads_to_largest(own_tokens) || replays_alone(own_tokens)) std::ranges::fill(of_all, tokens);
  for (std::int64_t layer = 0; layer < sizes_.num_layers; ++layer) {
    calls.push_back({.kind = CollectiveKind::all_gather,
                     .what = "tokens to the experts",
                     .shape = of_all,
                     .own = tokens});
    calls.push_back({.kind = CollectiveKind::reduce_scatter,
                     .what = "rows of a layer, sequence parallel",
                     .shape = {tokens},
                     .cut_over = sizes_.tp_size,
                     .is_own = true});
  }
  if (votes)
    calls.push_back(
        {.kind = CollectiveKind::all_reduce, .what = "ranks with requests left", .shape = {1}});
  return calls;
}

namespace {

// One rank's engine as the loop below drives it.
struct Engine {
  const DecisionSource* decisions = nullptr;
  DealtWorkload* dealt = nullptr;
  const Workload* workload = nullptr;  // as its loop uses it, wrappers included
  std::unique_ptr<LockstepRun> run;
};

// Waiting requests include those that wait for a connector (vLLM, scheduler.py,
// get_request_counts()), and those that the rank has not received yet. The null block is never in
// use.
RankLoad load_of(const Engine& engine, std::int64_t num_blocks) {
  const std::int64_t waiting = std::ssize(engine.decisions->waiting()) +
                               std::ssize(engine.decisions->skipped()) +
                               engine.dealt->num_dealt_requests();
  const auto usable = static_cast<double>(num_blocks - 1);
  const auto free = static_cast<double>(engine.decisions->num_free_blocks());
  return {.waiting = waiting,
          .running = std::ssize(engine.decisions->running()),
          .in_flight = engine.dealt->num_in_flight(),
          .cache_usage = usable > 0 ? 1.0 - free / usable : 0.0};
}

// Runs all ranks in lockstep: turns, decisions, matching of the collectives, execution, each phase
// on all ranks before the next. A rank cannot execute before the matching, since it needs the
// others' token counts.
class DataParallelRun {
 public:
  DataParallelRun(const RunConfig& config, const DataParallelOptions& options, Workload& workload)
      : config_(config),
        options_(options),
        workload_(workload),
        profile_(engine_profile(config.engine.engine)),
        balancer_(profile_) {}

  // Starts every engine, with equal sizes on all ranks: they are replicas with one configuration.
  Result<void> begin(std::span<const EngineParts> engines) {
    LS_CHECK(std::ssize(engines) == options_.dp_size, "{} engines for {} ranks", engines.size(),
             options_.dp_size);
    std::int64_t num_layers = 0;
    for (const KVCacheGroupSpec& group : config_.backend.plan.groups)
      num_layers += std::ssize(group.layer_names);
    for (const EngineParts& parts : engines) {
      LS_ASSIGN_OR_RETURN(auto run, LockstepRun::start(config_, parts.run));
      engines_.push_back({&parts.run.decisions, &parts.dealt, &parts.run.workload, std::move(run)});
      ranks_.emplace_back(options_, static_cast<std::int32_t>(ranks_.size()),
                          RankSizes{.tp_size = config_.backend.parallel.tp_size,
                                    .sync_rows = profile_.dp_sync_rows,
                                    .num_layers = num_layers,
                                    .max_capture_size = config_.backend.max_cudagraph_capture_size,
                                    .max_tokens_per_step = config_.backend.max_tokens_per_step});
    }
    return {};
  }

  // Runs steps until the workload ends, a rank fails, or steps_max is reached.
  Result<RunReport> run() {
    while (config_.steps_max == 0 || steps_ < config_.steps_max) {
      const bool idle =
          !is_hindered(steps_) && !is_hindered(steps_ - 1) && !is_any_busy() &&
          std::ranges::all_of(engines_, [](const Engine& engine) { return engine.run->is_idle(); });
      std::vector<WorkloadEvent> events;
      // A wave continues after its last request until the next vote. These steps are idle for the
      // engines, but not for the run: the ranks do not know yet that no request is left.
      const bool unfinished = has_unfinished();
      LS_ASSIGN_OR_RETURN(
          const auto turn,
          workload_.next_turn(
              {.step = steps_, .idle = idle && (!in_wave_ || unfinished), .unfinished = unfinished},
              events));
      if (turn == Turn::end || turn == Turn::cut) break;
      if (turn == Turn::stuck) {
        say_stuck(*std::ranges::find_if(engines_, [](const Engine& engine) {
          return engine.decisions->has_unfinished_requests();
        }));
        break;
      }
      deal(std::move(events));
      LS_ASSIGN_OR_RETURN(const auto go_on, step());
      if (!go_on) break;
    }
    return finish();
  }

 private:
  // Runs one step of all ranks. Returns false if the run ends.
  Result<bool> step() {
    if (const auto go_on = take_turns(); !go_on || !*go_on) return go_on;
    const auto decided = decide();
    ++steps_;
    if (!decided || !*decided) return decided;
    if (in_wave_)
      if (auto met = meet(); !met || !*met) return met;
    return execute();
  }

  // Passes each rank its events. Returns false if a rank is stuck.
  Result<bool> take_turns() {
    for (Engine& engine : engines_) {
      LS_ASSIGN_OR_RETURN(
          const Turn turn,
          engine.run->take_turn({.step = steps_,
                                 .idle = engine.run->is_idle(),
                                 .unfinished = engine.decisions->has_unfinished_requests()}));
      LS_CHECK(turn == Turn::step, "a rank ends by itself");
      // A rank without requests makes no progress while the others run: that is not a deadlock.
      const bool is_concerned = engine.decisions->has_unfinished_requests() || !has_unfinished();
      if (engine.run->is_stuck() && is_concerned) return say_stuck(engine);
    }
    return true;
  }

  // Decides the step on every rank. Returns false if a rank's run has ended, with a divergence for
  // example.
  Result<bool> decide() {
    scheduled_.clear();
    for (Engine& engine : engines_) {
      const auto go_on = engine.run->decide();
      if (!go_on || !*go_on) return go_on;
      scheduled_.push_back(engine.run->num_scheduled_tokens());
    }
    return true;
  }

  bool has_unfinished() const {
    return std::ranges::any_of(
        engines_, [](const Engine& engine) { return engine.decisions->has_unfinished_requests(); });
  }
  // A fault hinders some rank in that step, so an idle step proves nothing.
  bool is_hindered(std::int64_t step) const {
    return std::ranges::any_of(
        engines_, [step](const Engine& engine) { return engine.workload->is_hindered(step); });
  }
  bool is_any_busy() const {
    return std::ranges::any_of(engines_,
                               [](const Engine& engine) { return engine.workload->is_busy(); });
  }
  // Distributes the events of a turn. A new request goes to the rank with the lowest load at that
  // moment, so two arrivals in one turn go to different ranks of equal load. A new request starts a
  // wave. Other events go to every rank, an abort only to ranks that have the request.
  void deal(std::vector<WorkloadEvent> events) {
    for (WorkloadEvent& event : events) {
      if (event.kind == WorkloadEvent::Kind::add) {
        std::vector<RankLoad> loads;
        for (const Engine& engine : engines_)
          loads.push_back(load_of(engine, config_.backend.plan.num_blocks));
        engines_[balancer_.next(loads)].dealt->deal(std::move(event));
        in_wave_ = true;
        continue;
      }
      for (Engine& engine : engines_)
        if (event.kind != WorkloadEvent::Kind::abort || engine.dealt->knows(event.name))
          engine.dealt->deal(event);
    }
  }

  // Marks the engine's run as stuck. Returns false: the run ends.
  bool say_stuck(Engine& engine) {
    engine.run->set_stuck();
    return false;
  }
  // Matches the calls that the ranks make in the step. Returns false if they do not match.
  Result<bool> meet() {
    own_tokens_.clear();
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      own_tokens_.push_back(ranks_[r].own_tokens(scheduled_[r]));
    const bool votes = is_vote_step(profile_.dp_votes, ++steps_of_wave_);
    std::vector<std::vector<Collective>> calls;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      calls.push_back(ranks_[r].calls(scheduled_[r], own_tokens_, votes));
      collectives_ += std::ssize(calls.back());
      if (scheduled_[r] == 0) ++idle_rank_steps_;
    }
    if (const auto unmet = first_unmet(calls)) return say_unmet(*unmet);
    return true;
  }

  // Executes the step on all ranks, then advances the shared clock by the largest batch of any
  // rank. The wave ends in a step with a vote if no request is left.
  Result<bool> execute() {
    std::int64_t most = 0;
    for (std::size_t r = 0; r < engines_.size(); ++r) {
      const AgreedBatch agreed = in_wave_ ? ranks_[r].agreed_batch(own_tokens_) : AgreedBatch();
      most = std::max({most, std::int64_t{agreed.num_tokens}, scheduled_[r]});
      if (agreed.is_eager) ++eager_rank_steps_;
      const auto go_on = engines_[r].run->execute(agreed);
      if (!go_on || !*go_on) return go_on;
    }
    workload_.step_done(most);
    for (Engine& engine : engines_) engine.dealt->pass_on();
    if (in_wave_ && is_vote_step(profile_.dp_votes, steps_of_wave_) && !has_unfinished()) {
      in_wave_ = false;
      steps_of_wave_ = 0;
    }
    return true;
  }

  // Records the mismatch as the run's verdict. A rank that waits forever is a liveness failure of
  // the waiting rank; a wrong shape is a divergence of the rank that differs. Returns false: the
  // run ends.
  bool say_unmet(const UnmetCollective& unmet) {
    RunVerdict& found = unmet_.emplace();
    const std::string what = fmt::format("step {}: {}", steps_ - 1, unmet.what);
    if (unmet.hangs) {
      found.verdict = Verdict::liveness;
      found.stuck.push_back({fmt::format("data parallel rank {}", unmet.other), what});
      found.stuck_total = 1;
      found.stuck_dp_rank = unmet.other;
      return false;
    }
    found.verdict = Verdict::divergence;
    Divergence& divergence = found.divergence.emplace();
    divergence.phase = Phase::collective;
    divergence.step = steps_ - 1;
    divergence.dp_rank = unmet.rank;
    divergence.doing = "in a collective of the data parallel ranks";
    divergence.message = what;
    return false;
  }

  // Combines the engines' reports. Counts are added; the state hash depends on the order of ranks,
  // so an exchange of two ranks' results changes it. The first rank that failed supplies the
  // verdict, except that a mismatch of collectives comes first.
  Result<RunReport> finish() {
    RunReport report;
    RunSummary& all = report.summary;
    all.backend = engines_.front().run->summary().backend;
    for (std::size_t r = 0; r < engines_.size(); ++r) {
      LS_ASSIGN_OR_RETURN(auto one, engines_[r].run->finish());
      const RunSummary& summary = report.engines.emplace_back(std::move(one.summary));
      add_counts(summary, all);
      all.state_hash.low = all.state_hash.low * 31 + summary.state_hash.low;
      all.state_hash.high = all.state_hash.high * 31 + summary.state_hash.high;
      if (all.verdict != Verdict::agreed || summary.verdict == Verdict::agreed) continue;
      static_cast<RunVerdict&>(all) = summary;
      if (all.divergence) all.divergence->dp_rank = static_cast<std::int32_t>(r);
      if (all.stuck_total > 0) all.stuck_dp_rank = static_cast<std::int32_t>(r);
    }
    if (unmet_) static_cast<RunVerdict&>(all) = std::move(*unmet_);
    all.steps = steps_;
    all.simulated_ns = workload_.now_ns();
    all.idle_rank_steps = idle_rank_steps_;
    all.eager_rank_steps = eager_rank_steps_;
    all.collectives_checked = collectives_;
    all.seconds.wall = wall_.lap();
    report.records_consumed = workload_.records_consumed();
    return report;
  }

  const RunConfig& config_;
  const DataParallelOptions& options_;
  Workload& workload_;
  const EngineProfile& profile_;
  LoadBalancer balancer_;
  std::vector<Engine> engines_;
  std::vector<DataParallelRank> ranks_;
  std::vector<std::int64_t> scheduled_;   // tokens of each rank in the step
  std::vector<std::int64_t> own_tokens_;  // DataParallelRank::own_tokens() of each
  std::int64_t steps_ = 0;                // steps decided so far
  std::int64_t steps_of_wave_ = 0;        // since the wave began
  bool in_wave_ = false;                  // True while the ranks run together
  std::int64_t idle_rank_steps_ = 0;
  std::int64_t eager_rank_steps_ = 0;
  std::int64_t collectives_ = 0;
  std::optional<RunVerdict> unmet_;  // set by the first mismatch
  Stopwatch wall_;
};

}  // namespace

Result<RunReport> run_data_parallel(const RunConfig& config, const DataParallelOptions& options,
                                    std::span<const EngineParts> engines, Workload& workload) {
  DataParallelRun run(config, options, workload);
  LS_RETURN_IF_ERROR(run.begin(engines));
  return run.run();
}

void DealtWorkload::deal(WorkloadEvent event) {
  if (event.kind == WorkloadEvent::Kind::add) {
    // A new request may reuse the name of one that ended in the previous step. pass_on() must not
    // erase it.
    std::erase(left_before_, event.request.name);
    names_.insert(event.request.name);
    ++num_in_flight_;
  }
  dealt_.push_back(std::move(event));
}

std::int64_t DealtWorkload::num_dealt_requests() const {
  return std::ranges::count(dealt_, WorkloadEvent::Kind::add, &WorkloadEvent::kind);
}

Result<Turn> DealtWorkload::next_turn(const LoopState&, std::vector<WorkloadEvent>& events) {
  std::ranges::move(std::exchange(dealt_, {}), std::back_inserter(events));
  return Turn::step;
}

void DealtWorkload::request_left(std::string_view name, std::uint64_t ticket) {
  left_.emplace_back(name, ticket);
}

// The time that this rank's wrappers ask for, such as a late output. pass_on() applies it to the
// shared clock, where the latest rank counts.
void DealtWorkload::advance_to(std::int64_t now_ns) { until_ns_ = std::max(until_ns_, now_ns); }

// A name stays known for one more step after its end was reported: the client may send an abort in
// the meantime.
void DealtWorkload::pass_on() {
  all_.advance_to(until_ns_);
  for (const std::string& name : std::exchange(left_before_, {})) names_.erase(name);
  num_in_flight_ -= std::ssize(left_);
  for (auto& [name, ticket] : std::exchange(left_, {})) {
    all_.request_left(name, ticket);
    left_before_.push_back(std::move(name));
  }
}

}  // namespace lockstep
