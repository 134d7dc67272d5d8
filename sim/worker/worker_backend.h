// An engine's own worker as a backend: a process that holds it and speaks docs/protocols.md
// receives each step's decision, and its memory, tables and slots are judged like any backend's.
//
// (1) Pages are in memory that both processes map (shared_bytes.h, page_map.h); poison, and the
//     order of a reallocated block's bytes, are written here before the step.
// (2) What the worker raises, over the plan of a case or in a step, and what it reports that
//     differs from the step (rows, positions, tokens), are reports of the step: a divergence, not
//     an error.
// (3) Digests are read here, through the table that the worker's attention received.
// (4) What was sampled is sent before anything is written for the next step: a worker moves states
//     then, in blocks that the step may reallocate.
// Not here: attention itself, host tiers, ranks; the worker refuses what it cannot do.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "sim/foreign/foreign_engine.h"
#include "sim/protocol/backend.h"
#include "traces/formats/worker_facts.h"

namespace lockstep {

// `command`: starts such a process. Its options are those of any foreign engine.
ForeignEngineOptions worker_engine_options(std::string command);

// Is given what the worker made of each step, before anything is compared.
using FactsSink = std::function<void(std::int64_t step, WorkerStepFacts facts)>;

// Errors: a check mode other than fast, streams, ranks, a host tier, captured graphs, numbers.
Result<std::unique_ptr<Backend>> make_worker_backend(std::shared_ptr<ForeignEngines> engines,
                                                     const BackendConfig& config,
                                                     FactsSink facts = {});

}  // namespace lockstep
