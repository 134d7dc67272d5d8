#include "reference/plan/model_spec.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "reference/plan/page_size.h"
#include "reference/plan/planner.h"
#include "reference/plan/rank_plan.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {
namespace {

// The sizes that `count` divides into and that tp could be, nearest to tp first.
std::int64_t nearest_divisor(std::int64_t count, std::int64_t tp) {
  std::int64_t best = 1;
  for (std::int64_t d = 1; d <= count; ++d)
    if (count % d == 0 && std::abs(d - tp) <= std::abs(best - tp)) best = d;
  return best;
}

// Cuts a layer's figures over tp ranks; keeps the first refusal.
class Cut {
 public:
  Cut(std::string layer, std::int64_t tp) : layer_(std::move(layer)), tp_(tp) {}

  std::int64_t evenly(std::int64_t count, std::string_view what) {
    if (count % tp_ != 0 && refusal_.empty())
      refusal_ = fmt::format("{}: {} {} cannot be cut over tp {}; the nearest tp that works is {}",
                             layer_, count, what, tp_, nearest_divisor(count, tp_));
    return count / tp_;
  }

  std::int64_t kv_heads(std::int64_t heads) {
    if (tp_ <= heads) return evenly(heads, "KV heads");
    if (tp_ % heads != 0 && refusal_.empty())
      refusal_ = fmt::format(
          "{}: {} KV heads cannot be replicated evenly over tp {}; the nearest tp that works is {}",
          layer_, heads, tp_, tp_ / heads * heads);
    return 1;
  }

  const std::string& refusal() const { return refusal_; }

 private:
  std::string layer_;
  std::int64_t tp_;
  std::string refusal_;
};

std::vector<StateTensorSpec> state_tensors(const StateFigures& f, const PlanOptions& options,
                                           DType conv, DType ssm, Cut& cut) {
  const std::int64_t kept = f.conv_kernel - 1;
  const std::int64_t kept_with_drafts = kept + options.num_spec;
  // Releases before vllm-0.33.0 keep no drafts there.
  const std::int64_t kept_by_newer = options.overlays_groups ? kept_with_drafts : kept;
  const auto channels = [&](std::int64_t count) { return cut.evenly(count, "channels"); };
  const auto heads = [&] { return cut.evenly(f.num_heads, "state heads"); };
  switch (f.family) {
    case StateFamily::gated_delta_net: {
      const std::int64_t width = 2 * f.num_k_heads * f.head_k_dim + f.num_heads * f.head_dim;
      return {{{kept_with_drafts, channels(width)}, conv},
              {{heads(), f.head_dim, f.head_k_dim}, ssm}};
    }
    case StateFamily::kda: {
      const std::int64_t k_width = f.num_k_heads * f.head_k_dim;
      return {{{kept_by_newer, channels(f.num_heads * f.head_dim)}, conv},
              {{kept_by_newer, channels(k_width)}, conv},
              {{kept_by_newer, channels(k_width)}, conv},
              {{heads(), f.head_dim, f.head_dim}, DType::fp32}};
    }
    case StateFamily::mamba2: {
      // One group is replicated on every rank.
      if (f.n_groups > 1) cut.evenly(f.n_groups, "n_groups");
      const std::int64_t groups = f.n_groups == 1 ? options.tp : f.n_groups;
      const std::int64_t width = f.intermediate_size + 2 * groups * f.state_size;
      return {{{kept_with_drafts, channels(width)}, conv},
              {{heads(), f.head_dim, f.state_size}, ssm}};
    }
    case StateFamily::mamba1:
      return {{{kept, channels(f.intermediate_size)}, conv},
              {{channels(f.intermediate_size), f.state_size}, ssm}};
    case StateFamily::linear_attention:
      cut.evenly(f.n_groups, "norm groups (group_norm_size)");
      return {{{heads(), f.head_dim, f.head_dim}, conv}};
    case StateFamily::short_conv:
      return {{{kept_by_newer, channels(f.intermediate_size)}, conv}};
  }
  return {};
}

}  // namespace

std::int64_t num_draft_layers(const ModelSpec& model) {
  return std::ranges::count_if(model.layers, [&](const ModelSpec::Layer& layer) {
    return model.kinds[layer.kind].is_draft;
  });
}

namespace {

// vllm/config/model.py, verify_with_parallel_config(), and parallel.py: every release from 0.22.1.
Result<void> check_ranks(const ModelSpec& model, const PlanOptions& options) {
  const std::int64_t heads = model.num_attention_heads, tp = options.tp, dcp = options.dcp;
  if (heads % tp != 0)
    return fail("--tp {}: it does not divide num_attention_heads {}; the nearest that works is {}",
                tp, heads, nearest_divisor(heads, tp));
  if (dcp == 1) return {};
  if (options.pcp == 1 && tp % dcp != 0)
    return fail("--dcp {}: it does not divide --tp {}, whose ranks it shares", dcp, tp);
  std::int64_t kv_heads = 0;  // none: latent rows, which every rank has
  for (const LayerKind& kind : model.kinds)
    if (keeps_pairs(kind.spec) && !kind.is_draft)
      kv_heads = std::max(kv_heads, kind.spec.num_kv_heads);
  // mla/flashmla_sparse.py, FlashMLASparseImpl.
  const bool is_sparse = std::ranges::any_of(model.kinds, [](const LayerKind& kind) {
    return kind.index_topk > 0 && !kind.has_own_dtype;
  });
  if (kv_heads == 0 && is_sparse && itemsize_bytes(options.kv_dtype) > 1)
    return fail("--dcp {}: sparse attention (index_topk) needs a cache in fp8; use --kv-dtype fp8",
                dcp);
  if (kv_heads == 0) return {};
  if (tp <= kv_heads || dcp > tp / kv_heads)
    return fail("--dcp {}: num_key_value_heads {} with --tp {} allow at most {}; raise --tp", dcp,
                kv_heads, tp, std::max<std::int64_t>(tp / kv_heads, 1));
  if (heads / kv_heads % dcp != 0)
    return fail("--dcp {}: it does not divide the {} query heads per KV head (num_attention_heads)",
                dcp, heads / kv_heads);
  return {};
}

// flashinfer.py, get_supported_head_sizes().
bool flashinfer_reads(std::int64_t head_size) {
  return head_size == 64 || head_size == 128 || head_size == 256 || head_size == 512;
}

// Stages keep what their layers read (model_executor/layers/attention/attention.py,
// kv_sharing_target_layer_name).
Result<void> check_stages(const ModelSpec& model, const PlanOptions& options) {
  if (options.pp > 1 && !model.supports_pp)
    return fail("--pp {}: vLLM has no pipeline parallelism for this model (SupportsPP); use --pp 1",
                options.pp);
  if (!model.first_shared_layer) return {};
  if (stage_begin(model.num_hidden_layers, options.pp, options.pp - 1) <= *model.first_shared_layer)
    return {};
  return fail(
      "--pp {}: layers of the last stage read the cache of layer {} (num_kv_shared_layers), "
      "which another stage has; use --pp 1",
      options.pp, *model.first_shared_layer);
}

// Formats of K and V that FlashAttention lacks, which alone reads them in two sizes (flash_attn.py,
// FlashAttentionImpl; with scales per token and head queries stay bf16, and its kernel refuses the
// fp8 rows), and that only FlashInfer reads (flashinfer.py, supports_combination()).
Result<void> check_pairs(const ModelSpec& model, const PlanOptions& options) {
  const KVQuantMode mode = options.kv_quant_mode;
  const bool is_one_size = options.kv_dtype == DType::fp8_e5m2 || is_per_token_head(mode);
  for (const LayerKind& kind : model.kinds) {
    if (!keeps_pairs(kind.spec) || kind.has_own_dtype) continue;
    const std::int64_t size = kind.spec.head_size, size_v = head_size_v(kind.spec);
    if (is_one_size && size_v != size)
      return fail("--kv-dtype {}: no backend reads it in K and V of {} and {} elements; use fp8",
                  format_of(options), size, size_v);
    if (mode == KVQuantMode::nvfp4 && (!flashinfer_reads(size) || size == 64))
      return fail("--kv-dtype nvfp4: no backend of a Hopper GPU reads it in heads of {}; use fp8",
                  size);
  }
  return {};
}

// Why a backend cannot serve layers of the kind; empty: it can.
std::string_view unsuited(AttentionBackend backend, const LayerKind& kind,
                          const PlanOptions& options) {
  const bool has_latents = has_single_rows(kind.spec);
  if (!kind.backend.empty() && kind.backend != name_of(backend))
    return "the model file names their backend";
  if (layer_backend(kind.spec, backend) != backend)
    return has_latents ? "MLA not supported" : "non-MLA not supported";
  const bool is_sparse = kind.index_topk > 0 || !kind.spec.cache_dtype_str.empty();
  if (has_latents) return is_sparse ? "sparse not supported" : "";
  const bool is_flashinfer = backend == AttentionBackend::flashinfer;
  if (is_flashinfer && !flashinfer_reads(kind.spec.head_size)) return "head_size not supported";
  if (kind.has_own_dtype) return "";
  const KVQuantMode mode = options.kv_quant_mode;
  const bool has_no_such_format =
      (is_per_token_head(mode) && backend != AttentionBackend::triton_attn) ||
      (mode == KVQuantMode::nvfp4 && !is_flashinfer) ||
      (options.kv_dtype == DType::fp8_e5m2 && backend == AttentionBackend::flash_attn);
  return has_no_such_format ? "kv_cache_dtype not supported" : "";
}

}  // namespace

std::string_view format_of(const PlanOptions& options) {
  const KVQuantMode mode = options.kv_quant_mode;
  return mode == KVQuantMode::none ? name_of(options.kv_dtype) : name_of(mode);
}

Result<void> check_backend(const ModelSpec& model, const PlanOptions& options) {
  for (const LayerKind& kind : model.kinds) {
    const bool is_pair = keeps_pairs(kind.spec) && kind.spec.model_version.empty();
    if (!is_pair && (!is_full_of_latents(kind.spec.kind) || kind.name.ends_with("indexer")))
      continue;
    if (const auto reason = unsuited(options.backend, kind, options); !reason.empty())
      return fail("--backend {} cannot serve the layers `{}`: {}; leave the option out",
                  name_of(options.backend), kind.name, reason);
  }
  return {};
}

Result<void> take_model(const ModelSpec& model, PlanOptions& options) {
  options.mamba_chunk_size = model.mamba_chunk_size;
  options.mtp_modules = model.mtp_modules;
  options.num_hidden_layers = model.num_hidden_layers;
  LS_RETURN_IF_ERROR(check_ranks(model, options));
  LS_RETURN_IF_ERROR(check_stages(model, options));
  LS_RETURN_IF_ERROR(check_pairs(model, options));
  const bool is_quantized =
      itemsize_bytes(options.kv_dtype) == 1 || options.kv_quant_mode != KVQuantMode::none;
  const bool has_latents = std::ranges::any_of(model.kinds, [](const LayerKind& kind) {
    return is_full_of_latents(kind.spec.kind) && !kind.has_own_dtype;
  });
  if (!is_quantized || !has_latents) return {};
  if (options.kv_dtype != DType::fp8_e4m3 || options.kv_quant_mode != KVQuantMode::none)
    return fail("--kv-dtype: no backend keeps latent rows (kv_lora_rank) in {}; use bf16 or fp8",
                format_of(options));
  // FLASH_ATTN_MLA, the first choice of platforms/cuda.py, has no fp8. FLASHMLA reads blocks of 64;
  // of the user's other blocks TRITON_MLA reads those of all tokens.
  const bool is_sparse =
      std::ranges::any_of(model.kinds, [](const LayerKind& kind) { return kind.index_topk > 0; });
  if (options.backend == AttentionBackend::flash_attn && !is_sparse &&
      options.block_size.value_or(64) % 64 != 0)
    options.backend = AttentionBackend::triton_mla;
  if (options.backend != AttentionBackend::triton_mla) options.backend = AttentionBackend::flashmla;
  return {};
}

Result<LayerSpecs> layer_specs(const ModelSpec& model, const PlanOptions& options) {
  LayerSpecs layers;
  std::map<std::string, std::int64_t> same;  // caches of one name: two in a layer of LongCat
  for (const ModelSpec::Layer& layer : model.layers) {
    const LayerKind& kind = model.kinds[layer.kind];
    if (kind.is_draft && !options.has_drafter) continue;
    NamedSpec& named = layers.emplace_back();
    named.name = fmt::format("layers.{}.{}", layer.index, kind.name);
    if (const std::int64_t earlier = same[named.name]++; earlier > 0)
      named.name += fmt::format(".{}", earlier);
    named.spec = kind.spec;
    named.is_draft = kind.is_draft;
    named.index_topk = kind.index_topk;
    named.backend = kind.backend;
    KVCacheSpec& spec = named.spec;
    spec.dcp_sharded |= options.dcp == 1 && !is_ring(spec);
    Cut cut(named.name, options.tp);
    if (is_state_kind(spec.kind)) {
      const DType conv = kind.conv_dtype.value_or(model.dtype);
      const DType ssm = options.ssm_dtype.value_or(kind.ssm_dtype.value_or(conv));
      spec.states = state_tensors(kind.states, options, conv, ssm, cut);
      spec.block_size = 0;
      spec.mamba_cache_mode = options.mamba_cache_mode;
      spec.num_speculative_blocks = options.num_spec;
    } else {
      if (!has_single_rows(spec)) {
        spec.num_kv_heads = cut.kv_heads(spec.num_kv_heads);
        if (!kind.has_own_dtype) spec.kv_quant_mode = options.kv_quant_mode;
      }
      if (!kind.has_own_dtype) spec.dtype = options.kv_dtype;
      // A model file names these backends for rows of the model's dtype; they have no fp8.
      if (itemsize_bytes(spec.dtype) == 1 && named.backend.starts_with("flash_attn_mla"))
        named.backend.clear();
      // Sparse attention has its own fp8 (model_executor/layers/attention/mla_attention.py,
      // _canonicalize_sparse_mla_kv_cache_dtype()).
      if (has_single_rows(spec) && kind.index_topk > 0 && spec.dtype == DType::fp8_e4m3) {
        spec.cache_dtype_str = "fp8_ds_mla";
        spec.dtype = DType::uint8;
      }
    }
    if (!cut.refusal().empty()) return fail(cut.refusal());
  }
  return layers;
}

Result<void> take_checkpoint_format(const ModelSpec& model, PlanOptions& options) {
  if (model.kv_cache_dtype.empty()) return {};
  const bool is_nvfp4 = model.kv_cache_dtype == "nvfp4";
  if (!is_nvfp4 && model.kv_cache_dtype != "fp8")
    return fail("kv_cache_dtype '{}' is not fp8 or nvfp4; name the format with --kv-dtype",
                model.kv_cache_dtype);
  options.kv_dtype = is_nvfp4 ? DType::uint8 : DType::fp8_e4m3;
  if (is_nvfp4) options.kv_quant_mode = KVQuantMode::nvfp4;
  return {};
}

NamedSpec hidden_state_layer(std::int64_t num_layers, std::int64_t hidden_size, DType dtype) {
  NamedSpec layer;
  layer.name = "cache_only.0";
  layer.spec.kind = CacheKind::hidden_state;
  layer.spec.block_size = 0;
  layer.spec.num_kv_heads = num_layers;
  layer.spec.head_size = hidden_size;
  layer.spec.dtype = dtype;
  return layer;
}

namespace {

// The prefill kernel of FlashInfer for gated delta nets exports states at multiples of its chunk.
constexpr std::int64_t kGatedDeltaChunk = 64;

// Which drafters do not turn asynchronous scheduling off.
enum class AsyncDrafts : std::uint8_t { eagle, eagle_and_models, every };

struct ReleaseDefaults {
  std::string_view since;  // the first release
  AsyncDrafts async_drafts = AsyncDrafts::eagle;
  std::int32_t retention = kDenseRetention;
  bool mamba_in_mode_all = false;  // Mamba1 and Mamba2; other states in mode align
  bool mamba2_exports = false;
  bool gated_delta_exports = false;
};

// In the order of the releases; a row holds up to the next one.
constexpr ReleaseDefaults kDefaults[] = {
    {.since = "vllm-0.20.2", .mamba_in_mode_all = true},
    {.since = "vllm-0.28.0", .async_drafts = AsyncDrafts::eagle_and_models},
    {.since = "vllm-0.29.0", .async_drafts = AsyncDrafts::eagle_and_models, .retention = 0},
    {.since = "vllm-0.32.0",
     .async_drafts = AsyncDrafts::eagle_and_models,
     .retention = 0,
     .mamba2_exports = true},
    {.since = "vllm-0.33.0",
     .async_drafts = AsyncDrafts::every,
     .retention = 0,
     .mamba2_exports = true,
     .gated_delta_exports = true},
};

// Names of releases sort as their numbers do.
const ReleaseDefaults& defaults_of(std::string_view engine) {
  const auto behind = std::ranges::upper_bound(kDefaults, engine, {}, &ReleaseDefaults::since);
  return behind == std::begin(kDefaults) ? *behind : *std::prev(behind);
}

bool runs_async_with(SpecMethod method, AsyncDrafts drafts) {
  switch (method) {
    case SpecMethod::none:
    case SpecMethod::eagle:
      return true;
    case SpecMethod::draft_model:
      return drafts != AsyncDrafts::eagle;
    case SpecMethod::ngram:
      return drafts == AsyncDrafts::every;
  }
  return true;
}

bool is_mamba(StateFamily family) {
  return family == StateFamily::mamba1 || family == StateFamily::mamba2;
}

// Tokens between places where a layer of the kind can export a state; 0: nowhere.
std::int64_t exports_every(const ReleaseDefaults& defaults, const LayerKind& kind) {
  if (kind.prefill_checkpoint_alignment) return *kind.prefill_checkpoint_alignment;
  switch (kind.states.family) {
    case StateFamily::mamba2:
      return defaults.mamba2_exports ? 1 : 0;
    case StateFamily::gated_delta_net:
      return defaults.gated_delta_exports ? kGatedDeltaChunk : 0;
    default:
      return 0;
  }
}

}  // namespace

ServingDefaults serving_defaults(const EngineConfig& engine) {
  const ReleaseDefaults& defaults = defaults_of(engine.engine);
  const bool has_drafts = engine.num_spec_tokens > 0;
  return {
      .async_scheduling = !has_drafts || runs_async_with(engine.spec_method, defaults.async_drafts),
      .scheduler_reserve_full_isl = true,
      .prefix_cache_retention_interval = defaults.retention};
}

bool plans_async(const EngineConfig& engine) {
  return engine_profile(engine.engine).admission_counts_batches_in_flight &&
         serving_defaults(engine).async_scheduling;
}

MambaCacheMode served_cache_mode(const EngineConfig& engine, const ModelSpec& model) {
  bool has_states = false;
  bool has_attention = false;
  bool all_mamba = true;
  for (const LayerKind& kind : model.kinds) {
    has_attention |= is_attention(kind.spec.kind);
    if (!is_state_kind(kind.spec.kind)) continue;
    has_states = true;
    all_mamba &= is_mamba(kind.states.family);
  }
  if (!has_states || !has_attention || !engine.enable_prefix_caching) return MambaCacheMode::none;
  return all_mamba && defaults_of(engine.engine).mamba_in_mode_all ? MambaCacheMode::all
                                                                   : MambaCacheMode::align;
}

Result<void> take_served_checkpoints(std::string_view release, const ModelSpec& model,
                                     const PlanOptions& options, LayerSpecs& layers,
                                     const StateBlock& state_block) {
  if (options.mamba_cache_mode != MambaCacheMode::align) return {};
  const ReleaseDefaults& defaults = defaults_of(release);
  bool all_export = true;
  bool has_gated_delta = false;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!is_state_kind(layers[i].spec.kind)) continue;
    const std::int64_t every = exports_every(defaults, model.kinds[model.layers[i].kind]);
    layers[i].spec.num_prefill_checkpoint_blocks = every > 0 ? 1 : 0;
    layers[i].spec.prefill_checkpoint_alignment = every;
    all_export &= every > 0;
    has_gated_delta |=
        model.kinds[model.layers[i].kind].states.family == StateFamily::gated_delta_net;
  }
  // Gated delta nets emit states at one stride for the whole batch, so all of them must be asked
  // for on the grid of hits; and only where every layer can export.
  std::int64_t grid = 0;
  if (all_export && has_gated_delta && state_block) {
    LS_ASSIGN_OR_RETURN(grid, state_block(layers));
  } else if (all_export && has_gated_delta) {
    LS_ASSIGN_OR_RETURN(const auto sizes, aligned_sizes(layers, options));
    grid = sizes.mamba_block_size.value_or(0);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerKind& kind = model.kinds[model.layers[i].kind];
    KVCacheSpec& spec = layers[i].spec;
    if (!is_state_kind(spec.kind) || kind.states.family != StateFamily::gated_delta_net) continue;
    spec.num_prefill_checkpoint_blocks = grid > 0 && spec.num_prefill_checkpoint_blocks > 0 ? 1 : 0;
    spec.prefill_checkpoint_alignment = spec.num_prefill_checkpoint_blocks > 0 ? grid : 0;
  }
  return {};
}

}  // namespace lockstep
