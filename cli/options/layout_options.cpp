#include "cli/options/layout_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "reference/plan/capacity.h"
#include "reference/plan/limits.h"
#include "reference/profiles/releases.h"
#include "traces/formats/run_spec.h"

namespace lockstep {
namespace {

constexpr std::int64_t kLongestMax = std::int64_t{1} << 31;
constexpr std::int64_t kRanksMax = 4096;

// A word that `from_name` accepts, or an error message that lists the accepted words.
template <class T>
Result<T> parse_word(std::string_view option, std::string_view text,
                     std::optional<T> (*from_name)(std::string_view), std::string_view expected) {
  if (const auto value = from_name(text)) return *value;
  return fail("{}: '{}' is not one of {}", option, text, expected);
}

// "int8_per_token_head" is a dtype and a quantization mode in one word, as in vLLM's
// --kv-cache-dtype.
Result<void> set_kv_dtype(std::string_view text, PlanOptions& options) {
  LS_ASSIGN_OR_RETURN(const auto type, parse_word<ElementType>(
                                           "--kv-dtype", text, element_type_from_name,
                                           "bf16, fp16, fp32, fp8, fp8_e5m2, int8_per_token_head, "
                                           "fp8_per_token_head, int4_per_token_head, nvfp4"));
  options.kv_dtype = type.dtype;
  options.kv_quant_mode = type.mode;
  return {};
}

// Options with which the engine does not start (config/vllm.py, validate_mamba_block_size() and
// since 0.33.0 _reject_mismatched_float_kv_cache()).
Result<void> check_start(const LayoutArguments& a, const ModelSpec& model, const PlanOptions& o) {
  LS_RETURN_IF_ERROR(check_step(o.max_num_batched_tokens, o.max_num_seqs.value_or(0)));
  if (o.mamba_block_size && o.mamba_cache_mode == MambaCacheMode::none &&
      *o.mamba_block_size != o.max_model_len)
    return fail(
        "--mamba-block-size {}: only with prefix caching of states; choose --mamba-cache-mode",
        *o.mamba_block_size);
  const bool is_float = o.kv_dtype == DType::bf16 || o.kv_dtype == DType::fp16;
  if (a.kv_dtype != "auto" && is_float && o.kv_quant_mode == KVQuantMode::none &&
      o.overlays_groups && o.kv_dtype != model.dtype)
    return fail("--kv-dtype {}: the model is served in {}; choose that, auto or a quantized format",
                a.kv_dtype, name_of(model.dtype));
  return {};
}

}  // namespace

void add_layout_options(CLI::App& command, LayoutArguments& a) {
  // Limits far above any deployment: they keep products of ranks, layers and tokens within 64 bits.
  const auto ranks = CLI::Range(std::int64_t{1}, kRanksMax);
  const auto tokens = CLI::Range(std::int64_t{1}, kLongestMax);
  command.add_option("--tp", a.plan.tp, "tensor parallel ranks")->check(ranks);
  command.add_option("--pp", a.plan.pp, "pipeline stages")->check(ranks);
  command.add_option("--dcp", a.plan.dcp, "decode context parallel ranks")->check(ranks);
  command.add_option("--pcp", a.plan.pcp, "prefill context parallel ranks")->check(ranks);
  command.add_option("--ssm-dtype", a.ssm_dtype, "dtype of recurrent states (the model's)");
  command.add_option(
      "--backend", a.backend,
      "attention backend: flash_attn, flashinfer, triton_attn, triton_mla, flashmla");
  command.add_option("--engine", a.engine, "engine profile that plans")->capture_default_str();
  command.add_option(
      "--layout", a.layout,
      "one of the six cache layouts (NHD: the engine's choice); before vllm-0.33.0 NHD or HND");
  CLI::Option* const memory =
      command.add_option("--memory", a.memory, "cache memory per worker: 40GiB, 512MiB or bytes");
  // As vLLM's --num-gpu-blocks-override: replaces the number that the memory gives (vLLM 0.33.0,
  // v1/core/kv_cache_planning.py, may_override_num_blocks()).
  command.add_option("--num-blocks", a.plan.num_gpu_blocks_override, "blocks, instead of --memory")
      ->check(tokens)
      ->excludes(memory);
  command.add_option("--num-spec", a.plan.num_spec, "speculative tokens")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{64}));
  command
      .add_option("--max-model-len", a.plan.max_model_len,
                  "maximum tokens per request (the model's, at most 32,768)")
      ->check(tokens);
  command
      .add_option("--max-num-batched-tokens", a.plan.max_num_batched_tokens,
                  "maximum tokens per step")
      ->check(tokens);
  command
      .add_option("--max-num-seqs", a.plan.max_num_seqs, "running requests whose states must fit")
      ->check(tokens);
  command.add_option("--block-size", a.plan.block_size, "tokens per block (16, or as states need)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  command
      .add_option("--mamba-block-size", a.plan.mamba_block_size, "mode all: tokens per state chunk")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  // Windows and chunks become full attention, so no block is freed before its request ends.
  command.add_flag("--disable-hybrid-kv-cache-manager", a.plan.disable_hybrid_kv_cache_manager,
                   "keep all blocks of windows and chunks");
  // HiSparse exists only in the overlaid planner; plan_options() refuses it for an older release.
  CLI::Option* const host = command.add_option("--hisparse-host", a.host_pool,
                                               "HiSparse with a host pool of this size: 64GiB");
  command
      .add_option("--hisparse-device-buffer", a.plan.device_buffer_rows,
                  "KV entries of a request's hot region per layer")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{32768}))
      ->needs(host);
  CLI::Option* const hidden_states =
      command.add_option("--hidden-states", a.hidden_state_layers,
                         "number of layers whose hidden states are extracted");
  hidden_states->check(CLI::Range(std::int64_t{1}, std::int64_t{1024}));
  command.add_option("--hidden-size", a.hidden_size, "elements of one layer's hidden state")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 16))
      ->needs(hidden_states);
}

Result<bool> is_placed(const LayoutArguments& a) {
  const Release* release = find_release(a.engine);
  if (release == nullptr) return fail("--engine: '{}' is not one of {}", a.engine, release_names());
  const bool overlays = overlays_groups(*release);
  const auto layout = from_name<CacheLayout>(a.layout);
  if (!layout || (!overlays && is_overlaid(*layout)))
    return fail("--layout: '{}' is not NHD or HND{}", a.layout,
                overlays ? ", nor one of LBNHC, LBHNC, LHBNC, BLNHC, BLHNC and BHLNC"
                         : "; --engine vllm-0.33.0 has six layouts");
  return overlays;
}

std::vector<std::string> plan_warnings(const LayoutArguments& a, const ModelSpec& model,
                                       const PlanOptions& options, std::int64_t hit_step_tokens) {
  std::vector<std::string> warnings;
  // An unknown release was refused by is_placed(), so null does not occur here.
  const Release* release = find_release(a.engine);
  if (release != nullptr && !overlays_groups(*release) && release->name != kPlannerOfTensors)
    warnings.push_back(fmt::format(
        "planned by the rules of {}: {} may plan and lay out its pages differently ({})",
        kPlannerOfTensors, release->name, name_of(release->page_format)));
  const std::int64_t drafts = num_draft_layers(model);
  if (options.num_spec > 0 && drafts == 0)
    warnings.push_back(
        "no layers of a draft model are planned: MTP layers of the checkpoint "
        "(num_nextn_predict_layers, mtp_num_hidden_layers) or an EAGLE model keep more");
  if (drafts > 0 && options.num_spec > 0 && !options.has_drafter)
    warnings.push_back(fmt::format("the draft model's layers are left out: {} of {} layers", drafts,
                                   model.layers.size()));
  // vllm/config/model.py, _get_and_verify_max_len().
  if (model.max_model_len_limit > 0 && options.max_model_len > model.max_model_len_limit)
    warnings.push_back(
        fmt::format("--max-model-len {}: vLLM refuses more than the model's {} tokens, unless "
                    "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
                    options.max_model_len, model.max_model_len_limit));
  if (options.max_model_len <= hit_step_tokens)
    warnings.push_back(
        unfilled_block_text(hit_step_tokens, options.max_model_len, "max_model_len"));
  return warnings;
}

Result<std::int64_t> parse_size(std::string_view option, std::string_view text) {
  // Units are binary, as memory is allocated: G is GiB. "GB" is refused, since it may mean either.
  constexpr auto kUnits = std::to_array<std::pair<std::string_view, int>>({{"", 0},
                                                                           {"KiB", 10},
                                                                           {"MiB", 20},
                                                                           {"GiB", 30},
                                                                           {"TiB", 40},
                                                                           {"K", 10},
                                                                           {"M", 20},
                                                                           {"G", 30},
                                                                           {"T", 40}});
  // from_chars() ignores the locale, and accepts "1.5GiB".
  double number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  const auto known = std::ranges::find(kUnits, unit, &std::pair<std::string_view, int>::first);
  // -1 and NaN fail the comparison below; infinity exceeds its limit.
  const double bytes = known == kUnits.end() ? -1 : std::ldexp(number, known->second);
  if (status != std::errc{} || !(bytes >= 0) || bytes > std::ldexp(1, 50))
    return fail("{}: '{}' is not a size; write 40GiB, 512MiB or a number of bytes", option, text);
  return static_cast<std::int64_t>(bytes);
}

Result<PlanOptions> plan_options(const LayoutArguments& a, const ModelSpec& model) {
  PlanOptions o = a.plan;
  // Only the overlaid planner places the layers of a draft model.
  LS_ASSIGN_OR_RETURN(const bool placed, is_placed(a));
  o.has_drafter = placed && o.num_spec > 0;
  o.overlays_groups = placed;
  EngineConfig served;
  served.engine = find_release(a.engine)->name;
  served.num_spec_tokens = static_cast<std::int32_t>(o.num_spec);
  if (o.num_spec > 0) served.spec_method = SpecMethod::eagle;
  o.async_scheduling = plans_async(served);
  // A request of a model's full million tokens would not fit most memories, and the plan would be
  // refused.
  if (o.max_model_len == 0) o.max_model_len = std::min<std::int64_t>(model.max_model_len, 32768);
  LS_RETURN_IF_ERROR(a.kv_dtype == "auto" ? take_checkpoint_format(model, o)
                                          : set_kv_dtype(a.kv_dtype, o));
  const auto fixed = std::ranges::find_if(
      model.kinds, [](const LayerKind& kind) { return !kind.spec.cache_dtype_str.empty(); });
  if (a.kv_dtype != "auto" && o.kv_dtype != DType::fp8_e4m3 && fixed != model.kinds.end())
    return fail("--kv-dtype {}: the model fixes rows of {} (cache_dtype_str of `{}`); use fp8",
                a.kv_dtype, fixed->spec.cache_dtype_str, fixed->name);
  if (!a.ssm_dtype.empty()) {
    LS_ASSIGN_OR_RETURN(o.ssm_dtype, parse_word<DType>("--ssm-dtype", a.ssm_dtype, dtype_from_name,
                                                       "bf16, fp16, fp32"));
    const bool has_kda = std::ranges::any_of(model.kinds, [](const LayerKind& kind) {
      return is_state_kind(kind.spec.kind) && kind.states.family == StateFamily::kda;
    });
    if (itemsize_bytes(*o.ssm_dtype) == 1 || (has_kda && o.ssm_dtype != DType::fp32))
      return fail("--ssm-dtype {}: the planner keeps {}; use another", a.ssm_dtype,
                  has_kda ? "the states of KDA in fp32" : "states in fp32, bf16 or fp16");
  }
  LS_ASSIGN_OR_RETURN(o.mamba_cache_mode,
                      parse_word<MambaCacheMode>("--mamba-cache-mode", a.mamba_cache_mode,
                                                 from_name<MambaCacheMode>, "none, align, all"));
  LS_RETURN_IF_ERROR(check_start(a, model, o));
  if (!a.backend.empty()) {
    LS_ASSIGN_OR_RETURN(
        o.backend,
        parse_word<AttentionBackend>("--backend", a.backend, from_name<AttentionBackend>,
                                     "flash_attn, flashinfer, triton_attn, triton_mla, flashmla"));
    LS_RETURN_IF_ERROR(check_backend(model, o));
  }
  LS_ASSIGN_OR_RETURN(o.memory_bytes, parse_size("--memory", a.memory));
  LS_RETURN_IF_ERROR(take_model(model, o));
  if (a.host_pool.empty()) return o;
  if (!placed) return fail("--hisparse-host needs a release whose groups overlay one allocation");
  LS_ASSIGN_OR_RETURN(o.host_pool_bytes, parse_size("--hisparse-host", a.host_pool));
  return o;
}

}  // namespace lockstep
