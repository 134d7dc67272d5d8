// One workload under two engine profiles: where their decisions differ, and the result of each.
//
// The engines run one after the other, without a backend. Steps are compared by number: after the
// first difference in the scheduled requests, step n of one no longer corresponds to step n of the
// other, and only the first difference of each field is meaningful.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "sim/session/session.h"

namespace lockstep {

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
std::string_view name_of(DecisionField field);

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

}  // namespace lockstep
