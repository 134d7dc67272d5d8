#include "sim/connectors/connect.h"

#include <numeric>
#include <utility>

#include "reference/check.h"
#include "sim/connectors/peer_transfers.h"

namespace lockstep {
namespace {

class ConnectedWorkload : public Workload {
 public:
  ConnectedWorkload(std::unique_ptr<Workload> inner, WorkerConnector& connector)
      : inner_(std::move(inner)), connector_(connector) {}

  Result<void> connector_report(KVConnectorOutput& report) override {
    was_busy_ = connector_.is_busy();
    report = connector_.report();
    return {};
  }
  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override {
    LoopState seen = state;
    seen.idle &= !was_busy_;
    return inner_->next_turn(seen, events);
  }
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    return inner_->sample(step, rows, output);
  }
  void while_running(std::vector<WorkloadEvent>& events) override { inner_->while_running(events); }
  std::optional<bool> output_comes_in() const override { return inner_->output_comes_in(); }
  void step_done(std::int64_t scheduled_tokens) override { inner_->step_done(scheduled_tokens); }
  void request_left(std::string_view name, std::uint64_t ticket) override {
    inner_->request_left(name, ticket);
  }
  void request_refused(std::string_view name, std::uint64_t ticket, const Error& why) override {
    inner_->request_refused(name, ticket, why);
  }
  bool is_scripted() const override { return inner_->is_scripted(); }
  std::int64_t now_ns() const override { return inner_->now_ns(); }
  std::optional<std::int64_t> next_due_ns() const override { return inner_->next_due_ns(); }
  void advance_to(std::int64_t now_ns) override { inner_->advance_to(now_ns); }
  std::int64_t records_consumed() const override { return inner_->records_consumed(); }

 private:
  std::unique_ptr<Workload> inner_;
  WorkerConnector& connector_;
  bool was_busy_ = false;
};

class PeerWorkload final : public ConnectedWorkload {
 public:
  PeerWorkload(std::unique_ptr<Workload> inner, const SimulatedConnectorOptions& options)
      : ConnectedWorkload(std::move(inner), connector_), connector_(options), peers_(connector_) {}
  KVConnector* connector() override { return &peers_; }
  TransferPlanner* transfers() override { return &peers_; }

 private:
  SimulatedConnector connector_;
  PeerTransfers peers_;
};

class HostWorkload final : public ConnectedWorkload {
 public:
  HostWorkload(std::unique_ptr<Workload> inner, const OffloadOptions& options,
               const KVCacheConfig& plan, std::int32_t num_ranks)
      : ConnectedWorkload(std::move(inner), connector_), connector_(options, plan, num_ranks) {}
  KVConnector* connector() override { return &connector_; }
  TransferPlanner* transfers() override { return &connector_; }

 private:
  OffloadConnector connector_;
};

}  // namespace

std::string_view name_of(ConnectorKind kind) {
  switch (kind) {
    case ConnectorKind::none:
      return "none";
    case ConnectorKind::peers:
      return "peers";
    case ConnectorKind::host:
      return "host";
  }
  LS_CHECK(false, "connector kind {}", static_cast<int>(kind));
}

std::int64_t num_host_blocks(const ConnectorConfig& connector, const KVCacheConfig& plan) {
  return connector.kind == ConnectorKind::host ? connector.num_host_blocks : plan.num_blocks;
}

std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options) {
  return std::make_unique<PeerWorkload>(std::move(inner), options);
}

std::unique_ptr<Workload> connect(std::unique_ptr<Workload> inner, const ConnectorConfig& connector,
                                  const KVCacheConfig& plan, std::int32_t num_ranks,
                                  std::uint64_t seed) {
  switch (connector.kind) {
    case ConnectorKind::none:
      return inner;
    case ConnectorKind::host:
      return std::make_unique<HostWorkload>(
          std::move(inner),
          OffloadOptions{.seed = seed,
                         .num_host_blocks = connector.num_host_blocks,
                         .delay_steps_max = connector.delay_steps_max,
                         .failed_percent = connector.load_failed_percent,
                         .defect = connector.defect},
          plan, num_ranks);
    case ConnectorKind::peers: {
      SimulatedConnectorOptions options;
      options.seed = seed;
      if (connector.load_failed_percent > 0) options.lossy_percent = connector.load_failed_percent;
      options.num_groups = static_cast<std::int32_t>(plan.groups.size());
      options.block_size = 1;
      for (const KVCacheGroupSpec& group : plan.groups)
        options.block_size = std::lcm(options.block_size,
                                      static_cast<std::int32_t>(group.spec.block_size) * num_ranks);
      return connect_peers(std::move(inner), options);
    }
  }
  LS_CHECK(false, "connector kind {}", static_cast<int>(connector.kind));
}

}  // namespace lockstep
