#include "sim/conform/recording_compare.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "reference/check.h"
#include "sim/conform/recorded_terms.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

std::string child(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

// Depth first, in the order of the recorded side; keys that only the model has come last.
std::optional<FieldDifference> difference(const std::string& path, const Json& recorded,
                                          const Json& model) {
  if (recorded == model) return std::nullopt;
  if (recorded.is_object() && model.is_object()) {
    for (const auto& [key, value] : recorded.items()) {
      if (!model.contains(key)) return FieldDifference{child(path, key), value.dump(), "absent"};
      if (auto found = difference(child(path, key), value, model[key])) return found;
    }
    for (const auto& [key, value] : model.items())
      if (!recorded.contains(key)) return FieldDifference{child(path, key), "absent", value.dump()};
  }
  if (recorded.is_array() && model.is_array()) {
    for (std::size_t i = 0; i < std::min(recorded.size(), model.size()); ++i)
      if (auto found = difference(fmt::format("{}[{}]", path, i), recorded[i], model[i]))
        return found;
  }
  return FieldDifference{path, recorded.dump(), model.dump()};
}

}  // namespace

void StepTranscript::decided(const RecordedStep& recorded, const StepView& view,
                             ConnectorLog* connector) {
  step_ = {};
  step_.before = recorded.before;
  write_reset_results(view, step_.before);
  write_decision(view, step_);
  if (connector != nullptr) {
    auto answers = connector->take_answers();
    if (!answers.empty()) step_.connector = std::move(answers);
    write_transfers(view, step_);
    step_.worker = recorded.worker;
  }
  if (recorded.common_prefix_blocks)
    step_.common_prefix_blocks = view.decision.common_prefix_blocks;
  step_.during = recorded.during;
  step_.sampled = recorded.sampled;
  step_.drafts = recorded.drafts;
  if (recorded.tables) step_.tables = tables_of(view);
  step_.output_of_step = recorded.output_of_step;
  step_.stopped = recorded.stopped;
  step_.held = recorded.held;
  step_.stored = recorded.stored;
  step_.evicted = recorded.evicted;
  step_.cleared = recorded.cleared;
}

void StepTranscript::finished(const StepView& view, ConnectorLog* connector) {
  step_.held = connector != nullptr ? connector->take_held() : std::vector<std::string>();
  write_reset_results(view, step_.during);
  step_.stopped.clear();
  write_outcome(view, step_);
  step_.output_of_step.reset();
  if (view.output_of_step >= 0) step_.output_of_step = view.output_of_step;
}

FieldDifference first_difference(const std::string& recorded_line, const std::string& model_line) {
  const Json recorded = Json::parse(recorded_line);
  const Json model = Json::parse(model_line);
  auto found = difference("", recorded, model);
  LS_CHECK(found.has_value(), "equal lines: {}", recorded_line);
  return *std::move(found);
}

}  // namespace lockstep
