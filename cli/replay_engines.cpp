#include "cli/replay_engines.h"

#include <memory>
#include <string>
#include <utility>

#include "cuda_backend/gpu_backend.h"
#include "cuda_backend/plugin_backend.h"
#include "cuda_backend/simt_backend.h"

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

// An engine with its scheduler, its pool and the ranks that it runs on.
Result<void> add_engine(std::string_view backend_name, const KVTransfer& transfer,
                        PreparedReplay& prepared) {
  const LockstepConfig& config = prepared.config;
  auto decisions = make_reference_decisions(config.engine, config.device.plan.groups,
                                            config.device.plan.num_blocks, transfer,
                                            config.scheduler_defect, prepared.free_order);
  if (!decisions) return tl::unexpected(decisions.error());
  PreparedEngine& engine = prepared.engines.emplace_back();
  engine.decisions = std::move(*decisions);
  for (std::int32_t rank = 0; rank < num_ranks(config.device); ++rank) {
    auto backend = make_backend(backend_name, device_of_rank(config.device, rank));
    if (!backend) return tl::unexpected(backend.error());
    if (*backend) engine.ranks.push_back(std::move(*backend));
  }
  return {};
}

}  // namespace

Result<void> add_engines(std::string_view backend, const KVTransfer& transfer,
                         PreparedReplay& prepared) {
  for (std::int32_t engine = 0; engine < prepared.config.data_parallel.dp_size; ++engine)
    if (auto added = add_engine(backend, transfer, prepared); !added) return added;
  return {};
}

Result<void> add_faults(PreparedReplay& prepared) {
  if (prepared.faults.empty()) return {};
  const bool is_dealt = prepared.engines.size() > 1;
  for (PreparedEngine& engine : prepared.engines) {
    std::unique_ptr<Workload> inner;
    if (is_dealt) {
      auto dealt = std::make_unique<DealtWorkload>(*prepared.workload);
      engine.dealt = dealt.get();
      inner = std::move(dealt);
    } else {
      inner = std::move(prepared.workload);
    }
    auto faulty = make_faulty_workload(std::move(inner), prepared.faults);
    if (!faulty) return tl::unexpected(faulty.error());
    (*faulty)->watch(*engine.decisions);
    engine.faulty = faulty->get();
    if (is_dealt)
      engine.workload = std::move(*faulty);
    else
      prepared.workload = std::move(*faulty);
  }
  return {};
}

}  // namespace lockstep
