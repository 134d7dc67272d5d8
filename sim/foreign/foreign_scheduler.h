// The decisions of another engine, asked for step by step (docs/protocols.md).
//
// (1) Where the engine cannot be asked for something (EngineHello::features), the case is refused.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "reference/schedule/decision_source.h"
#include "sim/foreign/foreign_engine.h"
#include "traces/formats/recording.h"

namespace lockstep {

// What an engine has to be able to do for a configuration and its groups, and cannot; empty: it can
// do it all.
std::string missing_feature(const EngineHello& hello, const RecordingHeader& header);

// Each engine of a session by one of these. `tables_every`: steps from one showing of all block
// tables to the next. Errors of the factory: what the engine lacks or refuses, an engine that does
// not start.
DecisionsFactory decisions_of(std::shared_ptr<ForeignEngines> engines,
                              std::int64_t tables_every = 1);

}  // namespace lockstep
