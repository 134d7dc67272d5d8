// Results as JSON values, for files that hold more than one of them. Texts in them may not be
// UTF-8: dump them with error_handler_t::replace.
#pragma once

#include <nlohmann/json.hpp>

#include "sim/verdict/divergence.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

nlohmann::ordered_json json_of(const Divergence& divergence);
nlohmann::ordered_json json_of(const RunSummary& summary);

}  // namespace lockstep
