#include "reference/plan/attention_packing.h"

#include <fmt/core.h>

#include <algorithm>

#include "reference/plan/page_size.h"

namespace lockstep {

std::int64_t layers_per_page(const KVCacheSpec& spec, std::int64_t attn_pack) {
  const bool packed = spec.kind == CacheKind::full_attention || spec.kind == CacheKind::mla;
  return packed ? attn_pack : 1;
}

std::int64_t num_units(const LayerSpecs& layers_of_kind, std::int64_t attn_pack) {
  return cdiv(static_cast<std::int64_t>(layers_of_kind.size()),
              layers_per_page(layers_of_kind.front().spec, attn_pack));
}

void append_unit(const LayerSpecs& layers_of_kind, std::int64_t unit, KVCacheGroupSpec& group) {
  const auto count = static_cast<std::int64_t>(layers_of_kind.size());
  const std::int64_t begin = unit * group.layers_per_page;
  for (std::int64_t i = begin; i < std::min(begin + group.layers_per_page, count); ++i)
    group.layer_names.push_back(layers_of_kind[i].name);
}

std::int64_t empty_places(const KVCacheGroupSpec& group) {
  const auto layers = static_cast<std::int64_t>(group.layer_names.size());
  return round_up(layers, group.layers_per_page) - layers;
}

Result<bool> check_packable(const LayerSpecs& layers, std::int64_t attn_pack) {
  const auto count = [&](auto&& matches) {
    return std::ranges::count_if(layers, [&](const NamedSpec& l) { return matches(l.spec); });
  };
  const auto packed =
      count([&](const KVCacheSpec& spec) { return layers_per_page(spec, attn_pack) > 1; });
  if (count([](const KVCacheSpec& spec) { return is_state_kind(spec.kind); }) == 0)
    return fail(
        fmt::format("attn_pack {}: only a model with state layers has pages large enough to "
                    "pack; use 1",
                    attn_pack));
  if (packed < attn_pack)
    return fail(
        fmt::format("attn_pack {}: the model has {} attention layers to pack; use at most "
                    "{}",
                    attn_pack, packed, std::max<std::int64_t>(packed, 1)));
  return true;
}

Result<LayerSpecs> with_packed_pages(const LayerSpecs& layers, std::int64_t attn_pack) {
  std::int64_t pool_page = 0;
  const auto page_of = [&](const KVCacheSpec& spec) {
    return page_size_bytes(spec) * layers_per_page(spec, attn_pack);
  };
  for (const NamedSpec& layer : layers) pool_page = std::max(pool_page, page_of(layer.spec));
  for (const NamedSpec& layer : layers)
    if (page_of(layer.spec) != pool_page)
      return fail(
          fmt::format("{}: a page of {} bytes where {} packed attention layers make {}; "
                      "block sizes must be aligned with packing counted in",
                      layer.name, page_of(layer.spec), attn_pack, pool_page));
  return layers;
}

}  // namespace lockstep
