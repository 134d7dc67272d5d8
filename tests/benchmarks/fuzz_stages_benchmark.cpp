// The stages of a generated case without a backend, each with all stages before it. The difference
// of two is a stage's own time; tests/tidy/stages.py compares the shares with stored ones.
//
//   stage/generate    the case from its seed
//   stage/run         and a session on the model, without checks
//   stage/audit       and the recording of each step, audited
//   stage/invariants  and the invariants: all that `fuzz --backend none` does
#include <benchmark/benchmark.h>

#include "base/check.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kCases = 100;

enum class Stage { generate, run, audit, invariants };

void run_stage(Stage stage, std::uint64_t seed) {
  const SavedCase saved = generate_case(seed, {.backend = "none"});
  if (stage == Stage::generate) return;
  if (stage == Stage::run) {
    const auto session = Session::open(config_of(saved), parts_of(saved));
    LS_CHECK(session.has_value(), "seed {}: {}", seed, session.error().message);
    benchmark::DoNotOptimize((*session)->run());
    return;
  }
  JudgeOptions options;
  options.invariants = stage == Stage::invariants;
  benchmark::DoNotOptimize(judge(saved, options));
}

void run_stages(benchmark::State& state, Stage stage) {
  for (auto _ : state)
    for (std::uint64_t seed = 1; seed <= kCases; ++seed) run_stage(stage, seed);
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(kCases));
}

BENCHMARK_CAPTURE(run_stages, generate, Stage::generate)->Name("stage/generate");
BENCHMARK_CAPTURE(run_stages, run, Stage::run)->Name("stage/run");
BENCHMARK_CAPTURE(run_stages, audit, Stage::audit)->Name("stage/audit");
BENCHMARK_CAPTURE(run_stages, invariants, Stage::invariants)->Name("stage/invariants");

}  // namespace
}  // namespace lockstep
