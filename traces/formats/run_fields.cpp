#include "traces/formats/run_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

constexpr std::int64_t kTokensMax = 1 << 20;
constexpr std::int64_t kRanksMax = 64;
constexpr std::int64_t kNanosecondsMax = 1'000'000'000'000;

constexpr std::string_view kCache = "Cache";
constexpr std::string_view kEngine = "Engine";
constexpr std::string_view kConnector = "KV connector (vllm-0.22.1)";
constexpr std::string_view kRanks = "Ranks";
constexpr std::string_view kRun = "Run";

constexpr std::string_view kPartsExpected =
    "peers, host or one-group-peers, or up to 4 of them joined by +";

// The words of an enum, in the order of its values.
template <class E>
constexpr int kWordsOf = 0;
template <>
constexpr std::array<std::string_view, 2> kWordsOf<SchedulingPolicy> = {"fcfs", "priority"};
template <>
constexpr std::array<std::string_view, 3> kWordsOf<MambaCacheMode> = {"none", "align", "all"};
template <>
constexpr std::array<std::string_view, 4> kWordsOf<SpecMethod> = {"none", "ngram", "draft_model",
                                                                  "eagle"};
template <>
constexpr std::array<std::string_view, 3> kWordsOf<HashAlgorithm> = {"content", "sha256_cbor",
                                                                     "xxhash_cbor"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<CacheLayout> = {"NHD", "HND"};
template <>
constexpr std::array<std::string_view, 7> kWordsOf<AttentionBackend> = {
    "flash_attn", "flashinfer", "triton_attn", "triton_mla", "flashmla", "cache_only", "any_size"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<LayoutRule> = {"isolated", "vllm_0_22_1"};
template <>
constexpr std::array<std::string_view, 3> kWordsOf<CheckMode> = {"fast", "check", "hunt"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<Numbers> = {"words", "real"};
template <>
constexpr std::array<std::string_view, 2> kWordsOf<KVLoadFailurePolicy> = {"recompute", "fail"};

constexpr std::string_view kAttentionChoices[] = {"full", "mla"};
constexpr std::string_view kDtypeChoices[] = {"bf16",
                                              "fp16",
                                              "fp32",
                                              "fp8_e4m3",
                                              "fp8_e5m2",
                                              "int8",
                                              "fp8_per_token_head",
                                              "int8_per_token_head"};
constexpr std::string_view kBackendChoices[] = {"flash_attn", "flashinfer", "triton_attn",
                                                "any_size"};

const RunSpec& defaults() {
  static const RunSpec run;
  return run;
}

template <auto... path>
constexpr auto& at(RunSpec& run) {
  return (run.*....*path);
}
template <auto... path>
constexpr const auto& at(const RunSpec& run) {
  return (run.*....*path);
}

using Names = std::vector<std::string>;
using Sizes = std::vector<std::int64_t>;
using Parts = std::vector<ConnectorKind>;
using Percent = std::optional<std::int32_t>;

template <class T>
constexpr FieldKind kind_of() {
  if constexpr (std::is_same_v<T, bool>)
    return FieldKind::flag;
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    return FieldKind::uint64;
  else if constexpr (std::is_integral_v<T> || std::is_same_v<T, Percent>)
    return FieldKind::number;
  else if constexpr (std::is_enum_v<T>)
    return FieldKind::word;
  else
    return FieldKind::text;
}

template <class T>
bool set_text(T& member, std::string_view text) {
  if constexpr (std::is_enum_v<T>) {
    const auto found = std::ranges::find(kWordsOf<T>, text);
    if (found == kWordsOf<T>.end()) return false;
    member = static_cast<T>(found - kWordsOf<T>.begin());
  } else if constexpr (std::is_same_v<T, Parts>) {
    auto parts = text == "none" ? Parts{} : connector_parts_from_text(text);
    if (!parts) return false;
    member = std::move(*parts);
  } else if constexpr (std::is_same_v<T, Names>) {
    member = {std::string(text)};
  } else {
    member = text;
  }
  return true;
}

// Older saved cases have numbers for switches, words and connectors: a digit for each part.
template <class T>
T read_old_number(JsonValue value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.integer(0, 1) != 0;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(value.integer(0, std::ssize(kWordsOf<T>) - 1));
  } else {
    Parts parts;
    for (std::int64_t left = value.integer(0); left != 0; left /= 10) {
      if (left % 10 < 1 || left % 10 > 3 || parts.size() == kConnectorPartsMax) {
        value.refuse("up to 4 digits: 1 (peers), 2 (host) or 3 (one-group-peers)");
        return {};
      }
      parts.insert(parts.begin(), static_cast<ConnectorKind>(left % 10));
    }
    return parts;
  }
}

template <class T>
T read_words(JsonValue value) {
  std::array<JsonWord<T>, kWordsOf<T>.size()> words;
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = {kWordsOf<T>[i], static_cast<T>(i)};
  return value.word<T>(words);
}

template <class T>
void read_member(const RunField& field, JsonValue value, T& member, const T& as_default) {
  constexpr bool has_old_number =
      std::is_same_v<T, bool> || std::is_enum_v<T> || std::is_same_v<T, Parts>;
  if constexpr (has_old_number) {
    if (field.saved_in == SavedIn::settings && value.is_number()) {
      member = read_old_number<T>(value);
      return;
    }
  }
  if constexpr (std::is_same_v<T, bool>) {
    member = value.boolean();
  } else if constexpr (std::is_same_v<T, std::uint64_t>) {
    member = value.uint64();
  } else if constexpr (std::is_integral_v<T>) {
    member = value.integer<T>(std::min<std::int64_t>(field.at_least, as_default));
  } else if constexpr (std::is_same_v<T, Percent>) {
    const auto percent = value.integer<std::int32_t>(-1);  // -1, of older cases: absent
    member = percent < 0 ? Percent() : Percent(percent);
  } else if constexpr (std::is_enum_v<T>) {
    member = read_words<T>(value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    member = value.nonempty_string();
  } else if constexpr (std::is_same_v<T, Parts>) {
    if (!set_text(member, value.string())) value.refuse(kPartsExpected);
  } else if constexpr (std::is_same_v<T, Names>) {
    member.clear();
    for (JsonValue name : value.array()) member.emplace_back(name.nonempty_string());
  } else {
    member.clear();
    for (JsonValue size : value.array()) member.push_back(size.integer(1, INT32_MAX));
  }
}

template <class T>
void write_member(JsonWriter& out, const T& member) {
  if constexpr (std::is_same_v<T, bool>)
    out.boolean(member);
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    out.uint64(member);
  else if constexpr (std::is_integral_v<T>)
    out.integer(member);
  else if constexpr (std::is_same_v<T, Percent>)
    member ? out.integer(*member) : out.null();
  else if constexpr (std::is_enum_v<T>)
    out.string(kWordsOf<T>[static_cast<std::size_t>(member)]);
  else if constexpr (std::is_same_v<T, std::string>)
    out.string(member);
  else if constexpr (std::is_same_v<T, Parts>)
    out.string(connector_parts_text(member));
  else if constexpr (std::is_same_v<T, Names>)
    out.strings(member);
  else
    out.integers(member);
}

// A row for the member that `path` leads to from a RunSpec.
template <auto... path>
constexpr RunField row(RunField field) {
  using T = std::remove_cvref_t<decltype(at<path...>(std::declval<RunSpec&>()))>;
  field.kind = kind_of<T>();
  field.copy = [](const RunSpec& from, RunSpec& to) { at<path...>(to) = at<path...>(from); };
  field.is_equal = [](const RunSpec& one, const RunSpec& other) {
    return at<path...>(one) == at<path...>(other);
  };
  if constexpr (std::is_same_v<T, Percent>)
    field.number = [](const RunSpec& run) -> std::int64_t { return at<path...>(run).value_or(0); };
  else if constexpr (std::is_integral_v<T>)
    field.number = [](const RunSpec& run) { return static_cast<std::int64_t>(at<path...>(run)); };
  if constexpr (std::is_same_v<T, Percent>)
    field.set_number = [](RunSpec& run, std::int64_t number) {
      at<path...>(run) = static_cast<std::int32_t>(number);
    };
  else if constexpr (std::is_integral_v<T>)
    field.set_number = [](RunSpec& run, std::int64_t number) {
      at<path...>(run) = static_cast<T>(number);
    };
  if constexpr (std::is_same_v<T, std::uint64_t>)
    field.set_uint64 = [](RunSpec& run, std::uint64_t number) { at<path...>(run) = number; };
  if constexpr (std::is_enum_v<T>) {
    field.words = kWordsOf<T>;
    if (field.choices.empty()) field.choices = kWordsOf<T>;
  }
  if constexpr (kind_of<T>() == FieldKind::word ||
                (kind_of<T>() == FieldKind::text && !std::is_same_v<T, Sizes>))
    field.set_text = [](RunSpec& run, std::string_view text) {
      return set_text(at<path...>(run), text);
    };
  field.read = [](const RunField& of, JsonValue value, RunSpec& run) {
    read_member(of, value, at<path...>(run), at<path...>(defaults()));
  };
  field.write = [](JsonWriter& out, const RunSpec& run) { write_member(out, at<path...>(run)); };
  return field;
}
template <auto member>
constexpr RunField engine_row(RunField field) {
  field.saved_in = SavedIn::engine;
  return row<&RunSpec::engine, member>(field);
}
template <auto... path>
constexpr RunField setting_row(RunField field) {
  field.saved_in = SavedIn::settings;
  return row<path...>(field);
}

constexpr RunField kFields[] = {
    // The cache that is planned where the input brings none.
    row<&RunSpec::recipe, &RunRecipe::model>(
        {.name = "model",
         .group = kCache,
         .flag = "--model",
         .help = "all layers of a model of the catalogue, a model file or a config.json",
         .said_by = kByRecordings}),
    row<&RunSpec::recipe, &RunRecipe::layers>({.name = "layers",
                                               .group = kCache,
                                               .flag = "--layers",
                                               .help = "layers (2)",
                                               .at_least = 1,
                                               .at_most = 256,
                                               .said_by = kByModels}),
    row<&RunSpec::recipe, &RunRecipe::kv_heads>({.name = "kv_heads",
                                                 .group = kCache,
                                                 .flag = "--kv-heads",
                                                 .help = "KV heads of a layer (2)",
                                                 .at_least = 1,
                                                 .at_most = 256,
                                                 .said_by = kByModels}),
    row<&RunSpec::recipe, &RunRecipe::head_size>({.name = "head_size",
                                                  .group = kCache,
                                                  .flag = "--head-size",
                                                  .help = "elements of a head (64)",
                                                  .at_least = 1,
                                                  .at_most = 4096,
                                                  .said_by = kByModels}),
    setting_row<&RunSpec::queries_per_kv>({.name = "queries_per_kv",
                                           .group = kCache,
                                           .flag = "--queries-per-kv",
                                           .help = "query heads of a KV head (1)",
                                           .at_least = 1,
                                           .at_most = 64,
                                           .said_by = kBySavedCase}),
    row<&RunSpec::recipe, &RunRecipe::dtype>({.name = "dtype",
                                              .group = kCache,
                                              .flag = "--dtype",
                                              .help = "elements of the cache (bf16)",
                                              .choices = kDtypeChoices,
                                              .said_by = kByRecordings}),
    row<&RunSpec::recipe, &RunRecipe::attention>({.name = "attention",
                                                  .group = kCache,
                                                  .flag = "--attention",
                                                  .help = "kind of the layers (full)",
                                                  .choices = kAttentionChoices,
                                                  .said_by = kByModels}),
    row<&RunSpec::layout>({.name = "layout",
                           .group = kCache,
                           .flag = "--layout",
                           .help = "order of tokens and heads in a page (NHD)",
                           .said_by = kBySavedCase,
                           .saved_in = SavedIn::header}),
    row<&RunSpec::attention_backend>({.name = "attention_backend",
                                      .group = kCache,
                                      .flag = "--attention-backend",
                                      .help = "whose layout rules hold (flash_attn)",
                                      .choices = kBackendChoices,
                                      .said_by = kBySavedCase,
                                      .saved_in = SavedIn::header}),
    row<&RunSpec::kernel_block_sizes>(
        {.name = "kernel_block_sizes", .saved_in = SavedIn::header, .shrinks = Shrinks::never}),
    row<&RunSpec::layout_rule>({.name = "layout_rule", .saved_in = SavedIn::header}),
    row<&RunSpec::cache, &KVCacheConfig::num_blocks>(
        {.name = "num_blocks",
         .group = kCache,
         .flag = "--num-blocks",
         .help = "blocks of the pool, the null block included (the trace's hint; else one and a "
                 "half times the longest request)",
         .at_least = 2,
         .said_by = kByRecordings}),
    engine_row<&EngineConfig::block_size>({.name = "block_size",
                                           .group = kCache,
                                           .flag = "--block-size",
                                           .help = "tokens of a block (16)",
                                           .at_least = 1,
                                           .at_most = kTokensMax,
                                           .said_by = kByRecordings,
                                           .shrinks = Shrinks::size}),
    engine_row<&EngineConfig::mamba_block_size>(
        {.name = "mamba_block_size", .shrinks = Shrinks::size}),
    setting_row<&RunSpec::block_order>({.name = "block_order"}),

    // The engine.
    engine_row<&EngineConfig::engine>({.name = "engine",
                                       .group = kEngine,
                                       .flag = "--engine",
                                       .help = "profile to decide like ({})",
                                       .said_by = kByRecordings,
                                       .shrinks = Shrinks::never}),
    engine_row<&EngineConfig::policy>({.name = "policy",
                                       .group = kEngine,
                                       .flag = "--policy",
                                       .help = "who goes first (fcfs)",
                                       .said_by = kByRecordings}),
    engine_row<&EngineConfig::max_num_seqs>({.name = "max_num_seqs",
                                             .group = kEngine,
                                             .flag = "--max-num-seqs",
                                             .help = "running requests (256)",
                                             .at_least = 1,
                                             .at_most = kTokensMax,
                                             .said_by = kByRecordings,
                                             .shrinks = Shrinks::limit}),
    engine_row<&EngineConfig::max_num_batched_tokens>({.name = "max_num_batched_tokens",
                                                       .group = kEngine,
                                                       .flag = "--max-num-batched-tokens",
                                                       .help = "tokens of one step (8192)",
                                                       .at_least = 1,
                                                       .said_by = kByRecordings,
                                                       .shrinks = Shrinks::limit}),
    engine_row<&EngineConfig::max_model_len>(
        {.name = "max_model_len",
         .group = kEngine,
         .flag = "--max-model-len",
         .help = "prompt and output of a request at most (the longest of the trace)",
         .at_least = 1,
         .said_by = kByRecordings,
         .shrinks = Shrinks::limit}),
    engine_row<&EngineConfig::long_prefill_token_threshold>(
        {.name = "long_prefill_token_threshold",
         .group = kEngine,
         .flag = "--long-prefill-token-threshold",
         .help = "a prompt's tokens in one step at most; 0: no limit (0)",
         .said_by = kByRecordings,
         .phrase = ", prompts in chunks of {}"}),
    engine_row<&EngineConfig::enable_prefix_caching>(
        {.name = "enable_prefix_caching",
         .group = kEngine,
         .no_flag = "--no-prefix-caching",
         .no_help = "forget blocks when they are freed",
         .said_by = kByRecordings,
         .phrase = ", no prefix caching"}),
    engine_row<&EngineConfig::enable_chunked_prefill>(
        {.name = "enable_chunked_prefill",
         .group = kEngine,
         .no_flag = "--no-chunked-prefill",
         .no_help = "a prompt runs in one step or waits",
         .said_by = kByRecordings,
         .phrase = ", no chunked prefill"}),
    engine_row<&EngineConfig::async_scheduling>(
        {.name = "async_scheduling",
         .group = kEngine,
         .flag = "--async-scheduling",
         .help = "decide a step before the output of the one before is known",
         .said_by = kByRecordings,
         .phrase = ", async scheduling"}),
    engine_row<&EngineConfig::scheduler_reserve_full_isl>(
        {.name = "scheduler_reserve_full_isl",
         .group = kEngine,
         .flag = "--reserve-full-isl",
         .help = "admit a request only when its whole prompt fits (default)",
         .no_flag = "--no-reserve-full-isl",
         .no_help = "admit a request when its first chunk fits",
         .said_by = kByRecordings,
         .phrase = ", no full-length reservation"}),
    engine_row<&EngineConfig::hash_algorithm>(
        {.name = "hash_algorithm",
         .group = kEngine,
         .flag = "--hash-algorithm",
         .help = "of block hashes: the model's own, or one of the engine's (content; with "
                 "--cache-events sha256_cbor)",
         .said_by = kByRecordings}),
    engine_row<&EngineConfig::mamba_cache_mode>({.name = "mamba_cache_mode"}),
    engine_row<&EngineConfig::num_spec_tokens>(
        {.name = "num_spec_tokens", .phrase = ", {} drafts"}),
    engine_row<&EngineConfig::spec_method>({.name = "spec_method"}),
    engine_row<&EngineConfig::num_hash_lookahead_tokens>({.name = "num_hash_lookahead_tokens"}),
    engine_row<&EngineConfig::prefix_cache_retention_interval>(
        {.name = "prefix_cache_retention_interval"}),

    // KV connectors.
    setting_row<&RunSpec::connector, &ConnectorSpec::parts>(
        {.name = "connector",
         .group = kConnector,
         .flag = "--connector",
         .help = "peers: somebody knows prefixes of some prompts, loads take time and fail "
                 "(default); host: full blocks are stored in host memory and loaded from there; "
                 "one-group-peers: as peers, of one KV cache group; up to four of them in the "
                 "order in which they are asked: peers+host",
         .value_name = "PART[+PART...]",
         .default_text = "peers",
         .value_is_optional = true,
         .expected = kPartsExpected,
         .said_by = kByRecordings}),
    row<&RunSpec::recipe, &RunRecipe::disable_hybrid_kv_cache_manager>(
        {.name = "disable_hybrid_kv_cache_manager",
         .group = kConnector,
         .flag = "--disable-hybrid-kv-cache-manager",
         .help = "one KV cache group, whatever the layers (where a connector takes no more)",
         .no_flag = "--no-disable-hybrid-kv-cache-manager",
         .no_help = "insist on several",
         .said_by = kByRecordings}),
    setting_row<&RunSpec::connector, &ConnectorSpec::load_failure_policy>(
        {.name = "kv_load_failure_policy",
         .old_name = "load_failure_fails",
         .group = kConnector,
         .flag = "--kv-load-failure-policy",
         .help = "of requests whose load fails (recompute)",
         .said_by = kByRecordings}),
    setting_row<&RunSpec::connector, &ConnectorSpec::num_host_blocks>(
        {.name = "host_blocks",
         .group = kConnector,
         .flag = "--host-blocks",
         .help = "of each host tier (as many as the pool has)",
         .at_least = 1,
         .said_by = kByRecordings,
         .shrinks = Shrinks::lowered,
         .lowest = 1}),
    setting_row<&RunSpec::connector, &ConnectorSpec::load_failed_percent>(
        {.name = "load_failed_percent",
         .group = kConnector,
         .flag = "--load-failures",
         .help = "percent of the loads that fail (10 of those from peers, none from a host tier)",
         .at_most = 100,
         .said_by = kByRecordings,
         .shrinks = Shrinks::lowered,
         .lowest = 1}),
    setting_row<&RunSpec::connector, &ConnectorSpec::delay_steps_max>(
        {.name = "transfer_delay_steps",
         .group = kConnector,
         .flag = "--transfer-delay",
         .help = "steps that a load or store of the host tier takes at most (3)",
         .at_most = 1000,
         .said_by = kByRecordings,
         .shrinks = Shrinks::lowered,
         .lowest = 1}),

    // Ranks.
    setting_row<&RunSpec::tensor_parallel_size>(
        {.name = "tensor_parallel_size",
         .group = kRanks,
         .flag = "--tensor-parallel-size",
         .help = "ranks that share the heads of a layer (1)",
         .at_least = 1,
         .at_most = kRanksMax,
         .said_by = kBySavedCase,
         .shrinks = Shrinks::lowered,
         .lowest = 2}),
    setting_row<&RunSpec::pipeline_parallel_size>({.name = "pipeline_parallel_size",
                                                   .group = kRanks,
                                                   .flag = "--pipeline-parallel-size",
                                                   .help = "stages that share the layers (1)",
                                                   .at_least = 1,
                                                   .at_most = kRanksMax,
                                                   .said_by = kBySavedCase,
                                                   .shrinks = Shrinks::lowered,
                                                   .lowest = 2}),
    setting_row<&RunSpec::data_parallel_size>(
        {.name = "data_parallel_size",
         .group = kRanks,
         .flag = "--data-parallel-size",
         .help = "engines that share the requests and meet in every step (1)",
         .at_least = 1,
         .at_most = kRanksMax,
         .said_by = kByRecordings,
         .shrinks = Shrinks::lowered,
         .lowest = 2}),
    engine_row<&EngineConfig::dcp>(
        {.name = "dcp",
         .group = kRanks,
         .flag = "--decode-context-parallel-size",
         .help = "tensor parallel ranks that deal out tokens among one another (1)",
         .at_least = 1,
         .at_most = kRanksMax,
         .said_by = kByRecordings}),
    engine_row<&EngineConfig::pcp>({.name = "pcp",
                                    .group = kRanks,
                                    .flag = "--prefill-context-parallel-size",
                                    .help = "further ranks that tokens are dealt out to (1)",
                                    .at_least = 1,
                                    .at_most = kRanksMax,
                                    .said_by = kByRecordings}),
    setting_row<&RunSpec::cp_kv_cache_interleave_size>(
        {.name = "cp_kv_cache_interleave_size",
         .group = kRanks,
         .flag = "--cp-kv-cache-interleave-size",
         .help = "tokens in a row that go to one rank of context parallelism (1)",
         .at_least = 1,
         .at_most = kTokensMax,
         .said_by = kBySavedCase}),
    setting_row<&RunSpec::enforce_eager>(
        {.name = "enforce_eager",
         .group = kRanks,
         .flag = "--enforce-eager",
         .help = "data parallel ranks run no graphs: none is padded to the largest",
         .said_by = kByRecordings}),

    // The run.
    row<&RunSpec::backend>(
        {.name = "backend",
         .group = kRun,
         .flag = "--backend",
         .help = "auto, cuda (a GPU), simt (the same kernels on the CPU), none (the model alone), "
                 "or a plugin of yours: FILE.so (docs/check_your_kernels.md)",
         .default_text = "auto",
         .saved_in = SavedIn::header}),
    row<&RunSpec::check>({.name = "check",
                          .group = kRun,
                          .flag = "--check",
                          .help = "fast; check: watch every access of every simulated thread; "
                                  "hunt: preempt threads too",
                          .saved_in = SavedIn::header}),
    setting_row<&RunSpec::num_streams>(
        {.name = "num_streams",
         .group = kRun,
         .flag = "--streams",
         .help = "streams that a step's operations are spread over, with events in between (1)",
         .at_least = 1,
         .at_most = 64,
         .said_by = kBySavedCase}),
    setting_row<&RunSpec::delay_streams>(
        {.name = "delay_streams",
         .group = kRun,
         .flag = "--delay-streams",
         .help = "on the CPU: run every operation as late as events allow, in an order from the "
                 "seed (--check hunt does so too)",
         .said_by = kBySavedCase}),
    setting_row<&RunSpec::max_cudagraph_capture_size>(
        {.name = "max_cudagraph_capture_size",
         .group = kRun,
         .flag = "--graphs",
         .help = "capture a graph for each of vLLM's batch sizes up to N tokens, replay it and "
                 "pad to it",
         .at_least = 1,
         .said_by = kBySavedCase}),
    setting_row<&RunSpec::numbers>(
        {.name = "numbers",
         .old_name = "real_numbers",
         .group = kRun,
         .flag = "--numbers",
         .help = "what rows hold: words that are moved; real numbers, which an engine's kernels "
                 "quantise and attend to (words)",
         .said_by = kBySavedCase}),
    row<&RunSpec::mutants>({.name = "mutants",
                            .group = kRun,
                            .flag = "--mutant",
                            .help = "plant this defect (lockstep mutants --list)",
                            .said_by = kBySavedCase,
                            .saved_in = SavedIn::header,
                            .shrinks = Shrinks::never}),
    row<&RunSpec::seed>({.name = "seed",
                         .group = kRun,
                         .flag = "--seed",
                         .help = "of sampled tokens and of hunt's preemptions (0)",
                         .said_by = kBySavedCase,
                         .saved_in = SavedIn::header}),
    row<&RunSpec::recipe, &RunRecipe::faults>(
        {.name = "faults",
         .group = kRun,
         .flag = "--faults",
         .help = "what goes wrong: KIND@STEP[+STEPS][:NUMBER], by commas, or a seed "
                 "(docs/formats.md, Faults)",
         .value_name = "LIST|SEED",
         .said_by = kByRecordings}),
    row<&RunSpec::recipe, &RunRecipe::limit_requests>(
        {.name = "limit_requests",
         .group = kRun,
         .flag = "--limit",
         .help = "only the first N requests; 0: all (0)",
         .at_most = INT64_MAX,
         .said_by = kByRecordings}),
    setting_row<&RunSpec::step_time, &StepTimeModel::base_ns>(
        {.name = "step_base_ns",
         .group = kRun,
         .flag = "--step-base-ns",
         .help = "virtual time of a step (10000000)",
         .at_most = kNanosecondsMax,
         .said_by = kByRecordings}),
    setting_row<&RunSpec::step_time, &StepTimeModel::per_token_ns>(
        {.name = "step_token_ns",
         .group = kRun,
         .flag = "--step-per-token-ns",
         .help = "... and of each of its tokens (20000)",
         .at_most = kNanosecondsMax,
         .said_by = kByRecordings}),
    setting_row<&RunSpec::draft_acceptance_percent>({.name = "draft_acceptance_percent"}),
    setting_row<&RunSpec::budget, &CheckBudget::probe_rows>({.name = "probe_rows"}),
    setting_row<&RunSpec::budget, &CheckBudget::query_rows>({.name = "query_rows"}),
    setting_row<&RunSpec::budget, &CheckBudget::untouched_pages>({.name = "untouched_pages"}),
};

}  // namespace

bool RunField::is_default(const RunSpec& run) const { return is_equal(run, defaults()); }

std::string value_text(const RunField& field, const RunSpec& run) {
  JsonWriter out;
  field.write(out, run);
  std::string text = out.take_line();
  text.pop_back();
  return text.starts_with('"') ? text.substr(1, text.size() - 2) : text;
}

std::span<const RunField> run_fields() { return kFields; }

const RunField* find_run_field(std::string_view name) {
  const auto found = std::ranges::find(kFields, name, &RunField::name);
  return found == std::end(kFields) ? nullptr : found;
}

const RunField& run_field(std::string_view name) {
  const RunField* field = find_run_field(name);
  LS_CHECK(field != nullptr, "no option of a run is called {}", name);
  return *field;
}

const RunSpec& simplest_run() {
  static const RunSpec simplest = [] {
    RunSpec run;
    run.backend = "none";
    run.check = CheckMode::fast;
    return run;
  }();
  return simplest;
}

bool GivenRun::has(std::string_view name) const {
  return std::ranges::find(given, &run_field(name)) != given.end();
}

void GivenRun::add(const RunField& field) {
  if (std::ranges::find(given, &field) == given.end()) given.push_back(&field);
}

void GivenRun::set_text(std::string_view name, std::string_view text) {
  const RunField& field = run_field(name);
  const bool taken = field.set_text(spec, text);
  LS_CHECK(taken, "{} cannot be {}", name, text);
  add(field);
}

void GivenRun::forget(std::string_view name) { std::erase(given, &run_field(name)); }

void GivenRun::apply_to(RunSpec& run) const {
  for (const RunField* field : given) field->copy(spec, run);
}

std::string GivenRun::first_said_by(SaidBy input) const {
  for (const RunField& field : kFields) {
    if ((field.said_by & input) == 0 || !has(field.name)) continue;
    const bool is_reset = field.kind == FieldKind::flag && field.number(spec) == 0;
    return std::string(is_reset ? field.no_flag : field.flag);
  }
  return {};
}

}  // namespace lockstep
