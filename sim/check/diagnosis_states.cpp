// States of real numbers that are too far off, and what came out of them.
#include <fmt/core.h>

#include "base/check.h"
#include "sim/check/diagnosis.h"

namespace lockstep {

Divergence Diagnosis::about_state(Phase phase, const StateUpdate& update, const ModelLayer& layer,
                                  std::size_t state) const {
  Divergence found = about(phase);
  set_layer(found, layer.index);
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (program_->rows[i].row == update.row) found.request = worker_.at(requests_[i]).name;
  set_doing(found);
  found.block = index_of(update.target);
  found.part = fmt::format("state {}", state);
  found.token = std::int64_t{update.first_position} + update.num_tokens;
  return found;
}

Divergence Diagnosis::state(const StateUpdate& update, const ModelLayer& layer, std::size_t state,
                            std::int64_t element, double expected, double found_value,
                            double tolerance) const {
  Divergence found = about_state(Phase::page_written, update, layer, state);
  const StateLayout& at = layer.layout.states[state];
  found.byte = at.offset_bytes + element * at.itemsize_bytes;
  set_journal(found, {layer.layout.tensor_index, found.block}, found.byte);
  found.expected = fmt::format("{:.9g}", expected);
  found.found = fmt::format("{:.9g}", found_value);
  found.message = fmt::format(
      "state {} of layer {} ({}) in block {}, {}'s after {} tokens: element {} should be {} and is "
      "{} (tolerance {:.3g})",
      state, layer.index, layer.name, found.block, found.request, found.token, element,
      found.expected, found.found, tolerance);
  return found;
}

Divergence Diagnosis::state_output(const StateUpdate& update, const ModelLayer& layer,
                                   std::size_t state, std::int64_t element, double expected,
                                   double found_value, double tolerance) const {
  Divergence found = about_state(Phase::state_output, update, layer, state);
  --found.token;
  found.byte = element * 4;
  found.expected = fmt::format("{:.9g}", expected);
  found.found = fmt::format("{:.9g}", found_value);
  found.message = fmt::format(
      "what state {} of layer {} ({}) gives out for {}'s token {}: element {} should be {} and is "
      "{} (tolerance {:.3g})",
      state, layer.index, layer.name, found.request, found.token, element, found.expected,
      found.found, tolerance);
  return found;
}

}  // namespace lockstep
