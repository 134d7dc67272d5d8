// Recordings against the model: the reference scheduler receives the engine's inputs and must
// decide exactly as the engine did, in every field of every step.
//
// Compared, in the recording's own terms and order: scheduled (order, tokens, computed, new and
// resumed, blocks per group, drafts), preempted, finished, common_prefix_blocks, zero, running,
// waiting, free_blocks, tables, stopped, stored, evicted, cleared, the result of
// reset_prefix_cache, output_of_step, the derived block sizes, and the unfinished requests. With a
// KV connector also its queries with their local tokens, skipped, loading and held. What the model
// returned is an input; more tokens than the decision can bring are a mismatch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "traces/formats/recording.h"

namespace lockstep {

struct ConformMismatch {
  std::string file;
  std::int64_t step = -1;  // -1: the header or the end line
  std::string what;        // "scheduled[2].blocks[0]", "free_blocks", ...
  std::string recorded;    // JSON text
  std::string model;
};

struct ConformFile {
  std::string file;
  std::string engine;     // as the recording names it
  std::string judged_as;  // the profile: of that engine, of the nearest release, or as asked for
  std::int64_t steps = 0;
  std::string cut_off{};                    // as cut_off_text()
  std::optional<ConformMismatch> mismatch;  // the first one; absent: agreed
  bool is_stuck = false;     // it ends with requests that wait for each other, and nothing runs
  std::string wait_cycle{};  // which of them waits for which
};

struct ConformSummary {
  std::vector<ConformFile> files;    // sorted by name
  std::vector<RefusedFile> refused;  // likewise; none of them is in `files`
  std::int64_t agreed = 0;
  std::int64_t steps = 0;
  std::int64_t stuck = 0;  // recordings that end in a cycle of waiting requests
};

// `engine` is the profile to judge by; empty: that of the recording's engine. An Error: the file
// cannot be read, its engine has no profile, or it holds inputs that no engine can receive.
Result<ConformFile> conform_recording(const std::string& path, const std::string& engine = {});
// The same, of what has been read.
Result<ConformFile> conform_recording(const std::string& path,
                                      std::shared_ptr<const Recording> recording,
                                      const std::string& engine);

struct ConformOptions {
  std::string engine;  // as above
  int jobs = 1;        // files at a time; results do not depend on it
  // Called after each file, from one thread at a time, in any order.
  std::function<void(const std::string& file)> done{};
};
ConformSummary conform_recordings(std::vector<std::string> paths, const ConformOptions& options);

}  // namespace lockstep
