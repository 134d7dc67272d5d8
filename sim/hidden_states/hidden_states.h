// Files of hidden states on a simulated disk, and a trainer that polls for them: the engine
// continues while they are written, on a disk that is slow, fails and tears writes.
//
// Invariants
// (1) A file that the trainer can see is complete from the first moment, and holds its request's
//     rows. Anything else is a finding of Phase::hidden_file.
// (2) Every file appears, after the last step at the latest.
// (3) All of this depends only on the seed and the times of the steps.
//
// Not simulated: a trainer that lists the folder instead of opening the file that it waits for.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/names.h"
#include "base/result.h"
#include "base/seeded_random.h"
#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/engine/run_memory.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// The hidden states of a request that has ended, as a trainer gets them, and their file.

// Of one layer.
struct HiddenStateRows {
  std::string layer;  // its name in the plan
  DType dtype = DType::bf16;
  std::int64_t num_heads = 0;
  std::int64_t row_size_bytes = 0;  // of a head
  std::vector<std::uint8_t> bytes;  // [num_tokens, num_heads, row]
};

struct HiddenStates {
  std::string request;
  std::vector<ContentId> contents;  // one for each token
  std::vector<HiddenStateRows> layers;
};

// A safetensors file: a tensor [num_tokens, num_heads, hidden_size] for each layer, under its name,
// and `content_ids`, [num_tokens].
std::vector<std::uint8_t> hidden_state_file(const HiddenStates& states);

// Names of files: that of the request with everything but letters, digits, '.', '_' and '-' as
// %XX, and a number behind it where another request of that name was before.
class HiddenStateFileNames {
 public:
  std::string next(std::string_view request);

 private:
  std::set<std::string> used_;
};

// The hidden states of finished requests, read completely from the cache and compared with what the
// model expects for their tokens. Training data for draft models is taken from an engine this way
// (vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py).
//
// Invariants
// (1) For every request that ends by its own output: all computed tokens, once, in order, from 0 to
//     the token before the last sampled one.
// (2) They are read after the step that ends the request, when its blocks are free and not yet
//     reallocated.
//
// Not here: aborted requests, whose hidden states are not extracted; files.

class HiddenStateExtraction {
 public:
  HiddenStateExtraction(const MemoryModel& model, Worker& worker);

  void begin(std::int64_t step);
  void add(RequestId id);
  const StepProgram& program() const { return program_; }
  // Of the program's readback.
  Checked compare(const StepReadback& readback);
  // What was read, request by request. REQUIRES: it has compared equal.
  std::vector<HiddenStates> states(const StepReadback& readback);

  std::int64_t rows_compared() const { return rows_compared_; }
  // Requests whose end came with the output of a step before the one that preempted them.
  std::int64_t requests_without_a_row() const { return requests_without_a_row_; }

 private:
  Divergence difference(const RowExtraction& extraction, RequestId id, std::int64_t token,
                        std::span<const std::uint8_t> expected,
                        std::span<const std::uint8_t> found_row) const;

  const MemoryModel& model_;
  Worker& worker_;
  std::vector<std::int32_t> layers_;  // of hidden states
  StepProgram program_;
  std::vector<RequestId> requests_;  // of the program's extractions
  std::int64_t rows_compared_ = 0;
  std::int64_t requests_without_a_row_ = 0;
};

// A disk in virtual time: writes take a while and are visible while in progress; they fail, and a
// failed write may leave a part; renames take a while and also fail.
//
// Invariants
// (1) Its behaviour depends only on the seed and its calls, in order.
// (2) read() shows what any observer would see at that moment: of a write in progress, the part
//     that is written. A rename is atomic.
// (3) Every write and every rename completes once. A failed write leaves a part of its bytes (a
//     torn write), or nothing; a failed rename changes nothing.
// (4) At most one write per file is in progress.
//
// Not simulated: folders, space, a crash of the machine, a disk that reports false success.

struct DiskOptions {
  std::uint64_t seed = 0;
  std::int64_t delay_ns_min = 100'000;
  std::int64_t delay_ns_max = 2'000'000;
  std::int32_t fail_percent = 0;   // of writes and of renames
  std::int32_t torn_percent = 50;  // of failed writes leave a part
  bool operator==(const DiskOptions&) const = default;
};

enum class DiskTicket : std::uint64_t {};

struct DiskCompletion {
  DiskTicket ticket{};
  bool is_done = false;  // otherwise it failed
};

struct DiskCounts {
  std::int64_t writes = 0;
  std::int64_t writes_failed = 0;
  std::int64_t writes_torn = 0;  // of the failed ones
  std::int64_t renames = 0;
  std::int64_t renames_failed = 0;
};

class Disk {
 public:
  explicit Disk(const DiskOptions& options) : options_(options), random_(options.seed) {}

  // Empties the file, then fills it with `bytes` over time. REQUIRES: no write of it is in
  // progress; times never decrease, over all calls.
  DiskTicket write(std::int64_t now_ns, const std::string& path, std::vector<std::uint8_t> bytes);
  // `to` is replaced. REQUIRES: `from` exists when it is carried out.
  DiskTicket rename(std::int64_t now_ns, const std::string& from, const std::string& to);

  // Removes it at once. REQUIRES: it exists; no write or rename of it is in progress.
  void remove(const std::string& path);

  // The next operation completed by then; absent: none.
  std::optional<DiskCompletion> complete(std::int64_t now_ns);
  std::optional<std::int64_t> next_due_ns() const;

  // What is there at that moment; none: no such file.
  std::optional<std::vector<std::uint8_t>> read(std::int64_t now_ns, const std::string& path) const;
  std::vector<std::string> paths() const;
  const DiskCounts& counts() const { return counts_; }

 private:
  struct File {
    std::vector<std::uint8_t> bytes;  // that will be there
    std::int64_t begin_ns = 0;        // of the write; bytes appear evenly until end_ns
    std::int64_t end_ns = 0;
  };
  struct UnderWay {
    DiskTicket ticket{};
    bool is_done = false;
    std::string path;
    std::string renamed_to;     // empty: a write
    std::size_t num_bytes = 0;  // that stay
  };
  std::int64_t end_ns(std::int64_t now_ns);

  const DiskOptions options_;
  SeededRandom random_;
  std::map<std::string, File> files_;
  std::multimap<std::int64_t, UnderWay> under_way_;
  std::uint64_t num_tickets_ = 0;
  std::int64_t now_ns_ = 0;
  DiskCounts counts_;
};

// Files that an observer sees whole or not at all, on a disk that fails: each is written aside,
// under another name, and renamed when all of it is there.
//
// (1) Under a name that was put, read() finds nothing, or all bytes of one put() of that name;
//     after the last put of a name was reported done, those of that one.
// (2) Every put is reported once: done, or given up after `tries_max` failures.
// (3) What a try that failed has left aside is removed.

inline constexpr std::string_view kAside = ".part";  // behind a name, and a number

class WholeFiles {
 public:
  // `writes_in_place`: a planted defect, nothing is written aside.
  WholeFiles(Disk& disk, std::int32_t tries_max, bool writes_in_place = false)
      : disk_(disk), tries_max_(tries_max), writes_in_place_(writes_in_place) {}

  struct Outcome {
    std::string name;
    bool is_done = false;
  };

  // REQUIRES: no put of that name is in progress.
  void put(std::int64_t now_ns, const std::string& name, std::vector<std::uint8_t> bytes);
  // What has been reported since the last call, up to that time. To be called at every
  // Disk::next_due_ns(): it takes the disk's completions, all of which are its own.
  std::vector<Outcome> take_outcomes(std::int64_t now_ns);
  std::int64_t num_retries() const { return num_retries_; }

 private:
  struct Put {
    std::string name;
    std::string aside;
    std::vector<std::uint8_t> bytes;
    std::int32_t tries = 0;
    bool is_written = false;
  };
  void write(std::int64_t now_ns, Put put);

  Disk& disk_;
  const std::int32_t tries_max_;
  const bool writes_in_place_;
  std::map<DiskTicket, Put> under_way_;
  std::uint64_t num_asides_ = 0;
  std::int64_t num_retries_ = 0;
};

// Defects that can be planted in the transfer of hidden states; docs/reference/mutants.md describes
// them.
enum class HiddenStateDefect : std::uint8_t {
  none,
  hidden_save_race,  // a file is written under the name that it is looked for
};
template <>
inline constexpr char kWordJoint<HiddenStateDefect> = '-';

class WatchedFiles {
 public:
  WatchedFiles(std::uint64_t seed, HiddenStateDefect defect);

  // What a step has ended. Time never goes back, over all calls.
  void save(std::int64_t now_ns, std::int64_t step, const HiddenStates& states);
  // What the trainer has seen since the last call, up to this time.
  Checked look(std::int64_t now_ns);
  // Until every file has been seen.
  Checked finish();

  std::int64_t num_seen() const { return num_seen_; }

 private:
  struct Expected {
    std::string request;
    std::int64_t step = 0;
    std::vector<std::uint8_t> bytes;
  };
  Checked look_for_all();
  static Divergence difference(const std::string& name, const Expected& expected,
                               std::span<const std::uint8_t> seen);

  Disk disk_;
  WholeFiles files_;
  HiddenStateFileNames names_;
  std::map<std::string, Expected> expected_;  // by file, not seen yet
  std::int64_t now_ns_ = 0;
  std::int64_t num_seen_ = 0;
};

// Hidden states of a run: read out of the cache when their request ends, rank by rank, compared,
// and followed through files that a trainer looks at.
//
// Only one rank alone has rows that are whole: several read their parts and leave no files.
class HiddenStateCheck final : public MemoryCheck {
 public:
  // Receives what a step's output has ended, once it has compared equal. An error ends the run.
  using Sink = std::function<Result<void>(std::span<const HiddenStates>)>;

  HiddenStateCheck(std::uint64_t seed, HiddenStateDefect defect) : files_(seed, defect) {}
  void set_sink(Sink sink) { sink_ = std::move(sink); }

  void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
             RunSummary& summary) override;
  Checked output_taken(std::span<const StoppedRequest> stopped, std::int64_t now_ns) override;
  Checked finish(bool agreed) override;
  std::vector<std::string> not_checked() const override;

 private:
  struct Rank {
    const RankMemory memory;
    HiddenStateExtraction extraction;
    StepReadback readback;
  };
  Checked extract(Rank& rank, std::span<const StoppedRequest> stopped);
  Checked keep(Rank& rank, std::int64_t now_ns);

  WatchedFiles files_;
  Sink sink_;
  RunSummary* summary_ = nullptr;
  BackendConfig config_;  // of the whole model
  std::deque<Rank> ranks_;
};

}  // namespace lockstep
