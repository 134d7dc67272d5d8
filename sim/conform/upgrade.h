// What the way from one engine to another costs a workload: what each release on it comes to, and
// which of the policies that it changes does it.
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
// The engines run one after the other, without a backend. Steps are compared by number: after the
// first difference in the scheduled requests, step n of one no longer corresponds to step n of the
// other, and only the first difference of each field is meaningful.

// What a step's decision consists of.
enum class DecisionField : std::uint8_t {
  requests,   // scheduled requests, with their tokens and drafts
  hits,       // tokens found in the prefix cache by requests that enter
  blocks,     // block ids handed to the worker
  preempted,  // in order
  zeroed,     // block ids
  stored,     // block hashes added to the prefix cache
  evicted,    // block hashes removed from it
};
inline constexpr std::size_t kNumDecisionFields = 7;

struct EngineSide {
  std::string engine;
  RunSummary summary;
  std::string first_parting;  // its decision at the first step that differs; empty: none does
};

struct EngineDiff {
  std::array<EngineSide, 2> sides;
  // Per field, the first step in which it differs.
  std::array<std::optional<std::int64_t>, kNumDecisionFields> first_difference;

  std::optional<std::int64_t> first_step() const;  // of any field; nothing: none differs
};

// A workload from its start, new for each call.
using MakeWorkload = std::function<Result<std::unique_ptr<Workload>>()>;

// `config` applies to both except its engine's name and a given num_hash_lookahead_tokens, without
// connectors and data parallel ranks. Errors: a configuration that one of them refuses, a workload
// that cannot be read.
Result<EngineDiff> diff_engines(LockstepConfig config, std::array<std::string, 2> engines,
                                const MakeWorkload& make_workload);

// What a workload comes to under an engine.
struct EngineCosts {
  std::int64_t steps = 0;
  std::int64_t cached_tokens = 0;  // of prompts, found in the prefix cache
  std::int64_t preemptions = 0;
  std::int64_t evictions = 0;
  std::int64_t peak_blocks = 0;  // held at once by requests
  std::int64_t finished_requests = 0;
  bool operator==(const EngineCosts&) const = default;
};

struct CostColumn {
  std::string_view name;  // for a person
  std::int64_t EngineCosts::*member = nullptr;
};
// In the order of the members.
std::span<const CostColumn> cost_columns();
// "12 more steps, 3 fewer preemptions"; empty: they are the same.
std::string change_text(const EngineCosts& from, const EngineCosts& to);

// A policy that an engine changes, and what the workload comes to if only this is changed in the
// engine before it.
struct PolicyCost {
  const Policy* policy = nullptr;
  std::int64_t value = 0;
  EngineCosts costs;
};

struct UpgradeStage {
  std::string engine;
  std::string refused;  // why the engine does not start with this configuration; empty: it does
  EngineCosts costs;
  // Policies that cost or save something by themselves, compared with the stage before it that
  // runs. Empty with other costs than before: only together do they.
  std::vector<PolicyCost> because;
};

// In the order given. `at` is called before each run. Errors: a workload that cannot be read, an
// engine that has no profile, no engine that starts.
Result<std::vector<UpgradeStage>> upgrade_costs(LockstepConfig config,
                                                const std::vector<std::string>& engines,
                                                const MakeWorkload& make_workload,
                                                const std::function<void(const std::string&)>& at);

// The same as one HTML page that needs no other.
std::string upgrade_page(const std::string& trace, const std::vector<UpgradeStage>& stages);

}  // namespace lockstep
