// A step of the model in a recording's terms, and the first place where two recorded steps differ.
#pragma once

#include <optional>
#include <string>

#include "sim/connectors/connector_log.h"
#include "sim/lockstep.h"
#include "traces/recording.h"

namespace lockstep {

// Writes down what the model decided: `decided` after schedule(), `finished` at the end of the
// step. What a recording shows but nobody decides (events, samples, drafts) is taken from
// `recorded`.
class StepTranscript {
 public:
  // `connector`: who answered the scheduler; null: nobody. What the step comes to is `recorded`'s
  // until `finished`: what differs before is a decision.
  void decided(const RecordedStep& recorded, const StepView& view, ConnectorLog* connector);
  void finished(const StepView& view, ConnectorLog* connector);
  const RecordedStep& step() const { return step_; }

 private:
  RecordedStep step_;
};

struct FieldDifference {
  std::string what;  // "scheduled[2].blocks[0][1]"
  std::string recorded;
  std::string model;
};
// REQUIRES: the lines differ. JSON text of steps or end lines.
FieldDifference first_difference(const std::string& recorded_line, const std::string& model_line);

}  // namespace lockstep
