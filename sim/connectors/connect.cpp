#include "sim/connectors/connect.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "reference/plan/page_groups.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

// One connector and its transfers. Exactly one of these is set: peers with their workers, a host
// tier, or the workers of host pages.
struct Part {
  // Peers are two objects: SimulatedConnector answers and reports, PeerTransfers moves blocks.
  std::unique_ptr<SimulatedConnector> workers = nullptr;
  std::unique_ptr<PeerTransfers> peers = nullptr;
  std::unique_ptr<OffloadConnector> tier = nullptr;
  std::unique_ptr<PageWorkers> pages = nullptr;
  std::int64_t num_host_blocks = 0;

  // Returns the three interfaces of the part. For a tier and page workers they are one object.
  TransferPart pointers() const {
    if (tier != nullptr) return {tier.get(), tier.get(), tier.get(), num_host_blocks};
    if (pages != nullptr) return {pages.get(), pages.get(), pages.get(), num_host_blocks};
    return {peers.get(), workers.get(), peers.get(), num_host_blocks};
  }
};
using Parts = std::vector<Part>;

// Makes a connector with unknown peers. `groups` empty: groups without windows and host pages.
Part peer_part(const SimulatedConnectorOptions& options, bool takes_several_groups,
               std::int64_t num_host_blocks, std::span<const KVCacheGroupSpec> groups = {},
               std::int64_t num_pool_blocks = 0) {
  Part part{.num_host_blocks = num_host_blocks};
  part.workers = std::make_unique<SimulatedConnector>(options);
  part.peers =
      std::make_unique<PeerTransfers>(*part.workers, takes_several_groups, groups, num_pool_blocks);
  return part;
}

// A workload whose connectors are those of parts_. Everything except transfers is the inner
// workload's. The class only keeps empty steps running while a transfer is pending.
class ConnectedWorkload final : public Workload {
 public:
  // REQUIRES: at least one part.
  ConnectedWorkload(std::unique_ptr<Workload> inner, Parts parts, bool async_scheduling)
      : inner_(std::move(inner)), parts_(std::move(parts)) {
    LS_CHECK(!parts_.empty(), "{} parts of a connector", parts_.size());
    used_ = parts_.front().pointers();
    if (parts_.size() == 1) return;
    std::vector<TransferPart> pointers;
    for (const Part& part : parts_) pointers.push_back(part.pointers());
    MultiTransfers& all = all_.emplace(std::move(pointers), async_scheduling);
    // A peer that would hold a finished request's blocks must check whether another part loads into
    // them: invariant (4) of multi_connector.h.
    for (const Part& part : parts_)
      if (part.workers != nullptr)
        part.workers->ask_about_loads(
            [&all](RequestId request) { return all.is_loading(request); });
    used_ = {&all, &all, &all, 0};
  }

  KVConnector* connector() override { return used_.connector; }
  TransferPlanner* transfers() override { return used_.transfers; }
  bool is_busy() const override { return was_busy_; }
  Result<void> connector_report(KVConnectorOutput& report) override {
    // Read before report(): a transfer that completes in this report still kept the step busy.
    was_busy_ = used_.workers->is_busy();
    copied_pages_ = std::ranges::any_of(
        parts_, [](const Part& part) { return part.pages != nullptr && part.pages->is_busy(); });
    report = used_.workers->report();
    return {};
  }
  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override {
    LoopState seen = state;
    // An idle step ends the run, or jumps to the next arrival. Neither may happen during a
    // transfer.
    seen.idle &= !was_busy_;
    // An engine runs steps until its pages have arrived, even without a request.
    seen.unfinished |= copied_pages_;
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
  std::optional<MultiTransfers> all_;  // of several parts; absent: there is only one
  TransferPart used_;                  // the only part, or all of them
  bool was_busy_ = false;
  bool copied_pages_ = false;  // true if page workers were busy before the last report
};

// Returns the options of peers for this run. A failure rate of 0 also excludes dead peers: their
// loads fail in the same way.
SimulatedConnectorOptions peers_of(const ConnectorConfig& connector, const EngineConfig& engine,
                                   const KVCacheConfig& plan, std::int32_t num_ranks,
                                   std::uint64_t seed) {
  SimulatedConnectorOptions options{.seed = seed, .async_scheduling = engine.async_scheduling};
  if (connector.load_failed_percent) {
    // An explicit rate replaces the default of 10 %.
    options.lossy_percent = *connector.load_failed_percent;
    if (options.lossy_percent == 0) options.dead_percent = 0;
  }
  options.num_groups = static_cast<std::int32_t>(plan.groups.size());
  // A prefix elsewhere must end at a block boundary of every group. Under context parallelism an
  // entry of a sharded group's table covers block_size tokens on each rank. Example: groups of 16
  // and 48 tokens, 2 ranks: lcm(32, 96) = 96.
  options.block_size = 1;
  for (const KVCacheGroupSpec& group : plan.groups)
    options.block_size =
        std::lcm(options.block_size, static_cast<std::int32_t>(group.spec.block_size) *
                                         (is_dealt_out(group.spec) ? num_ranks : 1));
  return options;
}

// Makes one connector of the spec. Each kind reads only the options that apply to it.
Part make_part(ConnectorKind kind, const ConnectorConfig& connector, const EngineConfig& engine,
               const KVCacheConfig& plan, std::int32_t num_ranks, std::uint64_t seed) {
  if (kind == ConnectorKind::page_workers) {
    Part pages;
    pages.pages = std::make_unique<PageWorkers>(
        PageWorkerOptions{.seed = seed, .delay_steps_max = connector.delay_steps_max});
    return pages;
  }
  if (kind != ConnectorKind::host)
    return peer_part(peers_of(connector, engine, plan, num_ranks, seed),
                     class_of(kind).supports_hybrid_groups, num_host_blocks(kind, connector, plan),
                     plan.groups, engine.host_pool_num_blocks);
  Part part{.num_host_blocks = connector.num_host_blocks};
  part.tier = std::make_unique<OffloadConnector>(
      OffloadOptions{.seed = seed,
                     .num_host_blocks = connector.num_host_blocks,
                     .delay_steps_max = connector.delay_steps_max,
                     .failed_percent = connector.load_failed_percent.value_or(0),
                     .async_scheduling = engine.async_scheduling,
                     .defect = connector.defect},
      plan, num_ranks);
  return part;
}

// Refuses a planted defect that cannot show in this run, and states what is missing. Without this
// check a mutation test would pass because the defect never ran.
Result<void> check_defects(const ConnectorConfig& connector, const KVCacheConfig& plan) {
  if (connector.defect != ConnectorDefect::none && !connector.has(ConnectorKind::host))
    return fail("mutant: {} is planted in a host tier; add --connector host",
                name_of(connector.defect));
  if (connector.setup_defect == MultiConnectorDefect::none) return {};
  // hma_before_config shows before a plan exists: with a host tier as the only connector,
  // hybrid_groups_of() fails. A run that gets here has not met the defect.
  const bool shows = connector.setup_defect == MultiConnectorDefect::hma_any &&
                     connector.has(ConnectorKind::one_group_peers) && plan.groups.size() > 1;
  if (shows) return {};
  return fail("mutant: {} changes nothing here; it needs an engine with {}",
              name_of(connector.setup_defect),
              connector.setup_defect == MultiConnectorDefect::hma_any
                  ? "several KV cache groups (--model) and --connector one-group-peers+host"
                  : "only --connector host");
}

// Describes one connector for a person.
std::string part_text(ConnectorKind kind, const ConnectorConfig& connector) {
  if (kind == ConnectorKind::host)
    return fmt::format("a host tier of {} block{}, transfers up to {} step{} late",
                       connector.num_host_blocks, connector.num_host_blocks == 1 ? "" : "s",
                       connector.delay_steps_max, connector.delay_steps_max == 1 ? "" : "s");
  if (kind == ConnectorKind::page_workers)
    return fmt::format("host page workers, copies up to {} step{} late", connector.delay_steps_max,
                       connector.delay_steps_max == 1 ? "" : "s");
  return kind == ConnectorKind::peers ? "peers that hold prefixes of some prompts"
                                      : "peers that hold prefixes, for one KV cache group";
}

}  // namespace

std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options) {
  Parts parts;
  parts.push_back(peer_part(options, true, 0));
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
  // Each connector has its own seed. The first has that of the run, so adding a second connector
  // does not change the first one's answers.
  for (const ConnectorKind kind : connector.parts)
    parts.push_back(make_part(kind, connector, engine, plan, num_ranks,
                              parts.empty() ? seed : splitmix64(seed + parts.size())));
  return std::make_unique<ConnectedWorkload>(std::move(inner), std::move(parts),
                                             engine.async_scheduling);
}

ConnectorClass class_of(ConnectorKind kind) {
  // vLLM names its host tier OffloadingConnector; peers have no class there, so they keep the name
  // of their kind.
  return {.name = kind == ConnectorKind::host           ? "OffloadingConnector"
                  : kind == ConnectorKind::page_workers ? "PageWorkers"
                                                        : std::string(name_of(kind)),
          .supports_hybrid_groups = kind != ConnectorKind::one_group_peers};
}

std::string connector_text(const ConnectorConfig& connector) {
  if (connector.parts.empty()) return {};
  std::string text;
  for (const ConnectorKind kind : connector.parts)
    text += (text.empty() ? "" : "; then ") + part_text(kind, connector);
  if (connector.load_failed_percent)
    text += fmt::format("; {} % of the loads fail", *connector.load_failed_percent);
  return text;
}

// A host tier as the only connector stands for the engine's own offloading option, which names no
// connector. With other connectors it is one part of a MultiConnector.
Result<bool> hybrid_groups_of(const ConnectorConfig& connector, std::optional<bool> hybrid_groups) {
  MultiConnectorConfig config{.connectors = {}, .offloads = false, .hybrid_groups = hybrid_groups};
  if (connector.parts == std::vector{ConnectorKind::host})
    config.offloads = true;
  else
    for (const ConnectorKind kind : connector.parts) config.connectors.push_back(class_of(kind));
  LS_ASSIGN_OR_RETURN(const auto setup, set_up_connectors(config, connector.setup_defect));
  return setup.hybrid_groups && hybrid_groups.value_or(true);
}

RunTraits connector_traits(const ConnectorConfig& config) {
  using enum RunTrait;
  RunTraits traits;
  if (config.parts.empty()) return traits;
  traits.add({connector, simulated_connector});
  const auto num = [&](ConnectorKind kind) { return std::ranges::count(config.parts, kind); };
  const auto num_peers = num(ConnectorKind::peers);
  traits.add_if(config.has(ConnectorKind::host), host_tier);
  // With the planted defect the engine accepts these peers, so the combination must not be refused.
  traits.add_if(config.has(ConnectorKind::one_group_peers) &&
                    config.setup_defect != MultiConnectorDefect::hma_any,
                one_group_peers);
  traits.add_if(config.has(ConnectorKind::page_workers), hisparse_workers);
  // Host pages run with exactly one set of page workers, and with at most one peer connector.
  traits.add_if(num(ConnectorKind::page_workers) != 1 || num_peers > 1 ||
                    std::ssize(config.parts) > 1 + num_peers,
                other_parts);
  traits.add_if(config.load_failed_percent.value_or(0) > 0, failing_loads);
  return traits;
}

Result<void> check_connector(const ConnectorConfig& connector, const KVCacheConfig& plan) {
  if (connector.parts.size() > kConnectorPartsMax)
    return fail("connector: {} parts; expected at most {}", connector.parts.size(),
                kConnectorPartsMax);
  if (!connector.parts.empty() && has_host_pages(plan.groups))
    LS_RETURN_IF_ERROR(check_page_groups(plan.groups));
  return check_defects(connector, plan);
}

std::int64_t num_host_blocks(ConnectorKind kind, const ConnectorConfig& connector,
                             const KVCacheConfig& plan) {
  if (kind == ConnectorKind::page_workers) return 0;
  return kind == ConnectorKind::host ? connector.num_host_blocks : plan.num_blocks;
}

// Without parts, a recorded connector may still move blocks: it has unknown peers, which need one
// host block per block of the pool.
std::int64_t num_host_blocks(const ConnectorConfig& connector, const EngineConfig& engine,
                             const KVCacheConfig& plan) {
  std::int64_t sum = engine.host_pool_num_blocks;
  if (connector.parts.empty()) return sum + plan.num_blocks;
  for (const ConnectorKind kind : connector.parts) sum += num_host_blocks(kind, connector, plan);
  return sum;
}

}  // namespace lockstep
