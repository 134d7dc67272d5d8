#include "sim/conform/conform.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "base/stop_signal.h"
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
  unfinished_.step(view);
  return agrees();
}

// Members of a JSON object have no order.
static RecordedStep with_members_sorted(RecordedStep step) {
  if (step.tables) std::ranges::sort(*step.tables, {}, &RecordedTable::id);
  if (step.loading) std::ranges::sort(*step.loading, {}, &RecordedTable::id);
  return step;
}

bool ConformObserver::agrees() {
  // Structures first: JSON text is only made to name the field that differs.
  if (transcript_.step() == workload_.current()) return true;
  const RecordedStep recorded = with_members_sorted(workload_.current());
  const RecordedStep model = with_members_sorted(transcript_.step());
  if (model == recorded) return true;
  const FieldDifference found =
      first_difference(recording_step_line(recorded), recording_step_line(model));
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

// Keeps names and limits of the rows: the scheduler overwrites its decision in the next step.
void ConformObserver::note_rows(const StepView& view) {
  rows_.clear();
  for (std::size_t i = 0; i < view.decision.scheduled.size(); ++i)
    rows_.push_back(
        {std::string(view.name(view.decision.scheduled[i].id)), view.model().num_sampled_max(i)});
}

// Checks the recorded output against the decision in which both sides agree. In the audit of an
// engine, too many tokens are a finding; in the loop they would be an Error.
bool ConformObserver::output_fits() {
  const RecordedStep& recorded = workload_.current();
  for (const Row& row : rows_) {
    if (!list_fits("sampled", recorded.sampled, row.name, row.num_sampled_max)) return false;
    if (recorded.drafts && !list_fits("drafts", *recorded.drafts, row.name, num_spec_tokens_))
      return false;
  }
  return true;
}

// A request without a list returned no token, which every decision allows.
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
  // The plan comes from the recording, not from a model: only its groups and its pool matter here.
  config.backend.plan.num_blocks = header.num_blocks;
  config.backend.plan.groups = header.groups;
  config.connector.load_failure_policy = kv_transfer(header, log).kv_load_failure_policy;
  SessionParts parts;
  // The recording replaces clients, model and connector at once.
  parts.clients = std::move(recorded);
  parts.attach = [&](std::int32_t, Workload*) {
    return Onlooker{.connector = log, .observer = &run->observer_};
  };
  LS_ASSIGN_OR_RETURN(run->session_, Session::open(config, std::move(parts)));
  return run;
}

static ConformMismatch header_mismatch(std::string what, std::int64_t recorded,
                                       std::int64_t model) {
  return {.file = "",
          .step = -1,
          .what = std::move(what),
          .recorded = fmt::format("{}", recorded),
          .model = fmt::format("{}", model)};
}

std::optional<ConformMismatch> ConformRun::compare_header(const RecordingHeader& header) const {
  const Scheduler& scheduler = session_->scheduler();
  if (header.scheduler_block_size != scheduler.scheduler_block_size())
    return header_mismatch("scheduler_block_size", header.scheduler_block_size,
                           scheduler.scheduler_block_size());
  // Without prefix caching, only a connector's own store reads hashes, and the model has no such
  // store.
  const bool has_hashes = header.options.config.enable_prefix_caching || !header.connector;
  if (has_hashes && header.hash_block_size != scheduler.hash_block_size())
    return header_mismatch("hash_block_size", header.hash_block_size, scheduler.hash_block_size());
  return std::nullopt;
}

namespace {

// Compares the unfinished requests with the end line.
std::optional<ConformMismatch> compare_end(const RecordingEnd& recorded, RecordingEnd model) {
  if (recorded == model) return std::nullopt;
  const FieldDifference found =
      first_difference(recording_end_line(recorded), recording_end_line(model));
  return ConformMismatch{.file = "",
                         .step = -1,
                         .what = "end: " + found.what,
                         .recorded = found.recorded,
                         .model = found.model};
}

// Runs one recording to its end or its first difference.
Result<ConformFile> conform_workload(const std::string& path, RecordingHeader header,
                                     std::unique_ptr<RecordingWorkload> recorded,
                                     const std::string& engine) {
  if (const std::string what = unfollowed_input(header); !what.empty())
    return fail("{}:1: {}", path, what);
  if (!engine.empty()) header.options.config.engine = engine;
  ConformFile file{.file = path,
                   .engine = header.engine.text(),
                   .judged_as = header.options.config.engine,
                   .mismatch = {}};
  const auto opened = ConformRun::open(header, std::move(recorded));
  if (!opened) return fail("{}:1: {}", path, opened.error().message);
  ConformRun& judged = **opened;
  const RecordingWorkload& workload = judged.workload();
  const ConformObserver& observer = judged.observer();
  // A wrong block size would make every step differ, so the header comes first.
  file.mismatch = judged.compare_header(header);
  if (!file.mismatch) {
    const auto report = judged.session().run();
    if (!report) return tl::unexpected(report.error());
    file.steps = report->summary.steps;
    // Also set if all steps agree: the recorded engine has deadlocked as well.
    file.is_stuck = report->summary.verdict == Verdict::liveness;
    file.wait_cycle = report->summary.wait_cycle;
    file.mismatch = observer.mismatch();
    if (!file.mismatch) file.cut_off = cut_off_text(workload.end());
    if (!file.mismatch && file.steps == 0)
      return fail("{}:1: has no step to compare{}{}", path, file.cut_off.empty() ? "" : "; ",
                  file.cut_off);
    // A recording that was cut off has no end line to compare.
    if (!file.mismatch && file.cut_off.empty())
      file.mismatch =
          compare_end(workload.end(), {.steps = file.steps,
                                       .unfinished = observer.unfinished(),
                                       // Facts of the recorder, which the model has no view of.
                                       .steps_in_flight = workload.end().steps_in_flight,
                                       .failed_check = workload.end().failed_check,
                                       .failed_what = workload.end().failed_what});
  }
  if (file.mismatch) {
    file.mismatch->file = path;
    // A difference may have a reason outside the model. The message states it, so it is not
    // mistaken for a wrong policy.
    if (!header.beyond_format.empty())
      file.mismatch->what += fmt::format(" (no profile models the engine's options: {})",
                                         fmt::join(header.beyond_format, ", "));
    if (observer.has_keys())
      file.mismatch->what +=
          " (limits of adapters and encoder budgets are not modelled, and a request has an "
          "adapter, images or embeddings)";
  }
  return file;
}

// Turns an allocation failure into an Error: a huge recording must not end the other files'
// threads.
template <class Conform>
Result<ConformFile> within_memory(const std::string& path, Conform conform) {
  try {
    return conform();
  } catch (const std::bad_alloc&) {
    return fail("{}: needs more memory than there is", path);
  }
}

}  // namespace

Result<ConformFile> conform_recording(const std::string& path, const std::string& engine) {
  return within_memory(path, [&]() -> Result<ConformFile> {
    LS_ASSIGN_OR_RETURN(auto reader, RecordingReader::open(path));
    const RecordingHeader header = reader.header();
    return conform_workload(path, header, make_recording_workload(std::move(reader)), engine);
  });
}

Result<ConformFile> conform_recording(const std::string& path,
                                      std::shared_ptr<const Recording> recording,
                                      const std::string& engine) {
  return within_memory(path, [&] {
    return conform_workload(path, recording->header, make_recording_workload(recording, path),
                            engine);
  });
}

ConformSummary conform_recordings(std::vector<std::string> paths, const ConformOptions& options) {
  // Results are in the order of names, whatever thread finishes first.
  std::ranges::sort(paths);
  std::vector<Result<ConformFile>> results(paths.size(), ConformFile{});
  std::mutex report;
  std::size_t started = 0;
  const auto conform_one = [&](std::int64_t index) {
    const auto i = static_cast<std::size_t>(index);
    results[i] = conform_recording(paths[i], options.engine);
    const std::scoped_lock lock(report);
    if (options.done) options.done(paths[i]);
  };
  for_each_in_parallel(std::ssize(paths), options.jobs, conform_one,
                       [&] { return !stop_requested() && ++started > 0; });
  // Files are started in order, so those that a stop signal left out are at the end.
  paths.resize(started);
  ConformSummary summary;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    Result<ConformFile>& file = results[i];
    if (!file) {
      summary.refused.push_back({paths[i], file.error().message});
      continue;
    }
    summary.steps += file->steps;
    if (file->is_stuck) ++summary.stuck;
    if (!file->mismatch) ++summary.agreed;
    summary.files.push_back(std::move(*file));
  }
  return summary;
}

LiveConform::LiveConform(std::string judged_as, std::unique_ptr<ConformRun> model,
                         GrowingRecording& recording)
    : judged_as_(std::move(judged_as)), model_(std::move(model)), recording_(recording) {}
LiveConform::~LiveConform() = default;

Result<std::unique_ptr<LiveConform>> LiveConform::open(const RecordingHeader& header) {
  auto recording = make_growing_recording(header);
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
    // A growing recording has no end, so only a difference can end the model's run.
    LS_CHECK(found.has_value(), "the model's run ended by itself");
    take(*found);
  }
  return goes_on();
}

bool LiveConform::decided(const RecordedStep& step) {
  if (is_over_) return true;
  if (!goes_on()) return false;
  recording_.show(step);
  // The loop state is irrelevant: the recording decides when time advances.
  const auto turn = run_->take_turn({});
  LS_CHECK(turn && *turn == Turn::step, "a recording that grows has a step to take");
  return settle(run_->decide());
}

bool LiveConform::finished(const RecordedStep& step) {
  if (is_over_) return true;
  if (!goes_on()) return false;
  recording_.show(step);
  // Compared before execute(), which would turn such an output into an Error.
  is_over_ = !model_->observer().inputs_known();
  return is_over_ || settle(run_->execute({}));
}

void LiveConform::take(const ConformMismatch& found) {
  // The check is named by the first part of the field: "scheduled[2].blocks[0]" gives
  // conform.scheduled.
  mismatch_ = {.check = "conform." + found.what.substr(0, found.what.find_first_of("[.")),
               .step = found.step,
               .what = fmt::format("{}: the engine has {}, the model of {} {}", found.what,
                                   found.recorded, judged_as_, found.model)};
}

Result<void> ConformingRun::open(const LockstepConfig& config, const DecisionSource& decisions) {
  const KVCacheConfig& plan = config.backend.plan;
  LS_ASSIGN_OR_RETURN(
      live_, LiveConform::open(recorder_.header(config.engine, plan.groups, plan.num_blocks,
                                                decisions, config.connector.load_failure_policy)));
  return {};
}

}  // namespace lockstep
