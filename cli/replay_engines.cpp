#include "cli/replay_engines.h"

#include <memory>
#include <string>
#include <utility>

#include "cuda_backend/gpu_backend.h"
#include "cuda_backend/plugin/plugin_backend.h"
#include "cuda_backend/simt_backend.h"
#include "sim/connectors/connect.h"

namespace lockstep {
namespace {

Result<std::unique_ptr<Backend>> make_backend(std::string_view name, const BackendConfig& device) {
  if (name == "none") {
    if (device.check != CheckMode::fast || !device.mutant.empty() || device.num_streams > 1 ||
        device.max_cudagraph_capture_size > 0 || device.numbers != Numbers::words) {
      return fail(
          "--check, --mutant, --streams, --graphs and --numbers need a backend, and --backend none "
          "is the model alone");
    }
    return std::unique_ptr<Backend>();
  }
  if (name != "auto" && name != "cuda" && name != "simt")
    return make_plugin_backend(std::string(name), device);
  if (device.delay_streams && device.num_streams < 2)
    return fail("--delay-streams moves operations of different streams; give --streams 2 or more");
  const bool on_cpu = device.check != CheckMode::fast || device.delay_streams;
  if (name == "cuda" || (name == "auto" && !on_cpu && gpu_available())) {
    return make_gpu_backend(device);
  }
  return make_simt_backend(device);
}

// Of several engines: what is dealt out to one, beside a connector of its own.
std::unique_ptr<Workload> deal_to(PreparedEngine& engine, std::int32_t dp_rank,
                                  const PreparedReplay& prepared) {
  const LockstepConfig& config = prepared.config;
  auto dealt = std::make_unique<DealtWorkload>(*prepared.workload);
  engine.dealt = dealt.get();
  return connect(std::move(dealt), config.connector, config.engine, config.device.plan,
                 config.device.context.num_ranks,
                 connector_seed(prepared.workload_options.seed, dp_rank));
}

// An engine with its scheduler, its pool and the ranks that it runs on. `workload`: what it is
// given; with faults, behind them.
Result<void> add_engine(std::string_view backend_name, PreparedEngine& engine,
                        std::unique_ptr<Workload>& workload, const PreparedReplay& prepared) {
  const LockstepConfig& config = prepared.config;
  FaultyWorkload* faulty = nullptr;
  if (!prepared.run.faults.empty()) {
    auto behind = make_faulty_workload(std::move(workload), prepared.run.faults);
    if (!behind) return tl::unexpected(behind.error());
    faulty = behind->get();
    workload = std::move(*behind);
  }
  const KVTransfer transfer{workload->connector(), config.connector.load_failure_policy};
  auto decisions = make_reference_decisions(config.engine, config.device.plan.groups,
                                            config.device.plan.num_blocks, transfer,
                                            config.scheduler_defect, prepared.free_order);
  if (!decisions) return tl::unexpected(decisions.error());
  engine.decisions = std::move(*decisions);
  engine.faulty = faulty;
  if (faulty != nullptr) faulty->watch(*engine.decisions);
  for (std::int32_t rank = 0; rank < num_ranks(config.device); ++rank) {
    auto backend = make_backend(backend_name, device_of_rank(config.device, rank));
    if (!backend) return tl::unexpected(backend.error());
    if (*backend) engine.ranks.push_back(std::move(*backend));
  }
  return {};
}

}  // namespace

Result<void> add_engines(std::string_view backend, PreparedReplay& prepared) {
  const std::int32_t dp_size = prepared.config.data_parallel.dp_size;
  for (std::int32_t dp_rank = 0; dp_rank < dp_size; ++dp_rank) {
    PreparedEngine& engine = prepared.engines.emplace_back();
    if (dp_size > 1) engine.workload = deal_to(engine, dp_rank, prepared);
    std::unique_ptr<Workload>& workload = dp_size > 1 ? engine.workload : prepared.workload;
    if (auto added = add_engine(backend, engine, workload, prepared); !added) return added;
  }
  return {};
}

}  // namespace lockstep
