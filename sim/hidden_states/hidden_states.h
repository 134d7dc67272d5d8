// Hidden states of finished requests: extracted from the cache, compared, written to files on a
// simulated disk, and read by a trainer that polls for them. The engine continues while files are
// written, on a disk that is slow, fails and tears writes.
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

// The hidden states of a finished request as a trainer receives them, and their file.

// The rows of one layer.
struct HiddenStateRows {
  std::string layer;  // its name in the plan
  DType dtype = DType::bf16;
  std::int64_t num_heads = 0;
  std::int64_t row_size_bytes = 0;  // of a head
  std::vector<std::uint8_t> bytes;  // [num_tokens, num_heads, row]
};

struct HiddenStates {
  std::string request;
  std::vector<ContentId> contents;  // one per token, which identifies its prefix
  std::vector<HiddenStateRows> layers;
};

// Returns a safetensors file: a tensor [num_tokens, num_heads, hidden_size] per layer, under the
// layer's name, and `content_ids`, [num_tokens], U64. REQUIRES: every layer has rows for all
// tokens.
std::vector<std::uint8_t> hidden_state_file(const HiddenStates& states);

// Names of files: the request's name with everything except letters, digits, '.', '_' and '-' as
// %XX, and a number after it if an earlier request had the same name. Example: "a/b" gives
// "a%2Fb.safetensors", then "a%2Fb-2.safetensors".
class HiddenStateFileNames {
 public:
  // Returns a name that no earlier call returned.
  std::string next(std::string_view request);

 private:
  std::set<std::string> used_;
};

// Extracts the hidden states of finished requests from the cache and compares them with what the
// model expects for their tokens. An engine provides training data for draft models this way
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

  // Starts an empty program for the step.
  void begin(std::int64_t step);
  // Adds the extractions of a finished request, one per hidden-state layer. Without such layers,
  // nothing. A request without a row in the batch is only counted.
  void add(RequestId id);
  const StepProgram& program() const { return program_; }
  // Compares the rows that the backend returned for the program. Errors: too few or too many bytes.
  Checked compare(const StepReadback& readback);
  // Returns the rows by request. REQUIRES: compare() of this readback found no difference.
  std::vector<HiddenStates> states(const StepReadback& readback);

  std::int64_t rows_compared() const { return rows_compared_; }
  // Requests that finished while preempted: with asynchronous scheduling, an earlier step's output
  // may end a request that the current step has preempted. Their blocks are gone.
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

// A disk in virtual time: writes take time and are visible while in progress; they fail, and a
// failed write may leave a part; renames take time and also fail.
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
  std::int32_t fail_percent = 0;   // % of writes and of renames that fail
  std::int32_t torn_percent = 50;  // % of failed writes that leave a part
  bool operator==(const DiskOptions&) const = default;
};

// Identifies one write or rename, in the order of the calls.
enum class DiskTicket : std::uint64_t {};

struct DiskCompletion {
  DiskTicket ticket{};
  bool is_done = false;  // false: it failed
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

  // Starts a write: empties the file at once, then fills it with `bytes` over time. REQUIRES: no
  // write of it is in progress; times never decrease, over all calls.
  DiskTicket write(std::int64_t now_ns, const std::string& path, std::vector<std::uint8_t> bytes);
  // Starts a rename, which replaces `to`. REQUIRES: `from` exists when the rename completes.
  DiskTicket rename(std::int64_t now_ns, const std::string& from, const std::string& to);

  // Removes a file at once. REQUIRES: it exists; no write or rename of it is in progress.
  void remove(const std::string& path);

  // Returns the next operation that has completed by that time; absent: none. Call it until it is
  // absent.
  std::optional<DiskCompletion> complete(std::int64_t now_ns);
  // Returns when the next operation completes; absent: none is in progress.
  std::optional<std::int64_t> next_due_ns() const;

  // Returns the bytes that are there at that moment; absent: no such file.
  std::optional<std::vector<std::uint8_t>> read(std::int64_t now_ns, const std::string& path) const;
  std::vector<std::string> paths() const;
  const DiskCounts& counts() const { return counts_; }

 private:
  struct File {
    std::vector<std::uint8_t> bytes;  // all bytes of the write
    std::int64_t begin_ns = 0;        // of the write; bytes appear evenly until end_ns
    std::int64_t end_ns = 0;
  };
  // An operation in progress; its outcome is decided when it starts.
  struct UnderWay {
    DiskTicket ticket{};
    bool is_done = false;
    std::string path;
    std::string renamed_to;     // empty: a write
    std::size_t num_bytes = 0;  // of a write: bytes that remain
  };
  // Returns when an operation that starts now completes. Checks that time does not decrease.
  std::int64_t end_ns(std::int64_t now_ns);

  const DiskOptions options_;
  SeededRandom random_;
  std::map<std::string, File> files_;
  std::multimap<std::int64_t, UnderWay> under_way_;  // by completion time
  std::uint64_t num_tickets_ = 0;
  std::int64_t now_ns_ = 0;
  DiskCounts counts_;
};

// Files that an observer sees complete or not at all, on a disk that fails: each is written under a
// temporary name, and renamed when it is complete.
//
// (1) Under a name that was put, read() finds nothing, or all bytes of one put() of that name;
//     after the last put of a name was reported done, those of that put.
// (2) Every put is reported once: done, or given up after `tries_max` failures.
// (3) The temporary file of a failed try is removed.

inline constexpr std::string_view kAside = ".part";  // after a name, before a number

class WholeFiles {
 public:
  // `writes_in_place`: a planted defect that writes under the final name. `tries_max`: at least 1.
  WholeFiles(Disk& disk, std::int32_t tries_max, bool writes_in_place = false)
      : disk_(disk), tries_max_(tries_max), writes_in_place_(writes_in_place) {}

  struct Outcome {
    std::string name;
    bool is_done = false;
  };

  // Starts to write a file. REQUIRES: no put of that name is in progress.
  void put(std::int64_t now_ns, const std::string& name, std::vector<std::uint8_t> bytes);
  // Returns the puts that ended since the last call, up to that time, and starts renames and
  // retries. Called at every Disk::next_due_ns(): it consumes the disk's completions, all of which
  // are its own.
  std::vector<Outcome> take_outcomes(std::int64_t now_ns);
  std::int64_t num_retries() const { return num_retries_; }

 private:
  struct Put {
    std::string name;
    std::string aside;  // temporary name of this try
    std::vector<std::uint8_t> bytes;
    std::int32_t tries = 0;
    bool is_written = false;  // true: the rename is in progress
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
  hidden_save_race,  // a file is written under its final name
};
template <>
inline constexpr char kWordJoint<HiddenStateDefect> = '-';

// Writes files of hidden states and polls for them as a trainer does, every 50 us of virtual time.
//
// (1) A file is expected from save() until the trainer has seen and removed it.
// (2) Polling stops while no file is expected, so a run without hidden states costs nothing.
class WatchedFiles {
 public:
  WatchedFiles(std::uint64_t seed, HiddenStateDefect defect);

  // Saves the hidden states of a request that `step` ended. Times never decrease, over all calls.
  void save(std::int64_t now_ns, std::int64_t step, const HiddenStates& states);
  // Polls from the last call up to this time. Returns a divergence for an incomplete or wrong file.
  Checked look(std::int64_t now_ns);
  // Polls until every file has been seen.
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

// The memory check of a run's hidden states: extracts them when their request ends, rank by rank,
// compares them, and follows them through files that a trainer reads.
//
// Files exist only with a single rank. Several ranks each read their own part of a row, so none has
// a complete one.
class HiddenStateCheck final : public MemoryCheck {
 public:
  // Receives the hidden states of the requests that a step's output ended, after they compared
  // equal. An error ends the run.
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
  // Extracts and compares on one rank.
  Checked extract(Rank& rank, std::span<const StoppedRequest> stopped);
  // Saves the extracted rows and passes them to the sink.
  Checked keep(Rank& rank, std::int64_t now_ns);

  WatchedFiles files_;
  Sink sink_;
  RunSummary* summary_ = nullptr;
  BackendConfig config_;  // of the whole model
  std::deque<Rank> ranks_;
};

}  // namespace lockstep
