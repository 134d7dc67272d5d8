#include "sim/connectors/connect.h"

#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "reference/types/token_run.h"
#include "sim/connectors/multi_connector.h"
#include "sim/connectors/peer_transfers.h"

namespace lockstep {
namespace {

// A connector and what it moves.
class Part {
 public:
  virtual ~Part() = default;
  virtual TransferPart pointers() = 0;
  // There are others, which load too.
  virtual void join(const MultiTransfers&) {}
};
using Parts = std::vector<std::unique_ptr<Part>>;

class PeerPart final : public Part {
 public:
  PeerPart(const SimulatedConnectorOptions& options, bool takes_several_groups,
           std::int64_t num_host_blocks)
      : workers_(options),
        peers_(workers_, takes_several_groups),
        num_host_blocks_(num_host_blocks) {}
  TransferPart pointers() override { return {&peers_, &workers_, &peers_, num_host_blocks_}; }
  void join(const MultiTransfers& all) override {
    workers_.ask_about_loads([&all](RequestId request) { return all.is_loading(request); });
  }

 private:
  SimulatedConnector workers_;
  PeerTransfers peers_;
  const std::int64_t num_host_blocks_;
};

class HostPart final : public Part {
 public:
  HostPart(const OffloadOptions& options, const KVCacheConfig& plan, std::int32_t num_ranks)
      : tier_(options, plan, num_ranks), num_host_blocks_(options.num_host_blocks) {}
  TransferPart pointers() override { return {&tier_, &tier_, &tier_, num_host_blocks_}; }

 private:
  OffloadConnector tier_;
  const std::int64_t num_host_blocks_;
};

class ConnectedWorkload final : public Workload {
 public:
  // REQUIRES: at least one part.
  ConnectedWorkload(std::unique_ptr<Workload> inner, Parts parts, bool async_scheduling)
      : inner_(std::move(inner)), parts_(std::move(parts)) {
    LS_CHECK(!parts_.empty(), "{} parts of a connector", parts_.size());
    used_ = parts_.front()->pointers();
    if (parts_.size() == 1) return;
    std::vector<TransferPart> pointers;
    for (const auto& part : parts_) pointers.push_back(part->pointers());
    MultiTransfers& all = all_.emplace(std::move(pointers), async_scheduling);
    for (const auto& part : parts_) part->join(all);
    used_ = {&all, &all, &all, 0};
  }

  KVConnector* connector() override { return used_.connector; }
  TransferPlanner* transfers() override { return used_.transfers; }
  bool is_busy() const override { return was_busy_; }
  Result<void> connector_report(KVConnectorOutput& report) override {
    was_busy_ = used_.workers->is_busy();
    report = used_.workers->report();
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
  std::optional<bool> output_comes_in(std::int64_t step) const override {
    return inner_->output_comes_in(step);
  }
  void step_done(std::int64_t scheduled_tokens) override { inner_->step_done(scheduled_tokens); }
  void request_left(std::string_view name, std::uint64_t ticket) override {
    inner_->request_left(name, ticket);
  }
  void request_refused(std::string_view name, std::uint64_t ticket, const Error& why) override {
    inner_->request_refused(name, ticket, why);
  }
  bool is_scripted() const override { return inner_->is_scripted(); }
  std::string place() const override { return inner_->place(); }
  std::int64_t now_ns() const override { return inner_->now_ns(); }
  std::optional<std::int64_t> next_due_ns() const override { return inner_->next_due_ns(); }
  void advance_to(std::int64_t now_ns) override { inner_->advance_to(now_ns); }
  std::int64_t records_consumed() const override { return inner_->records_consumed(); }

 private:
  std::unique_ptr<Workload> inner_;
  const Parts parts_;
  std::optional<MultiTransfers> all_;  // of several parts
  TransferPart used_;                  // the only part, or all of them
  bool was_busy_ = false;
};

SimulatedConnectorOptions peers_of(const ConnectorConfig& connector, const EngineConfig& engine,
                                   const KVCacheConfig& plan, std::int32_t num_ranks,
                                   std::uint64_t seed) {
  SimulatedConnectorOptions options;
  options.async_scheduling = engine.async_scheduling;
  options.seed = seed;
  if (connector.load_failed_percent) {
    options.lossy_percent = *connector.load_failed_percent;
    if (options.lossy_percent == 0) options.dead_percent = 0;
  }
  options.num_groups = static_cast<std::int32_t>(plan.groups.size());
  options.block_size = 1;
  for (const KVCacheGroupSpec& group : plan.groups)
    options.block_size =
        std::lcm(options.block_size, static_cast<std::int32_t>(group.spec.block_size) * num_ranks);
  return options;
}

std::unique_ptr<Part> make_part(ConnectorKind kind, const ConnectorConfig& connector,
                                const EngineConfig& engine, const KVCacheConfig& plan,
                                std::int32_t num_ranks, std::uint64_t seed) {
  if (kind == ConnectorKind::host)
    return std::make_unique<HostPart>(
        OffloadOptions{.seed = seed,
                       .num_host_blocks = connector.num_host_blocks,
                       .delay_steps_max = connector.delay_steps_max,
                       .failed_percent = connector.load_failed_percent.value_or(0),
                       .async_scheduling = engine.async_scheduling,
                       .defect = connector.defect},
        plan, num_ranks);
  return std::make_unique<PeerPart>(peers_of(connector, engine, plan, num_ranks, seed),
                                    class_of(kind).supports_hybrid_groups,
                                    num_host_blocks(kind, connector, plan));
}

}  // namespace

std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options) {
  Parts parts;
  parts.push_back(std::make_unique<PeerPart>(options, true, 0));
  return std::make_unique<ConnectedWorkload>(std::move(inner), std::move(parts),
                                             options.async_scheduling);
}

std::uint64_t connector_seed(std::uint64_t seed, std::int32_t dp_rank) {
  return dp_rank <= 0 ? seed : splitmix64(seed ^ (static_cast<std::uint64_t>(dp_rank) << 32));
}

std::unique_ptr<Workload> connect(std::unique_ptr<Workload> inner, const ConnectorConfig& connector,
                                  const EngineConfig& engine, const KVCacheConfig& plan,
                                  std::int32_t num_ranks, std::uint64_t seed) {
  if (connector.parts.empty()) return inner;
  Parts parts;
  // Each draws from a seed of its own; the first, or only one, from that of the run.
  for (const ConnectorKind kind : connector.parts)
    parts.push_back(make_part(kind, connector, engine, plan, num_ranks,
                              parts.empty() ? seed : splitmix64(seed + parts.size())));
  return std::make_unique<ConnectedWorkload>(std::move(inner), std::move(parts),
                                             engine.async_scheduling);
}

}  // namespace lockstep
