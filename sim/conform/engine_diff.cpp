#include "sim/conform/engine_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

// One step's decision, a hash for each field.
using StepDigest = std::array<std::uint64_t, kNumDecisionFields>;

class Fnv {
 public:
  void add(std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ ^= (value >> (8 * byte)) & 0xFF;
      hash_ *= 0x100000001B3ull;
    }
  }
  void add(std::string_view text) {
    for (const char c : text) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
    add(text.size());
  }
  std::uint64_t hash() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325ull;
};

std::uint64_t id_of(BlockId block) { return static_cast<std::uint64_t>(index_of(block)); }

StepDigest digest(const StepView& view) {
  std::array<Fnv, kNumDecisionFields> fields;
  const auto field = [&](DecisionField f) -> Fnv& { return fields[static_cast<std::size_t>(f)]; };
  const SchedulerOutput& decision = view.decision;
  for (const ScheduledRequest& row : decision.scheduled) {
    Fnv& requests = field(DecisionField::requests);
    requests.add(view.name(row.id));
    requests.add(static_cast<std::uint64_t>(row.num_tokens));
    requests.add(static_cast<std::uint64_t>(row.num_spec));
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
  std::ranges::transform(fields, out.begin(), &Fnv::hash);
  return out;
}

class DigestSteps final : public StepObserver {
 public:
  bool finished(const StepView& view) override {
    steps.push_back(digest(view));
    return true;
  }
  std::vector<StepDigest> steps;
};

std::string text_of(const SchedulerOutput& decision, std::size_t i, std::string_view name) {
  const ScheduledRequest& row = decision.scheduled[i];
  std::string text = fmt::format("  {}: {} tokens from {}", name, row.num_tokens, row.computed);
  if (row.is_resumed)
    text += ", back after a preemption";
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

// The decision of one step in words.
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

Result<RunSummary> run(const LockstepConfig& config, const MakeWorkload& make_workload,
                       StepObserver& observer) {
  auto decisions = make_reference_decisions(config.engine, config.device.plan.groups,
                                            config.device.plan.num_blocks);
  if (!decisions)
    return fail(fmt::format("{}: {}", config.engine.engine, decisions.error().message));
  auto workload = make_workload();
  if (!workload) return tl::unexpected(workload.error());
  Result<RunReport> report = run_lockstep(config, **decisions, **workload, nullptr, &observer);
  if (!report) return tl::unexpected(report.error());
  return std::move(report->summary);
}

void compare(const std::vector<StepDigest>& left, const std::vector<StepDigest>& right,
             EngineDiff& diff) {
  const std::size_t num_common = std::min(left.size(), right.size());
  for (std::size_t f = 0; f < kNumDecisionFields; ++f) {
    std::size_t step = 0;
    while (step < num_common && left[step][f] == right[step][f]) ++step;
    if (step < num_common) diff.first_difference[f] = static_cast<std::int64_t>(step);
  }
  if (!diff.first_step() && left.size() != right.size())
    diff.first_difference[static_cast<std::size_t>(DecisionField::requests)] =
        static_cast<std::int64_t>(num_common);
}

}  // namespace

std::string_view name_of(DecisionField field) {
  static constexpr std::array<std::string_view, kNumDecisionFields> kNames{
      "requests", "hits", "blocks", "preempted", "zeroed", "stored", "evicted"};
  return kNames[static_cast<std::size_t>(field)];
}

std::optional<std::int64_t> EngineDiff::first_step() const {
  std::optional<std::int64_t> first;
  for (const auto& step : first_difference)
    if (step && (!first || *step < *first)) first = step;
  return first;
}

Result<EngineDiff> diff_engines(LockstepConfig config, std::array<std::string, 2> engines,
                                const MakeWorkload& make_workload) {
  EngineDiff diff;
  std::array<DigestSteps, 2> digests;
  for (std::size_t side = 0; side < 2; ++side) {
    config.engine.engine = engines[side];
    config.engine.num_hash_lookahead_tokens = kEngineHashLookahead;  // what each takes by itself
    diff.sides[side].engine = engines[side];
    Result<RunSummary> summary = run(config, make_workload, digests[side]);
    if (!summary) return tl::unexpected(summary.error());
    diff.sides[side].summary = std::move(*summary);
  }
  compare(digests[0].steps, digests[1].steps, diff);
  const std::optional<std::int64_t> first = diff.first_step();
  if (!first) return diff;
  for (std::size_t side = 0; side < 2; ++side) {
    config.engine.engine = engines[side];
    DescribeStep describe(*first);
    Result<RunSummary> summary = run(config, make_workload, describe);
    if (!summary) return tl::unexpected(summary.error());
    diff.sides[side].first_parting = std::move(describe.text);
  }
  return diff;
}

}  // namespace lockstep
