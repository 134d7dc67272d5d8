#include "cli/replay_options.h"

#include <CLI/CLI.hpp>
#include <limits>
#include <utility>

#include "reference/types/engine_config.h"

namespace lockstep {
namespace {

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

template <class T>
void add_count(CLI::App& command, const std::string& name, std::optional<T>& value,
               const std::string& help, const std::string& group, std::int64_t at_least = 1,
               std::int64_t at_most = kInt32Max) {
  CLI::Range range(at_least, at_most);
  range.description("");  // the help says what a value means, an error what it may be
  command.add_option(name, value, help)->check(range)->type_name("N")->group(group);
}

void add_choice(CLI::App& command, const std::string& name, std::optional<std::string>& value,
                const std::string& help, std::vector<std::string> choices,
                const std::string& group) {
  command.add_option(name, value, help)->check(CLI::IsMember(std::move(choices)))->group(group);
}

void add_switch(CLI::App& command, const std::string& name, std::optional<bool>& value, bool sets,
                const std::string& help, const std::string& group) {
  command
      .add_flag_callback(
          name, [&value, sets] { value = sets; }, help)
      ->group(group);
}

std::string first_given(std::initializer_list<std::pair<bool, const char*>> options) {
  for (const auto& [is_given, name] : options) {
    if (is_given) return name;
  }
  return {};
}

void declare_cache(CLI::App& command, ReplayOptions& o) {
  const std::string group = "Cache";
  command
      .add_option("--model", o.model,
                  "all layers of a model of the catalogue, a model file or a config.json")
      ->group(group);
  add_count(command, "--layers", o.layers, "layers (2)", group, 1, 256);
  add_count(command, "--kv-heads", o.kv_heads, "KV heads of a layer (2)", group, 1, 256);
  add_count(command, "--head-size", o.head_size, "elements of a head (64)", group, 1, 4096);
  add_count(command, "--queries-per-kv", o.queries_per_kv, "query heads of a KV head (1)", group, 1,
            64);
  add_choice(command, "--dtype", o.dtype, "elements of the cache (bf16)",
             {"bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8", "fp8_per_token_head",
              "int8_per_token_head"},
             group);
  add_choice(command, "--attention", o.attention, "kind of the layers (full)", {"full", "mla"},
             group);
  add_choice(command, "--layout", o.layout, "order of tokens and heads in a page (NHD)",
             {"NHD", "HND"}, group);
  add_choice(command, "--attention-backend", o.attention_backend,
             "whose layout rules hold (flash_attn)",
             {"flash_attn", "flashinfer", "triton_attn", "any_size"}, group);
  add_count(command, "--num-blocks", o.num_blocks,
            "blocks of the pool, the null block included (the trace's hint; else one and a half "
            "times the longest request)",
            group, 2);
  add_count(command, "--block-size", o.block_size, "tokens of a block (16)", group, 1, 1 << 20);
}

void declare_connector(CLI::App& command, ReplayOptions& o) {
  const std::string group = "KV connector (vllm-0.22.1)";
  command
      .add_option("--connector", o.connector,
                  "peers: somebody knows prefixes of some prompts, loads take time and fail "
                  "(default); host: full blocks are stored in host memory and loaded from there; "
                  "one-group-peers: as peers, of one KV cache group; up to four of them in the "
                  "order in which they are asked: peers+host")
      ->expected(0, 1)
      ->default_str("peers")
      ->type_name("PART[+PART...]")
      ->group(group);
  add_switch(command, "--disable-hybrid-kv-cache-manager", o.disable_hybrid_kv_cache_manager, true,
             "one KV cache group, whatever the layers (where a connector takes no more)", group);
  add_switch(command, "--no-disable-hybrid-kv-cache-manager", o.disable_hybrid_kv_cache_manager,
             false, "insist on several", group);
  add_choice(command, "--kv-load-failure-policy", o.load_failure_policy,
             "of requests whose load fails (recompute)", {"recompute", "fail"}, group);
  add_count(command, "--host-blocks", o.host_blocks, "of each host tier (as many as the pool has)",
            group, 1);
  add_count(command, "--load-failures", o.load_failures,
            "percent of the loads that fail (10 of those from peers, none from a host tier)", group,
            0, 100);
  add_count(command, "--transfer-delay", o.transfer_delay,
            "steps that a load or store of the host tier takes at most (3)", group, 0, 1000);
}

void declare_engine(CLI::App& command, ReplayOptions& o) {
  const std::string group = "Engine";
  command
      .add_option("--engine", o.engine, "profile to decide like (" + EngineConfig{}.engine + ")")
      ->group(group);
  add_choice(command, "--policy", o.policy, "who goes first (fcfs)", {"fcfs", "priority"}, group);
  add_count(command, "--max-num-seqs", o.max_num_seqs, "running requests (256)", group, 1, 1 << 20);
  add_count(command, "--max-num-batched-tokens", o.max_num_batched_tokens,
            "tokens of one step (8192)", group);
  add_count(command, "--max-model-len", o.max_model_len,
            "prompt and output of a request at most (the longest of the trace)", group);
  add_count(command, "--long-prefill-token-threshold", o.long_prefill_token_threshold,
            "a prompt's tokens in one step at most; 0: no limit (0)", group, 0);
  add_switch(command, "--no-prefix-caching", o.enable_prefix_caching, false,
             "forget blocks when they are freed", group);
  add_switch(command, "--no-chunked-prefill", o.enable_chunked_prefill, false,
             "a prompt runs in one step or waits", group);
  add_switch(command, "--async-scheduling", o.async_scheduling, true,
             "decide a step before the output of the one before is known", group);
  add_switch(command, "--reserve-full-isl", o.reserve_full_isl, true,
             "admit a request only when its whole prompt fits (default)", group);
  add_switch(command, "--no-reserve-full-isl", o.reserve_full_isl, false,
             "admit a request when its first chunk fits", group);
  add_choice(command, "--hash-algorithm", o.hash_algorithm,
             "of block hashes: the model's own, or one of the engine's (content; with "
             "--cache-events sha256_cbor)",
             {"content", "sha256_cbor", "xxhash_cbor"}, group);
  declare_connector(command, o);
}

void declare_ranks(CLI::App& command, ReplayOptions& o) {
  const std::string group = "Ranks";
  add_count(command, "--tensor-parallel-size", o.tp, "ranks that share the heads of a layer (1)",
            group, 1, 64);
  add_count(command, "--pipeline-parallel-size", o.pp, "stages that share the layers (1)", group, 1,
            64);
  add_count(command, "--data-parallel-size", o.dp,
            "engines that share the requests and meet in every step (1)", group, 1, 64);
  add_count(command, "--decode-context-parallel-size", o.dcp,
            "tensor parallel ranks that deal out tokens among one another (1)", group, 1, 64);
  add_count(command, "--prefill-context-parallel-size", o.pcp,
            "further ranks that tokens are dealt out to (1)", group, 1, 64);
  add_count(command, "--cp-kv-cache-interleave-size", o.cp_interleave,
            "tokens in a row that go to one rank of context parallelism (1)", group, 1, 1 << 20);
  add_switch(command, "--enforce-eager", o.enforce_eager, true,
             "data parallel ranks run no graphs: none is padded to the largest", group);
}

void declare_run(CLI::App& command, ReplayOptions& o) {
  const std::string group = "Run";
  command
      .add_option("--backend", o.backend,
                  "auto, cuda (a GPU), simt (the same kernels on the CPU), none (the model alone), "
                  "or a plugin of yours: FILE.so (docs/check_your_kernels.md)")
      ->capture_default_str()
      ->group(group);
  add_choice(command, "--check", o.check,
             "fast; check: watch every access of every simulated thread; hunt: preempt threads too",
             {"fast", "check", "hunt"}, group);
  add_count(command, "--streams", o.num_streams,
            "streams that a step's operations are spread over, with events in between (1)", group,
            1, 64);
  add_switch(command, "--delay-streams", o.delay_streams, true,
             "on the CPU: run every operation as late as events allow, in an order from the seed "
             "(--check hunt does so too)",
             group);
  add_count(
      command, "--graphs", o.max_cudagraph_capture_size,
      "capture a graph for each of vLLM's batch sizes up to N tokens, replay it and pad to it",
      group);
  add_choice(
      command, "--numbers", o.numbers,
      "what rows hold: words that are moved; real numbers, which an engine's kernels quantise "
      "and attend to (words)",
      {"words", "real"}, group);
  command.add_option("--mutant", o.mutant, "plant this defect (lockstep mutants --list)")
      ->group(group);
  command.add_option("--seed", o.seed, "of sampled tokens and of hunt's preemptions (0)")
      ->group(group);
  command
      .add_option("--faults", o.faults,
                  "what goes wrong: KIND@STEP[+STEPS][:NUMBER], by commas, or a seed "
                  "(docs/formats.md, Faults)")
      ->type_name("LIST|SEED")
      ->group(group);
  command.add_option("--limit", o.limit_requests, "only the first N requests; 0: all (0)")
      ->check(CLI::NonNegativeNumber)
      ->group(group);
  add_count(command, "--step-base-ns", o.step_base_ns, "virtual time of a step (10000000)", group,
            0, 1'000'000'000'000);
  add_count(command, "--step-per-token-ns", o.step_per_token_ns,
            "... and of each of its tokens (20000)", group, 0, 1'000'000'000'000);
}

}  // namespace

void declare_replay_options(CLI::App& command, ReplayOptions& o) {
  command
      .add_option("FILE", o.file,
                  "request trace, Mooncake JSONL, Azure CSV, benchmark, recording or saved case")
      ->required();
  declare_cache(command, o);
  declare_engine(command, o);
  declare_ranks(command, o);
  declare_run(command, o);
  const std::string group = "Output";
  command.add_option("--report", o.report_path, "one HTML page that draws the run")->group(group);
  command.add_option("--json", o.json_path, "the result as JSON")->group(group);
  command
      .add_option("--hidden-states", o.hidden_states_dir,
                  "a folder for the hidden states of finished requests, a file each, whole as soon "
                  "as it is there (docs/formats.md)")
      ->type_name("DIR")
      ->group(group);
  command
      .add_option("--cache-events", o.cache_events_path,
                  "JSON lines: blocks stored in and removed from the prefix cache, step by step")
      ->group(group);
  CLI::Option* save =
      command.add_option("--save", o.save_dir, "folder that a divergence is saved to, as a case")
          ->group(group);
  command.add_flag("--shrink", o.shrink, "make the saved case as small as it goes, beside it")
      ->needs(save)
      ->group(group);
}

std::string ReplayOptions::contradicts_model() const {
  return first_given({
      {layers.has_value(), "--layers"},
      {kv_heads.has_value(), "--kv-heads"},
      {head_size.has_value(), "--head-size"},
      {attention.has_value(), "--attention"},
  });
}

std::string ReplayOptions::contradicts_recording() const {
  return first_given({
      {model.has_value(), "--model"},
      {layers.has_value(), "--layers"},
      {kv_heads.has_value(), "--kv-heads"},
      {head_size.has_value(), "--head-size"},
      {attention.has_value(), "--attention"},
      {dtype.has_value(), "--dtype"},
      {num_blocks.has_value(), "--num-blocks"},
      {block_size.has_value(), "--block-size"},
      {engine.has_value(), "--engine"},
      {policy.has_value(), "--policy"},
      {hash_algorithm.has_value(), "--hash-algorithm"},
      {max_num_seqs.has_value(), "--max-num-seqs"},
      {max_num_batched_tokens.has_value(), "--max-num-batched-tokens"},
      {max_model_len.has_value(), "--max-model-len"},
      {long_prefill_token_threshold.has_value(), "--long-prefill-token-threshold"},
      {enable_prefix_caching.has_value(), "--no-prefix-caching"},
      {enable_chunked_prefill.has_value(), "--no-chunked-prefill"},
      {reserve_full_isl.has_value(), "--reserve-full-isl"},
      {async_scheduling.has_value(), "--async-scheduling"},
      {connector.has_value(), "--connector"},
      {disable_hybrid_kv_cache_manager == true, "--disable-hybrid-kv-cache-manager"},
      {disable_hybrid_kv_cache_manager == false, "--no-disable-hybrid-kv-cache-manager"},
      {faults.has_value(), "--faults"},
      {load_failure_policy.has_value(), "--kv-load-failure-policy"},
      {host_blocks.has_value(), "--host-blocks"},
      {load_failures.has_value(), "--load-failures"},
      {transfer_delay.has_value(), "--transfer-delay"},
      {dp.has_value(), "--data-parallel-size"},
      {enforce_eager.has_value(), "--enforce-eager"},
      {dcp.has_value(), "--decode-context-parallel-size"},
      {pcp.has_value(), "--prefill-context-parallel-size"},
      {limit_requests != 0, "--limit"},
      {step_base_ns.has_value(), "--step-base-ns"},
      {step_per_token_ns.has_value(), "--step-per-token-ns"},
  });
}

std::string ReplayOptions::contradicts_saved_case() const {
  const std::string given = first_given({
      {layout.has_value(), "--layout"},
      {attention_backend.has_value(), "--attention-backend"},
      {queries_per_kv.has_value(), "--queries-per-kv"},
      {tp.has_value(), "--tensor-parallel-size"},
      {pp.has_value(), "--pipeline-parallel-size"},
      {cp_interleave.has_value(), "--cp-kv-cache-interleave-size"},
      {num_streams.has_value(), "--streams"},
      {delay_streams.has_value(), "--delay-streams"},
      {max_cudagraph_capture_size.has_value(), "--graphs"},
      {numbers.has_value(), "--numbers"},
      {mutant.has_value(), "--mutant"},
      {seed.has_value(), "--seed"},
      {!save_dir.empty(), "--save"},
  });
  return given.empty() ? contradicts_recording() : given;
}

}  // namespace lockstep
