#include "sim/conform/upgrade.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/number_text.h"

namespace lockstep {
namespace {

class PeakBlocks final : public StepObserver {
 public:
  explicit PeakBlocks(std::int64_t num_blocks) : num_blocks_(num_blocks) {}
  bool decided(const StepView& view) override {
    peak = std::max(peak, num_blocks_ - 1 - view.decisions.num_free_blocks());
    return true;
  }
  std::int64_t peak = 0;

 private:
  std::int64_t num_blocks_;
};

struct EngineRun {
  EngineCosts costs;
  std::string refused;
};

// An Error: the workload's.
Result<EngineRun> run_engine(LockstepConfig config, const std::string& engine,
                             const MakeWorkload& make_workload) {
  config.engine.engine = engine;
  config.engine.num_hash_lookahead_tokens = kEngineHashLookahead;  // what it takes by itself
  LS_ASSIGN_OR_RETURN(auto workload, make_workload());
  PeakBlocks blocks(config.backend.plan.num_blocks);
  SessionParts parts;
  parts.clients = std::move(workload);
  parts.attach = [&](std::int32_t, Workload*) { return Onlooker{.observer = &blocks}; };
  const auto session = Session::open(config, std::move(parts));
  if (!session) return EngineRun{.costs = {}, .refused = session.error().message};
  LS_ASSIGN_OR_RETURN(const RunReport report, (*session)->run());
  const RunSummary& run = report.summary;
  return EngineRun{.costs = {.steps = run.steps,
                             .cached_tokens = run.cached_tokens,
                             .preemptions = run.preemptions,
                             .evictions = run.evictions,
                             .peak_blocks = blocks.peak,
                             .finished_requests = run.finished_requests},
                   .refused = {}};
}

constexpr CostColumn kColumns[] = {{"steps", &EngineCosts::steps},
                                   {"prompt tokens hit", &EngineCosts::cached_tokens},
                                   {"preemptions", &EngineCosts::preemptions},
                                   {"hashes evicted", &EngineCosts::evictions},
                                   {"blocks at most", &EngineCosts::peak_blocks},
                                   {"requests finished", &EngineCosts::finished_requests}};

}  // namespace

std::span<const CostColumn> cost_columns() { return kColumns; }

std::string change_text(const EngineCosts& from, const EngineCosts& to) {
  std::string text;
  for (const auto& [name, member] : kColumns) {
    const std::int64_t by = to.*member - from.*member;
    if (by != 0)
      text += fmt::format("{}{} {} {}", text.empty() ? "" : ", ", with_commas(std::abs(by)),
                          by > 0 ? "more" : "fewer", name);
  }
  return text;
}

Result<std::vector<UpgradeStage>> upgrade_costs(LockstepConfig config,
                                                const std::vector<std::string>& engines,
                                                const MakeWorkload& make_workload,
                                                const std::function<void(const std::string&)>& at) {
  config.data_parallel = {};
  config.connector = {};
  config.scheduler_defect = SchedulerDefect::none;
  std::vector<UpgradeStage> stages;
  std::size_t before = engines.size();  // the last stage that runs
  for (const std::string& engine : engines) {
    LS_ASSIGN_OR_RETURN(const EngineProfile* profile, parse_engine(engine));
    at(engine);
    LS_ASSIGN_OR_RETURN(EngineRun run, run_engine(config, engine, make_workload));
    UpgradeStage stage{
        .engine = engine, .refused = std::move(run.refused), .costs = run.costs, .because = {}};
    if (before < stages.size() && stage.refused.empty() && stage.costs != stages[before].costs) {
      const EngineProfile& old = engine_profile(stages[before].engine);
      for (const Policy* policy : differences(old, *profile)) {
        const std::int64_t value = policy->get(*profile);
        const std::string& alone = with_policy(old, *policy, value).name;
        at(alone);
        LS_ASSIGN_OR_RETURN(const EngineRun changed, run_engine(config, alone, make_workload));
        if (changed.refused.empty() && changed.costs != stages[before].costs)
          stage.because.push_back({policy, value, changed.costs});
      }
    }
    if (stage.refused.empty()) before = stages.size();
    stages.push_back(std::move(stage));
  }
  if (before == engines.size() && !stages.empty())
    return fail(fmt::format("{}: {}", stages.front().engine, stages.front().refused));
  return stages;
}

}  // namespace lockstep
