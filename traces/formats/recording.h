// An engine recording: a scheduler's decisions, step by step, with their inputs. docs/formats.md,
// "Engine recording", documents every key; the structs follow it, in the order in which keys are
// written.
//
// Invariants
// (1) Absent and present differ where an engine distinguishes them (std::optional); a list that an
//     engine omits when empty (`before`, `preempted`, `zero`, ...) is empty.
// (2) Order is the file's: of events, of scheduled requests, of blocks, of queues.
// (3) Reading a written recording gives the same recording, and the same bytes where the file has
//     this format's order of keys; `pause` is written as `pause_state`.
// (4) Block ids are within the pool of their group, and every list per group has one entry per
//     group: readers refuse anything else.
//
// Not checked here: whether the decisions make sense. conform and audit check that.
#pragma once

#include <algorithm>
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

// Options that limit request inputs other than tokens; absent: the file does not state them.
// Recordings have them; saved cases and trace hints do not, because the model's scheduler has no
// such inputs.
struct InputOptions {
  std::optional<std::int32_t> max_loras{};           // adapters that may run in one step
  std::optional<std::int32_t> mm_max_item_embeds{};  // encoder rows of the largest item
  std::optional<bool> disable_chunked_mm_input{};
  std::optional<bool> is_encoder_decoder{};
  std::string runner{};  // "pooling": the model samples nothing
  bool operator==(const InputOptions&) const = default;
};

// Options as a file states them: the values, and the names of those that it states, in file order.
// The others keep the defaults of EngineConfig. The names are stored so that writing the options
// again gives the same bytes.
struct EngineOptions {
  EngineConfig config;
  std::vector<std::string> given;
  InputOptions inputs{};  // only of recordings
  bool operator==(const EngineOptions&) const = default;
};

// The engine that decided, as the recording names it.
struct RecordedEngine {
  std::string name;     // "vllm"
  std::string version;  // "0.22.1"
  // Policies that differ from the release, as parse_engine() reads them: ",freed_blocks=append".
  std::string policies{};
  // The full description: "vllm-0.22.1,freed_blocks=append".
  std::string text() const { return name + "-" + version + policies; }
  // Returns the profile that judges the recording: the engine's own, or else that of the nearest
  // release of vLLM with the same policies ("0.33.1.dev7" gives "vllm-0.33.0"). Another engine gets
  // its own text, for which no profile exists.
  std::string profile() const;
  bool operator==(const RecordedEngine&) const = default;
};

// The real worker that held the cache.
struct WorkedBy {
  RecordedEngine engine;
  // Which of the engine's model runners ran, which of its kinds of state layers, and the id of a
  // defect planted in it. Empty: the engine offers no choice, and no defect was planted.
  std::string runner{};
  std::string states{};
  std::string plant{};
  // For messages: "vllm-0.33.0, runner v2".
  std::string text() const;
  bool operator==(const WorkedBy&) const = default;
};

// A KV connector as the engine configured it: the traits by which the scheduler's decisions depend
// on it (KVConnectorTraits), and what identifies it.
struct RecordedConnectorConfig {
  // kv_load_failure_policy: "fail" ends a request whose load failed, "recompute" computes its
  // tokens.
  bool fail_on_load_error = false;
  // True if it accepts requests with several KV cache groups (vLLM's SupportsHMA).
  bool supports_hybrid_groups = false;
  std::string kv_role{};
  // True if the output in flight of a preempted request is dropped: its blocks, which the connector
  // would send, are gone.
  bool requires_kv_delivery = false;
  // True if its loads complete hits that are longer in one group than in another.
  bool divergent_hits = false;
  // True if it reports pending frees while it sends blocks; the scheduler then waits instead of
  // preempting.
  bool waits_for_sends = false;
  // Number of connectors that it combines; 0: it is a single one.
  std::int32_t parts = 0;
  // Name of a vLLM connector, and its options as JSON in file order. Empty name: another engine's.
  std::string name{};
  std::vector<std::pair<std::string, std::string>> options{};
  bool operator==(const RecordedConnectorConfig&) const = default;
};

// The first line: the configuration under which all steps were decided.
struct RecordingHeader {
  RecordedEngine engine;
  // Family and seed identify the recording within its collection; no decision depends on them.
  std::string family;
  std::int64_t seed = 0;
  EngineOptions options{};  // config.engine is set from `engine`
  std::vector<KVCacheGroupSpec> groups{};
  // Blocks of the device pool, null block included.
  std::int64_t num_blocks = 0;
  std::optional<RecordedConnectorConfig> connector{};
  // Tokens; the engine derives both from the groups: a multiple of every group's block, and the
  // unit of block hashes.
  std::int64_t scheduler_block_size = 0;
  std::int64_t hash_block_size = 0;
  // Encoder rows that one step may compute, and rows that the encoder's cache holds.
  std::optional<std::int32_t> encoder_compute_budget{};
  std::optional<std::int32_t> encoder_cache_size{};
  // Optional keys of steps that this header announces. Without the announcement an absent key means
  // "not recorded", with it "none".
  bool has_cache_events = false;           // `events`: the key hash_algorithm is present
  bool has_held_drafts = false;            // `held_drafts`
  bool has_stale_outputs = false;          // `stale_outputs`
  std::optional<WorkedBy> worker_facts{};  // `facts`, of this worker
  // Options of the engine that affect decisions and have no key in this format (x_beyond_format).
  // No profile follows them: conform names them in a mismatch, and the audit relaxes the rules that
  // they would break.
  std::vector<std::string> beyond_format{};
  bool operator==(const RecordingHeader&) const = default;
};

// One entry of `before` or `during`: a client's action between two decisions, or the place at which
// an earlier step's output was processed.
struct RecordedEvent {
  enum class Kind : std::uint8_t {
    add,
    abort,
    reset_prefix_cache,
    pause_state,
    output,
    // The next input of a session, whose previous one has been answered.
    chunk,
    // The session has no further input.
    close,
    // The request's grammar is compiled, so that it no longer waits; or it failed to compile.
    grammar_ready,
    grammar_failed,
    reset_encoder_cache,
  };
  Kind kind = Kind::add;
  // add, chunk. arrival_ns is the recorded arrival, which the file has in seconds. Positions of a
  // chunk's items count from the chunk's start.
  RequestSpec request{};
  // add: the key was present. A priority of 0 is written only if it was: 0 is also the default.
  bool priority_given = false;
  // add: `stop_token_ids` is an empty list. Without the key, a recording may leave such tokens out.
  bool has_no_stop_tokens = false;
  // The other kinds that concern a request: its name.
  std::string name{};
  // add: keys `structured`, `resumable` and `pooling`. A pooling request ends with a pooled output
  // and has no `max_tokens`.
  bool needs_grammar = false;
  bool is_session = false;
  bool is_pooling = false;
  // add: the name that the request's cache events carry; empty: none.
  std::string session_id{};
  // add: the request of which this is one of `n` samples. No decision depends on it.
  std::string parent{};
  // reset_prefix_cache: the engine's return value; false while requests hold blocks.
  bool reset_succeeded = false;
  bool resets_running = false;  // reset_prefix_cache: all running requests were preempted first
  PauseState pause_state = PauseState::unpaused;
  // output: the output of that step was processed here. Only in `during`, and only where events
  // follow it and a further output follows these; a step's last output is
  // RecordedStep::output_of_step.
  std::int64_t output_of_step = 0;
  bool operator==(const RecordedEvent&) const = default;
};

// [num_groups, number of blocks]: block ids in table order; lengths differ by group.
using BlocksPerGroup = std::vector<std::vector<BlockId>>;

// One request of a decision, in the engine's order.
struct RecordedScheduled {
  std::string id;
  // Tokens computed in this step, the drafts in `spec` included, which are the last of them.
  std::int32_t tokens = 0;
  bool is_new = false;
  // True if the request was preempted: `blocks` replaces its table instead of extending it.
  bool resumed = false;
  // Tokens whose cache existed before the step, prefix hit included.
  std::int32_t computed = 0;
  // Blocks handed to the worker: the whole table when new or resumed, else the added ones. Absent:
  // the recording has null, since no group got any.
  std::optional<BlocksPerGroup> blocks;
  // Draft tokens to verify; -1 is a placeholder of asynchronous scheduling, whose drafts only the
  // worker knows.
  std::vector<std::int32_t> spec;
  // Multimodal items that the encoder computes in this step, by their number in the request.
  std::vector<std::int32_t> encode{};
  bool operator==(const RecordedScheduled&) const = default;
};

// The whole block table of a request.
struct RecordedTable {
  std::string id;
  BlocksPerGroup blocks;
  bool operator==(const RecordedTable&) const = default;
};

// Tokens of a request: sampled ones, or drafts.
struct RecordedTokens {
  std::string id;
  std::vector<std::int32_t> tokens;
  bool operator==(const RecordedTokens&) const = default;
};

// The connector's answer to get_num_new_matched_tokens(), in query order. `local` is the argument:
// tokens that the prefix cache holds.
struct RecordedConnectorAnswer {
  std::string id;
  std::int32_t local = 0;
  // Tokens past `local` that it can load; absent: null, "query again later".
  std::optional<std::int32_t> external;
  // True if the load takes longer than the step; the request waits for it.
  bool async = false;
  bool operator==(const RecordedConnectorAnswer&) const = default;
};

// Reports of the connector's workers, which arrive with a step's output (vLLM's KVConnectorOutput).
struct RecordedWorker {
  // Requests whose load, or whose send, has completed.
  std::vector<std::string> received;
  std::vector<std::string> sent;
  // Blocks of the device pool that a load failed to fill.
  std::vector<BlockId> invalid_blocks;
  // The requests in `received` for which no data arrived.
  std::vector<std::string> failed{};
  // Completed transfers and store events, by number.
  std::vector<std::int64_t> jobs{};
  std::vector<std::int64_t> store_events{};
  // Transfers of host pages, with the number of workers that submitted or completed each.
  std::vector<TransferCount> enqueued{};
  std::vector<TransferCount> completed{};
  bool operator==(const RecordedWorker&) const = default;
};

// A grammar's verdict on a request's drafts.
struct RecordedGrammar {
  std::string id;
  std::int32_t asked = 0;
  // Number of leading drafts that the grammar accepts; at most `asked`.
  std::int32_t valid = 0;
  bool operator==(const RecordedGrammar&) const = default;
};

// An item in the encoder's cache.
struct RecordedEncoderEntry {
  std::string id;
  // Requests that hold it, in ascending order; empty: the item is reclaimable.
  std::vector<std::string> holders;
  bool operator==(const RecordedEncoderEntry&) const = default;
};

struct RecordedCount {
  std::string id;
  std::int32_t count = 0;
  bool operator==(const RecordedCount&) const = default;
};

// An output that arrived for a request that had been preempted, or had ended, since that output's
// step.
struct RecordedStaleOutput {
  std::string id;
  std::int64_t of_step = 0;
  // Tokens of the output that the engine still appended to the request.
  std::int32_t taken = 0;
  bool operator==(const RecordedStaleOutput&) const = default;
};

// A request that a step's output ended.
struct RecordedStopped {
  std::string id;
  std::string reason;  // "stop", "length", "abort", "error"
  bool operator==(const RecordedStopped&) const = default;
};

// A waiting request that the decision passed over.
struct RecordedSkipped {
  std::string id;
  std::string status;  // "WAITING", "WAITING_FOR_REMOTE_KVS", "PREEMPTED", ...
  bool operator==(const RecordedSkipped&) const = default;
};

// Keys of steps for requests with inputs other than tokens: encoder items, grammars, sessions,
// pooling. Empty lists are omitted from the file.
struct RecordedInputs {
  // Items whose encoder rows the worker drops before the step.
  std::vector<std::string> free_encoder{};
  // [free rows] or [free rows, free or reclaimable rows]; empty: not recorded.
  std::vector<std::int32_t> encoder_slots{};
  // All items in the encoder's cache, and those that no request holds.
  std::optional<std::vector<RecordedEncoderEntry>> encoder_cache{};
  std::optional<std::vector<std::string>> encoder_freeable{};
  // Waiting requests that hold blocks, in queue order.
  std::vector<std::string> holding{};
  // Waiting requests that wait for a grammar or for the next input of a session.
  std::vector<RecordedSkipped> blocked{};
  std::vector<RecordedGrammar> grammar{};
  // True if the step was sampled after the previous step's output had been processed: grammars need
  // it.
  bool is_deferred = false;
  // Of a deferred step: its drafts, what the grammars left of them (-1 is padding), and how many
  // drafts they cut per request.
  std::vector<RecordedTokens> drafts_in_flight{};
  std::vector<RecordedTokens> spec_in_flight{};
  std::vector<RecordedCount> invalid_drafts{};
  // Requests whose pooled output arrived, which ends them.
  std::vector<std::string> pooled{};
  bool operator==(const RecordedInputs&) const = default;
};

// Reports of the workers of one of several combined connectors.
struct RecordedPartReport {
  std::vector<std::string> received{}, sent{};
  bool operator==(const RecordedPartReport&) const = default;
};

// Keys of steps with a KV connector in newer releases. The decisions of vLLM's own connectors are
// stored as JSON text: no code depends on them, and they are written back unchanged.
struct RecordedTransfers {
  // Requests that hold blocks while they wait, with their status: a queue of its own.
  std::optional<std::vector<RecordedSkipped>> kv_holding{};
  // Requests of both queues that were passed over, in ascending order.
  std::vector<std::string> deferred{};
  // True if the step contains a load that is not asynchronous.
  bool loads_within = false;
  // JSON per combined connector; empty: absent.
  std::string parts{}, parts_held{}, offload{};
  std::vector<RecordedPartReport> parts_worker{};
  bool operator==(const RecordedTransfers&) const = default;
};

// A part of a block hash besides tokens: an adapter's name, a salt, a digest, or an image's
// identifier together with a position.
struct RecordedExtraKey {
  std::string value;
  // Of images: the offset of the image's first token from the block's first token; negative where
  // the image starts in an earlier block.
  std::optional<std::int64_t> place{};
  bool operator==(const RecordedExtraKey&) const = default;
};

// Commands that page workers receive in a step (reference/types/host_pages.h), by request, in
// scheduling order; empty entries are omitted.
struct RecordedPages {
  std::vector<PageTransfer> transfers{};
  std::vector<std::pair<std::string, std::vector<RowMirror>>> mirrors{};
  bool all_resident = false;
  std::vector<std::pair<std::string, ResidencyUpdate>> residency{};
  std::int64_t free_host_blocks = 0;
  bool operator==(const RecordedPages&) const = default;
};

// A change of the prefix cache, as an engine publishes it to routers (vLLM 0.33.0,
// distributed/kv_events.py). Hashes are the engine's own.
struct RecordedCacheEvent {
  enum class Kind : std::uint8_t { stored, removed, cleared };
  Kind kind = Kind::stored;
  std::int32_t group = 0;
  // Hexadecimal, one per hash block of the range; empty when cleared.
  std::vector<std::string> block_hashes{};
  // stored: hash of the block before the range; absent: the range starts the prompt.
  std::optional<std::string> parent{};
  // stored: tokens of the whole range, block_size of them per hash.
  std::vector<std::int32_t> token_ids{};
  std::int32_t block_size = 0;
  // stored: the extra keys of each hash; empty: no block has any.
  std::vector<std::vector<RecordedExtraKey>> extra_keys{};
  // stored: facts of the request and the group. `medium` is also present for removed blocks.
  std::optional<std::int64_t> lora_id{};
  std::string lora_name{}, medium{}, session_id{}, kv_cache_spec_kind{};
  std::optional<std::int32_t> kv_cache_spec_sliding_window{};
  bool operator==(const RecordedCacheEvent&) const = default;
};

// One line: the inputs since the previous step, the decision, the state after it, and the output.
// Optional members distinguish "not recorded" from "none" (invariant (1)).
struct RecordedStep {
  // Position in the recording, from 0.
  std::int64_t step = 0;
  std::vector<RecordedEvent> before;
  // The connector's answers to the queries of this decision, in order.
  std::optional<std::vector<RecordedConnectorAnswer>> connector;
  std::vector<RecordedScheduled> scheduled{};
  // Requests preempted by this decision, in order; requests that ended since the previous step.
  std::vector<std::string> preempted{};
  std::vector<std::string> finished{};
  // Per group, blocks that all running requests share; may be empty. Absent since 0.33.0.
  std::optional<std::vector<std::int32_t>> common_prefix_blocks{};
  // Blocks that the worker zeroes before use.
  std::vector<BlockId> zero{};
  // Block copies that the worker makes before the step, in order.
  std::vector<KVCacheBlockCopy> copies{};
  std::optional<RecordedPages> pages{};
  // Queues after the decision, in queue order.
  std::vector<std::string> running{};
  std::vector<std::string> waiting{};
  std::optional<std::vector<RecordedSkipped>> skipped{};
  // Free blocks of the pool after the decision; -1: unknown, since requests were removed from the
  // recording.
  std::int64_t free_blocks = 0;
  // Drafts that requests outside `scheduled` keep for a later step, in ascending order of names.
  std::vector<RecordedTokens> held_drafts{};
  // Tables of all running requests, and of all requests with a load in flight, ended ones included.
  std::optional<std::vector<RecordedTable>> tables{};
  std::optional<std::vector<RecordedTable>> loading{};
  // Events after the decision and before `output_of_step` arrived.
  std::vector<RecordedEvent> during{};
  std::optional<RecordedWorker> worker{};
  // Tokens that the model returned for this step, per request: an input of the recording, even if
  // the engine processed them steps later.
  std::vector<RecordedTokens> sampled{};
  // The step whose output was processed last before the next decision; absent: none was, or the
  // engine is synchronous.
  std::optional<std::int64_t> output_of_step{};
  std::vector<RecordedStaleOutput> stale_outputs{};  // in order of arrival
  std::vector<RecordedStopped> stopped{};
  std::optional<std::vector<RecordedTokens>> drafts{};
  // Finished requests that keep their blocks until they are sent.
  std::vector<std::string> held{};
  // Block hashes added to and removed from the prefix cache by the step. `cleared`: it was emptied.
  std::int64_t stored = 0;
  std::int64_t evicted = 0;
  bool cleared = false;
  // Events published since the end of the previous step, and what the worker did. Only if the
  // header announces them.
  std::vector<RecordedCacheEvent> events{};
  std::optional<WorkerStepFacts> facts{};
  RecordedInputs inputs{};
  RecordedTransfers transfers{};
  // True if the request runs. If it is also preempted, it has only a new table: SGLang's prefix
  // cache has replaced blocks in it (docs/engines.md).
  bool runs(const std::string& name) const { return std::ranges::count(running, name) > 0; }
  bool operator==(const RecordedStep&) const = default;
};

// The last line, which marks the file as complete.
struct RecordingEnd {
  std::int64_t steps = 0;               // step lines before this one
  std::vector<std::string> unfinished;  // live requests, in ascending order
  // Number of last non-empty steps whose outputs never arrived: the tokens that they sampled are
  // unknown.
  std::int64_t steps_in_flight = 0;
  // The engine raised an exception after the last step, in "schedule" or "update"; empty: none.
  // raised_before: events since that step.
  std::string raised_in{};
  std::vector<RecordedEvent> raised_before{};
  // True if the file ends before its end line, after `steps` whole steps: the process that wrote it
  // was killed, or still writes. The other members are then unknown.
  bool is_cut_off = false;
  // The check that ended the recorded run ("liveness", "engine.exception") and its message. Empty:
  // the run did not fail, or its decisions show the failure.
  std::string failed_check{};
  std::string failed_what{};
  bool operator==(const RecordingEnd&) const = default;
};
// Returns "cut off after step 41"; empty: the recording is complete.
std::string cut_off_text(const RecordingEnd& end);

// A whole recording in memory; RecordingReader reads long ones.
struct Recording {
  RecordingHeader header;
  std::vector<RecordedStep> steps;
  RecordingEnd end;
  bool operator==(const Recording&) const = default;
};

// Reads a recording step by step, so that memory does not grow with its length.
//
// Invariants
// (1) A step has passed every check of form against the header when next() returns it.
// (2) Steps are numbered 0, 1, 2, ... without gaps.
// (3) After an error or the end, no further step is returned.
class RecordingReader {
 public:
  // Opens the file (plain or gzip) and reads its header. Errors: the file, a header that is cut
  // off, a header of another format or version.
  static Result<RecordingReader> open(const std::string& path);
  RecordingReader(RecordingReader&&) noexcept;
  RecordingReader& operator=(RecordingReader&&) noexcept;
  ~RecordingReader();

  const RecordingHeader& header() const;
  // "FILE:LINE" of the last line read, for messages about a step.
  std::string place() const;
  // Reads the next step into `step` and returns true; false after the last whole step, when end()
  // is set. A file may be cut off between two lines or in its last line. Anything else (a torn line
  // that ends in a newline, steps out of order, lines after the end) is an error.
  Result<bool> next(RecordedStep& step);
  // REQUIRES: next() has returned false.
  const RecordingEnd& end() const;

 private:
  struct State;
  explicit RecordingReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Reads a whole recording. Errors as of RecordingReader; the second: also one without a step.
Result<Recording> read_recording(const std::string& path);
Result<Recording> read_recorded_steps(const std::string& path);

// Converts the recorded requests to a trace, for an engine that samples at other steps than the
// recorded one.
//
// Events before step k get the time k * step_ns: on a clock on which every step takes step_ns they
// precede step k again, as long as no engine idles longer. A request's output is as long as the
// recorded one; a request that did not end gets all its max_tokens. Stop tokens are dropped, since
// the length ends the request. A name that the recording uses again is numbered: "a", "a#2".
//
// Errors: a recording with a KV connector, whose answers a trace cannot hold, or with an event that
// it cannot hold (RecordedEvent::Kind): a pause, the input of a session, an answer of a grammar, or
// a reset of the encoder's cache.
Result<Trace> trace_of(const Recording& recording, std::int64_t step_ns);

// The steps of a recording from a file, from memory, or one at a time while an engine runs. The
// three sources behave the same for code that walks over steps.
class RecordedSteps {
 public:
  explicit RecordedSteps(RecordingReader reader) : reader_(std::move(reader)) {}
  RecordedSteps(std::shared_ptr<const Recording> recording, std::string path)
      : recording_(std::move(recording)), path_(std::move(path)) {}
  // A recording that grows: the caller has already filled the step, and next() leaves it unchanged.
  RecordedSteps() = default;

  // All steps, of a recording in memory; empty: they are read one at a time.
  std::span<const RecordedStep> in_memory() const;
  // As RecordingReader::next().
  Result<bool> next(RecordedStep& step) {
    if (reader_) return reader_->next(step);
    if (recording_ == nullptr) return true;
    if (at_ == recording_->steps.size()) return false;
    step = recording_->steps[at_++];
    return true;
  }
  // REQUIRES: next() has returned false; not a recording that grows.
  const RecordingEnd& end() const { return reader_ ? reader_->end() : recording_->end; }
  // "FILE:LINE" of the last step; empty: the steps come from no file. Line 1 is the header, so step
  // k is on line k + 2.
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

// Writes a recording line by line to PATH.partial; close() makes it durable and renames it to PATH,
// so that PATH is always complete. A writer destroyed without close() leaves no file.
//
// Invariants
// (1) Up to 64 KiB of lines are buffered, so that a crash loses the last steps; lockstep::recorder
//     flushes every step instead.
// (2) write() comes between create() and close(), close() at most once.
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
