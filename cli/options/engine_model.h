// Builds model files with an installed engine: --from vllm:DIR (docs/planner.md). The engine's own
// code decides which layers a config.json has, so models that this project's reader does not
// support can be planned.
#pragma once

#include <string>

#include "base/result.h"

namespace CLI {
class App;
}

namespace lockstep {

// Declares --from, and --engine-python for its interpreter.
void declare_from(CLI::App& command, std::string& from);

// Returns the text of a model file with the layers that the engine `from` builds for `config`, a
// config.json or its folder. Errors: the engine does not start, refuses the configuration, or
// builds a layer that a model file cannot express.
Result<std::string> engine_model(const std::string& config, const std::string& from);

// Writes that model file to the temporary folder and replaces `config` by its path. The path
// depends only on the file's text, so a repeated command reads the same file. No effect if `from`
// is empty.
Result<void> take_engine_model(std::string& config, const std::string& from);

}  // namespace lockstep
