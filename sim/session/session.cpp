#include "sim/session/session.h"

#include <fmt/core.h>

#include <utility>

#include "base/check.h"
#include "sim/connectors/connect.h"
#include "sim/ranks/data_parallel.h"

namespace lockstep {

Result<void> check_ranks(const LockstepConfig& config) {
  constexpr std::int32_t kEnginesMax = 64;
  const std::int32_t dp_size = config.data_parallel.dp_size;
  if (dp_size < 1 || dp_size > kEnginesMax)
    return fail(fmt::format("data_parallel_size {}: expected 1 to {}", dp_size, kEnginesMax));
  if (config.data_parallel.defect != DataParallelDefect::none && dp_size == 1)
    return fail(fmt::format("mutant: {} is planted in data parallel ranks, and there is one engine",
                            name_of(config.data_parallel.defect)));
  if (config.data_parallel.defect == DataParallelDefect::dp_graph_alone &&
      config.device.max_cudagraph_capture_size == 0)
    return fail("mutant: dp-graph-alone is of captured graphs, and none are captured");
  if (dp_size > 1 && config.data_parallel.enforce_eager &&
      config.device.max_cudagraph_capture_size > 0)
    return fail("enforce_eager with max_cudagraph_capture_size: it says that no graphs run");
  return check_ranks(config.device);
}

Result<std::vector<std::unique_ptr<Backend>>> open_backends(const BackendConfig& config,
                                                            const BackendFactory& factory) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (std::int32_t rank = 0; rank < num_ranks(config); ++rank) {
    auto backend = factory(config_of_rank(config, rank));
    if (!backend) return tl::unexpected(backend.error());
    if (*backend) backends.push_back(std::move(*backend));
  }
  return backends;
}

Result<void> Session::add_engine(std::int32_t dp_rank, SessionParts& parts) {
  SessionEngine& engine = engines_[static_cast<std::size_t>(dp_rank)];
  std::unique_ptr<Workload> given = std::move(parts.clients);
  if (clients_ != nullptr) {
    auto dealt = std::make_unique<DealtWorkload>(*clients_);
    engine.dealt = dealt.get();
    given = std::move(dealt);
  }
  if (given != nullptr && !given->is_scripted())
    given =
        connect(std::move(given), config_.connector, config_.engine, config_.device.plan,
                config_.device.context.num_ranks, connector_seed(parts.connector_seed, dp_rank));
  FaultyWorkload* faulty = nullptr;
  if (!parts.faults.empty()) {
    auto behind = make_faulty_workload(std::move(given), parts.faults);
    if (!behind) return tl::unexpected(behind.error());
    engine.faulty = faulty = behind->get();
    given = std::move(*behind);
  }
  engine.owned = std::move(given);
  engine.workload = engine.owned.get();
  KVConnector* connector = nullptr;
  if (parts.attach) {
    const Onlooker onlooker = parts.attach(dp_rank, engine.workload);
    if (onlooker.workload != nullptr) engine.workload = onlooker.workload;
    if (onlooker.observer != nullptr) engine.observers.add(*onlooker.observer);
    connector = onlooker.connector;
  }
  if (connector == nullptr) connector = engine.workload->connector();
  auto scheduler = Scheduler::create(
      config_.engine, config_.device.plan.groups, config_.device.plan.num_blocks,
      {connector, config_.connector.load_failure_policy}, config_.scheduler_defect);
  if (!scheduler) return tl::unexpected(scheduler.error());
  if (!parts.free_order.empty()) scheduler->order_free_blocks(parts.free_order);
  engine.scheduler = std::make_unique<Scheduler>(std::move(*scheduler));
  if (faulty != nullptr) faulty->watch(*engine.scheduler);
  engine.ranks = parts.borrowed;
  if (parts.backend) {
    auto backends = open_backends(config_.device, parts.backend);
    if (!backends) return tl::unexpected(backends.error());
    engine.backends = std::move(*backends);
    for (const auto& backend : engine.backends) engine.ranks.push_back(backend.get());
  }
  engine.hidden_states =
      std::make_unique<HiddenStateCheck>(config_.device.seed, config_.hidden_state_defect);
  engine.together = std::make_unique<RankUnion>();
  engine.checks = {engine.hidden_states.get(), engine.together.get()};
  if (config_.draw) engine.drawer = std::make_unique<TimelineRecorder>(config_);
  return {};
}

Result<std::unique_ptr<Session>> Session::open(const LockstepConfig& config, SessionParts parts) {
  std::unique_ptr<Session> session(new Session(config));
  const std::int32_t num_engines = config.data_parallel.dp_size;
  if (num_engines > 1) session->clients_ = std::move(parts.clients);
  session->engines_.resize(static_cast<std::size_t>(num_engines));
  for (std::int32_t dp_rank = 0; dp_rank < num_engines; ++dp_rank)
    if (auto added = session->add_engine(dp_rank, parts); !added)
      return tl::unexpected(added.error());
  return session;
}

void Session::observe(std::int32_t dp_rank, StepObserver& observer) {
  engines_[static_cast<std::size_t>(dp_rank)].observers.add(observer);
}

void Session::give_hidden_states(const HiddenStateCheck::Sink& sink) {
  for (SessionEngine& engine : engines_) engine.hidden_states->set_sink(sink);
}

// Who draws looks on last.
RunParts Session::parts_of(SessionEngine& engine) {
  if (engine.drawer != nullptr) engine.observers.add(*engine.drawer);
  return {*engine.scheduler, *engine.workload, engine.ranks, &engine.observers, engine.checks};
}

Result<std::unique_ptr<LockstepRun>> Session::start() {
  LS_CHECK(engines_.size() == 1, "{} engines", engines_.size());
  return LockstepRun::start(config_, parts_of(engines_.front()));
}

Result<RunReport> Session::run() {
  if (engines_.size() == 1) return run_lockstep(config_, parts_of(engines_.front()));
  std::vector<EngineParts> engines;
  for (SessionEngine& engine : engines_) engines.push_back({*engine.dealt, parts_of(engine)});
  return run_data_parallel(config_, config_.data_parallel, engines, *clients_);
}

Timeline Session::take_timeline(std::int32_t dp_rank) {
  return engines_[static_cast<std::size_t>(dp_rank)].drawer->take();
}

}  // namespace lockstep
