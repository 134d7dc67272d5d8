// What an engine in C++ links to have its scheduler audited: writes an engine recording
// (docs/formats.md) step by step, for `lockstep audit`, `conform` and `replay`. Installed as
// <lockstep/recorder.h> with CMake's target lockstep::recorder; needs nothing but the standard
// library.
//
// 1. Calls come in the order of the engine: add() and leave() before the step that they come to,
//    step() when the step's output is there, end() once.
// 2. Block ids are those that were handed to the worker, not those of the scheduler's own tables:
//    the worker reads what it was told. Id 0 is the null block.
// 3. The file has its name when end() has returned; until then it is PATH.partial. The first error
//    ends the recording: error() says which, and later calls do nothing.
//
// Not written: connectors, drafts, copies, cache events; docs/formats.md has their keys.
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
  std::vector<Group> groups = {Group()};
  std::int64_t num_blocks = 0;  // of the pool, the null block included
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
};

// One step: what was decided, and what came out of it.
struct Step {
  std::vector<Scheduled> scheduled;
  std::vector<std::string> preempted, finished;  // finished: since the step before
  std::vector<std::string> running, waiting;     // after the decision, in queue order
  std::int64_t free_blocks = 0;
  std::vector<std::pair<std::string, std::vector<std::int32_t>>> sampled;  // tokens, by request
  // {id, "stop" | "length" | "abort" | "error"}: ended by this output.
  std::vector<std::pair<std::string, std::string>> stopped;
  // The whole tables of running requests, per group; shown now and then they check the rest.
  std::vector<std::pair<std::string, std::vector<std::vector<std::int32_t>>>> tables;
};

class Recorder {
 public:
  Recorder(const std::string& path, const Engine& engine);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();  // without end(): PATH.partial stays, for whoever looks into a crash

  void add(const std::string& id, const std::vector<std::int32_t>& prompt, std::int32_t max_tokens);
  void leave(const std::string& id);  // its client has given it up
  void step(const Step& step);
  // `unfinished`: requests that are left.
  void end(std::vector<std::string> unfinished = {});

  const std::string& error() const { return error_; }  // one sentence; empty: all is well

 private:
  void write(const std::string& line);

  std::string path_;
  std::FILE* file_ = nullptr;  // null: ended, or an error
  std::string before_;         // what has happened since the last step, as JSON
  std::size_t num_groups_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_requests_ = 0;
  std::string error_;
};

}  // namespace lockstep::recorder
