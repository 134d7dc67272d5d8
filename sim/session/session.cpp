#include "sim/session/session.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "sim/connectors/connect.h"
#include "sim/ranks/data_parallel.h"

namespace lockstep {

bool ObserverList::decided(const StepView& view) {
  return std::ranges::all_of(observers_, [&](auto* observer) { return observer->decided(view); });
}

bool ObserverList::finished(const StepView& view) {
  return std::ranges::all_of(observers_, [&](auto* observer) { return observer->finished(view); });
}

bool ObserverList::extracted(std::span<const HiddenStates> requests) {
  return std::ranges::all_of(observers_,
                             [&](auto* observer) { return observer->extracted(requests); });
}

Result<std::vector<std::unique_ptr<Backend>>> open_backends(const BackendConfig& config,
                                                            const BackendFactory& factory) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (std::int32_t rank = 0; rank < num_ranks(config); ++rank) {
    auto backend = factory(device_of_rank(config, rank));
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
    given = connect(std::move(given), config_.connector, config_.engine, config_.device.plan,
                    config_.device.context.num_ranks,
                    connector_seed(parts.connector_seed, dp_rank));
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
  auto decisions = make_reference_decisions(
      config_.engine, config_.device.plan.groups, config_.device.plan.num_blocks,
      {connector, config_.connector.load_failure_policy}, config_.scheduler_defect,
      parts.free_order);
  if (!decisions) return tl::unexpected(decisions.error());
  engine.decisions = std::move(*decisions);
  if (faulty != nullptr) faulty->watch(*engine.decisions);
  engine.ranks = parts.borrowed;
  if (!parts.backend) return {};
  auto backends = open_backends(config_.device, parts.backend);
  if (!backends) return tl::unexpected(backends.error());
  engine.backends = std::move(*backends);
  for (const auto& backend : engine.backends) engine.ranks.push_back(backend.get());
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

Result<std::unique_ptr<LockstepRun>> Session::start() {
  LS_CHECK(engines_.size() == 1, "{} engines", engines_.size());
  SessionEngine& engine = engines_.front();
  return start_lockstep(config_, *engine.decisions, *engine.workload, engine.ranks,
                        &engine.observers);
}

Result<RunReport> Session::run() {
  if (engines_.size() == 1) {
    SessionEngine& engine = engines_.front();
    return run_lockstep(config_, *engine.decisions, *engine.workload,
                        std::span<Backend* const>(engine.ranks), &engine.observers);
  }
  std::vector<EngineParts> engines;
  for (SessionEngine& engine : engines_)
    engines.push_back({.decisions = engine.decisions.get(),
                       .ranks = engine.ranks,
                       .dealt = engine.dealt,
                       .workload = engine.workload,
                       .observer = &engine.observers});
  return run_data_parallel(config_, engines, *clients_);
}

}  // namespace lockstep
