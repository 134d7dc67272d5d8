// A Hugging Face config.json read as a model: the caches that vLLM 0.33.0's model class creates for
// it.
//
// 1. The architecture chooses the rule; the configuration class adds defaults and aliases
//    (config_reading.h). An architecture that the table does not list is read as a plain decoder,
//    which the model's assumptions state.
// 2. A key that could shape the cache and that no rule reads is refused by name: a wrong plan would
//    be worse than no plan.
//
// Not checked here: bounds of the figures; models/model_file.h checks the result as a model file.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/plan/model_spec.h"
#include "traces/configs/config_reading.h"

namespace lockstep {

// Derives a model from the text of a config.json; `file` names it in errors. A model that keeps
// nothing (an encoder) has no layers. Errors: JSON, a missing or contradictory key, an architecture
// without a rule.
Result<ModelSpec> model_from_hf_config(std::string_view text, const std::string& file);

// The text with Infinity, -Infinity and NaN, which Python's json module writes, as strings: a key
// that a rule reads is refused with such a value, any other is ignored.
std::string with_quoted_literals(std::string_view text);

// The architectures of vLLM 0.33.0 by family: the rule that derives their layers, and the
// architecture of the text part of a multimodal one.

struct Architecture {
  void (*layers)(ConfigReading&) = nullptr;  // nullptr: the text part's architecture has the rule
  std::string_view text_architecture = {};   // empty: that of the text part's configuration
  // True if it serves as a pooling model, for which vLLM prefers fp16.
  bool is_pooling = false;
  bool supports_pp = true;
  bool reads_is_causal = false;  // true if attention keeps nothing under `is_causal: false`
};
// Looks up a registered name ("LlamaForCausalLM"); nullptr: the table does not have it.
const Architecture* find_architecture(std::string_view name);

}  // namespace lockstep
