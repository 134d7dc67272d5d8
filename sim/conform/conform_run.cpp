#include "sim/conform/conform_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "sim/connectors/recorded_connector.h"

namespace lockstep {

bool ConformObserver::decided(const StepView& view) {
  for (const RecordedEvent& event : workload_.current().before)
    has_keys_ |= event.kind == RecordedEvent::Kind::add && !event.request.keys.empty();
  transcript_.decided(workload_.current(), view, connector_);
  note_rows(view);
  return agrees() && output_fits();
}

bool ConformObserver::inputs_known() {
  transcript_.take_inputs(workload_.current());
  return output_fits();
}

bool ConformObserver::finished(const StepView& view) {
  transcript_.finished(view, connector_);
  unfinished_ = unfinished_of(view);
  return agrees();
}

bool ConformObserver::agrees() {
  const RecordedStep& recorded = workload_.current();
  if (transcript_.step() == recorded) return true;
  const FieldDifference found =
      first_difference(recording_step_line(recorded), recording_step_line(transcript_.step()));
  return parts(found.what, found.recorded, found.model);
}

bool ConformObserver::parts(std::string what, std::string recorded, std::string model) {
  mismatch_ = {.file = "",
               .step = workload_.current().step,
               .what = std::move(what),
               .recorded = std::move(recorded),
               .model = std::move(model)};
  return false;
}

void ConformObserver::note_rows(const StepView& view) {
  rows_.clear();
  for (std::size_t i = 0; i < view.decision.scheduled.size(); ++i)
    rows_.push_back(
        {std::string(view.name(view.decision.scheduled[i].id)), view.model().num_sampled_max(i)});
}

// Whether a model can have returned what is recorded, for the decision in which both agree.
bool ConformObserver::output_fits() {
  const RecordedStep& recorded = workload_.current();
  for (const Row& row : rows_) {
    if (!list_fits("sampled", recorded.sampled, row.name, row.num_sampled_max)) return false;
    if (recorded.drafts && !list_fits("drafts", *recorded.drafts, row.name, num_spec_tokens_))
      return false;
  }
  return true;
}

bool ConformObserver::list_fits(std::string_view key, const std::vector<RecordedTokens>& lists,
                                std::string_view name, std::int64_t num_tokens_max) {
  const auto list = std::ranges::find(lists, name, &RecordedTokens::id);
  if (list == lists.end() || std::ssize(list->tokens) <= num_tokens_max) return true;
  return parts(fmt::format("{}.{}", key, name), fmt::format("[{}]", fmt::join(list->tokens, ",")),
               fmt::format("at most {} of them", num_tokens_max));
}

ConformRun::ConformRun(const RecordingHeader& header, RecordingWorkload& recorded)
    : workload_(recorded),
      observer_(recorded, header,
                recorded.connector() == nullptr ? nullptr : &log_.emplace(*recorded.connector())) {}

Result<std::unique_ptr<ConformRun>> ConformRun::open(const RecordingHeader& header,
                                                     std::unique_ptr<RecordingWorkload> recorded) {
  std::unique_ptr<ConformRun> run(new ConformRun(header, *recorded));
  ConnectorLog* const log = run->log_ ? &*run->log_ : nullptr;
  LockstepConfig config;
  config.engine = header.options.config;
  config.backend.plan.num_blocks = header.num_blocks;
  config.backend.plan.groups = header.groups;
  config.connector.load_failure_policy = kv_transfer(header, log).kv_load_failure_policy;
  SessionParts parts;
  parts.clients = std::move(recorded);
  parts.attach = [&](std::int32_t, Workload*) {
    return Onlooker{.connector = log, .observer = &run->observer_};
  };
  LS_ASSIGN_OR_RETURN(run->session_, Session::open(config, std::move(parts)));
  return run;
}

namespace {

ConformMismatch header_mismatch(std::string what, std::int64_t recorded, std::int64_t model) {
  return {.file = "",
          .step = -1,
          .what = std::move(what),
          .recorded = fmt::format("{}", recorded),
          .model = fmt::format("{}", model)};
}

}  // namespace

std::optional<ConformMismatch> ConformRun::compare_header(const RecordingHeader& header) const {
  const Scheduler& scheduler = session_->scheduler();
  if (header.scheduler_block_size != scheduler.scheduler_block_size())
    return header_mismatch("scheduler_block_size", header.scheduler_block_size,
                           scheduler.scheduler_block_size());
  // Without prefix caching only a connector's own store reads hashes; the model has none.
  if (header.options.config.enable_prefix_caching &&
      header.hash_block_size != scheduler.hash_block_size())
    return header_mismatch("hash_block_size", header.hash_block_size, scheduler.hash_block_size());
  return std::nullopt;
}

}  // namespace lockstep
