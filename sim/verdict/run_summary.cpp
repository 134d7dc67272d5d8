#include "sim/verdict/run_summary.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

#include "base/names.h"

namespace lockstep {
namespace {

// A key in JSON and a number of a T.
template <class T, class Number>
using Field = std::pair<const char*, Number T::*>;

// One table per struct serves JSON and sums, so neither can miss a field.
constexpr Field<KernelStatistics, std::int64_t> kKernelCounts[] = {
    {"launches", &KernelStatistics::launches}, {"ctas", &KernelStatistics::ctas},
    {"threads", &KernelStatistics::threads},   {"accesses", &KernelStatistics::accesses},
    {"switches", &KernelStatistics::switches}, {"barriers", &KernelStatistics::barriers}};

constexpr Field<GraphStatistics, std::int64_t> kGraphCounts[] = {
    {"captured", &GraphStatistics::captured},
    {"replayed", &GraphStatistics::replayed},
    {"dropped", &GraphStatistics::dropped}};

constexpr Field<PhaseSeconds, double> kPhases[] = {{"schedule_s", &PhaseSeconds::schedule},
                                                   {"program_s", &PhaseSeconds::program},
                                                   {"execute_s", &PhaseSeconds::execute},
                                                   {"compare_s", &PhaseSeconds::compare},
                                                   {"wall_s", &PhaseSeconds::wall}};

}  // namespace

std::string to_hex(StateHash hash) { return fmt::format("{:016x}{:016x}", hash.high, hash.low); }

// Optional findings appear only if they are set, except `divergence`, which is null without one:
// readers test that key.
nlohmann::ordered_json json_of(const RunSummary& summary) {
  nlohmann::ordered_json json;
  json["verdict"] = name_of(summary.verdict);
  json["backend"] = summary.backend;
  for (const RunCounter& counter : kRunCounters) json[counter.name] = summary.*counter.count;
  json["kernels"] = nlohmann::ordered_json::array();
  for (const KernelStatistics& kernel : summary.kernels) {
    nlohmann::ordered_json entry;
    entry["kernel"] = kernel.kernel;
    for (const auto& [name, count] : kKernelCounts) entry[name] = kernel.*count;
    json["kernels"].push_back(std::move(entry));
  }
  for (const auto& [name, count] : kGraphCounts) json["graphs"][name] = summary.graphs.*count;
  json["not_checked"] = summary.not_checked;
  json["state_hash"] = to_hex(summary.state_hash);
  json["divergence"] = nullptr;
  if (summary.divergence) json["divergence"] = json_of(*summary.divergence);
  if (const auto& failure = summary.engine_failure)
    json["engine_failure"] = {
        {"kind", failure->kind}, {"what", failure->what}, {"trace", failure->trace}};
  for (const auto& [key, found] :
       {std::pair{"mismatch", &summary.mismatch}, {"violation", &summary.violation}})
    if (*found)
      json[key] = {{"check", (*found)->check},
                   {"step", (*found)->step},
                   {"request", (*found)->request},
                   {"what", (*found)->what}};
  json["wait_cycle"] = summary.wait_cycle;
  json["stuck"] = nlohmann::ordered_json::array();
  for (const StuckRequest& stuck : summary.stuck)
    json["stuck"].push_back({{"request", stuck.name}, {"why", stuck.why}});
  json["stuck_total"] = summary.stuck_total;
  json["stuck_dp_rank"] = summary.stuck_dp_rank;
  for (const auto& [name, seconds] : kPhases) json[name] = summary.seconds.*seconds;
  return json;
}

// Keeps the order of first appearance, so equal runs print equal lists.
void add_kernel(const KernelStatistics& kernel, std::vector<KernelStatistics>& kernels) {
  const auto same = std::ranges::find(kernels, kernel.kernel, &KernelStatistics::kernel);
  if (same == kernels.end()) {
    kernels.push_back(kernel);
    return;
  }
  for (const auto& [name, count] : kKernelCounts) (*same).*count += kernel.*count;
}

// Times are sums over ranks; the caller sets the wall time.
void add_counts(const RunSummary& one, RunSummary& sum) {
  for (const RunCounter& counter : kRunCounters) sum.*counter.count += one.*counter.count;
  for (const auto& [name, seconds] : kPhases) sum.seconds.*seconds += one.seconds.*seconds;
  for (const auto& [name, count] : kGraphCounts) sum.graphs.*count += one.graphs.*count;
  for (const KernelStatistics& kernel : one.kernels) add_kernel(kernel, sum.kernels);
  for (const std::string& sentence : one.not_checked)
    if (std::ranges::find(sum.not_checked, sentence) == sum.not_checked.end())
      sum.not_checked.push_back(sentence);
}

// Covers the whole decision, block ids included: two runs with equal chains allocate equal blocks.
void StateHashChain::add(const SchedulerOutput& decision) {
  add(static_cast<std::uint64_t>(decision.step) << 32 | decision.scheduled.size());
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    add(static_cast<std::uint64_t>(index_of(scheduled.id)) << 32 |
        static_cast<std::uint32_t>(scheduled.num_tokens));
    add(static_cast<std::uint64_t>(scheduled.computed) << 32 |
        static_cast<std::uint64_t>(scheduled.num_spec) << 2 |
        static_cast<std::uint64_t>(scheduled.is_new) << 1 |
        static_cast<std::uint64_t>(scheduled.is_resumed));
  }
  // The length comes first, so that an entry that moves from one list to the next changes the hash.
  const auto add_all = [this](const auto& list) {
    add(list.size());
    for (const auto& entry : list) add(static_cast<std::uint64_t>(entry));
  };
  add_all(decision.block_ends);
  add_all(decision.block_ids);
  add_all(decision.spec_tokens);
  add_all(decision.preempted);
  add_all(decision.finished);
  add_all(decision.zero);
  add_all(decision.common_prefix_blocks);
}

}  // namespace lockstep
