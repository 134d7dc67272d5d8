// Writes an engine recording (docs/formats.md) step by step, for `lockstep audit`, `conform` and
// `replay`: a library for engines in C++. Installed as <lockstep/recorder.h> with CMake's target
// lockstep::recorder; needs only the standard library.
//
// Invariants
// (1) Calls come in the order of the engine: add() and leave() before the step that they affect,
//     step() when the step's output exists, end() once.
// (2) Block ids are those sent to the worker, not those of the scheduler's own tables. Id 0 is the
//     null block.
// (3) The file has its name when end() has returned; until then it is PATH.partial. The first error
//     ends the recording: error() returns it, and later calls do nothing.
// (4) A returned step() is in the file: a process that is killed loses only the step in progress,
//     and PATH.partial can be audited.
//
// Not written: connectors, copies, cache events; docs/formats.md has their keys. Not checked: the
// decisions, and that names and texts are UTF-8.
//
// Thread safety: none; one thread calls all methods of a Recorder.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::recorder {

// One KV cache group: layers that share a block table. Its position is its index in all lists per
// group.
struct Group {
  std::vector<std::string> layers = {"layers.0"};
  // "full", "mla", "sliding_window" or "chunked_local".
  std::string kind = "full";
  // Tokens per block.
  std::int32_t block_size = 16;
  std::int32_t num_kv_heads = 1;
  std::int32_t head_size = 64;
  std::string dtype = "bf16";
  std::int32_t sliding_window = 0;        // tokens; 0: none
  std::int32_t attention_chunk_size = 0;  // of chunked_local
};

// Configuration of the engine: what an audit or the model needs to judge its decisions.
struct Engine {
  std::string name = "engine";
  std::string version = "0";
  // Name of the recording in reports.
  std::string model = "";
  // Running requests, tokens per step, and tokens per request.
  std::int32_t max_num_seqs = 256;
  std::int32_t max_num_batched_tokens = 8192;
  std::int32_t max_model_len = 8192;
  bool enable_prefix_caching = false;
  bool enable_chunked_prefill = true;
  bool async_scheduling = false;
  // Drafts per request and step at most; 0: no speculation.
  std::int32_t num_spec_tokens = 0;
  std::string spec_method = "ngram";  // or "draft_model", "eagle"
  // True if Step::held_drafts (Step::stale_outputs) is complete: an empty list then means "none"
  // instead of "not recorded".
  bool tells_held_drafts = false;
  bool tells_stale_outputs = false;
  std::vector<Group> groups = {Group()};
  // Blocks of the pool, null block included.
  std::int64_t num_blocks = 0;
};

// Tokens [at, at + n) of a prompt that represent an image or a clip.
struct PromptItem {
  std::string id;  // equal content, equal id
  std::int32_t at = 0;
  std::int32_t n = 0;
  std::string kind = "image";
};

// A LoRA adapter. Adapters of one name and different paths are different.
struct Adapter {
  std::string name = "";  // empty: none
  std::int64_t id = 0;
  // Path of its weights.
  std::string path = "";
};

// A prompt with embeddings in place of tokens: one hexadecimal digest per `digest_tokens`
// positions, and one for the remainder. Equal embeddings have equal digests.
struct PromptEmbeds {
  std::int32_t digest_tokens = 0;
  std::vector<std::string> digests = {};
};

// Everything besides tokens that two requests must have in common to share blocks.
struct Keys {
  std::string cache_salt = "";
  Adapter lora = {};
  // In the order of their positions, without overlap.
  std::vector<PromptItem> mm = {};
  PromptEmbeds embeds = {};
};

// Tokens that end a request when it samples them. Without any, an audit does not check that a
// request that ends by "stop" sampled one.
struct EndTokens {
  std::int32_t eos = -1;  // -1: none
  std::vector<std::int32_t> stop_token_ids = {};
};

// One request of a step.
struct Scheduled {
  std::string id;
  // Tokens scheduled now, drafts included.
  std::int32_t tokens = 0;
  // Tokens computed before the step.
  std::int32_t computed = 0;
  bool is_new = false;
  // True after a preemption: `blocks` is the whole table again.
  bool resumed = false;
  // [num_groups, number of blocks]: blocks handed over now, the whole table when new or resumed,
  // else the added ones. Empty: no group got a block.
  std::vector<std::vector<std::int32_t>> blocks;
  // Drafts to verify: the last of the request's tokens in this step.
  std::vector<std::int32_t> spec = {};
};

// An output that arrived for a request that was preempted or ended after its step. For an ended
// request only tokens that were appended count.
struct StaleOutput {
  std::string id;
  std::int64_t of_step = 0;
  // Tokens of the output that were appended to the request.
  std::int32_t taken = 0;
};

using TokensByRequest = std::vector<std::pair<std::string, std::vector<std::int32_t>>>;

// One step: the decision and its output.
struct Step {
  std::vector<Scheduled> scheduled;
  // Requests preempted by this decision, and requests that ended since the previous step.
  std::vector<std::string> preempted, finished;
  // Queues after the decision, in queue order.
  std::vector<std::string> running, waiting;
  // After the decision.
  std::int64_t free_blocks = 0;
  // Tokens that the model returned for this step, even if the engine processes them later.
  TokensByRequest sampled;
  // Requests that this output ended: {id, "stop" | "length" | "abort" | "error"}.
  std::vector<std::pair<std::string, std::string>> stopped;
  // Whole tables of running requests, per group. Optional: a table now and then lets the audit
  // check the blocks that it has added up.
  std::vector<std::pair<std::string, std::vector<std::vector<std::int32_t>>>> tables;
  TokensByRequest drafts = {};       // proposed for the next step
  TokensByRequest held_drafts = {};  // after the decision, of requests that are not in `scheduled`
  std::vector<StaleOutput> stale_outputs = {};  // received with this step
  // With asynchronous scheduling, the step whose output arrived last; -1: none arrived.
  std::int64_t output_of_step = -1;
};

// One recording. No method throws for an error of the file; error() reports the first one.
class Recorder {
 public:
  // Opens PATH.partial and writes the header. A device or a FIFO is written directly.
  Recorder(const std::string& path, const Engine& engine);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  // Without end(), PATH.partial stays, so that a crash can be inspected.
  ~Recorder();

  // A request arrives. Refused: an empty prompt, max_tokens below 1, items out of order or past the
  // prompt, a wrong number of digests.
  void add(const std::string& id, const std::vector<std::int32_t>& prompt, std::int32_t max_tokens,
           const Keys& keys = Keys(), const EndTokens& ends = EndTokens());
  // The client disconnects, or aborts the request.
  void leave(const std::string& id);
  // Writes one step and flushes it. Refused: `blocks` of another number of groups; held drafts or
  // stale outputs that the engine did not announce.
  void step(const Step& step);
  // Writes the end line and renames the file. `unfinished`: requests that are still live, in any
  // order.
  void end(std::vector<std::string> unfinished = {});

  const std::string& error() const { return error_; }  // one line; empty: no error

 private:
  void write(const std::string& line);
  void refuse(const std::string& what);  // the recording ends
  void check(const Step& step);

  std::string path_;
  std::string written_;        // path_ itself, or its temporary file
  std::FILE* file_ = nullptr;  // null: ended, or an error
  std::string before_;         // events since the last step, as JSON
  std::size_t num_groups_;
  bool tells_held_drafts_, tells_stale_outputs_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_requests_ = 0;
  std::string error_;
};

}  // namespace lockstep::recorder
