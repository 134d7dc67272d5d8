// The table of options, and lookups in it. Each row names the option in files, its flag, help and
// range, the inputs that determine it, and the way in which the shrinker simplifies it.
#include "traces/formats/run_fields.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/number_text.h"
#include "reference/types/host_pages.h"
#include "traces/formats/run_field_rows.h"

namespace lockstep {
namespace {

using namespace run_rows;

// Bounds of the command line, far above any real configuration, so that a typing error is refused.
constexpr std::int64_t kTokenOptionMax = 1 << 20;
constexpr std::int64_t kRanksMax = 64;
constexpr std::int64_t kNanosecondsMax = 1'000'000'000'000;

// Groups of the help, in the order in which it prints them.
constexpr std::string_view kCache = "Cache";
constexpr std::string_view kEngine = "Engine";
constexpr std::string_view kConnector = "KV connector";
constexpr std::string_view kRanks = "Ranks";
constexpr std::string_view kRun = "Run";

// A row that the command line has. Numbers are from at_least to at_most; other kinds ignore both.
constexpr RunField option(std::string_view name, std::string_view group, std::string_view flag,
                          std::string_view help, std::uint8_t said_by, std::int64_t at_least = 0,
                          std::int64_t at_most = INT32_MAX) {
  return {.name = name,
          .group = group,
          .flag = flag,
          .help = help,
          .at_least = at_least,
          .at_most = at_most,
          .said_by = said_by};
}
// Modifiers of a row: how it shrinks, and the words that the command line accepts.
constexpr RunField shrunk(RunField field, Shrinks how, std::int64_t lowest = 0) {
  field.shrinks = how;
  field.lowest = lowest;
  return field;
}
constexpr RunField one_of(std::span<const std::string_view> choices, RunField field) {
  field.choices = choices;
  return field;
}
// A switch: `flag` sets it, `no_flag` resets it; either may be empty.
constexpr RunField switched(std::string_view name, std::string_view group, std::string_view flag,
                            std::string_view help, std::string_view no_flag,
                            std::string_view no_help, std::string_view phrase = {}) {
  RunField field = option(name, group, flag, help, kByRecordings);
  field.no_flag = no_flag;
  field.no_help = no_help;
  field.phrase = phrase;
  return field;
}
// A row that the first line of a saved case has.
template <auto... path>
constexpr RunField header_row(RunField field) {
  field.saved_in = SavedIn::header;
  return row<path...>(field);
}

constexpr RunField kFields[] = {
    // The cache that is planned where the input has no plan.
    row<&RunSpec::recipe, &RunRecipe::model>(
        option("model", kCache, "--model",
               "all layers of a catalogue model, a model file or a config.json", kByRecordings)),
    row<&RunSpec::recipe, &RunRecipe::layers>(
        option("layers", kCache, "--layers", "number of layers (2)", kByModels, 1, 256)),
    row<&RunSpec::recipe, &RunRecipe::kv_heads>(
        option("kv_heads", kCache, "--kv-heads", "KV heads per layer (2)", kByModels, 1, 256)),
    row<&RunSpec::recipe, &RunRecipe::head_size>(
        option("head_size", kCache, "--head-size", "elements per head (64)", kByModels, 1, 4096)),
    setting_row<&RunSpec::queries_per_kv>(option("queries_per_kv", kCache, "--queries-per-kv",
                                                 "query heads per KV head (1)", kBySavedCase, 1,
                                                 64)),
    row<&RunSpec::recipe, &RunRecipe::dtype>(
        one_of(kDtypeChoices,
               option("dtype", kCache, "--dtype", "dtype of the cache (bf16)", kByRecordings))),
    row<&RunSpec::recipe, &RunRecipe::attention>(
        one_of(kAttentionChoices,
               option("attention", kCache, "--attention", "kind of attention (full)", kByModels))),
    header_row<&RunSpec::layout>(
        option("layout", kCache, "--layout",
               "order of tokens and heads in a page, or of the whole cache for engines with six "
               "layouts (NHD: the engine's choice)",
               kBySavedCase)),
    header_row<&RunSpec::attention_backend>(
        one_of(kBackendChoices,
               option("attention_backend", kCache, "--attention-backend",
                      "attention backend that defines the layout (flash_attn)", kBySavedCase))),
    header_row<&RunSpec::kernel_block_sizes>(
        {.name = "kernel_block_sizes", .shrinks = Shrinks::never}),
    header_row<&RunSpec::layout_rule>({.name = "layout_rule"}),
    // Saved as part of `cache`, hence no place of its own. At least 2: the null block and one
    // usable block.
    row<&RunSpec::cache, &KVCacheConfig::num_blocks>(
        option("num_blocks", kCache, "--num-blocks",
               "blocks of the pool, null block included (the trace's hint, else 1.5 times the "
               "longest request)",
               kByRecordings, 2)),
    engine_row<&EngineConfig::block_size>(
        shrunk(option("block_size", kCache, "--block-size", "tokens per block (16)", kByRecordings,
                      1, kTokenOptionMax),
               Shrinks::size)),
    engine_row<&EngineConfig::mamba_block_size>(
        {.name = "mamba_block_size", .shrinks = Shrinks::size}),
    setting_row<&RunSpec::block_order>({.name = "block_order"}),

    // The engine.
    // Never shrunk: the case is about this release.
    engine_row<&EngineConfig::engine>(shrunk(
        option("engine", kEngine, "--engine", "engine profile to simulate ({})", kByRecordings),
        Shrinks::never)),
    engine_row<&EngineConfig::policy>(
        option("policy", kEngine, "--policy", "scheduling policy (fcfs)", kByRecordings)),
    engine_row<&EngineConfig::max_num_seqs>(shrunk(
        option("max_num_seqs", kEngine, "--max-num-seqs",
               "running requests (the trace's hint, else 256)", kByRecordings, 1, kTokenOptionMax),
        Shrinks::limit)),
    engine_row<&EngineConfig::max_num_batched_tokens>(
        shrunk(option("max_num_batched_tokens", kEngine, "--max-num-batched-tokens",
                      "tokens per step (the trace's hint, else 8192)", kByRecordings, 1),
               Shrinks::limit)),
    engine_row<&EngineConfig::max_model_len>(
        shrunk(option("max_model_len", kEngine, "--max-model-len",
                      "maximum tokens per request, prompt and output (the longest of the trace)",
                      kByRecordings, 1),
               Shrinks::limit)),
    engine_row<&EngineConfig::long_prefill_token_threshold>(
        {.name = "long_prefill_token_threshold",
         .group = kEngine,
         .flag = "--long-prefill-token-threshold",
         .help = "maximum prompt tokens of a request per step; 0: no limit (0)",
         .said_by = kByRecordings,
         .phrase = ", prompts in chunks of {}"}),
    engine_row<&EngineConfig::enable_prefix_caching>(
        switched("enable_prefix_caching", kEngine, "", "", "--no-prefix-caching",
                 "disable prefix caching", ", no prefix caching")),
    engine_row<&EngineConfig::enable_chunked_prefill>(
        switched("enable_chunked_prefill", kEngine, "", "", "--no-chunked-prefill",
                 "run a prompt in one step or let it wait", ", no chunked prefill")),
    engine_row<&EngineConfig::async_scheduling>(
        switched("async_scheduling", kEngine, "--async-scheduling",
                 "schedule a step before the previous output is known (the release's default)",
                 "--no-async-scheduling", "schedule a step after the previous output is known",
                 ", async scheduling")),
    engine_row<&EngineConfig::scheduler_reserve_full_isl>(switched(
        "scheduler_reserve_full_isl", kEngine, "--reserve-full-isl",
        "admit a request only when its whole prompt fits (default)", "--no-reserve-full-isl",
        "admit a request when its first chunk fits", ", no full-length reservation")),
    engine_row<&EngineConfig::hash_algorithm>(
        option("hash_algorithm", kEngine, "--hash-algorithm",
               "block hashes: content (the model's own) or an engine's algorithm (content; with "
               "--cache-events sha256_cbor)",
               kByRecordings)),
    engine_row<&EngineConfig::mamba_cache_mode>(
        option("mamba_cache_mode", kEngine, "--mamba-cache-mode",
               "--model with recurrent states: none, align or all (the release's default)",
               kByRecordings)),
    // Rows without a flag: a plan, a recording or a model file determines them.
    engine_row<&EngineConfig::num_spec_tokens>(
        {.name = "num_spec_tokens", .phrase = ", {} drafts"}),
    engine_row<&EngineConfig::spec_method>({.name = "spec_method"}),
    engine_row<&EngineConfig::num_hash_lookahead_tokens>({.name = "num_hash_lookahead_tokens"}),
    engine_row<&EngineConfig::prefix_cache_retention_interval>(
        option("prefix_cache_retention_interval", kEngine, "--prefix-cache-retention-interval",
               "tokens between cached states and windows; 0: only at the end of a prompt or shared "
               "prefix; -1: all (the release's default)",
               kByRecordings, kDenseRetention)),
    row<&RunSpec::recipe, &RunRecipe::prefill_checkpoints>(
        switched("prefill_checkpoints", kEngine, "", "", "--no-prefill-checkpoints",
                 "--model with states: end prefill chunks where a state is kept; export none from "
                 "inside a chunk")),
    engine_row<&EngineConfig::num_prefill_lookahead_tokens>(
        {.name = "num_prefill_lookahead_tokens"}),
    engine_row<&EngineConfig::prefix_match_unit>({.name = "prefix_match_unit"}),
    row<&RunSpec::recipe, &RunRecipe::layers_per_group>(
        option("layers_per_group", kCache, "--layers-per-group",
               "--model: only the first N layers of each group have pages; decisions, blocks and "
               "kinds of pages do not change (all)",
               kByRecordings, 1, 1024)),
    row<&RunSpec::recipe, &RunRecipe::hisparse_host_gib>(
        option("hisparse_host_gib", kCache, "--hisparse-host-gib",
               "HiSparse: host pool in GiB for the KV entries of a --model's sparse attention "
               "(--connector hisparse)",
               kByRecordings, 1, 1 << 20)),
    row<&RunSpec::recipe, &RunRecipe::hisparse_device_buffer>(
        option("hisparse_device_buffer", kCache, "--hisparse-device-buffer",
               "KV entries of a request's hot region per layer (the engine's choice)",
               kByRecordings, 1, 32768)),
    engine_row<&EngineConfig::encoder_compute_budget>(
        option("encoder_compute_budget", kEngine, "--encoder-compute-budget",
               "encoder tokens computed per step, with cross attention (max_num_batched_tokens)",
               kByRecordings)),
    engine_row<&EngineConfig::encoder_cache_size>(option(
        "encoder_cache_size", kEngine, "--encoder-cache-size",
        "encoder tokens that the encoder cache holds (max_num_batched_tokens)", kByRecordings)),

    // KV connectors.
    setting_row<&RunSpec::connector, &ConnectorSpec::parts>(
        {.name = "connector",
         .group = kConnector,
         .flag = "--connector",
         .help = "peers: simulated peers hold prefixes of some prompts, loads take steps and may "
                 "fail (default); host: full blocks are stored in host memory and loaded from "
                 "there; one-group-peers: like peers, for one KV cache group; hisparse: workers "
                 "copy pages of HiSparse's groups; up to four, queried in this order: peers+host",
         .value_name = "PART[+PART...]",
         .default_text = "peers",
         .value_is_optional = true,
         .expected = kPartsExpected,
         .said_by = kByRecordings}),
    row<&RunSpec::recipe, &RunRecipe::disable_hybrid_kv_cache_manager>(
        switched("disable_hybrid_kv_cache_manager", kConnector, "--disable-hybrid-kv-cache-manager",
                 "one KV cache group for all layers (if a connector supports only one)",
                 "--no-disable-hybrid-kv-cache-manager", "require several groups")),
    setting_row<&RunSpec::connector, &ConnectorSpec::load_failure_policy>(
        {.name = "kv_load_failure_policy",
         .old_name = "load_failure_fails",
         .group = kConnector,
         .flag = "--kv-load-failure-policy",
         .help = "policy for requests whose load fails (recompute)",
         .said_by = kByRecordings}),
    setting_row<&RunSpec::connector, &ConnectorSpec::num_host_blocks>(
        shrunk(option("host_blocks", kConnector, "--host-blocks",
                      "blocks of each host tier (as many as the pool has)", kByRecordings, 1),
               Shrinks::lowered, 1)),
    setting_row<&RunSpec::connector, &ConnectorSpec::load_failed_percent>(
        shrunk(option("load_failed_percent", kConnector, "--load-failures",
                      "percent of loads that fail (10 from peers, 0 from a host tier)",
                      kByRecordings, 0, 100),
               Shrinks::lowered, 1)),
    setting_row<&RunSpec::connector, &ConnectorSpec::delay_steps_max>(
        shrunk(option("transfer_delay_steps", kConnector, "--transfer-delay",
                      "maximum steps of a load or store of the host tier, or of a copy of "
                      "HiSparse's pages (3)",
                      kByRecordings, 0, 1000),
               Shrinks::lowered, 1)),

    setting_row<&RunSpec::engine, &EngineConfig::host_pool_num_blocks>(shrunk(
        {.name = "hisparse_host_num_blocks", .said_by = kByRecordings}, Shrinks::lowered, 1)),

    // Ranks.
    setting_row<&RunSpec::tensor_parallel_size>(
        shrunk(option("tensor_parallel_size", kRanks, "--tensor-parallel-size",
                      "ranks that shard the heads of a layer (1)", kBySavedCase, 1, kRanksMax),
               Shrinks::lowered, 2)),
    setting_row<&RunSpec::pipeline_parallel_size>(
        shrunk(option("pipeline_parallel_size", kRanks, "--pipeline-parallel-size",
                      "stages that split the layers (1)", kBySavedCase, 1, kRanksMax),
               Shrinks::lowered, 2)),
    setting_row<&RunSpec::data_parallel_size>(
        shrunk(option("data_parallel_size", kRanks, "--data-parallel-size",
                      "engines that split the requests and synchronize in every step (1)",
                      kByRecordings, 1, kRanksMax),
               Shrinks::lowered, 2)),
    engine_row<&EngineConfig::dcp>(option(
        "dcp", kRanks, "--decode-context-parallel-size",
        "tensor parallel ranks across which tokens are sharded (1)", kByRecordings, 1, kRanksMax)),
    engine_row<&EngineConfig::pcp>(option("pcp", kRanks, "--prefill-context-parallel-size",
                                          "additional ranks across which tokens are sharded (1)",
                                          kByRecordings, 1, kRanksMax)),
    setting_row<&RunSpec::cp_kv_cache_interleave_size>(option(
        "cp_kv_cache_interleave_size", kRanks, "--cp-kv-cache-interleave-size",
        "consecutive tokens per context parallel rank (1)", kBySavedCase, 1, kTokenOptionMax)),
    setting_row<&RunSpec::enforce_eager>(option(
        "enforce_eager", kRanks, "--enforce-eager",
        "run data parallel ranks without graphs: no rank is padded to the largest", kByRecordings)),

    // The run.
    header_row<&RunSpec::backend>(
        {.name = "backend",
         .group = kRun,
         .flag = "--backend",
         .help = "auto, cuda (a GPU), simt (the same kernels on the CPU), none (only the model), "
                 "FILE.so (your kernels, docs/check_your_kernels.md) or vllm[:DIR] (vLLM's own "
                 "worker, docs/real_worker.md)",
         .default_text = "auto"}),
    header_row<&RunSpec::check>(option("check", kRun, "--check",
                                       "check: watch every memory access of every simulated "
                                       "thread; hunt: also preempt threads (fast)",
                                       kByNobody)),
    setting_row<&RunSpec::num_streams>(
        option("num_streams", kRun, "--streams",
               "streams that run a step's operations, ordered by events (1)", kBySavedCase, 1, 64)),
    setting_row<&RunSpec::delay_streams>(option("delay_streams", kRun, "--delay-streams",
                                                "on the CPU: run every operation as late as events "
                                                "allow, in a seeded order (--check hunt also does)",
                                                kBySavedCase)),
    setting_row<&RunSpec::max_cudagraph_capture_size>(
        option("max_cudagraph_capture_size", kRun, "--graphs",
               "capture a graph for each of vLLM's batch sizes up to N tokens; pad batches to them "
               "and replay",
               kBySavedCase, 1)),
    setting_row<&RunSpec::numbers>(
        {.name = "numbers",
         .old_name = "real_numbers",
         .group = kRun,
         .flag = "--numbers",
         .help = "content of KV entries: words, which are only moved, or real numbers, which "
                 "kernels quantize and attend to (words)",
         .said_by = kBySavedCase}),
    setting_row<&RunSpec::decide>(option(
        "decide", kRun, "--decide",
        "source of decisions on a recording's inputs: recording (its own) or model (recording)",
        kBySavedCase)),
    // Never shrunk: the planted defect is what the case shows.
    header_row<&RunSpec::mutants>(
        shrunk(option("mutants", kRun, "--mutant", "plant this defect (lockstep mutants --list)",
                      kBySavedCase),
               Shrinks::never)),
    header_row<&RunSpec::seed>(option("seed", kRun, "--seed",
                                      "seed of sampled tokens and of hunt's preemptions (0)",
                                      kBySavedCase)),
    row<&RunSpec::recipe, &RunRecipe::faults>(
        {.name = "faults",
         .group = kRun,
         .flag = "--faults",
         .help = "faults to inject: KIND@STEP[+STEPS][:NUMBER], separated by commas, or a seed "
                 "(docs/formats.md, Faults)",
         .value_name = "LIST|SEED",
         .said_by = kByRecordings}),
    row<&RunSpec::recipe, &RunRecipe::limit_requests>(
        option("limit_requests", kRun, "--limit", "only the first N requests; 0: all (0)",
               kByRecordings, 0, INT64_MAX)),
    setting_row<&RunSpec::step_time, &StepTimeModel::base_ns>(
        option("step_base_ns", kRun, "--step-base-ns", "virtual time per step in ns (10000000)",
               kByRecordings, 0, kNanosecondsMax)),
    setting_row<&RunSpec::step_time, &StepTimeModel::per_token_ns>(
        option("step_token_ns", kRun, "--step-per-token-ns",
               "plus virtual time per token of the step in ns (20000)", kByRecordings, 0,
               kNanosecondsMax)),
    setting_row<&RunSpec::draft_acceptance_percent>(
        option("draft_acceptance_percent", kRun, "--draft-acceptance",
               "percent of draft tokens that are accepted ({})", kByRecordings, 0, 100)),
    setting_row<&RunSpec::short_drafts_percent>(option(
        "short_drafts_percent", kRun, "--short-drafts",
        "percent of proposals with fewer draft tokens than allowed ({})", kByRecordings, 0, 100)),
    setting_row<&RunSpec::budget, &CheckBudget::probe_rows>({.name = "probe_rows"}),
    setting_row<&RunSpec::budget, &CheckBudget::query_rows>({.name = "query_rows"}),
    setting_row<&RunSpec::budget, &CheckBudget::untouched_pages>({.name = "untouched_pages"}),
};

}  // namespace

bool RunField::is_default(const RunSpec& run) const { return is_equal(run, defaults()); }

// Uses the writer of files, so that messages and files show the same text. take_line() ends in a
// newline.
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
  LS_CHECK(field != nullptr, "unknown run option {}", name);
  return *field;
}

// Decisions do not depend on the backend, so a case that still fails without one is simpler.
const RunSpec& simplest_run() {
  static const RunSpec simplest = [] {
    return RunSpec{.backend = "none", .check = CheckMode::fast};
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

// In the order of the table, so that the message is the same whatever the order of the flags. A
// switch that was reset is named by its no_flag.
std::string GivenRun::first_said_by(SaidBy input) const {
  for (const RunField& field : kFields) {
    if ((field.said_by & input) == 0 || !has(field.name)) continue;
    const bool is_reset = field.kind == FieldKind::flag && field.number(spec) == 0;
    return std::string(is_reset ? field.no_flag : field.flag);
  }
  return {};
}

// Names of connector parts on the command line and in files.
constexpr std::array kKinds = std::to_array<std::pair<ConnectorKind, std::string_view>>({
    {ConnectorKind::peers, "peers"},
    {ConnectorKind::host, "host"},
    {ConnectorKind::one_group_peers, "one-group-peers"},
    {ConnectorKind::page_workers, kHostPagesWord},
});

static std::optional<ConnectorKind> kind_from_name(std::string_view name) {
  for (const auto& [kind, known] : kKinds)
    if (known == name) return kind;
  return std::nullopt;
}

std::string_view name_of(ConnectorKind kind) {
  for (const auto& [known, name] : kKinds)
    if (known == kind) return name;
  LS_CHECK(false, "connector kind {}", static_cast<int>(kind));
}

bool ConnectorSpec::has(ConnectorKind kind) const {
  return std::ranges::find(parts, kind) != parts.end();
}

// Splits at "+"; an empty part, as in "peers+", is unknown. A part may repeat.
std::optional<std::vector<ConnectorKind>> connector_parts_from_text(std::string_view text) {
  std::vector<ConnectorKind> parts;
  for (;;) {
    const std::size_t end = std::min(text.find('+'), text.size());
    const auto kind = kind_from_name(text.substr(0, end));
    if (!kind || parts.size() == kConnectorPartsMax) return std::nullopt;
    parts.push_back(*kind);
    if (end == text.size()) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string connector_parts_text(const std::vector<ConnectorKind>& parts) {
  const auto name = [](ConnectorKind kind) { return name_of(kind); };
  return parts.empty() ? "none" : joined(parts, name, "+");
}

// Dtypes in which each inline-scaled mode stores its elements. Modes with per-tensor scales need no
// entry: their name is the dtype's.
constexpr auto kQuantised = std::to_array<ElementType>({
    {DType::int8, KVQuantMode::int8_per_token_head},
    {DType::fp8_e4m3, KVQuantMode::fp8_per_token_head},
    {DType::uint8, KVQuantMode::nvfp4},
    {DType::uint8, KVQuantMode::int4_per_token_head},
});

// Quantizations first: "fp8_per_token_head" is not a dtype, and no dtype has a quantization's name.
std::optional<ElementType> element_type_from_name(std::string_view name) {
  for (const ElementType& type : kQuantised)
    if (name == name_of(type.mode)) return type;
  if (const auto dtype = dtype_from_name(name)) return ElementType{*dtype, KVQuantMode::none};
  return std::nullopt;
}

std::string_view name_of(const ElementType& type) {
  return type.mode == KVQuantMode::none ? name_of(type.dtype) : name_of(type.mode);
}

}  // namespace lockstep
