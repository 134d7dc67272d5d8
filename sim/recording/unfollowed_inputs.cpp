#include "sim/recording/unfollowed_inputs.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

std::string not_followed(std::string_view key, std::string_view what) {
  return fmt::format("{}: {} and the model's scheduler does not follow that", key, what);
}

std::string unfollowed_event(const RecordedEvent& event) {
  if (event.needs_grammar)
    return not_followed("structured", "a request waits for its grammar, which cuts its drafts,");
  if (event.is_session)
    return not_followed("resumable", "a request is a session whose input comes in chunks,");
  if (event.is_pooling)
    return not_followed("pooling", "a request ends with a pooled output instead of tokens,");
  if (event.kind == RecordedEvent::Kind::reset_encoder_cache)
    return not_followed("reset_encoder_cache", "the encoder's cache is emptied,");
  return {};
}

}  // namespace

std::string unfollowed_input(const RecordingHeader& header) {
  const InputOptions& inputs = header.options.inputs;
  const bool has_encoder = has_cross_attention(header.groups);
  if (inputs.is_encoder_decoder.value_or(false) != has_encoder)
    return not_followed("config.is_encoder_decoder",
                        "an encoder and groups of cross_attention are not there together,");
  if (inputs.runner == "pooling")
    return not_followed("config.runner", "the model pools and samples nothing,");
  if (header.encoder_compute_budget && !has_encoder)
    return not_followed("encoder_compute_budget",
                        "an encoder's budget and cache limit what is scheduled,");
  if (header.connector && header.connector->name == "SimpleCPUOffloadConnector")
    return not_followed("connector.name", "stores of SimpleCPUOffloadConnector hold blocks,");
  if (inputs.max_loras) return not_followed("config.max_loras", "adapters in a step are limited,");
  return {};
}

std::string unfollowed_input(const RecordedStep& step) {
  for (const auto* events : {&step.before, &step.during})
    for (const RecordedEvent& event : *events)
      if (std::string what = unfollowed_event(event); !what.empty()) return what;
  return {};
}

}  // namespace lockstep
