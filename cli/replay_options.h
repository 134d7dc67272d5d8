// What `lockstep replay` can be told. An absent option is chosen from the file (a trace's hints, a
// recording's header, a saved case) or from the trace's own needs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace lockstep {

struct ReplayOptions {
  std::string file;

  // The cache of the model.
  std::optional<std::int32_t> layers, kv_heads, head_size, queries_per_kv;
  std::optional<std::string> model, attention, dtype, layout, attention_backend;

  // The pool and the engine.
  std::optional<std::int64_t> num_blocks;
  std::optional<std::int32_t> block_size, max_num_seqs, max_num_batched_tokens, max_model_len,
      long_prefill_token_threshold;
  std::optional<std::string> engine, policy, hash_algorithm;
  std::optional<bool> enable_prefix_caching, enable_chunked_prefill, reserve_full_isl,
      async_scheduling, disable_hybrid_kv_cache_manager;
  std::optional<std::string> connector, load_failure_policy;
  std::optional<std::int64_t> host_blocks;
  std::optional<std::int32_t> load_failures, transfer_delay;
  std::int64_t staging_blocks = 0;  // of a buffer that another engine's blocks go through

  // The ranks.
  std::optional<std::int32_t> tp, pp, dp, dcp, pcp, cp_interleave;
  std::optional<bool> enforce_eager;

  // The run.
  std::string backend = "auto";
  std::optional<std::string> check, mutant, numbers;
  std::optional<std::int32_t> num_streams, max_cudagraph_capture_size;
  std::optional<bool> delay_streams;
  std::optional<std::uint64_t> seed;
  std::optional<std::string> faults;  // a list, or a seed of one
  std::int64_t limit_requests = 0;    // 0: all
  std::optional<std::int64_t> step_base_ns, step_per_token_ns;

  // What it leaves behind; empty: nothing.
  std::string report_path, json_path, save_dir, cache_events_path, hidden_states_dir;
  bool shrink = false;  // what is saved, beside it

  // The first option given that a model, a recording, or a saved case says for itself; empty: none.
  std::string contradicts_model() const;
  std::string contradicts_recording() const;
  std::string contradicts_saved_case() const;
};

// Declares the options on `command`; `options` must outlive it.
void declare_replay_options(CLI::App& command, ReplayOptions& options);

}  // namespace lockstep
