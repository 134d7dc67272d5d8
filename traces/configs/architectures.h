// The architectures of vLLM 0.33.0 by family: which rule derives their layers, and which
// architecture the text part of a multimodal one has.
#pragma once

#include <string_view>

#include "traces/configs/layer_rules.h"

namespace lockstep {

struct Architecture {
  void (*layers)(ConfigReading&) = nullptr;  // nullptr: the text part's architecture has the rule
  std::string_view text_architecture = {};   // empty: that of the text part's configuration
  bool is_pooling = false;
};
// nullptr: the table has no such architecture.
const Architecture* find_architecture(std::string_view name);

}  // namespace lockstep
