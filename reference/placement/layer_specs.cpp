#include "reference/placement/placement.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/check.h"

namespace lockstep {
namespace {

constexpr std::int64_t kDefaultBlock = 16, kScaleBytes = 4;

// Kinds of layers whose specs follow one rule. Rows of the first four have the cache's format.
enum class LayerKind : std::uint8_t {
  plain,      // K and V of heads
  latent,     // one row of MLA a token
  v4_latent,  // compressed rows
  v4_window,  // their window
  v4_state,   // keys not yet compressed
  indexer,    // keys of a sparse indexer
  own_rows,   // rows in a format of their own
};

LayerKind kind_of(std::string_view backend) {
  if (backend.starts_with("v4")) return LayerKind::v4_latent;
  if (backend == "sparse_swa") return LayerKind::v4_window;
  if (backend.starts_with("compressor")) return LayerKind::v4_state;
  if (backend.starts_with("indexer")) return LayerKind::indexer;
  if (backend == "qsa_state" || backend == "kpool_tail" || backend == "cache_only" ||
      backend == "inkling_sconv")
    return LayerKind::own_rows;
  if (backend.find("mla") != std::string_view::npos) return LayerKind::latent;
  return LayerKind::plain;
}

const CacheBackend& backend_named(const std::string& name) {
  const CacheBackend* backend = find_cache_backend(name);
  LS_CHECK(backend != nullptr, "no backend {}", name);
  return *backend;
}

std::int64_t packed_bits(std::int64_t elements, std::int64_t bits) {
  return cdiv(elements * bits, 8);
}

// What a cache of this name holds.
struct CacheFormat {
  DType dtype = DType::bf16;
  KVQuantMode mode = KVQuantMode::none;
};
CacheFormat cache_format(std::string_view kv_dtype, DType model_dtype) {
  if (kv_dtype == "auto") return {model_dtype, KVQuantMode::none};
  if (kv_dtype == "bfloat16") return {DType::bf16, KVQuantMode::none};
  if (kv_dtype == "float16") return {DType::fp16, KVQuantMode::none};
  if (kv_dtype == "int8_per_token_head") return {DType::int8, KVQuantMode::int8_per_token_head};
  if (kv_dtype == "fp8_per_token_head") return {DType::uint8, KVQuantMode::fp8_per_token_head};
  if (kv_dtype == "int4_per_token_head") return {DType::uint8, KVQuantMode::int4_per_token_head};
  if (kv_dtype == "nvfp4_ds_mla") return {DType::uint8, KVQuantMode::nvfp4_ds_mla};
  if (kv_dtype.starts_with("nvfp4")) return {DType::uint8, KVQuantMode::nvfp4};
  if (kv_dtype.starts_with("turboquant_"))
    return {DType::uint8, from_name<KVQuantMode>(kv_dtype).value_or(KVQuantMode::none)};
  return {DType::uint8, KVQuantMode::fp8_per_tensor};
}

// TurboQuant: keys of 8 bits, or fewer and a norm; values with scale and zero point.
std::int64_t turboquant_bytes(KVQuantMode mode, std::int64_t head_size) {
  const bool is_k8 = mode == KVQuantMode::turboquant_k8v4;
  const std::int64_t key = is_k8 ? 8 : mode == KVQuantMode::turboquant_4bit_nc ? 4 : 3;
  const std::int64_t value = mode == KVQuantMode::turboquant_3bit_nc ? 3 : 4;
  const std::int64_t bytes =
      packed_bits(head_size, key) + (is_k8 ? 0 : 2) + packed_bits(head_size, value) + 4;
  return round_up(bytes, 2);
}

// A backend with rows of tokens, and its kernels before the layers have a spec.
struct TokenBackend {
  const CacheBackend* backend = nullptr;
  KernelSizes sizes;
};

// Distinct, in layer order. `main`: the layer with the model's heads; nullptr: none.
std::vector<TokenBackend> token_backends(const std::vector<PlacementLayer>& layers,
                                         const PlacementLayer* main,
                                         const PlacementOptions& options) {
  std::vector<TokenBackend> backends;
  for (const PlacementLayer& layer : layers) {
    const CacheBackend* backend = find_cache_backend(layer.backend);
    if (backend == nullptr || is_state_backend(*backend)) continue;
    if (std::ranges::find(backends, backend, &TokenBackend::backend) != backends.end()) continue;
    KVCacheSpec facts;
    if (layer.spec) facts.tokens_per_state = layer.spec->tokens_per_state;
    facts.head_size = main != nullptr ? main->spec->head_size : 0;
    facts.kv_quant_mode = cache_format(options.format, options.model_dtype).mode;
    backends.push_back({backend, kernel_sizes(*backend, options.device, facts)});
  }
  return backends;
}

std::vector<std::int64_t> bases_of(const KernelSizes& sizes) {
  std::vector<std::int64_t> bases = sizes.listed;
  if (sizes.multiple_of != 0) bases.push_back(sizes.multiple_of);
  return bases;
}

bool supports_block(const TokenBackend& backend, std::int64_t block_size) {
  const auto bases = bases_of(backend.sizes);
  return std::ranges::any_of(bases, [&](std::int64_t base) { return block_size % base == 0; });
}

Result<std::int64_t> preferred_block(const std::vector<TokenBackend>& backends) {
  const auto all_take = [&](std::int64_t size) {
    return std::ranges::all_of(
        backends, [&](const TokenBackend& backend) { return supports_block(backend, size); });
  };
  if (backends.size() == 1 && backends[0].backend->name == "sparse_swa") return 256;
  if (all_take(kDefaultBlock)) return kDefaultBlock;
  if (backends.size() == 1) return backends[0].sizes.smallest();
  std::set<std::int64_t> candidates = {1};
  for (const TokenBackend& backend : backends) {
    std::set<std::int64_t> combined;
    for (const std::int64_t base : bases_of(backend.sizes))
      for (const std::int64_t other : candidates) combined.insert(std::lcm(base, other));
    candidates = std::move(combined);
  }
  for (const std::int64_t size : candidates)
    if (all_take(size)) return size;
  return fail("the backends of this model share no block size");
}

// The layer whose heads stand for the model's: a latent one where there is one, then one that
// attends to all tokens.
const PlacementLayer* main_layer(const std::vector<PlacementLayer>& layers) {
  const PlacementLayer* main = nullptr;
  const auto rank_of = [](const PlacementLayer& layer) {
    if (kind_of(layer.backend) == LayerKind::latent) return 2;
    return is_full_attention(layer.spec->kind) ? 1 : 0;
  };
  for (const PlacementLayer& layer : layers) {
    if (!layer.spec || !is_attention(layer.spec->kind) || layer.spec->plan.is_draft.value) continue;
    const LayerKind kind = kind_of(layer.backend);
    if (kind != LayerKind::plain && kind != LayerKind::latent) continue;
    if (main == nullptr || rank_of(layer) > rank_of(*main)) main = &layer;
  }
  return main;
}

// Bytes of one token in a layer with the model's heads.
std::int64_t token_bytes(const CacheBackend& backend, DeviceFamily device, const KVCacheSpec& heads,
                         const CacheFormat& format) {
  KVCacheSpec spec;
  spec.block_size = 1;
  spec.num_kv_heads = heads.num_kv_heads;
  spec.head_size = spec.head_size_v = heads.head_size;
  spec.dtype = format.dtype;
  spec.kv_quant_mode = format.mode;
  return page_bytes(customized(backend, device, spec));
}

// Gated delta nets export states at multiples of their kernel's chunk, and ask for them on the grid
// of hits. Other mixers do not shape the block.
constexpr std::int64_t kGatedDeltaChunk = 64;
bool exports_on_grid(const KVCacheSpec& spec) {
  return std::max<std::int64_t>(spec.prefill_checkpoint_alignment, 1) % kGatedDeltaChunk == 0;
}

// Blocks end where every layer can export a state.
std::int64_t checkpoint_alignment(const std::vector<PlacementLayer>& layers) {
  const bool all_on_grid = std::ranges::all_of(layers, [](const PlacementLayer& layer) {
    return !layer.spec || !is_state_kind(layer.spec->kind) || exports_on_grid(*layer.spec);
  });
  return all_on_grid ? kGatedDeltaChunk : 1;
}

// Bytes of a state as the model class states them: LFM2's omits the drafts (lfm2.py,
// get_mamba_state_shape_from_config()).
std::int64_t stated_bytes(const KVCacheSpec& spec, std::int64_t drafts) {
  const std::vector<std::int64_t>& dims = spec.states.front().dims;
  if (spec.states.size() != 1 || dims.size() != 2) return content_bytes(spec);
  return content_bytes(spec) / dims[0] * (dims[0] - drafts);
}

// The attention block grows until its page holds the states; their page is padded to it.
void align_to_states(const std::vector<PlacementLayer>& layers, const KVCacheSpec& heads,
                     const std::vector<TokenBackend>& backends, const PlacementOptions& options,
                     BlockAlignment& alignment) {
  std::int64_t state_bytes = 0;
  for (const PlacementLayer& layer : layers)
    if (layer.spec && is_state_kind(layer.spec->kind))
      state_bytes = std::max(state_bytes, stated_bytes(*layer.spec, options.drafted_tokens()));
  if (state_bytes == 0) return;
  const CacheFormat format = cache_format(options.format, options.model_dtype);
  const bool has_mla = is_mla(heads.kind);
  std::int64_t bytes = token_bytes(*backends[0].backend, options.device, heads, format);
  if (has_mla) {
    bytes = heads.head_size * itemsize_bytes(format.dtype);
  } else if (options.format.starts_with("turboquant_")) {
    bytes = heads.num_kv_heads * turboquant_bytes(format.mode, heads.head_size);
    if (!options.skip_layers.empty())
      bytes = std::lcm(
          bytes, 2 * heads.num_kv_heads * heads.head_size * itemsize_bytes(options.model_dtype));
  }
  std::int64_t unit = std::max(backends[0].sizes.smallest(), alignment.block_size);
  if (has_mla) unit = std::max<std::int64_t>(unit, 128);
  if (options.mamba_cache_mode == MambaCacheMode::align)
    unit = std::lcm(unit, checkpoint_alignment(layers));
  std::int64_t common = 1;
  for (const TokenBackend& backend : backends) common = std::lcm(common, backend.sizes.smallest());
  const std::int64_t block = round_up(unit * cdiv(state_bytes, unit * bytes), common);
  alignment.block_size = std::max(alignment.block_size, block);
  if (options.mamba_cache_mode == MambaCacheMode::align)
    alignment.mamba_block_size = alignment.block_size;
  if (alignment.block_size * bytes != state_bytes)
    alignment.mamba_page_size_padded = alignment.block_size * bytes;
}

// Quantized layers with unquantized ones: the quantized block grows until its page holds a kernel
// block of the others, which are padded to it.
Result<void> align_to_skipped(const KVCacheSpec& heads, const TokenBackend& first,
                              const PlacementOptions& options, BlockAlignment& alignment) {
  const CacheBackend& backend = *first.backend;
  const std::int64_t primary = token_bytes(backend, options.device, heads,
                                           cache_format(options.format, options.model_dtype));
  const std::int64_t skipped =
      token_bytes(backend, options.device, heads, {options.model_dtype, KVQuantMode::none});
  if (skipped < primary)
    return fail(
        "layers left unquantized take {} bytes per token, fewer than the {} of quantized ones",
        skipped, primary);
  if (skipped == primary) return {};
  const std::int64_t kernel = first.sizes.smallest();
  const std::int64_t unit = std::max(kernel, alignment.block_size);
  const std::int64_t page =
      std::max(skipped * kernel, alignment.mamba_page_size_padded.value_or(0));
  alignment.block_size = std::max(alignment.block_size, unit * cdiv(page, unit * primary));
  alignment.skip_page_size_padded = alignment.block_size * primary;
  if (alignment.mamba_page_size_padded)
    alignment.mamba_page_size_padded = alignment.skip_page_size_padded;
  return {};
}

// A window picks its own block: the largest kernel size whose page fits the primary page.
std::int64_t window_block(const CacheBackend& backend, DeviceFamily device, KVCacheSpec spec,
                          const BlockAlignment& alignment) {
  spec.block_size = 1;
  const std::int64_t token =
      std::max<std::int64_t>(unpadded_page_bytes(customized(backend, device, spec)), 1);
  const std::int64_t budget =
      alignment.skip_page_size_padded.value_or(token * alignment.block_size);
  const KernelSizes sizes = kernel_sizes(backend, device, spec);
  std::vector<std::int64_t> candidates = sizes.listed;
  if (sizes.multiple_of != 0)
    candidates.push_back(
        std::max(sizes.multiple_of, budget / token / sizes.multiple_of * sizes.multiple_of));
  std::int64_t best = 0;
  for (const std::int64_t size : candidates)
    if (size * token <= budget) best = std::max(best, size);
  return best != 0 ? best : *std::ranges::min_element(candidates);
}

struct SpecMaker {
  const BlockAlignment& alignment;
  const PlacementOptions& options;
  bool is_v41 = false;
  std::int64_t pooled_keys = 4;  // of one KV entry of a pooled indexer

  // V4.1 on sm100 keeps shorter records.
  bool has_short_records() const { return is_v41 && options.device == DeviceFamily::sm100; }
  bool has_packed_rows() const {
    return options.format == "fp8_ds_mla" || options.format == "nvfp4_ds_mla";
  }
  std::int64_t page_alignment() const {
    return has_packed_rows() && !has_short_records() ? 576 : 512;
  }

  void latent(KVCacheSpec& spec) const {
    spec.cache_dtype_str = options.format;
    spec.plan.max_tp_shards = 1;
    if (options.format == "fp8_ds_mla") spec.plan.state_content_bytes = 656;
    if (options.format == "nvfp4_ds_mla") spec.plan.state_content_bytes = 352;
  }

  void v4_rows(KVCacheSpec& spec, bool is_window) const {
    spec.cache_dtype_str = options.format;
    spec.model_version = "deepseek_v4";
    spec.alignment = page_alignment();
    const std::int64_t record = options.format == "nvfp4_ds_mla" ? 288 : 528;
    if (is_window || !is_v41) spec.plan.max_tp_shards = 1;
    if (is_window) spec.block_size = is_v41 ? 32 : 64;
    if (!has_packed_rows()) return;
    spec.plan.state_content_bytes = !has_short_records() ? 584 : is_window ? 528 : record;
    if (is_window && has_short_records())
      spec.block_stride_alignment = std::lcm<std::int64_t>(528, record);
  }

  void v4_state(KVCacheSpec& spec) const {
    if (is_ring(spec.kind)) {
      spec.block_size = 8;
      while (spec.block_size < options.drafted_tokens() + 2) spec.block_size *= 2;
      return;
    }
    spec.plan.max_tp_shards = 1;
    spec.block_size = spec.sliding_window == 8 ? 4 : 8;
    spec.alignment = page_alignment();
  }

  void indexer(KVCacheSpec& spec, const std::string& backend) const {
    if (backend == "indexer_m3") return;
    if (backend != "indexer_v41" && backend != "indexer_v41_sparse") spec.plan.max_tp_shards = 1;
    if (backend == "indexer_v32" || backend == "indexer_kpool") return;
    spec.alignment = page_alignment();
    if (backend == "indexer_v41_sparse")
      spec.block_stride_alignment = std::lcm<std::int64_t>(
          256, has_packed_rows() && has_short_records() ? 1 : page_alignment());
  }

  KVCacheSpec make(const PlacementLayer& layer) const {
    KVCacheSpec spec = *layer.spec;
    const CacheBackend& backend = backend_named(layer.backend);
    if (is_state_kind(spec.kind)) {
      spec.block_size = alignment.mamba_block_size;
      spec.page_size_padded = alignment.mamba_page_size_padded;
      spec.mamba_cache_mode = options.mamba_cache_mode;
      spec.num_speculative_blocks = options.drafted_tokens();
      if (spec.prefill_checkpoint_alignment != 0 && exports_on_grid(spec))
        spec.prefill_checkpoint_alignment =
            options.prefix_match_unit ? std::lcm(*options.prefix_match_unit, kGatedDeltaChunk)
                                      : alignment.mamba_block_size;
      return spec;
    }
    const CacheFormat format = layer.is_unquantized
                                   ? CacheFormat{options.model_dtype, KVQuantMode::none}
                                   : cache_format(options.format, options.model_dtype);
    spec.block_size = alignment.block_size;
    if (spec.plan.is_draft.value && options.dcp > 1 && options.draft_dcp == 1)
      spec.dcp_sharded = false;
    const LayerKind kind = kind_of(layer.backend);
    if (kind <= LayerKind::v4_window) {  // rows in the format of the cache
      spec.dtype = format.dtype;
      spec.kv_quant_mode = format.mode;
    }
    switch (kind) {
      case LayerKind::plain:
        if (spec.kind != CacheKind::sliding_window) break;
        spec.block_size = window_block(backend, options.device, spec, alignment);
        spec.page_size_padded = alignment.skip_page_size_padded;
        break;
      case LayerKind::latent:
        latent(spec);
        break;
      case LayerKind::v4_latent:
      case LayerKind::v4_window:
        v4_rows(spec, spec.kind == CacheKind::sliding_window_mla);
        break;
      case LayerKind::v4_state:
        v4_state(spec);
        break;
      case LayerKind::indexer:
        indexer(spec, layer.backend);
        break;
      case LayerKind::own_rows:
        if (layer.backend == "inkling_sconv" && layer.fixed_block_size != 0)
          spec.block_size = layer.fixed_block_size;
        else if (layer.backend == "kpool_tail")
          spec.block_size = pooled_tail();
        else if (is_ring(spec.kind))
          spec.block_size = round_up(kRingGroup + options.drafted_tokens(), kRingGroup);
        break;
    }
    apply_alignment(spec);
    spec = customized(backend, options.device, spec);
    const KernelSizes sizes = kernel_sizes(backend, options.device, spec);
    if (spec.block_stride_alignment == 1 && spec.plan.stride_kernel_tokens == 0 &&
        sizes.multiple_of == 0)
      spec.plan.stride_kernel_tokens = *std::ranges::max_element(sizes.listed);
    return spec;
  }

  // Keys of an open pool, drafts included, in a power of two of pools (models/glm5next/common/
  // attention.py). Every context parallel rank replicates it and compresses the pools that it has.
  std::int64_t pooled_tail() const {
    std::int64_t ring = pooled_keys;
    while (ring < pooled_keys + options.drafted_tokens()) ring *= 2;
    return ring;
  }

  static constexpr std::int64_t kRingGroup = 8;  // tokens to a compressed key of QSA
};

// What the engine asserts of a layer: FlashInfer's nvfp4 keeps K and V in slots of equal size, and
// the ring of an open pool divides the block.
Result<void> check_format(const PlacementLayer& layer, const BlockAlignment& alignment) {
  const KVCacheSpec& spec = *layer.spec;
  if (is_state_kind(spec.kind) && content_bytes(spec) > page_bytes(spec))
    return fail(
        "layer {}: its state takes {} bytes with its drafts, more than the page of {} that the "
        "engine plans without them; use fewer --num-spec",
        layer.name, content_bytes(spec), page_bytes(spec));
  if (layer.backend == "kpool_tail" && alignment.block_size % spec.block_size != 0)
    return fail(
        "layer {}: blocks of {} tokens are not a multiple of its ring of {}; choose another "
        "--block-size",
        layer.name, alignment.block_size, spec.block_size);
  const auto slot = [](std::int64_t elements) { return elements / 2 + elements / 16; };
  if (layer.backend != "flashinfer" || spec.kv_quant_mode != KVQuantMode::nvfp4 ||
      slot(spec.head_size) == slot(spec.head_size_v))
    return {};
  return fail(
      "layer {}: nvfp4 keeps K and V in slots of equal size, and their heads have {} and {} "
      "elements; choose another --kv-dtype",
      layer.name, spec.head_size, spec.head_size_v);
}

}  // namespace

KVCacheSpec customized(const CacheBackend& backend, DeviceFamily device, KVCacheSpec spec) {
  const KVQuantMode mode = spec.kv_quant_mode;
  if (backend.name == "flashmla_sparse" || backend.name == "flash_attn_mla_sparse" ||
      backend.name == "flashinfer_mla_sparse") {
    const bool is_by_pages = backend.name == "flashmla_sparse" && mode != KVQuantMode::none &&
                             device != DeviceFamily::sm100;
    const std::int64_t rows = backend.name == "flashinfer_mla_sparse" ? backend.multiple_of : 1;
    spec.block_stride_alignment = is_by_pages ? 1 : rows * content_bytes(spec);
    spec.plan.stride_kernel_tokens = is_by_pages ? 64 : 0;
    return spec;
  }
  if (spec.plan.state_content_bytes != 0) return spec;
  const std::int64_t share = mode == KVQuantMode::int4_per_token_head ? 2 : 1;
  const std::int64_t item = itemsize_bytes(spec.dtype);
  const LayerKind kind = kind_of(backend.name);
  if (is_per_token_head(mode) && kind == LayerKind::latent)
    spec.plan.state_content_bytes = spec.head_size / share * item + 2 * kScaleBytes;
  if (is_per_token_head(mode) && backend.name == "triton_attn")
    spec.plan.state_content_bytes =
        (spec.head_size / share + spec.head_size_v / share) * item + 2 * kScaleBytes;
  if (mode == KVQuantMode::nvfp4 && backend.name == "flashinfer") {
    spec.plan.num_head_slots = 2 * spec.num_kv_heads;
    spec.plan.state_content_bytes = (spec.head_size / 2 + spec.head_size / 16) * item;
  }
  if (backend.name == "turboquant" && is_turboquant(mode))
    spec.plan.state_content_bytes = turboquant_bytes(mode, spec.head_size);
  return spec;
}

void forget_plan(KVCacheSpec& spec) {
  spec.block_size = 1;
  spec.page_size_padded.reset();
  spec.mamba_cache_mode = MambaCacheMode::none;
  spec.num_speculative_blocks = 0;
  if (!is_attention(spec.kind)) return;
  spec.plan.num_head_slots = spec.plan.state_content_bytes = spec.plan.max_tp_shards = 0;
  spec.block_stride_alignment = 1;
  spec.plan.stride_kernel_tokens = 0;
  spec.cache_dtype_str.clear();
  spec.alignment = 0;
  spec.model_version.clear();
  spec.kv_quant_mode = KVQuantMode::none;
}

PlacementLayer layer_facts(const PlacementLayer& layer) {
  PlacementLayer facts = layer;
  if (!facts.spec || !has_layer_views(facts.spec->kind)) return facts;
  KVCacheSpec& spec = *facts.spec;
  facts.fixed_block_size = spec.block_size;
  forget_plan(spec);
  if (!is_attention(spec.kind)) return facts;
  spec.dcp_sharded = true;
  facts.is_unquantized = layer.spec->kv_quant_mode == KVQuantMode::none;
  if (kind_of(layer.backend) <= LayerKind::v4_window) spec.dtype = DType::bf16;
  return facts;
}

Result<BlockAlignment> align_blocks(const std::vector<PlacementLayer>& facts,
                                    const PlacementOptions& options) {
  BlockAlignment alignment{
      options.block_size.value_or(kDefaultBlock), options.max_model_len, {}, {}};
  const PlacementLayer* main = main_layer(facts);
  const std::vector<TokenBackend> backends = token_backends(facts, main, options);
  if (options.mamba_cache_mode == MambaCacheMode::align && main == nullptr)
    alignment.mamba_block_size = alignment.block_size;
  if (backends.empty()) return alignment;
  if (!options.block_size) {
    LS_ASSIGN_OR_RETURN(alignment.block_size, preferred_block(backends));
  }
  const std::int64_t before = alignment.block_size;
  if (main != nullptr) {
    align_to_states(facts, *main->spec, backends, options, alignment);
    if (!options.skip_layers.empty())
      LS_RETURN_IF_ERROR(align_to_skipped(*main->spec, backends[0], options, alignment));
  }
  if (alignment.block_size == before) return alignment;
  for (const TokenBackend& backend : backends)
    if (!supports_block(backend, alignment.block_size))
      return fail(
          "blocks must hold {} tokens to cover the states, and {} does not take them; choose "
          "another --block-size",
          alignment.block_size, backend.backend->name);
  return alignment;
}

Result<std::vector<PlacementLayer>> layers_with_specs(const std::vector<PlacementLayer>& facts,
                                                      const BlockAlignment& alignment,
                                                      const PlacementOptions& options) {
  const bool is_v41 = std::ranges::any_of(facts, [](const PlacementLayer& layer) {
    return layer.backend.starts_with("v41") || layer.backend == "compressor_v41";
  });
  SpecMaker maker{alignment, options, is_v41};
  for (const PlacementLayer& layer : facts)
    if (layer.backend == "indexer_kpool") maker.pooled_keys = layer.spec->tokens_per_state.tokens;
  std::vector<PlacementLayer> layers = facts;
  std::vector<KernelSizes> sizes;
  for (PlacementLayer& layer : layers) {
    if (!layer.spec || !has_layer_views(layer.spec->kind)) continue;
    layer.spec = maker.make(layer);
    LS_RETURN_IF_ERROR(check_format(layer, alignment));
    if (is_mla(layer.spec->kind))
      sizes.push_back(kernel_sizes(backend_named(layer.backend), options.device, *layer.spec));
  }
  if (!options.has_host_pages()) return layers;
  LS_ASSIGN_OR_RETURN(const std::int64_t block, common_kernel_block(alignment.block_size, sizes));
  LayerSpecs named;
  for (PlacementLayer& layer : layers) {
    if (!layer.spec || !has_layer_views(layer.spec->kind)) continue;
    if (is_mla(layer.spec->kind)) layer.spec = with_block_size(*layer.spec, block);
    named.push_back({layer.name, *layer.spec});
  }
  LS_ASSIGN_OR_RETURN(const std::vector<KVCacheGroupSpec> groups,
                      host_page_groups(named, CacheLayout::BLHNC, options));
  for (PlacementLayer& layer : layers)
    if (layer.spec && !has_layer_views(layer.spec->kind))
      for (const KVCacheGroupSpec& group : groups)
        if (std::ranges::find(group.layer_names, layer.name) != group.layer_names.end())
          layer.spec = group.spec;
  return layers;
}

}  // namespace lockstep
