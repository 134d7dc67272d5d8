
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"

namespace lockstep {
namespace {

// Sampled where the recording has nothing for a row: no stop token of the cases that are kept.
constexpr std::int32_t kAnyToken = 7;
// Idle steps in a row in which an engine may still act on the last report: with steps in flight the
// engine receives it one step later.
constexpr int kIdleStepsMax = 3;

// A block that a load did not fill, by its position in its request's table: another engine has
// other blocks there.
struct LostBlock {
  std::string name;
  std::size_t entry = 0;
  std::size_t step = 0;  // in which it was reported
};

std::vector<LostBlock> lost_blocks(const Recording& recording) {
  std::map<std::string, std::vector<BlockId>> tables;  // of the first group
  std::vector<LostBlock> lost;
  for (std::size_t i = 0; i < recording.steps.size(); ++i) {
    const RecordedStep& step = recording.steps[i];
    for (const RecordedScheduled& row : step.scheduled) {
      if (!row.blocks) continue;
      auto& table = tables[row.id];
      if (row.is_new || row.resumed) table.clear();
      table.insert(table.end(), row.blocks->front().begin(), row.blocks->front().end());
    }
    for (const RecordedTable& loading : step.loading.value_or(std::vector<RecordedTable>{}))
      tables[loading.id] = loading.blocks.front();
    if (!step.worker) continue;
    for (const BlockId block : step.worker->invalid_blocks)
      for (const auto& [name, table] : tables)
        if (const auto found = std::ranges::find(table, block); found != table.end())
          lost.push_back({name, static_cast<std::size_t>(found - table.begin()), i});
  }
  return lost;
}

class GivenConnector final : public KVConnector {
 public:
  explicit GivenConnector(const Recording& recording)
      : recording_(recording), lost_(lost_blocks(recording)) {
    for (std::size_t i = 0; i < recording.steps.size(); ++i) {
      const RecordedStep& step = recording.steps[i];
      for (const RecordedConnectorAnswer& answer :
           step.connector.value_or(std::vector<RecordedConnectorAnswer>{}))
        asked_[answer.id].answers.push_back({i, answer});
      if (!step.worker) continue;
      for (const std::string& name : step.worker->received) received_[name].push_back(i);
      for (const std::string& name : step.worker->sent) sent_[name].push_back(i);
      failed_.insert(step.worker->failed.begin(), step.worker->failed.end());
    }
  }

  void begin_step(std::size_t step) { step_ = step; }

  KVConnectorTraits traits() const override { return traits_of(*recording_.header.connector); }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    Asked& asked = asked_[std::string(query.name)];
    asked.request = query.request;
    const auto answer = answer_to(asked, query.num_local_tokens);
    asked.is_async = false;
    asked.is_answered = answer && answer->external;
    if (!answer) return {};
    // After the end of the recording no query waits.
    if (!answer->external && step_ >= recording_.steps.size()) return {};
    if (!answer->external) return {.num_tokens = std::nullopt};
    const std::int32_t end = answer->local + *answer->external;
    const bool is_async = answer->async && end > query.num_local_tokens;
    const std::int32_t limit = query.num_tokens - query.num_local_tokens - (is_async ? 0 : 1);
    const std::int32_t tokens = std::clamp(end - query.num_local_tokens, 0, std::max(limit, 0));
    asked.is_async = is_async && tokens > 0;
    return {.num_tokens = tokens, .is_async = asked.is_async};
  }

  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    for (auto& [name, asked] : asked_) {
      if (asked.request != request) continue;
      asked.is_taken = true;
      asked.is_loading = asked.is_async && num_external_tokens > 0;
      if (num_external_tokens > 0) asked.blocks.assign(blocks.begin(), blocks.end());
    }
  }

  bool request_finished(RequestId request, std::string_view name) override {
    const bool keeps = std::ranges::any_of(recording_.steps, [&](const RecordedStep& step) {
      return std::ranges::find(step.held, name) != step.held.end();
    });
    if (keeps) sending_[std::string(name)] = request;
    return keeps;
  }

  void report(KVConnectorOutput& report) {
    std::vector<std::string> done;
    for (auto& [name, asked] : asked_)
      if (asked.is_loading && is_due(received_[name])) {
        asked.is_loading = false;
        done.push_back(name);
      }
    for (const std::string& name : in_python_set_order(done)) {
      report.finished_recving.push_back(*asked_[name].request);
      if (failed_.contains(name)) report.failed_recving.push_back(*asked_[name].request);
    }
    done.clear();
    for (const auto& [name, request] : sending_)
      if (is_due(sent_[name])) done.push_back(name);
    for (const std::string& name : in_python_set_order(done)) {
      report.finished_sending.push_back(sending_[name]);
      sending_.erase(name);
    }
    report_lost(report);
  }

  bool has_transfers() const {
    return !sending_.empty() ||
           std::ranges::any_of(asked_, [](const auto& entry) { return entry.second.is_loading; });
  }

 private:
  struct Answer {
    std::size_t step = 0;
    RecordedConnectorAnswer answer;
  };
  struct Asked {
    std::optional<RequestId> request;
    std::vector<Answer> answers;  // those to come; the first of them may have been given
    bool was_asked = false;
    bool is_answered = false;  // ... and the answer was not "ask again"
    bool is_taken = false;     // ... and blocks were allocated by it
    bool is_async = false;
    bool is_loading = false;
    std::vector<BlockId> blocks;  // that were loaded into
  };

  // The answer of this step if it was recorded, otherwise the current one until it is used.
  std::optional<RecordedConnectorAnswer> answer_to(Asked& asked, std::int32_t local) {
    auto& answers = asked.answers;
    const auto now = std::ranges::find_if(answers, [&](const Answer& answer) {
      return answer.step == step_ && answer.answer.local == local;
    });
    if (now != answers.end())
      answers.erase(answers.begin(), now);
    else if (!answers.empty() && asked.was_asked && (asked.is_taken || !asked.is_answered))
      answers.erase(answers.begin());
    asked.was_asked = true;
    asked.is_taken = false;
    if (answers.empty()) return std::nullopt;
    return answers.front().answer;
  }

  // A report of the first of these steps, or of the end of the recording, is due.
  bool is_due(std::vector<std::size_t>& steps) const {
    if (steps.empty()) return step_ >= recording_.steps.size();
    if (steps.front() > step_) return false;
    steps.erase(steps.begin());
    return true;
  }

  void report_lost(KVConnectorOutput& report) {
    std::erase_if(lost_, [&](const LostBlock& lost) {
      const std::vector<BlockId>& blocks = asked_[lost.name].blocks;
      if (lost.step > step_ || blocks.empty()) return false;
      if (lost.entry < blocks.size() && blocks[lost.entry] != kNullBlock)
        report.invalid_block_ids.push_back(blocks[lost.entry]);
      return true;
    });
    std::ranges::sort(report.invalid_block_ids);
    const auto again = std::ranges::unique(report.invalid_block_ids);
    report.invalid_block_ids.erase(again.begin(), again.end());
  }

  const Recording& recording_;
  std::vector<LostBlock> lost_;
  std::size_t step_ = 0;
  std::map<std::string, Asked> asked_;
  std::map<std::string, std::vector<std::size_t>> received_, sent_;  // in which steps
  std::map<std::string, RequestId> sending_;
  std::set<std::string> failed_;  // of whose loads nothing arrives
};

class GivenInputs final : public Workload {
 public:
  explicit GivenInputs(std::shared_ptr<const Recording> recording)
      : recording_(std::move(recording)) {
    if (recording_->header.connector) connector_.emplace(*recording_);
  }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override {
    if (turn_ >= recording_->steps.size()) {
      if (!state.unfinished && !is_busy()) return Turn::end;
      idle_steps_ = state.idle && !is_busy() ? idle_steps_ + 1 : 0;
      if (idle_steps_ > kIdleStepsMax) return Turn::stuck;
    } else {
      append(recording_->steps[turn_].before, events);
    }
    if (connector_) connector_->begin_step(turn_);
    ++turn_;
    return Turn::step;
  }

  Result<void> sample(std::int64_t, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    const RecordedStep* step = current();
    for (const SampledRow& row : rows) {
      const bool is_recorded =
          step != nullptr &&
          std::ranges::any_of(step->scheduled,
                              [&](const RecordedScheduled& other) { return other.id == row.name; });
      if (row.samples) {
        const std::size_t most = row.drafts.size() + 1;
        const auto* sampled = step == nullptr ? nullptr : tokens_of(step->sampled, row.name);
        if (sampled != nullptr)
          output.tokens.insert(output.tokens.end(), sampled->begin(),
                               sampled->begin() + std::min(sampled->size(), most));
        else
          output.tokens.push_back(kAnyToken);
      }
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
      if (num_drafts() == 0 || recording_->header.options.config.async_scheduling) continue;
      const auto* drafts =
          is_recorded && step->drafts ? tokens_of(*step->drafts, row.name) : nullptr;
      if (drafts != nullptr)
        output.draft_tokens.insert(output.draft_tokens.end(), drafts->begin(), drafts->end());
      else if (row.samples && !is_recorded)
        output.draft_tokens.insert(output.draft_tokens.end(), num_drafts(), kAnyToken + 1);
      output.draft_ends.push_back(static_cast<std::uint32_t>(output.draft_tokens.size()));
    }
    return {};
  }

  KVConnector* connector() override { return connector_ ? &*connector_ : nullptr; }
  Result<void> connector_report(KVConnectorOutput& report) override {
    if (connector_) connector_->report(report);
    return {};
  }
  bool is_busy() const override {
    return turn_ < recording_->steps.size() || (connector_ && connector_->has_transfers());
  }
  void while_running(std::vector<WorkloadEvent>& events) override {
    if (const RecordedStep* step = current()) append(step->during, events);
  }
  void step_done(std::int64_t) override {}
  void request_left(std::string_view, std::uint64_t) override {}
  std::int64_t now_ns() const override { return static_cast<std::int64_t>(turn_); }
  std::int64_t records_consumed() const override { return static_cast<std::int64_t>(turn_); }

 private:
  // The step that the loop is in; null: behind the last.
  const RecordedStep* current() const {
    return turn_ > recording_->steps.size() ? nullptr : &recording_->steps[turn_ - 1];
  }
  std::size_t num_drafts() const {
    return static_cast<std::size_t>(recording_->header.options.config.num_spec_tokens);
  }
  static const std::vector<std::int32_t>* tokens_of(const std::vector<RecordedTokens>& rows,
                                                    std::string_view name) {
    const auto found = std::ranges::find(rows, name, &RecordedTokens::id);
    return found == rows.end() ? nullptr : &found->tokens;
  }
  // The loop decides when an output arrives; the engine decides what a reset returned.
  static void append(const std::vector<RecordedEvent>& recorded,
                     std::vector<WorkloadEvent>& events) {
    for (const RecordedEvent& event : recorded) {
      if (event.kind == RecordedEvent::Kind::output) continue;
      events.push_back(workload_event_of(event));
      events.back().recorded_reset.reset();
    }
  }

  const std::shared_ptr<const Recording> recording_;
  std::optional<GivenConnector> connector_;
  std::size_t turn_ = 0;  // steps that were begun
  int idle_steps_ = 0;    // behind the recording, in a row
};

}  // namespace

std::unique_ptr<Workload> make_given_inputs(std::shared_ptr<const Recording> recording) {
  return std::make_unique<GivenInputs>(std::move(recording));
}

}  // namespace lockstep
