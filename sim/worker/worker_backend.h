// An engine's own worker as a backend: a process that contains it, and speaks docs/protocols.md,
// receives each step's decision. Its memory, tables and slots are compared like any backend's.
//
// Invariants
// (1) Pages are in memory that both processes map (shared_bytes.h, page_map.h). Poison, and the
//     byte order of a reallocated block, are written by this process before the step.
// (2) What the worker raises, over the plan of a case or in a step, and what it reports that
//     differs from the step (rows, positions, tokens), are reports of the step: a divergence, not
//     an error.
// (3) Digests are computed by this process, through the table that the worker's attention received.
// (4) What was sampled is sent before anything is written for the next step: a worker then moves
//     states, in blocks that the step may reallocate.
//
// Not here: attention itself, host tiers, ranks; make_worker_backend() refuses what is not
// supported.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "sim/foreign/foreign_engine.h"
#include "sim/protocol/backend.h"
#include "traces/formats/worker_facts.h"

namespace lockstep {

// Returns the options of a worker process that `command` starts.
ForeignEngineOptions worker_engine_options(std::string command);

// Receives what the worker did with each step, before anything is compared.
using FactsSink = std::function<void(std::int64_t step, WorkerStepFacts facts)>;

// Errors: a check mode other than fast, streams, ranks, a host tier, captured graphs, numbers.
Result<std::unique_ptr<Backend>> make_worker_backend(std::shared_ptr<ForeignEngines> engines,
                                                     const BackendConfig& config,
                                                     FactsSink facts = {});

}  // namespace lockstep
