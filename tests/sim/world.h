// Small worlds for the tests of the simulator: groups, engines and traffic made from a seed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/session/session.h"
#include "tests/sim/plain_backend.h"

namespace lockstep {

// A group of `layers` layers named after `prefix`.
KVCacheGroupSpec make_group(const std::string& prefix, int layers, KVCacheSpec spec);
KVCacheSpec full_spec(std::int64_t block_size = 16, DType dtype = DType::bf16);
KVCacheSpec sliding_spec(std::int64_t window, std::int64_t block_size = 16);
KVCacheSpec mamba_spec(MambaCacheMode mode, std::int64_t block_size = 16);

// Requests with shared prefixes, bursts, aborts and a second turn that waits for the first.
Trace make_traffic(std::uint64_t seed, int num_requests);

// An engine in which such traffic is tight: 4 requests, 64 tokens per step, 256 tokens long.
LockstepConfig make_world(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks);

// Runs a session of these parts to its end.
Result<RunReport> run_session(const LockstepConfig& config, SessionParts parts);
// Runs a trace on a backend (null: the model alone).
Result<RunReport> run_world(const LockstepConfig& config, const Trace& trace, Backend* backend,
                            StepObserver* observer = nullptr);

}  // namespace lockstep
