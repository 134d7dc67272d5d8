#include "reference/plan/model_spec.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

constexpr std::array kFamilies = std::to_array<std::pair<StateFamily, std::string_view>>({
    {StateFamily::gated_delta_net, "gated_delta_net"},
    {StateFamily::kda, "kda"},
    {StateFamily::mamba2, "mamba2"},
    {StateFamily::mamba1, "mamba1"},
    {StateFamily::linear_attention, "linear_attention"},
    {StateFamily::short_conv, "short_conv"},
});

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
          "{}: {} KV heads cannot be replicated evenly over tp {}; the nearest tp "
          "that works is {}",
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
      return {{{kept, channels(f.num_heads * f.head_dim)}, conv},
              {{kept, channels(k_width)}, conv},
              {{kept, channels(k_width)}, conv},
              {{heads(), f.head_dim, f.head_dim}, DType::fp32}};
    }
    case StateFamily::mamba2: {
      // Groups that tp does not divide are replicated until every rank has those of its heads.
      const std::int64_t groups = f.n_groups % options.tp == 0 ? f.n_groups : options.tp;
      const std::int64_t width = f.intermediate_size + 2 * groups * f.state_size;
      return {{{kept_with_drafts, channels(width)}, conv},
              {{heads(), f.head_dim, f.state_size}, ssm}};
    }
    case StateFamily::mamba1:
      return {{{kept, channels(f.intermediate_size)}, conv},
              {{channels(f.intermediate_size), f.state_size}, ssm}};
    case StateFamily::linear_attention:
      return {{{heads(), f.head_dim, f.head_dim}, conv}};
    case StateFamily::short_conv:
      return {{{kept, channels(f.intermediate_size)}, conv}};
  }
  return {};
}

}  // namespace

std::string_view name_of(StateFamily family) {
  for (const auto& [value, name] : kFamilies)
    if (value == family) return name;
  return "?";
}

std::optional<StateFamily> state_family_from_name(std::string_view name) {
  for (const auto& [value, known] : kFamilies)
    if (known == name) return value;
  return std::nullopt;
}

std::int64_t num_draft_layers(const ModelSpec& model) {
  return std::ranges::count_if(model.layers, [&](const ModelSpec::Layer& layer) {
    return model.kinds[layer.kind].is_draft;
  });
}

Result<LayerSpecs> layer_specs(const ModelSpec& model, const PlanOptions& options) {
  LayerSpecs layers;
  for (const ModelSpec::Layer& layer : model.layers) {
    const LayerKind& kind = model.kinds[layer.kind];
    if (kind.is_draft && !options.has_drafter) continue;
    NamedSpec& named = layers.emplace_back();
    named.name = fmt::format("layers.{}.{}", layer.index, kind.name);
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
        spec.kv_quant_mode = options.kv_quant_mode;
      }
      if (!kind.has_own_dtype) spec.dtype = options.kv_dtype;
    }
    if (!cut.refusal().empty()) return fail(cut.refusal());
  }
  return layers;
}

Result<void> take_checkpoint_format(const ModelSpec& model, PlanOptions& options) {
  if (model.kv_cache_dtype.empty()) return {};
  if (model.kv_cache_dtype == "fp8") {
    options.kv_dtype = DType::fp8_e4m3;
  } else if (model.kv_cache_dtype == "nvfp4") {
    options.kv_dtype = DType::uint8;
    options.kv_quant_mode = KVQuantMode::nvfp4;
  } else {
    return fail(fmt::format("kv_cache_dtype '{}' is not fp8 or nvfp4; name the format with "
                            "--kv-dtype",
                            model.kv_cache_dtype));
  }
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

}  // namespace lockstep
