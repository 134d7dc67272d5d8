// A Hugging Face config.json read as a model: the caches that vLLM 0.33.0's model class makes of
// it.
//
// 1. The architecture chooses the rule; the configuration class adds defaults and
//    aliases (config_reading.h). An architecture that the table does not list is read as a plain
//    decoder, which the model's assumptions state.
// 2. A key that could shape the cache and that no rule reads is refused by name.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/plan/model_spec.h"
#include "traces/configs/config_reading.h"

namespace lockstep {

// `file` names the text in errors. A model that keeps nothing (an encoder) has no layers.
Result<ModelSpec> model_from_hf_config(std::string_view text, const std::string& file);

// The architectures of vLLM 0.33.0 by family: which rule derives their layers, and which
// architecture the text part of a multimodal one has.

struct Architecture {
  void (*layers)(ConfigReading&) = nullptr;  // nullptr: the text part's architecture has the rule
  std::string_view text_architecture = {};   // empty: that of the text part's configuration
  bool is_pooling = false;
};
// nullptr: the table has no such architecture.
const Architecture* find_architecture(std::string_view name);

}  // namespace lockstep
