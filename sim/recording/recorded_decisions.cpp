#include "sim/recording/recorded_decisions.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/foreign/reported_decisions.h"

namespace lockstep {
namespace {

class RecordingReporter final : public StepReporter {
 public:
  explicit RecordingReporter(std::shared_ptr<const Recording> recording)
      : recording_(std::move(recording)) {
    for (const RecordedStep& step : recording_->steps)
      for (const auto* events : {&step.before, &step.during})
        for (const RecordedEvent& event : *events)
          if (event.kind == RecordedEvent::Kind::reset_prefix_cache)
            resets_.push_back(event.reset_succeeded);
  }

  Result<void> add(const RequestSpec& request) override {
    requests_[request.name] = {.num_prompt = request.prompt.size(),
                               .num_tokens = request.prompt.size(),
                               .max_tokens = request.max_tokens,
                               .min_tokens = request.min_tokens,
                               .stop_tokens = request.stop_token_ids};
    if (request.eos_token) requests_[request.name].stop_tokens.push_back(*request.eos_token);
    return {};
  }
  void abort_request(const std::string& name) override { requests_.erase(name); }
  void set_pause_state(PauseState) override {}

  std::optional<bool> reset_prefix_cache(bool preempts_running, RecordedStep& step) override {
    const bool succeeded = next_reset_ < resets_.size() && resets_[next_reset_++];
    if (preempts_running) {
      for (const std::string& name : step.running)
        if (const auto found = requests_.find(name); found != requests_.end())
          found->second.reset_after = current_ == nullptr ? -1 : current_->step;
      step.waiting.insert(step.waiting.begin(), step.running.begin(), step.running.end());
      step.running.clear();
    }
    return succeeded;
  }

  bool decide(std::int64_t number, RecordedStep& step) override {
    if (number >= std::ssize(recording_->steps)) {
      constexpr std::string_view kEngine = "engine.";
      const RecordingEnd& end = recording_->end;
      if (end.failed_check.starts_with(kEngine))
        failure_ = {.kind = end.failed_check.substr(kEngine.size()), .what = end.failed_what};
      else
        fail(fmt::format("the recording ends before step {}", number));
      return false;
    }
    current_ = &recording_->steps[static_cast<std::size_t>(number)];
    num_told_ = 0;
    step = *current_;
    step.stopped.clear();
    return true;
  }

  bool update(const RecordedStep& output, RecordedStep& step, TokenCounts& counts) override {
    for (const RecordedTokens& row : output.sampled) {
      const auto found = requests_.find(row.id);
      if (found == requests_.end()) continue;
      found->second.num_tokens += num_taken(row, output.step, found->second);
      counts.num_tokens.emplace_back(row.id, found->second.num_tokens);
    }
    step.stopped.clear();
    if (!is_last_output(output.step)) return true;
    const auto& stopped = current_->stopped;
    step.stopped.assign(stopped.begin() + static_cast<std::ptrdiff_t>(num_told_), stopped.end());
    num_told_ = stopped.size();
    for (const RecordedStopped& end : step.stopped) {
      requests_.erase(end.id);
      std::erase(step.running, end.id);
      std::erase(step.waiting, end.id);
      if (step.skipped)
        std::erase_if(*step.skipped, [&](const RecordedSkipped& row) { return row.id == end.id; });
    }
    return true;
  }

  const EngineFailure* failure() const override { return failure_ ? &*failure_ : nullptr; }
  void fail(std::string what) override {
    if (!failure_) failure_ = {.kind = "recording", .what = std::move(what)};
  }

 private:
  struct Request {
    std::int64_t num_prompt = 0;
    std::int64_t num_tokens = 0;  // prompt, and what outputs gave
    std::int32_t max_tokens = 0;
    std::int32_t min_tokens = 0;
    std::vector<std::int32_t> stop_tokens;
    std::int64_t reset_after = -1;  // the last step before a reset preempted it
  };

  // Tokens of an output that its request takes; of one that ends, up to the token that ends it.
  std::int64_t num_taken(const RecordedTokens& row, std::int64_t of_step,
                         const Request& request) const {
    for (const RecordedStaleOutput& stale : current_->stale_outputs)
      if (stale.id == row.id && stale.of_step == of_step) return stale.taken;
    if (of_step <= request.reset_after) return 0;
    if (std::ranges::find(current_->stopped, row.id, &RecordedStopped::id) ==
        current_->stopped.end())
      return std::ssize(row.tokens);
    std::int64_t taken = 0;
    for (const std::int32_t token : row.tokens) {
      const std::int64_t num_output = request.num_tokens + ++taken - request.num_prompt;
      if (num_output >= request.max_tokens) break;
      if (num_output >= request.min_tokens &&
          std::ranges::find(request.stop_tokens, token) != request.stop_tokens.end())
        break;
    }
    return taken;
  }

  bool is_last_output(std::int64_t of_step) const {
    return !current_->output_of_step || of_step >= *current_->output_of_step;
  }

  const std::shared_ptr<const Recording> recording_;
  const RecordedStep* current_ = nullptr;  // decided last
  std::size_t num_told_ = 0;               // of its ends
  std::vector<bool> resets_;               // what they returned, in order
  std::size_t next_reset_ = 0;
  std::unordered_map<std::string, Request> requests_;
  std::optional<EngineFailure> failure_;
};

}  // namespace

DecisionsFactory recorded_decisions(std::shared_ptr<const Recording> recording) {
  return [recording = std::move(recording)](
             const EngineToDecide&) -> Result<std::unique_ptr<DecisionSource>> {
    return std::make_unique<ReportedDecisions>(std::make_unique<RecordingReporter>(recording),
                                               recording->header, nullptr);
  };
}

}  // namespace lockstep
