#include "sim/conform/conform.h"

#include <fmt/core.h>

#include <algorithm>
#include <mutex>

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
  ConformObserver(const RecordingWorkload& workload, ConnectorLog* connector)
      : workload_(workload), connector_(connector) {}

  bool decided(const StepView& view) override {
    transcript_.decided(workload_.current(), view, connector_);
    return true;
  }

  bool finished(const StepView& view) override {
    transcript_.finished(view, connector_);
    const RecordedStep& recorded = workload_.current();
    if (transcript_.step() == recorded) return true;
    const FieldDifference found =
        first_difference(recording_step_line(recorded), recording_step_line(transcript_.step()));
    mismatch_ = {.file = "",
                 .step = recorded.step,
                 .what = found.what,
                 .recorded = found.recorded,
                 .model = found.model};
    return false;
  }

  std::optional<ConformMismatch> mismatch() const { return mismatch_; }
  // Who had not left after the last step, sorted.
  std::vector<std::string> unfinished() const {
    const RecordedStep& last = transcript_.step();
    std::vector<std::string> names = last.running;
    names.insert(names.end(), last.waiting.begin(), last.waiting.end());
    if (last.skipped)
      for (const RecordedSkipped& skipped : *last.skipped) names.push_back(skipped.id);
    std::erase_if(names, [&](const std::string& name) {
      return std::ranges::find(last.stopped, name, &RecordedStopped::id) != last.stopped.end();
    });
    std::ranges::sort(names);
    return names;
  }

 private:
  const RecordingWorkload& workload_;
  ConnectorLog* connector_;
  StepTranscript transcript_;
  std::optional<ConformMismatch> mismatch_;
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

// Errors of a reader begin with the path and the line; the others are given the path here.
Error with_path(const std::string& path, const Error& error) {
  if (error.message.starts_with(path)) return error;
  return {fmt::format("{}: {}", path, error.message)};
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

}  // namespace

Result<ConformFile> conform_recording(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader header = reader->header();
  ConformFile file{.file = path, .steps = 0, .mismatch = {}};
  auto recorded = make_recording_workload(std::move(*reader));
  const RecordingWorkload& workload = *recorded;
  std::optional<ConnectorLog> connector;
  if (recorded->connector() != nullptr) connector.emplace(*recorded->connector());
  ConnectorLog* const log = connector ? &*connector : nullptr;
  ConformObserver observer(workload, log);
  LockstepConfig config;
  config.engine = header.options.config;
  config.device.plan.num_blocks = header.num_blocks;
  config.device.plan.groups = header.groups;
  config.connector.load_failure_policy = kv_transfer(header, log).kv_load_failure_policy;
  SessionParts parts;
  parts.clients = std::move(recorded);
  parts.attach = [&](std::int32_t, Workload*) {
    return Onlooker{.connector = log, .observer = &observer};
  };
  const auto session = Session::open(config, std::move(parts));
  if (!session) return fail(fmt::format("{}: {}", path, session.error().message));
  file.mismatch = compare_header(header, (*session)->scheduler());
  if (!file.mismatch) {
    const auto report = (*session)->run();
    if (!report) return tl::unexpected(with_path(path, report.error()));
    file.steps = report->summary.steps;
    file.is_stuck = report->summary.verdict == Verdict::liveness;
    file.mismatch = observer.mismatch();
    if (!file.mismatch)
      file.mismatch =
          compare_end(workload.end(), {.steps = file.steps, .unfinished = observer.unfinished()});
  }
  if (file.mismatch) file.mismatch->file = path;
  return file;
}

Result<ConformSummary> conform_recordings(std::vector<std::string> paths, int jobs,
                                          const std::function<void(const ConformFile&)>& done) {
  std::ranges::sort(paths);
  std::vector<Result<ConformFile>> results(paths.size(), ConformFile{});
  std::mutex report;
  for_each_in_parallel(std::ssize(paths), jobs, [&](std::int64_t index) {
    const auto i = static_cast<std::size_t>(index);
    results[i] = conform_recording(paths[i]);
    const std::scoped_lock lock(report);
    if (done && results[i]) done(*results[i]);
  });
  ConformSummary summary;
  for (Result<ConformFile>& file : results) {
    if (!file) return tl::unexpected(file.error());
    summary.steps += file->steps;
    if (file->is_stuck) ++summary.stuck;
    if (!file->mismatch) ++summary.agreed;
    summary.files.push_back(std::move(*file));
  }
  return summary;
}

}  // namespace lockstep
