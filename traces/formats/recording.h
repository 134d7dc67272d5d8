// An engine recording: a scheduler's decisions, step by step, with their inputs. docs/formats.md,
// "Engine recording", documents every key; the structs follow it.
//
// Invariants
// (1) Absent and present differ where an engine distinguishes them (std::optional); a list that an
//     engine omits when empty (`before`, `preempted`, `zero`, ...) is empty.
// (2) Order is the file's: of events, of scheduled requests, of blocks, of queues.
// (3) Reading a written recording gives the same recording, and the same bytes where the file has
//     this format's order of keys; `pause` is written as `pause_state`.
//
// Not checked here: whether the decisions make sense. conform and audit check that.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/scheduler_types.h"
#include "traces/formats/worker_facts.h"

namespace lockstep {

struct Trace;  // request_trace.h

// Options that limit request inputs other than tokens; absent: not given.
struct InputOptions {
  std::optional<std::int32_t> max_loras{};  // adapters in a step
  std::optional<std::int32_t> mm_max_item_embeds{};
  std::optional<bool> disable_chunked_mm_input{};
  std::optional<bool> is_encoder_decoder{};
  std::string runner{};  // "pooling": the model samples nothing
  bool operator==(const InputOptions&) const = default;
};

// Options as a file gives them: the values, and which of them were written down (in their order).
// The others keep the defaults of EngineConfig.
struct EngineOptions {
  EngineConfig config;
  std::vector<std::string> given;
  InputOptions inputs{};  // of a recording
  bool operator==(const EngineOptions&) const = default;
};

struct RecordedEngine {
  std::string name;        // "vllm"
  std::string version;     // "0.22.1"
  std::string policies{};  // in which it differs from that: ",freed_blocks=append"
  // What it calls itself.
  std::string text() const { return name + "-" + version + policies; }
  // The profile that it is judged by: its own, or else of the nearest release of vLLM. Of another
  // engine what it calls itself, which has no profile.
  std::string profile() const;
  bool operator==(const RecordedEngine&) const = default;
};

// The real worker that held the cache: `runner` of several that the engine has, `states` its kind
// of layers that keep states, where one was chosen, `plant` a defect planted in it.
struct WorkedBy {
  RecordedEngine engine;
  std::string runner{};
  std::string states{};
  std::string plant{};
  std::string text() const;  // "vllm-0.33.0, runner v2"
  bool operator==(const WorkedBy&) const = default;
};

struct RecordedConnectorConfig {
  bool fail_on_load_error = false;  // kv_load_failure_policy: "fail" or "recompute"
  bool supports_hybrid_groups = false;
  std::string kv_role{};
  bool requires_kv_delivery = false;  // a preempted request's output in flight is dropped
  bool divergent_hits = false;        // it completes hits that are deeper in one group
  bool waits_for_sends = false;       // while blocks are sent it says that frees are pending
  std::int32_t parts = 0;             // connectors beneath it
  // Of one of vLLM's own: which, and its options as JSON, the rest of the object's keys in order.
  std::string name{};
  std::vector<std::pair<std::string, std::string>> options{};
  bool operator==(const RecordedConnectorConfig&) const = default;
};

struct RecordingHeader {
  RecordedEngine engine;
  std::string family;
  std::int64_t seed = 0;
  EngineOptions options;  // config.engine is set from `engine`
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks = 0;
  std::optional<RecordedConnectorConfig> connector;
  std::int64_t scheduler_block_size = 0;
  std::int64_t hash_block_size = 0;
  // Rows of the encoder: of one step, and of its cache.
  std::optional<std::int32_t> encoder_compute_budget{};
  std::optional<std::int32_t> encoder_cache_size{};
  bool has_cache_events = false;           // steps have `events`: hash_algorithm is there
  bool has_held_drafts = false;            // ... `held_drafts`
  bool has_stale_outputs = false;          // ... `stale_outputs`
  std::optional<WorkedBy> worker_facts;    // steps have `facts`, of this worker
  std::vector<std::string> beyond_format;  // options that decide and have no key: x_beyond_format
  bool operator==(const RecordingHeader&) const = default;
};

// One entry of `before` or `during`: what clients did.
struct RecordedEvent {
  enum class Kind : std::uint8_t {
    add,
    abort,
    reset_prefix_cache,
    pause_state,
    output,
    chunk,           // the next input of a session
    close,           // a session has no more
    grammar_ready,   // a request no longer needs to wait for its grammar
    grammar_failed,  // ... will never have one
    reset_encoder_cache,
  };
  Kind kind = Kind::add;
  // add, chunk; arrival_ns is the recorded arrival in seconds. Positions of a chunk's items count
  // from its start.
  RequestSpec request;
  bool priority_given = false;   // add: the key was there (0 is a priority too)
  std::string name;              // of the others: whose
  bool needs_grammar = false;    // add: `structured`
  bool is_session = false;       // add: `resumable`
  bool is_pooling = false;       // add: ends with a pooled output, and has no `max_tokens`
  std::string session_id;        // add: a name for its cache events
  std::string parent;            // add: of which it is one of several samples; decides nothing
  bool reset_succeeded = false;  // reset_prefix_cache: what the engine returned
  bool resets_running = false;   // reset_prefix_cache: all running requests were preempted first
  PauseState pause_state = PauseState::unpaused;
  // output: of that step, processed here; only in `during`, where events follow it and a further
  // output follows these.
  std::int64_t output_of_step = 0;
  bool operator==(const RecordedEvent&) const = default;
};

using BlocksPerGroup = std::vector<std::vector<BlockId>>;

struct RecordedScheduled {
  std::string id;
  std::int32_t tokens = 0;
  bool is_new = false;
  bool resumed = false;
  std::int32_t computed = 0;
  std::optional<BlocksPerGroup> blocks;  // absent: the recording says null, none were handed over
  std::vector<std::int32_t> spec;        // draft tokens to verify; -1 is a placeholder
  std::vector<std::int32_t> encode{};    // items that the encoder computes now, by number
  bool operator==(const RecordedScheduled&) const = default;
};

struct RecordedTable {
  std::string id;
  BlocksPerGroup blocks;
  bool operator==(const RecordedTable&) const = default;
};

struct RecordedTokens {
  std::string id;
  std::vector<std::int32_t> tokens;
  bool operator==(const RecordedTokens&) const = default;
};

struct RecordedConnectorAnswer {
  std::string id;
  std::int32_t local = 0;
  std::optional<std::int32_t> external;  // absent: null, "ask again"
  bool async = false;
  bool operator==(const RecordedConnectorAnswer&) const = default;
};

struct RecordedWorker {
  std::vector<std::string> received;
  std::vector<std::string> sent;
  std::vector<BlockId> invalid_blocks;
  std::vector<std::string> failed{};         // of those received: nothing of them arrived
  std::vector<std::int64_t> jobs{};          // transfers that ended, by number
  std::vector<std::int64_t> store_events{};  // likewise
  std::vector<TransferCount> enqueued{};     // transfers of host pages
  std::vector<TransferCount> completed{};
  bool operator==(const RecordedWorker&) const = default;
};

// What a grammar said of drafts.
struct RecordedGrammar {
  std::string id;
  std::int32_t asked = 0;
  std::int32_t valid = 0;  // number of leading drafts that it accepts
  bool operator==(const RecordedGrammar&) const = default;
};

struct RecordedEncoderEntry {
  std::string id;
  std::vector<std::string> holders;  // requests, ascending
  bool operator==(const RecordedEncoderEntry&) const = default;
};

struct RecordedCount {
  std::string id;
  std::int32_t count = 0;
  bool operator==(const RecordedCount&) const = default;
};

// An output for a request that was preempted or had ended since its step.
struct RecordedStaleOutput {
  std::string id;
  std::int64_t of_step = 0;
  std::int32_t taken = 0;  // tokens of it that were still appended to the request
  bool operator==(const RecordedStaleOutput&) const = default;
};

struct RecordedStopped {
  std::string id;
  std::string reason;  // "stop", "length", "abort", "error"
  bool operator==(const RecordedStopped&) const = default;
};

struct RecordedSkipped {
  std::string id;
  std::string status;  // "WAITING", "WAITING_FOR_REMOTE_KVS", "PREEMPTED", ...
  bool operator==(const RecordedSkipped&) const = default;
};

// What steps have of requests that bring more than tokens. Lists that are empty are left out.
struct RecordedInputs {
  std::vector<std::string> free_encoder{};    // items whose rows the worker drops before the step
  std::vector<std::int32_t> encoder_slots{};  // rows free; and free or reclaimable
  std::optional<std::vector<RecordedEncoderEntry>> encoder_cache{};
  std::optional<std::vector<std::string>> encoder_freeable{};
  std::vector<std::string> holding{};      // waiting requests that hold blocks: a queue
  std::vector<RecordedSkipped> blocked{};  // waiting requests that wait for a grammar or for input
  std::vector<RecordedGrammar> grammar{};
  bool is_deferred = false;  // sampled after the previous step's output was processed
  std::vector<RecordedTokens> drafts_in_flight{};
  std::vector<RecordedTokens> spec_in_flight{};  // their outcome; -1 is padding
  std::vector<RecordedCount> invalid_drafts{};   // how many of them grammars cut
  std::vector<std::string> pooled{};             // whose pooled output came
  bool operator==(const RecordedInputs&) const = default;
};

// What the workers of one of several connectors reported.
struct RecordedPartReport {
  std::vector<std::string> received{}, sent{};
  bool operator==(const RecordedPartReport&) const = default;
};

// Fields of steps with a KV connector in newer releases. The decisions of vLLM's own connectors are
// kept as JSON: no code depends on them.
struct RecordedTransfers {
  std::optional<std::vector<RecordedSkipped>> kv_holding{};  // a queue of its own, with status
  std::vector<std::string> deferred{};  // passed-over requests of both queues; ascending
  bool loads_within = false;            // the step contains a load that is not asynchronous
  std::string parts{}, parts_held{}, offload{};    // JSON; empty: not there
  std::vector<RecordedPartReport> parts_worker{};  // empty: not there
  bool operator==(const RecordedTransfers&) const = default;
};

// What a hash covers in addition to tokens: an adapter's name, a salt, a digest, or with a position
// an image and the offset of its first token from the block's first token.
struct RecordedExtraKey {
  std::string value;
  std::optional<std::int64_t> place{};
  bool operator==(const RecordedExtraKey&) const = default;
};

// What page workers receive in a step (reference/types/host_pages.h), by request, in scheduling
// order; empty entries are left out.
struct RecordedPages {
  std::vector<PageTransfer> transfers{};
  std::vector<std::pair<std::string, std::vector<RowMirror>>> mirrors{};
  bool all_resident = false;
  std::vector<std::pair<std::string, ResidencyUpdate>> residency{};
  std::int64_t free_host_blocks = 0;
  bool operator==(const RecordedPages&) const = default;
};

// A change of the prefix cache, as an engine reports it to routers. Hashes are the engine's own.
struct RecordedCacheEvent {
  enum class Kind : std::uint8_t { stored, removed, cleared };
  Kind kind = Kind::stored;
  std::int32_t group = 0;
  std::vector<std::string> block_hashes{};  // hexadecimal
  std::optional<std::string> parent{};      // stored: of the block before; absent: none
  std::vector<std::int32_t> token_ids{};    // stored: of the whole range
  std::int32_t block_size = 0;              // stored: tokens of a block
  std::vector<std::vector<RecordedExtraKey>> extra_keys{};  // stored: per hash; empty: none
  // Stored: of the request; `medium` of removed blocks too.
  std::optional<std::int64_t> lora_id{};
  std::string lora_name{}, medium{}, session_id{}, kv_cache_spec_kind{};
  std::optional<std::int32_t> kv_cache_spec_sliding_window{};
  bool operator==(const RecordedCacheEvent&) const = default;
};

struct RecordedStep {
  std::int64_t step = 0;
  std::vector<RecordedEvent> before;
  std::optional<std::vector<RecordedConnectorAnswer>> connector;
  std::vector<RecordedScheduled> scheduled;
  std::vector<std::string> preempted;
  std::vector<std::string> finished;
  std::optional<std::vector<std::int32_t>> common_prefix_blocks;  // per group; gone in 0.33
  std::vector<BlockId> zero;
  std::vector<KVCacheBlockCopy> copies;  // the worker copies them before the step, in order
  std::optional<RecordedPages> pages{};
  std::vector<std::string> running;
  std::vector<std::string> waiting;
  std::optional<std::vector<RecordedSkipped>> skipped;
  std::int64_t free_blocks = 0;  // -1: unknown, of a recording from which requests were removed
  // Of requests that are not scheduled: drafts that are kept for a later step, by name.
  std::vector<RecordedTokens> held_drafts;
  std::optional<std::vector<RecordedTable>> tables;
  std::optional<std::vector<RecordedTable>> loading;
  std::vector<RecordedEvent> during;  // after the decision, before `output_of_step` arrived
  std::optional<RecordedWorker> worker;
  std::vector<RecordedTokens> sampled;
  std::optional<std::int64_t> output_of_step;
  std::vector<RecordedStaleOutput> stale_outputs;  // in order of arrival
  std::vector<RecordedStopped> stopped;
  std::optional<std::vector<RecordedTokens>> drafts;
  std::vector<std::string> held;
  std::int64_t stored = 0;
  std::int64_t evicted = 0;
  bool cleared = false;
  std::vector<RecordedCacheEvent> events;  // in order; only if the header enables them
  std::optional<WorkerStepFacts> facts;    // ... so too
  RecordedInputs inputs{};
  RecordedTransfers transfers{};
  bool operator==(const RecordedStep&) const = default;
};

struct RecordingEnd {
  std::int64_t steps = 0;
  std::vector<std::string> unfinished;
  // Number of last non-empty steps without an output: what they sampled is unknown.
  std::int64_t steps_in_flight = 0;
  // The engine raised an exception, in "schedule" or "update", after the last step; empty: none.
  // Events since that step.
  std::string raised_in{};
  std::vector<RecordedEvent> raised_before{};
  // The file ends before its end line, after `steps` whole steps: the process that wrote it was
  // killed, or still writes. The other fields are unknown.
  bool is_cut_off = false;
  // What ended the run that was recorded: "liveness", or "engine.exception" and the like. Empty: no
  // failure that the decisions do not show.
  std::string failed_check{};
  std::string failed_what{};
  bool operator==(const RecordingEnd&) const = default;
};
// "cut off after step 41"; empty: the recording is whole.
std::string cut_off_text(const RecordingEnd& end);

struct Recording {
  RecordingHeader header;
  std::vector<RecordedStep> steps;
  RecordingEnd end;
  bool operator==(const Recording&) const = default;
};

// Reads a recording step by step, so that memory does not grow with its length.
class RecordingReader {
 public:
  static Result<RecordingReader> open(const std::string& path);
  RecordingReader(RecordingReader&&) noexcept;
  RecordingReader& operator=(RecordingReader&&) noexcept;
  ~RecordingReader();

  const RecordingHeader& header() const;
  // "FILE:LINE" of the line read last.
  std::string place() const;
  // Reads the next step into `step`: true; false after the last whole one, when end() is set. A
  // file may be cut off between two lines or in its last line. Anything else (a line that is torn
  // and has a newline, steps out of order, lines after the end) is an Error.
  Result<bool> next(RecordedStep& step);
  // Requires: next() has returned false.
  const RecordingEnd& end() const;

 private:
  struct State;
  explicit RecordingReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

Result<Recording> read_recording(const std::string& path);

// The requests as a trace, for another engine, which samples at other steps than the recorded one.
// What came before step k arrives at k * step_ns: on a clock on which every step takes step_ns that
// is before step k again, as long as no engine idles longer. A request's output is as long as the
// recorded one; one that did not end gets all its max_tokens. Errors: a recording with a KV
// connector.
Result<Trace> trace_of(const Recording& recording, std::int64_t step_ns);

// Steps from a file, or from memory.
class RecordedSteps {
 public:
  explicit RecordedSteps(RecordingReader reader) : reader_(std::move(reader)) {}
  RecordedSteps(std::shared_ptr<const Recording> recording, std::string path)
      : recording_(std::move(recording)), path_(std::move(path)) {}
  RecordedSteps() = default;  // of a recording that grows: the step is there already

  Result<bool> next(RecordedStep& step) {
    if (reader_) return reader_->next(step);
    if (recording_ == nullptr) return true;
    if (at_ == recording_->steps.size()) return false;
    step = recording_->steps[at_++];
    return true;
  }
  const RecordingEnd& end() const { return reader_ ? reader_->end() : recording_->end; }
  std::string place() const {
    if (reader_) return reader_->place();
    return path_.empty() ? path_ : path_ + ":" + std::to_string(at_ + 1);  // a line per step
  }

 private:
  std::optional<RecordingReader> reader_;
  std::shared_ptr<const Recording> recording_;
  std::string path_;  // of the recording's file; empty: none
  std::size_t at_ = 0;
};

// The lines of a recording, each with its newline, keys in the format's order.
std::string recording_header_line(const RecordingHeader& header);
std::string recording_step_line(const RecordedStep& step);
std::string recording_end_line(const RecordingEnd& end);

// Writes a recording line by line to PATH.partial; close() makes it durable and gives it its name,
// so that PATH is never half a recording. Destroyed without close(), it leaves no file behind.
class RecordingWriter {
 public:
  static Result<RecordingWriter> create(const std::string& path, const RecordingHeader& header);
  RecordingWriter(RecordingWriter&&) noexcept;
  RecordingWriter& operator=(RecordingWriter&&) noexcept;
  ~RecordingWriter();
  Result<void> write(const RecordedStep& step);
  Result<void> close(const RecordingEnd& end);

 private:
  struct State;
  explicit RecordingWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
