#include "sim/conform/upgrade.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/markup.h"
#include "base/number_text.h"
#include "base/stop_signal.h"

namespace lockstep {
namespace {

// One hash per field of a step's decision: 56 bytes per step, so that two runs of a long trace fit
// into memory.
using StepDigest = std::array<std::uint64_t, kNumDecisionFields>;

std::uint64_t id_of(BlockId block) { return static_cast<std::uint64_t>(index_of(block)); }

StepDigest digest(const StepView& view) {
  std::array<StateHashChain, kNumDecisionFields> fields;
  const auto field = [&](DecisionField f) -> StateHashChain& {
    return fields[static_cast<std::size_t>(f)];
  };
  const SchedulerOutput& decision = view.decision;
  for (const ScheduledRequest& row : decision.scheduled) {
    StateHashChain& requests = field(DecisionField::requests);
    requests.add(view.name(row.id));
    requests.add(static_cast<std::uint64_t>(row.num_tokens));
    requests.add(static_cast<std::uint64_t>(row.num_spec));
    // Only an admitted request looks up the prefix cache.
    if (!row.is_new) continue;
    field(DecisionField::hits).add(view.name(row.id));
    field(DecisionField::hits).add(static_cast<std::uint64_t>(row.computed));
  }
  for (const BlockId block : decision.block_ids) field(DecisionField::blocks).add(id_of(block));
  for (const RequestId id : decision.preempted) field(DecisionField::preempted).add(view.name(id));
  for (const BlockId block : decision.zero) field(DecisionField::zeroed).add(id_of(block));
  field(DecisionField::stored).add(static_cast<std::uint64_t>(view.counters.stored));
  field(DecisionField::evicted).add(static_cast<std::uint64_t>(view.counters.evicted));
  StepDigest out;
  std::ranges::transform(fields, out.begin(),
                         [](const StateHashChain& chain) { return chain.value().low; });
  return out;
}

class DigestSteps final : public StepObserver {
 public:
  bool finished(const StepView& view) override {
    steps.push_back(digest(view));
    return !stop_requested();
  }
  std::vector<StepDigest> steps;
};

// Describes a scheduled request: "r3: 16 tokens from 32, new; group 0: blocks 5 6".
std::string text_of(const SchedulerOutput& decision, std::size_t i, std::string_view name) {
  const ScheduledRequest& row = decision.scheduled[i];
  std::string text = fmt::format("  {}: {} tokens from {}", name, row.num_tokens, row.computed);
  if (row.is_resumed)
    text += ", resumed after a preemption";
  else if (row.is_new)
    text += ", new";
  if (row.num_spec > 0) text += fmt::format(", {} of them drafts", row.num_spec);
  constexpr std::size_t kShown = 12;  // blocks of a group
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    const std::span<const BlockId> blocks = decision.blocks(i, g);
    if (blocks.empty()) continue;
    text += fmt::format("{} group {}: blocks", g == 0 ? ";" : ",", g);
    for (std::size_t b = 0; b < std::min(blocks.size(), kShown); ++b)
      text += fmt::format(" {}", index_of(blocks[b]));
    if (blocks.size() > kShown) text += fmt::format(" and {} more", blocks.size() - kShown);
  }
  return text + "\n";
}

// Describes the decision of one step as text, then ends the run.
class DescribeStep final : public StepObserver {
 public:
  explicit DescribeStep(std::int64_t step) : step_(step) {}
  bool finished(const StepView& view) override {
    const SchedulerOutput& decision = view.decision;
    if (decision.step != step_) return true;
    for (std::size_t i = 0; i < decision.scheduled.size(); ++i)
      text += text_of(decision, i, view.name(decision.scheduled[i].id));
    if (decision.scheduled.empty()) text += "  nothing runs\n";
    for (const RequestId id : decision.preempted)
      text += fmt::format("  {} is preempted\n", view.name(id));
    if (!decision.zero.empty()) text += fmt::format("  {} blocks to zero\n", decision.zero.size());
    text += fmt::format("  {} block hashes stored, {} evicted\n", view.counters.stored,
                        view.counters.evicted);
    return false;
  }
  std::string text;

 private:
  std::int64_t step_;
};

struct EngineRun {
  RunSummary summary;
  std::string refused;  // why the engine does not start with this configuration; empty: it does
};

// Runs the workload under one engine. A configuration that the engine refuses is a result, since an
// upgrade may stop working; a workload that cannot be read is an Error.
Result<EngineRun> run(LockstepConfig config, const std::string& engine,
                      const MakeWorkload& make_workload, StepObserver& observer) {
  config.engine.engine = engine;
  // A value that suits one engine may be refused by the next, so each uses its own.
  config.engine.num_hash_lookahead_tokens = kEngineHashLookahead;
  SessionParts parts;
  LS_ASSIGN_OR_RETURN(parts.clients, make_workload());
  parts.attach = [&](std::int32_t, Workload*) { return Onlooker{.observer = &observer}; };
  const auto session = Session::open(config, std::move(parts));
  if (!session) return EngineRun{.summary = {}, .refused = session.error().message};
  LS_ASSIGN_OR_RETURN(RunReport report, (*session)->run());
  return EngineRun{.summary = std::move(report.summary), .refused = {}};
}

// The same; a refusal is an Error that starts with the engine's name.
Result<RunSummary> run_started(const LockstepConfig& config, const std::string& engine,
                               const MakeWorkload& make_workload, StepObserver& observer) {
  LS_ASSIGN_OR_RETURN(EngineRun ran, run(config, engine, make_workload, observer));
  if (!ran.refused.empty()) return fail("{}: {}", engine, ran.refused);
  return std::move(ran.summary);
}

// Finds the first differing step of each field. If one run is a prefix of the other, the runs
// differ in `requests` at the step after the shorter one, unless a stop signal ended it.
void compare(const std::vector<StepDigest>& left, const std::vector<StepDigest>& right,
             EngineDiff& diff) {
  const std::size_t num_common = std::min(left.size(), right.size());
  for (std::size_t f = 0; f < kNumDecisionFields; ++f) {
    std::size_t step = 0;
    while (step < num_common && left[step][f] == right[step][f]) ++step;
    if (step < num_common) diff.first_difference[f] = static_cast<std::int64_t>(step);
  }
  if (!diff.first_step() && left.size() != right.size() && !stop_requested())
    diff.first_difference[static_cast<std::size_t>(DecisionField::requests)] =
        static_cast<std::int64_t>(num_common);
}

}  // namespace

std::optional<std::int64_t> EngineDiff::first_step() const {
  std::optional<std::int64_t> first;
  for (const auto& step : first_difference)
    if (step && (!first || *step < *first)) first = step;
  return first;
}

Result<EngineDiff> diff_engines(LockstepConfig config, std::array<std::string, 2> engines,
                                const MakeWorkload& make_workload) {
  config.data_parallel = {};
  config.connector = {};
  config.scheduler_defect = SchedulerDefect::none;
  EngineDiff diff;
  std::array<DigestSteps, 2> digests;
  for (std::size_t side = 0; side < 2; ++side) {
    diff.sides[side].engine = engines[side];
    LS_ASSIGN_OR_RETURN(diff.sides[side].summary,
                        run_started(config, engines[side], make_workload, digests[side]));
  }
  compare(digests[0].steps, digests[1].steps, diff);
  const std::optional<std::int64_t> first = diff.first_step();
  if (!first || stop_requested()) return diff;
  for (std::size_t side = 0; side < 2; ++side) {
    // A second run of each engine: keeping every decision of the first one would need far more
    // memory.
    DescribeStep describe(*first);
    LS_RETURN_IF_ERROR(run_started(config, engines[side], make_workload, describe));
    diff.sides[side].first_parting = std::move(describe.text);
  }
  return diff;
}

namespace {

// Measures the most blocks in use after a decision. The null block is not counted.
class PeakBlocks final : public StepObserver {
 public:
  explicit PeakBlocks(std::int64_t num_blocks) : num_blocks_(num_blocks) {}
  bool decided(const StepView& view) override {
    peak = std::max(peak, num_blocks_ - 1 - view.decisions.num_free_blocks());
    return !stop_requested();
  }
  std::int64_t peak = 0;

 private:
  std::int64_t num_blocks_;
};

// Returns the costs of the workload under one engine, or why the engine does not start.
Result<UpgradeStage> stage_of(const LockstepConfig& config, const std::string& engine,
                              const MakeWorkload& make_workload) {
  PeakBlocks blocks(config.backend.plan.num_blocks);
  LS_ASSIGN_OR_RETURN(EngineRun ran, run(config, engine, make_workload, blocks));
  return UpgradeStage{.engine = engine,
                      .refused = std::move(ran.refused),
                      .costs = {.steps = ran.summary.steps,
                                .cached_tokens = ran.summary.cached_tokens,
                                .preemptions = ran.summary.preemptions,
                                .evictions = ran.summary.evictions,
                                .peak_blocks = blocks.peak,
                                .finished_requests = ran.summary.finished_requests},
                      .because = {}};
}

// One column per member of EngineCosts, with the words of change_text(): "3 fewer preemptions".
constexpr CostColumn kColumns[] = {{"steps", &EngineCosts::steps},
                                   {"prompt tokens hit", &EngineCosts::cached_tokens},
                                   {"preemptions", &EngineCosts::preemptions},
                                   {"hashes evicted", &EngineCosts::evictions},
                                   {"peak blocks", &EngineCosts::peak_blocks},
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
    LS_ASSIGN_OR_RETURN(UpgradeStage stage, stage_of(config, engine, make_workload));
    if (before < stages.size() && stage.refused.empty() && stage.costs != stages[before].costs) {
      const EngineProfile& old = engine_profile(stages[before].engine);
      // One run per changed policy, so a stage costs as many runs as the release changes policies.
      for (const Policy* policy : differences(old, *profile)) {
        const std::int64_t value = policy->get(*profile);
        const std::string& alone = with_policy(old, *policy, value).name;
        at(alone);
        LS_ASSIGN_OR_RETURN(const auto changed, stage_of(config, alone, make_workload));
        // A policy may be refused by itself: the configuration needs another one with it.
        if (changed.refused.empty() && changed.costs != stages[before].costs)
          stage.because.push_back({policy, value, changed.costs});
      }
    }
    if (stop_requested()) break;  // the stage is incomplete
    // A refused engine is skipped: the next one is compared with the last that runs.
    if (stage.refused.empty()) before = stages.size();
    stages.push_back(std::move(stage));
  }
  if (before == engines.size() && !stages.empty())
    return fail("{}: {}", stages.front().engine, stages.front().refused);
  return stages;
}

// The way from one engine to another as one HTML page that needs no other.

namespace {

constexpr std::string_view kHead = R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Lockstep: what an upgrade costs</title>
<style>
body { max-width: 1100px; margin: 0 auto; padding: 28px 24px; color: #1b2430;
       font: 14px/1.5 system-ui, "DejaVu Sans", sans-serif; }
table { border-collapse: collapse; }
th, td { padding: 4px 14px; border-bottom: 1px solid #d9dee5; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.same { color: #98a4b3; } .changed { font-weight: 600; color: #0072b2; }
.dim { color: #5c6877; }
</style>
</head>
<body>
)";

// Returns a table row. Cells that equal those of the previous running stage are grey.
std::string row_of(const UpgradeStage& stage, const UpgradeStage* before) {
  std::string row = fmt::format("<tr><td>{}</td>", escaped_for_markup(stage.engine));
  if (!stage.refused.empty())
    return row + fmt::format("<td colspan=\"{}\">does not start: {}</td></tr>\n",
                             cost_columns().size(), escaped_for_markup(stage.refused));
  for (const CostColumn& column : cost_columns()) {
    const std::int64_t value = stage.costs.*column.member;
    const bool is_same = before != nullptr && before->costs.*column.member == value;
    row += fmt::format("<td class=\"{}\">{}</td>",
                       is_same             ? "same"
                       : before != nullptr ? "changed"
                                           : "",
                       with_commas(value));
  }
  return row + "</tr>\n";
}

// Returns the section on what changed at a stage and which single policies cause it.
std::string reasons_of(const UpgradeStage& stage, const UpgradeStage& before) {
  std::string text = fmt::format("<h2>{}</h2>\n<p>{}</p>\n", escaped_for_markup(stage.engine),
                                 escaped_for_markup(change_text(before.costs, stage.costs)));
  if (stage.because.empty()) return text + "<p class=\"dim\">No single policy explains it.</p>\n";
  text += "<ul>\n";
  for (const PolicyCost& cost : stage.because)
    text +=
        fmt::format("<li><code>{} = {}</code> alone: {}<br><span class=\"dim\">{}</span></li>\n",
                    cost.policy->name, cost.policy->word(cost.value),
                    escaped_for_markup(change_text(before.costs, cost.costs)),
                    escaped_for_markup(cost.policy->effect));
  return text + "</ul>\n";
}

}  // namespace

std::string upgrade_page(const std::string& trace, const std::vector<UpgradeStage>& stages) {
  std::string page(kHead);
  page +=
      fmt::format("<h1>What an upgrade costs</h1>\n<p class=\"dim\">{}</p>\n<table>\n<tr><th></th>",
                  escaped_for_markup(trace));
  for (const CostColumn& column : cost_columns()) page += fmt::format("<th>{}</th>", column.name);
  page += "</tr>\n";
  std::string reasons;
  const UpgradeStage* before = nullptr;
  for (const UpgradeStage& stage : stages) {
    page += row_of(stage, before);
    // A stage that does not start has no costs to compare.
    if (!stage.refused.empty()) continue;
    if (before != nullptr && stage.costs != before->costs) reasons += reasons_of(stage, *before);
    before = &stage;
  }
  return page + "</table>\n" + reasons + "</body>\n</html>\n";
}

}  // namespace lockstep
