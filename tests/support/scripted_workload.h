// A workload that does what a script says: which request arrives or is aborted before which step.
#pragma once

#include <string>
#include <vector>

#include "sim/engine/workload.h"
#include "tests/support/scripted_connector.h"

namespace lockstep {

class ScriptedWorkload final : public Workload {
 public:
  // What happens before one step.
  using Turnful = std::vector<WorkloadEvent>;

  // Every sampled token is 7; with drafts, `accepted` of the num_spec drafts are accepted each
  // time.
  ScriptedWorkload(std::vector<Turnful> script, std::int32_t num_spec = 0,
                   std::int32_t accepted = 0)
      : script_(std::move(script)), num_spec_(num_spec), accepted_(accepted) {}

  // Answers the scheduler and reports what its script says for each step. Must outlive the
  // workload.
  void use(ScriptedConnector& connector) { connector_ = &connector; }
  KVConnector* connector() override { return connector_; }
  Result<void> connector_report(KVConnectorOutput& report) override {
    if (connector_ != nullptr) report = connector_->report(turn_ - 1);
    return {};
  }

  static WorkloadEvent add(std::string name, Prompt prompt, std::int32_t max_tokens) {
    WorkloadEvent event;
    event.request.name = std::move(name);
    event.request.prompt = std::move(prompt);
    event.request.max_tokens = max_tokens;
    return event;
  }
  static WorkloadEvent abort(std::string name) {
    WorkloadEvent event;
    event.kind = WorkloadEvent::Kind::abort;
    event.name = std::move(name);
    return event;
  }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override {
    if (turn_ < script_.size()) {
      events.insert(events.end(), script_[turn_].begin(), script_[turn_].end());
      ++turn_;
      return Turn::step;
    }
    if (!state.unfinished) return Turn::end;
    return state.idle ? Turn::stuck : Turn::step;
  }

  Result<void> sample(std::int64_t, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    output = {};
    for (const SampledRow& row : rows) {
      if (row.samples) {
        const auto drafts = static_cast<std::int32_t>(row.drafts.size());
        for (std::int32_t i = 0; i < std::min(accepted_, drafts); ++i)
          output.tokens.push_back(row.drafts[static_cast<std::size_t>(i)]);
        output.tokens.push_back(7);
        for (std::int32_t i = 0; i < num_spec_; ++i)
          output.draft_tokens.push_back(i < accepted_ ? 7 : 9);
      }
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
      if (num_spec_ > 0)
        output.draft_ends.push_back(static_cast<std::uint32_t>(output.draft_tokens.size()));
    }
    return {};
  }

  void step_done(std::int64_t) override { ++now_; }
  void request_left(std::string_view, std::uint64_t) override {}
  std::int64_t now_ns() const override { return now_; }
  std::int64_t records_consumed() const override { return static_cast<std::int64_t>(turn_); }

 private:
  std::vector<Turnful> script_;
  std::int32_t num_spec_;
  std::int32_t accepted_;
  ScriptedConnector* connector_ = nullptr;
  std::size_t turn_ = 0;
  std::int64_t now_ = 0;
};

inline Prompt seeded_prompt(std::uint64_t seed, std::uint32_t count) {
  Prompt prompt;
  prompt.append({TokenRun::Kind::seeded, seed, 0, count});
  return prompt;
}

}  // namespace lockstep
