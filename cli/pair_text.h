// What `lockstep pair` prints and writes.
#pragma once

#include <string>

#include "sim/pair/engine_pair.h"

namespace lockstep {

std::string pair_configuration_text(const PairOptions& options);
std::string pair_text(const PairReport& report, double seconds);
std::string pair_verdict_text(const PairReport& report);
std::string pair_json(const std::string& file, const PairOptions& options,
                      const PairReport& report);

}  // namespace lockstep
