#include "sim/conform/live_conform.h"

#include <fmt/core.h>

#include <utility>

#include "base/check.h"
#include "sim/conform/conform_run.h"
#include "traces/formats/engine_options.h"

namespace lockstep {

LiveConform::LiveConform(std::string judged_as, std::unique_ptr<ConformRun> model,
                         GrowingRecording& recording)
    : judged_as_(std::move(judged_as)), model_(std::move(model)), recording_(recording) {}
LiveConform::~LiveConform() = default;

Result<std::unique_ptr<LiveConform>> LiveConform::open(const RecordingHeader& header) {
  auto recording = make_growing_recording(header.connector);
  GrowingRecording& growing = *recording;
  LS_ASSIGN_OR_RETURN(auto model, ConformRun::open(header, std::move(recording)));
  std::unique_ptr<LiveConform> live(
      new LiveConform(header.options.config.engine, std::move(model), growing));
  LS_ASSIGN_OR_RETURN(live->run_, live->model_->session().start());
  if (const auto found = live->model_->compare_header(header)) live->take(*found);
  return live;
}

bool LiveConform::settle(const Result<bool>& went_on) {
  if (!went_on) {
    error_ = went_on.error();
  } else if (!*went_on) {
    const auto& found = model_->observer().mismatch();
    LS_CHECK(found.has_value(), "the model's run ended by itself");
    take(*found);
  }
  return goes_on();
}

bool LiveConform::decided(const RecordedStep& step) {
  if (is_over_) return true;
  if (!goes_on()) return false;
  recording_.show(step);
  const auto turn = run_->take_turn({});
  LS_CHECK(turn && *turn == Turn::step, "a recording that grows has a step to take");
  return settle(run_->decide());
}

bool LiveConform::finished(const RecordedStep& step) {
  if (is_over_) return true;
  if (!goes_on()) return false;
  recording_.show(step);
  is_over_ = !model_->observer().inputs_known();
  return is_over_ || settle(run_->execute({}));
}

void LiveConform::take(const ConformMismatch& found) {
  mismatch_ = {.check = "conform." + found.what.substr(0, found.what.find_first_of("[.")),
               .step = found.step,
               .what = fmt::format("{}: the engine has {}, the model of {} {}", found.what,
                                   found.recorded, judged_as_, found.model)};
}

Result<void> ConformingRun::open(const LockstepConfig& config, const DecisionSource& decisions) {
  RecordingHeader header = recording_header(config.engine, config.backend.plan.groups,
                                            config.backend.plan.num_blocks, decisions);
  if (recorder_.connector() != nullptr)
    connect_engine(header, config.connector.load_failure_policy, recorder_.connector()->traits());
  LS_ASSIGN_OR_RETURN(live_, LiveConform::open(header));
  return {};
}

}  // namespace lockstep
