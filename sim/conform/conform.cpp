#include "sim/conform/conform.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "base/parallel.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recorded_terms.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

// Compares every step with the recorded one and ends the run at the first difference.
class ConformObserver final : public StepObserver {
 public:
  // `connector` is null in a recording without one.
  ConformObserver(const RecordingWorkload& workload, const RecordingHeader& header,
                  ConnectorLog* connector)
      : workload_(workload),
        connector_(connector),
        num_spec_tokens_(header.options.config.num_spec_tokens),
        transcript_(header) {}

  // What the model returned is for the recorded decision: another one ends the run before its
  // output comes in.
  bool decided(const StepView& view) override {
    for (const RecordedEvent& event : workload_.current().before)
      has_keys_ |= event.kind == RecordedEvent::Kind::add && !event.request.keys.empty();
    transcript_.decided(workload_.current(), view, connector_);
    return agrees() && output_fits(view);
  }

  bool finished(const StepView& view) override {
    transcript_.finished(view, connector_);
    unfinished_ = unfinished_of(view);
    return agrees();
  }

  std::optional<ConformMismatch> mismatch() const { return mismatch_; }
  // A request so far had an adapter, images or embeddings.
  bool has_keys() const { return has_keys_; }
  // Who had not left after the last step, sorted.
  const std::vector<std::string>& unfinished() const { return unfinished_; }

 private:
  bool agrees() {
    const RecordedStep& recorded = workload_.current();
    if (transcript_.step() == recorded) return true;
    const FieldDifference found =
        first_difference(recording_step_line(recorded), recording_step_line(transcript_.step()));
    return parts(found.what, found.recorded, found.model);
  }

  bool parts(std::string what, std::string recorded, std::string model) {
    mismatch_ = {.file = "",
                 .step = workload_.current().step,
                 .what = std::move(what),
                 .recorded = std::move(recorded),
                 .model = std::move(model)};
    return false;
  }

  // Whether a model can have returned what is recorded, for the decision in which both agree.
  bool output_fits(const StepView& view) {
    const RecordedStep& recorded = workload_.current();
    for (std::size_t i = 0; i < view.decision.scheduled.size(); ++i) {
      const std::string_view name = view.name(view.decision.scheduled[i].id);
      if (!list_fits("sampled", recorded.sampled, name, view.model().num_sampled_max(i)))
        return false;
      if (recorded.drafts && !list_fits("drafts", *recorded.drafts, name, num_spec_tokens_))
        return false;
    }
    return true;
  }

  bool list_fits(std::string_view key, const std::vector<RecordedTokens>& lists,
                 std::string_view name, std::int64_t num_tokens_max) {
    const auto list = std::ranges::find(lists, name, &RecordedTokens::id);
    if (list == lists.end() || std::ssize(list->tokens) <= num_tokens_max) return true;
    return parts(fmt::format("{}.{}", key, name), fmt::format("[{}]", fmt::join(list->tokens, ",")),
                 fmt::format("at most {} of them", num_tokens_max));
  }

  const RecordingWorkload& workload_;
  ConnectorLog* connector_;
  std::int64_t num_spec_tokens_;
  StepTranscript transcript_;
  std::vector<std::string> unfinished_;
  std::optional<ConformMismatch> mismatch_;
  bool has_keys_ = false;
};

ConformMismatch header_mismatch(std::string what, std::int64_t recorded, std::int64_t model) {
  return {.file = "",
          .step = -1,
          .what = std::move(what),
          .recorded = fmt::format("{}", recorded),
          .model = fmt::format("{}", model)};
}

std::optional<ConformMismatch> compare_header(const RecordingHeader& header,
                                              const Scheduler& scheduler) {
  if (header.scheduler_block_size != scheduler.scheduler_block_size())
    return header_mismatch("scheduler_block_size", header.scheduler_block_size,
                           scheduler.scheduler_block_size());
  if (header.hash_block_size != scheduler.hash_block_size())
    return header_mismatch("hash_block_size", header.hash_block_size, scheduler.hash_block_size());
  return std::nullopt;
}

// Who never finished, as the end line says it.
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

Result<ConformFile> conform_workload(const std::string& path, RecordingHeader header,
                                     std::unique_ptr<RecordingWorkload> recorded,
                                     const std::string& engine) {
  if (!engine.empty()) header.options.config.engine = engine;
  ConformFile file{.file = path,
                   .engine = header.engine.text(),
                   .judged_as = header.options.config.engine,
                   .mismatch = {}};
  const RecordingWorkload& workload = *recorded;
  std::optional<ConnectorLog> connector;
  if (recorded->connector() != nullptr) connector.emplace(*recorded->connector());
  ConnectorLog* const log = connector ? &*connector : nullptr;
  ConformObserver observer(workload, header, log);
  LockstepConfig config;
  config.engine = header.options.config;
  config.backend.plan.num_blocks = header.num_blocks;
  config.backend.plan.groups = header.groups;
  config.connector.load_failure_policy = kv_transfer(header, log).kv_load_failure_policy;
  SessionParts parts;
  parts.clients = std::move(recorded);
  parts.attach = [&](std::int32_t, Workload*) {
    return Onlooker{.connector = log, .observer = &observer};
  };
  const auto session = Session::open(config, std::move(parts));
  if (!session) return fail(fmt::format("{}:1: {}", path, session.error().message));
  file.mismatch = compare_header(header, (*session)->scheduler());
  if (!file.mismatch) {
    const auto report = (*session)->run();
    if (!report) return tl::unexpected(report.error());
    file.steps = report->summary.steps;
    file.is_stuck = report->summary.verdict == Verdict::liveness;
    file.mismatch = observer.mismatch();
    if (!file.mismatch)
      file.mismatch =
          compare_end(workload.end(), {.steps = file.steps,
                                       .unfinished = observer.unfinished(),
                                       .steps_in_flight = workload.end().steps_in_flight});
  }
  if (file.mismatch) {
    file.mismatch->file = path;
    if (!header.beyond_format.empty())
      file.mismatch->what +=
          fmt::format(" (no profile follows what the engine was started with: {})",
                      fmt::join(header.beyond_format, ", "));
    if (observer.has_keys())
      file.mismatch->what +=
          " (limits of adapters and encoder budgets are not followed, and a request has an "
          "adapter, "
          "images or embeddings)";
  }
  return file;
}

// In a thread nobody else would catch it.
template <class Conform>
Result<ConformFile> within_memory(const std::string& path, Conform conform) {
  try {
    return conform();
  } catch (const std::bad_alloc&) {
    return fail(fmt::format("{}: takes more memory than there is", path));
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
    return conform_workload(path, recording->header, make_recording_workload(recording), engine);
  });
}

ConformSummary conform_recordings(std::vector<std::string> paths, const ConformOptions& options) {
  std::ranges::sort(paths);
  std::vector<Result<ConformFile>> results(paths.size(), ConformFile{});
  std::mutex report;
  for_each_in_parallel(std::ssize(paths), options.jobs, [&](std::int64_t index) {
    const auto i = static_cast<std::size_t>(index);
    results[i] = conform_recording(paths[i], options.engine);
    const std::scoped_lock lock(report);
    if (options.done) options.done(paths[i]);
  });
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

}  // namespace lockstep
