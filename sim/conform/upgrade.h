// What an upgrade from one engine to another costs a workload: the result under each release on the
// way, and the changed policy that causes each difference.
//
// Everything runs without a backend, so only decisions are compared. Simulated time orders events
// and is not a prediction: compare steps, not seconds.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/profiles/policies.h"
#include "sim/session/session.h"

namespace lockstep {

// One workload under two engine profiles: where their decisions differ, and the result of each.
//
// The engines run one after the other. Steps are compared by number: after the first difference in
// the scheduled requests, step n of one no longer corresponds to step n of the other, and only the
// first difference of each field is meaningful.

// The parts of a step's decision that are compared separately.
enum class DecisionField : std::uint8_t {
  requests,   // scheduled requests, with their tokens and drafts
  hits,       // tokens found in the prefix cache by admitted requests
  blocks,     // block ids handed to the worker
  preempted,  // in order
  zeroed,     // block ids
  stored,     // number of block hashes added to the prefix cache
  evicted,    // number of block hashes removed from it
};
inline constexpr std::size_t kNumDecisionFields = 7;

struct EngineSide {
  std::string engine;
  RunSummary summary;
  std::string first_parting;  // decision of the first step that differs, as text
};

struct EngineDiff {
  std::array<EngineSide, 2> sides;
  // Per field, the first step in which it differs; absent: it never does.
  std::array<std::optional<std::int64_t>, kNumDecisionFields> first_difference;

  std::optional<std::int64_t> first_step() const;  // of any field; absent: none differs
};

// Makes the workload from its start: every run consumes one.
using MakeWorkload = std::function<Result<std::unique_ptr<Workload>>()>;

// Runs both engines. `config` applies to both, except for its engine's name and a given
// num_hash_lookahead_tokens; connectors and data parallel ranks are dropped. Errors: a
// configuration that one of them refuses, a workload that cannot be read. Costs two runs, and two
// more if the engines differ. After a stop signal the steps that both have run are compared.
Result<EngineDiff> diff_engines(LockstepConfig config, std::array<std::string, 2> engines,
                                const MakeWorkload& make_workload);

// The result of a workload under an engine.
struct EngineCosts {
  std::int64_t steps = 0;
  std::int64_t cached_tokens = 0;  // of prompts, found in the prefix cache
  std::int64_t preemptions = 0;
  std::int64_t evictions = 0;
  std::int64_t peak_blocks = 0;  // most blocks in use at once
  std::int64_t finished_requests = 0;
  bool operator==(const EngineCosts&) const = default;
};

struct CostColumn {
  std::string_view name;  // for a person
  std::int64_t EngineCosts::*member = nullptr;
};
// In the order of the members.
std::span<const CostColumn> cost_columns();
// Describes the change: "12 more steps, 3 fewer preemptions". Empty: no change.
std::string change_text(const EngineCosts& from, const EngineCosts& to);

// A policy that an engine changes, and the result if only this policy is changed in the previous
// engine.
struct PolicyCost {
  const Policy* policy = nullptr;
  std::int64_t value = 0;
  EngineCosts costs;
};

struct UpgradeStage {
  std::string engine;
  std::string refused;  // why the engine does not start with this configuration; empty: it does
  EngineCosts costs;
  // Policies that change the result by themselves, compared with the previous stage that runs.
  // Empty although the costs changed: only several policies together change the result.
  std::vector<PolicyCost> because;
};

// Runs the engines in the order given, and each changed policy by itself. `at` receives the
// engine's name before each run. Errors: a workload that cannot be read, an engine without a
// profile, or no engine that starts. A stop signal ends it; the complete stages are returned.
Result<std::vector<UpgradeStage>> upgrade_costs(LockstepConfig config,
                                                const std::vector<std::string>& engines,
                                                const MakeWorkload& make_workload,
                                                const std::function<void(const std::string&)>& at);

// Writes the stages as one self-contained HTML page.
std::string upgrade_page(const std::string& trace, const std::vector<UpgradeStage>& stages);

}  // namespace lockstep
