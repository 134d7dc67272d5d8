// A Hugging Face config.json read as a model: the caches that vLLM 0.33.0's model class makes of
// it.
//
// 1. The architecture chooses the rule (architectures.h); the configuration class adds defaults and
//    aliases (config_part.h). An architecture that the table does not list is read as a plain
//    decoder, which the model's assumptions state.
// 2. A key that could shape the cache and that no rule reads is refused by name.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/plan/model_spec.h"

namespace lockstep {

// `file` names the text in errors. A model that keeps nothing (an encoder) has no layers.
Result<ModelSpec> model_from_hf_config(std::string_view text, const std::string& file);

}  // namespace lockstep
