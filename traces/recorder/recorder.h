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
// Not written: connectors, copies, cache events; docs/formats.md has their keys.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::recorder {

// One KV cache group: layers that share a block table.
struct Group {
  std::vector<std::string> layers = {"layers.0"};
  std::string kind = "full";  // or "mla", "sliding_window", "chunked_local"
  std::int32_t block_size = 16;
  std::int32_t num_kv_heads = 1;
  std::int32_t head_size = 64;
  std::string dtype = "bf16";
  std::int32_t sliding_window = 0;        // tokens; 0: none
  std::int32_t attention_chunk_size = 0;  // of chunked_local
};

struct Engine {
  std::string name = "engine";
  std::string version = "0";
  std::string model = "";  // what the recording is called
  std::int32_t max_num_seqs = 256;
  std::int32_t max_num_batched_tokens = 8192;
  std::int32_t max_model_len = 8192;
  bool enable_prefix_caching = false;
  bool enable_chunked_prefill = true;
  bool async_scheduling = false;
  std::int32_t num_spec_tokens = 0;   // drafts of a step at most; 0: none are made
  std::string spec_method = "ngram";  // or "draft_model", "eagle"
  bool tells_held_drafts = false;     // Step::held_drafts holds all that there are
  bool tells_stale_outputs = false;   // Step::stale_outputs likewise
  std::vector<Group> groups = {Group()};
  std::int64_t num_blocks = 0;  // of the pool, the null block included
};

// Tokens [at, at + n) of a prompt that stand for an image or a clip.
struct PromptItem {
  std::string id;  // equal content, equal id
  std::int32_t at = 0;
  std::int32_t n = 0;
  std::string kind = "image";
};

// Of LoRA.
struct Adapter {
  std::string name = "";  // empty: none
  std::int64_t id = 0;
  std::string path = "";  // where its weights lie
};

// A prompt with embeddings in place of tokens: a digest, hexadecimal, of each `digest_tokens`
// places and one of what is left behind. Equal embeddings, equal digests.
struct PromptEmbeds {
  std::int32_t digest_tokens = 0;
  std::vector<std::string> digests = {};
};

// What else, with the tokens, two requests must have in common to share blocks.
struct Keys {
  std::string cache_salt = "";
  Adapter lora = {};
  std::vector<PromptItem> mm = {};  // in the order of their places, without overlap
  PromptEmbeds embeds = {};
};

// One request of a step, in the engine's order.
struct Scheduled {
  std::string id;
  std::int32_t tokens = 0;    // scheduled now
  std::int32_t computed = 0;  // before
  bool is_new = false;
  bool resumed = false;  // after a preemption: `blocks` are its whole table again
  // Per group, handed over now: all when new, else those added; empty: none in any group.
  std::vector<std::vector<std::int32_t>> blocks;
  std::vector<std::int32_t> spec = {};  // drafts to verify: the last of its tokens
};

// Output that arrived for a request that was preempted or ended after its step. For an
// ended request only the tokens that were appended count.
struct StaleOutput {
  std::string id;
  std::int64_t of_step = 0;
  std::int32_t taken = 0;  // of its tokens, appended to the request
};

using TokensByRequest = std::vector<std::pair<std::string, std::vector<std::int32_t>>>;

// One step: what was decided, and what came out of it.
struct Step {
  std::vector<Scheduled> scheduled;
  std::vector<std::string> preempted, finished;  // finished: since the previous step
  std::vector<std::string> running, waiting;     // after the decision, in queue order
  std::int64_t free_blocks = 0;
  TokensByRequest sampled;
  // {id, "stop" | "length" | "abort" | "error"}: ended by this output.
  std::vector<std::pair<std::string, std::string>> stopped;
  // The whole tables of running requests, per group; shown now and then they check the rest.
  std::vector<std::pair<std::string, std::vector<std::vector<std::int32_t>>>> tables;
  TokensByRequest drafts = {};       // proposed for the next step
  TokensByRequest held_drafts = {};  // after the decision, of requests that are not in `scheduled`
  std::vector<StaleOutput> stale_outputs = {};  // received with this step
  // With asynchronous scheduling, the step whose output arrived last; -1: none did.
  std::int64_t output_of_step = -1;
};

class Recorder {
 public:
  Recorder(const std::string& path, const Engine& engine);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();  // without end(): PATH.partial stays, to inspect a crash

  void add(const std::string& id, const std::vector<std::int32_t>& prompt, std::int32_t max_tokens,
           const Keys& keys = Keys());
  void leave(const std::string& id);  // its client has given it up
  void step(const Step& step);
  // `unfinished`: requests that are left.
  void end(std::vector<std::string> unfinished = {});

  const std::string& error() const { return error_; }  // one line; empty: no error

 private:
  void write(const std::string& line);
  void refuse(const std::string& what);  // the recording ends
  void check(const Step& step);

  std::string path_;
  std::string written_;        // path_ itself, or its temporary file
  std::FILE* file_ = nullptr;  // null: ended, or an error
  std::string before_;         // what has happened since the last step, as JSON
  std::size_t num_groups_;
  bool tells_held_drafts_, tells_stale_outputs_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_requests_ = 0;
  std::string error_;
};

}  // namespace lockstep::recorder
