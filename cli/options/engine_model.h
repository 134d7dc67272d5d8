// Model files that an installed engine writes: --from vllm:DIR (docs/planner.md).
#pragma once

#include <string>

#include "base/result.h"

namespace CLI {
class App;
}

namespace lockstep {

void declare_from(CLI::App& command, std::string& from);

// The model file of the layers that the engine `from` builds for the config.json at `config`, or in
// that folder. An Error: the engine does not start, refuses the configuration, or builds a layer
// that a model file cannot express.
Result<std::string> engine_model(const std::string& config, const std::string& from);

// Puts the path of that model file in the place of `config`. The path depends on the file's text
// only, so a repeated command reads the same file. Nothing happens without `from`.
Result<void> take_engine_model(std::string& config, const std::string& from);

}  // namespace lockstep
