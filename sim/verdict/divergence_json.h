// Results as JSON values, for the files that hold several of them. For .cpp files of this folder
// only.
#pragma once

#include <nlohmann/json.hpp>

#include "sim/verdict/divergence.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

nlohmann::ordered_json json_of(const Divergence& divergence);
nlohmann::ordered_json json_of(const RunSummary& summary);

}  // namespace lockstep
