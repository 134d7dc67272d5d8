#include "sim/conform/conform.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "base/parallel.h"
#include "base/stop_signal.h"
#include "sim/conform/conform_run.h"
#include "sim/recording/recording_workload.h"

namespace lockstep {
namespace {

// Unfinished requests, as the end line lists them.
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
  if (const std::string what = unfollowed_input(header); !what.empty())
    return fail(fmt::format("{}:1: {}", path, what));
  if (!engine.empty()) header.options.config.engine = engine;
  ConformFile file{.file = path,
                   .engine = header.engine.text(),
                   .judged_as = header.options.config.engine,
                   .mismatch = {}};
  const auto opened = ConformRun::open(header, std::move(recorded));
  if (!opened) return fail(fmt::format("{}:1: {}", path, opened.error().message));
  ConformRun& judged = **opened;
  const RecordingWorkload& workload = judged.workload();
  const ConformObserver& observer = judged.observer();
  file.mismatch = judged.compare_header(header);
  if (!file.mismatch) {
    const auto report = judged.session().run();
    if (!report) return tl::unexpected(report.error());
    file.steps = report->summary.steps;
    file.is_stuck = report->summary.verdict == Verdict::liveness;
    file.wait_cycle = report->summary.wait_cycle;
    file.mismatch = observer.mismatch();
    if (!file.mismatch) file.cut_off = cut_off_text(workload.end());
    if (!file.mismatch && file.cut_off.empty())
      file.mismatch =
          compare_end(workload.end(), {.steps = file.steps,
                                       .unfinished = observer.unfinished(),
                                       .steps_in_flight = workload.end().steps_in_flight,
                                       .failed_check = workload.end().failed_check,
                                       .failed_what = workload.end().failed_what});
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

// A thread would otherwise lose the exception.
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
    return conform_workload(path, recording->header, make_recording_workload(recording, path),
                            engine);
  });
}

ConformSummary conform_recordings(std::vector<std::string> paths, const ConformOptions& options) {
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

}  // namespace lockstep
