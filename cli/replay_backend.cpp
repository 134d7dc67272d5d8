#include "cli/replay_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "cuda_backend/gpu_backend.h"
#include "cuda_backend/plugin/plugin_backend.h"
#include "cuda_backend/simt_backend.h"
#include "properties/generate/generator.h"
#include "properties/invariants/planned_need.h"

namespace lockstep {

namespace {

Result<std::unique_ptr<Backend>> make_backend(std::string_view name, const BackendConfig& config) {
  if (name == "none") {
    if (config.check != CheckMode::fast || !config.mutant.empty() || config.num_streams > 1 ||
        config.max_cudagraph_capture_size > 0 || config.numbers != Numbers::words) {
      return fail(
          "--check, --mutant, --streams, --graphs and --numbers need a backend, and --backend none "
          "is the model alone");
    }
    return std::unique_ptr<Backend>();
  }
  if (name != "auto" && name != "cuda" && name != "simt")
    return make_plugin_backend(std::string(name), config);
  if (config.delay_streams && config.num_streams < 2)
    return fail("--delay-streams moves operations of different streams; give --streams 2 or more");
  const bool on_cpu = config.check != CheckMode::fast || config.delay_streams;
  if (name == "cuda" || (name == "auto" && !on_cpu && gpu_available())) {
    return make_gpu_backend(config);
  }
  return make_simt_backend(config);
}

// A list as it is given, or one of a seed: a fault for every few requests, over the time in which
// they come, and a pool pinched to one of the longest.
Result<void> plan_faults(PreparedReplay& prepared) {
  RunSpec& run = prepared.run;
  const std::string& given = run.recipe.faults;
  if (given.empty()) return {};
  std::uint64_t seed = 0;
  const char* const end = given.data() + given.size();
  const auto [behind, error] = std::from_chars(given.data(), end, seed);
  if (error == std::errc() && behind == end) {
    SeededChoices choices(seed);
    const FaultRoom room{
        .steps = std::max<std::int64_t>(32, 2 * prepared.num_records),
        .faults_max = std::clamp<std::int64_t>(prepared.num_records / 4, 6, 1'000),
        .blocks_of_request = planned_blocks_of_request(run.engine, run.cache.groups)};
    run.faults = faults_of(draw_faults(choices, room));
    return {};
  }
  const Result<FaultPlan> plan = fault_plan_from_text(given);
  if (!plan) return fail(fmt::format("--faults: {}", plan.error().message));
  run.faults = faults_of(*plan);
  return {};
}

}  // namespace

BackendFactory replay_backend(std::string name) {
  return [name = std::move(name)](const BackendConfig& own) { return make_backend(name, own); };
}

Result<OpenReplay> open_replay(const ReplayRequest& request) {
  auto prepared = prepare_replay(request);
  if (!prepared) return tl::unexpected(prepared.error());
  OpenReplay replay{std::move(*prepared), nullptr};
  if (auto planned = plan_faults(replay); !planned) return tl::unexpected(planned.error());
  replay.parts.faults = replay.run.faults;
  replay.parts.backend = replay_backend(replay.run.backend);
  auto session = Session::open(replay.config, std::move(replay.parts));
  if (!session)
    return fail(fmt::format("{}{}", replay.run.faults.empty() ? "" : request.file + ": ",
                            session.error().message));
  replay.session = std::move(*session);
  return replay;
}

}  // namespace lockstep
