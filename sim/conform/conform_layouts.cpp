#include "sim/conform/conform_layouts.h"

#include <fmt/format.h>

#include <optional>

#include "reference/plan/planner.h"

namespace lockstep {
namespace {

// The first value that differs. A refusal is one in any words; that the recorder's own machine had
// too little memory for a pool says nothing about the plan.
std::optional<ConformMismatch> first_difference(const nlohmann::json& recorded,
                                                const nlohmann::json& model,
                                                const std::string& at) {
  if (recorded.is_object() && model.is_object()) {
    const bool is_refused = recorded.contains("refused");
    if (is_refused && recorded["refused"].is_string() &&
        recorded["refused"].get<std::string>().find("DefaultCPUAllocator") != std::string::npos)
      return std::nullopt;
    for (const auto& [key, value] : recorded.items()) {
      const std::string name = at.empty() ? key : at + "." + key;
      if (!model.contains(key)) return ConformMismatch{"", 0, name, value.dump(), "nothing"};
      if ((key == "refused" && value.is_string()) || name == "refused.text") continue;
      if (auto difference = first_difference(value, model[key], name)) return difference;
    }
    for (const auto& [key, value] : model.items())
      if (!recorded.contains(key))
        return ConformMismatch{"", 0, at.empty() ? key : at + "." + key, "nothing", value.dump()};
    return std::nullopt;
  }
  if (recorded.is_array() && model.is_array() && recorded.size() == model.size()) {
    for (std::size_t i = 0; i < recorded.size(); ++i)
      if (auto difference = first_difference(recorded[i], model[i], fmt::format("{}[{}]", at, i)))
        return difference;
    return std::nullopt;
  }
  // "copy: what it is": the word tells.
  const bool is_defect = at.starts_with("defects[") && recorded.is_string() && model.is_string();
  if (is_defect && recorded.get<std::string>().starts_with(model.get<std::string>() + ":"))
    return std::nullopt;
  if (recorded == model) return std::nullopt;
  return ConformMismatch{"", 0, at, recorded.dump(), model.dump()};
}

// Views in a recording, each tensor of a layer counted.
std::int64_t count_views(const nlohmann::json& at) {
  if (!at.is_structured()) return 0;
  std::int64_t count = at.is_object() && (at.contains("stride") || at.contains("page")) ? 1 : 0;
  if (count == 0)
    for (const nlohmann::json& part : at) count += count_views(part);
  return count;
}
std::int64_t count_pool_views(const nlohmann::json& recorded) {
  std::int64_t count = 0;
  for (const char* pools : {"views", "pools"})
    if (recorded.contains(pools)) count += count_views(recorded[pools]);
  return count;
}

// The backend's derivation of the recorded views.
std::optional<ConformMismatch> difference_of_backend(const TensorPlanInputs& inputs,
                                                     const nlohmann::json& recorded,
                                                     const ViewSource& backend) {
  const auto plan = plan_memory(unaligned_layers(inputs), inputs.options);
  if (!plan) return std::nullopt;  // a mismatch already, or refused by both
  const auto views = pools_record(plan->workers.front(), inputs.options.backend, recorded, backend);
  return first_difference(recorded["views"], views, "views (backend)");
}

// Compares one plan with the model's and the backend's, and counts the compared views.
std::optional<ConformMismatch> mismatch_of(const PlanRecording& recording,
                                           const ViewSource& backend, std::int64_t& views) {
  const nlohmann::json recorded = compared_results(recording);
  auto mismatch = first_difference(recorded, plan_record(recording, recorded), "");
  views += count_pool_views(recorded);
  const auto* inputs = std::get_if<TensorPlanInputs>(&recording.inputs);
  if (mismatch || !backend || inputs == nullptr || !recorded.contains("views")) return mismatch;
  views += count_pool_views(recorded);
  return difference_of_backend(*inputs, recorded, backend);
}

}  // namespace

Result<LayoutConformance> conform_layouts(const std::string& path, const ViewSource& backend) {
  LS_ASSIGN_OR_RETURN(const auto recordings, read_plan_recordings(path));
  LayoutConformance result;
  result.file = path;
  for (const PlanRecording& recording : recordings) {
    std::optional<ConformMismatch> mismatch;
    try {
      mismatch = mismatch_of(recording, backend, result.views);
    } catch (const nlohmann::json::exception& error) {
      // A value of a type that no comparison expects. The other files are still compared.
      return fail("{}:{}: {}", path, recording.line, error.what());
    }
    ++result.plans;
    if (!mismatch) {
      ++result.agreed;
      continue;
    }
    mismatch->file = path;
    mismatch->step = recording.line;
    result.mismatches.push_back({std::move(*mismatch), recording.model});
  }
  return result;
}

}  // namespace lockstep
