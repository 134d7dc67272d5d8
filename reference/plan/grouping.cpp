#include "reference/plan/grouping.h"

#include <algorithm>

#include "base/check.h"
#include "reference/plan/page_size.h"

namespace lockstep {

namespace {

bool same_row_format(const KVCacheSpec& a, const KVCacheSpec& b) {
  return a.cache_dtype_str == b.cache_dtype_str && a.tokens_per_state == b.tokens_per_state &&
         a.model_version == b.model_version;
}

// A window that only some of the layers name is the group's; two different ones cannot be merged.
Result<std::int64_t> merged_window(const LayerSpecs& layers, std::int64_t KVCacheSpec::*window) {
  std::int64_t merged = 0;
  for (const NamedSpec& layer : layers) {
    const std::int64_t value = layer.spec.*window;
    if (value == 0 || value == merged) continue;
    if (merged != 0)
      return fail("{}: a window of {} tokens in one group with a window of {}", layer.name, value,
                  merged);
    merged = value;
  }
  return merged;
}

// The one spec that stands for all layers, or nothing when they differ. MLA layers are compared by
// row format alone, as in vLLM: a hidden-state cache merges with them whatever its rows (see plan
// warnings).
Result<std::optional<KVCacheSpec>> merged_spec(const LayerSpecs& layers) {
  const KVCacheSpec& first = layers.front().spec;
  const auto all = [&](auto&& matches) {
    return std::ranges::all_of(layers, [&](const NamedSpec& l) { return matches(l.spec); });
  };
  const auto is_alike = [&](const KVCacheSpec& s) {
    if (is_mla(first.kind)) return is_mla(s.kind) && same_row_format(s, first);
    return is_mla_window(s.kind) && same_row_format(s, first) &&
           s.sliding_window == first.sliding_window;
  };
  if (is_mla(first.kind) || is_mla_window(first.kind)) {
    if (!all(is_alike)) return std::nullopt;
    KVCacheSpec merged = first;
    merged.alignment = 0;  // its padding stays, its alignment does not
    return merged;
  }
  if (is_full_of_pairs(first.kind)) {
    const bool same = all([&](const KVCacheSpec& s) {
      return is_full_of_pairs(s.kind) && s.block_size == first.block_size &&
             s.num_kv_heads == first.num_kv_heads && s.head_size == first.head_size &&
             s.dtype == first.dtype && s.kv_quant_mode == first.kv_quant_mode &&
             s.page_size_padded == first.page_size_padded && s.sink_len == first.sink_len &&
             s.rswa_window == first.rswa_window;
    });
    KVCacheSpec merged = first;
    if (!all([](const KVCacheSpec& s) { return is_full_attention(s.kind); })) return std::nullopt;
    LS_ASSIGN_OR_RETURN(merged.sliding_window, merged_window(layers, &KVCacheSpec::sliding_window));
    LS_ASSIGN_OR_RETURN(merged.attention_chunk_size,
                        merged_window(layers, &KVCacheSpec::attention_chunk_size));
    if (!same || (merged.sliding_window != 0 && merged.attention_chunk_size != 0))
      return std::nullopt;
    return merged;
  }
  if (!all([&](const KVCacheSpec& s) { return s == first; })) return std::nullopt;
  return first;
}

// Windows and chunks treated as full attention when the manager of hybrid caches is switched off.
Result<LayerSpecs> without_hybrid_manager(LayerSpecs layers) {
  LS_ASSIGN_OR_RETURN(const auto one, merged_spec(layers));
  if (one.has_value() || is_uniform_type(layers)) return layers;
  const auto full =
      std::ranges::find_if(layers, [](const auto& l) { return is_full_attention(l.spec.kind); });
  const std::int64_t full_block_size = full == layers.end() ? 0 : full->spec.block_size;
  for (NamedSpec& layer : layers) {
    KVCacheSpec& spec = layer.spec;
    if (full_block_size == 0) break;
    if (is_mla_window(spec.kind)) {
      spec.kind = CacheKind::mla;
      spec.sliding_window = 0;
      spec.block_size = full_block_size;
      spec = with_alignment_padding(spec);
    } else if (is_windowed(spec.kind)) {
      spec.kind = CacheKind::full_attention;
    }
  }
  LS_ASSIGN_OR_RETURN(const auto converted, merged_spec(layers));
  if (!converted.has_value() && !is_uniform_type(layers))
    return fail(
        "the hybrid KV cache manager is switched off and the layers cannot be turned into one kind "
        "of cache; switch it on");
  return layers;
}

}  // namespace

KVCacheGroupSpec uniform_type_group(const LayerSpecs& layers) {
  KVCacheGroupSpec group;
  group.spec = layers.front().spec;
  for (const NamedSpec& layer : layers) {
    group.layer_names.push_back(layer.name);
    group.layer_specs.push_back(layer.spec);
  }
  return group;
}

std::int64_t layers_per_group(std::span<const std::int64_t> layers_of_kind) {
  const auto [least, most] = std::ranges::minmax(layers_of_kind);
  return 2 * most < 3 * least ? most : least;
}

PageBuckets by_page_size(const LayerSpecs& layers,
                         std::int64_t (*page_of)(const KVCacheSpec& spec)) {
  PageBuckets buckets;
  for (const NamedSpec& layer : layers) {
    const std::int64_t page = page_of(layer.spec);
    auto bucket = std::ranges::find(buckets, page, &PageBuckets::value_type::first);
    if (bucket == buckets.end()) bucket = buckets.insert(buckets.end(), {page, {}});
    bucket->second.push_back(layer);
  }
  return buckets;
}

std::vector<KVCacheGroupSpec> dealt_groups(const PageBuckets& buckets, std::int64_t count) {
  std::vector<KVCacheGroupSpec> groups;
  for (std::int64_t g = 0; g < count; ++g) {
    LayerSpecs layers;
    for (auto i = static_cast<std::size_t>(g); i < buckets.front().second.size();
         i += static_cast<std::size_t>(count))
      for (const auto& [page, bucket] : buckets) layers.push_back(bucket[i]);
    groups.push_back(uniform_type_group(layers));
  }
  return groups;
}

std::int64_t num_layer_tuples(const LayerSpecs& layers) {
  std::int64_t most = 0;
  for (const auto& [page, bucket] : by_page_size(layers, page_size_bytes))
    most = std::max<std::int64_t>(most, std::ssize(bucket));
  return most;
}

KVCacheGroupSpec one_spec_group(const LayerSpecs& layers, KVCacheSpec spec) {
  KVCacheGroupSpec group;
  for (const NamedSpec& layer : layers) group.layer_names.push_back(layer.name);
  group.spec = std::move(spec);
  return group;
}

KVCacheGroupSpec with_layers(const KVCacheGroupSpec& whole,
                             const std::function<bool(const std::string& name)>& holds) {
  KVCacheGroupSpec own = whole;
  own.layer_names.clear();
  own.layer_specs.clear();
  for (std::size_t i = 0; i < whole.layer_names.size(); ++i) {
    if (!holds(whole.layer_names[i])) continue;
    own.layer_names.push_back(whole.layer_names[i]);
    if (whole.is_uniform_type()) own.layer_specs.push_back(whole.layer_specs[i]);
  }
  if (!own.layer_specs.empty()) own.spec = own.layer_specs.front();
  return own;
}

LayerSpecs layers_of(std::span<const KVCacheGroupSpec> groups) {
  LayerSpecs layers;
  for (const KVCacheGroupSpec& group : groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      layers.push_back({group.layer_names[i], group.layer_spec(i)});
  return layers;
}

std::vector<LayerSpecs> by_equal_spec(const LayerSpecs& layers) {
  std::vector<LayerSpecs> kinds;
  for (const NamedSpec& layer : layers) {
    const auto kind = std::ranges::find_if(
        kinds, [&](const LayerSpecs& k) { return k.front().spec == layer.spec; });
    if (kind == kinds.end())
      kinds.push_back({layer});
    else
      kind->push_back(layer);
  }
  return kinds;
}

bool need_same_slots(const KVCacheSpec& first, const KVCacheSpec& other, bool is_overlaid) {
  const auto page = [](const KVCacheSpec& spec) {
    return spec.page_size_padded.value_or(unpadded_page_size_bytes(spec));
  };
  if (other.block_size != first.block_size) return false;
  if (is_overlaid && other.dcp_sharded != first.dcp_sharded) return false;
  if (traits_of(other.kind).keeps != traits_of(first.kind).keeps) return false;
  // Windows of MLA rows are windows to the plain class, but not the other way round.
  if (is_mla_window(first.kind) && other.kind != first.kind) return false;
  switch (traits_of(first.kind).keeps) {
    case Keeps::window:
      return other.sliding_window == first.sliding_window &&
             (!is_mla_window(first.kind) || other.bounded_replay == first.bounded_replay);
    case Keeps::chunk:
      return other.attention_chunk_size == first.attention_chunk_size;
    case Keeps::states:
      if (other.num_speculative_blocks != first.num_speculative_blocks) return false;
      return !is_overlaid ||
             (other.num_prefill_checkpoint_blocks == first.num_prefill_checkpoint_blocks &&
              other.prefill_checkpoint_alignment == first.prefill_checkpoint_alignment &&
              page(other) == page(first) && other.plan.tp_replicated == first.plan.tp_replicated);
    case Keeps::pages:
      return other.kind == first.kind;
    default:
      return true;
  }
}

bool is_uniform_type(const LayerSpecs& layers, bool is_overlaid) {
  return std::ranges::all_of(layers, [&](const NamedSpec& layer) {
    return need_same_slots(layers.front().spec, layer.spec, is_overlaid);
  });
}

std::int64_t approximate_gcd(std::span<const std::int64_t> values, std::int64_t lower_bound) {
  const std::int64_t low = std::max<std::int64_t>(1, lower_bound);
  const std::int64_t high = std::ranges::max(values);
  std::int64_t best = low;
  std::int64_t best_padding = -1;
  for (std::int64_t d = low; d <= high; ++d) {
    std::int64_t padding = 0;
    for (std::int64_t value : values) padding += round_up(value, d) - value;
    if (best_padding < 0 || padding <= best_padding) {
      best = d;
      best_padding = padding;
    }
  }
  return best;
}

std::int64_t layers_per_page(const KVCacheSpec& spec, std::int64_t attn_pack) {
  const bool packed = attends_to_all(spec.kind);
  return packed ? attn_pack : 1;
}

std::int64_t empty_places(const KVCacheGroupSpec& group) {
  const auto layers = static_cast<std::int64_t>(group.layer_names.size());
  return round_up(layers, group.layers_per_page) - layers;
}

namespace {

// Groups of DeepSeek-V4: layers in tuples of several page sizes (main rows, indexer rows,
// compressed rows); window layers are distributed over tuples of the same sizes, so that tensors
// can be shared.

// The window layers padded to the next larger page of the full layers.
Result<LayerSpecs> padded_to_pages(LayerSpecs windows, const PageBuckets& full) {
  for (NamedSpec& layer : windows) {
    const std::int64_t page = page_size_bytes(layer.spec);
    std::int64_t next = 0;
    std::int64_t largest = 0;
    for (const auto& [size, bucket] : full) {
      if (size >= page && (next == 0 || size < next)) next = size;
      largest = std::max(largest, size);
    }
    if (next == 0)
      return fail(
          "{}: its page of {} bytes is larger than any of the full layers, at most {} bytes; use a "
          "smaller block size",
          layer.name, page, largest);
    if (page < next) layer.spec.page_size_padded = next;
  }
  return windows;
}

// Tuple t holds the t-th layer of every page size; group i takes tuples i, i + n, ...
Result<std::vector<KVCacheGroupSpec>> deal_tuples(const LayerSpecs& windows,
                                                  std::int64_t tuples_per_group) {
  const PageBuckets buckets = by_page_size(windows, page_size_bytes);
  const std::size_t tuples = buckets.front().second.size();
  for (const auto& [page, bucket] : buckets)
    if (bucket.size() != tuples)
      return fail("window layers of {} bytes per page are {}, others {}; a tuple takes one of each",
                  page, bucket.size(), tuples);
  return dealt_groups(buckets, cdiv(static_cast<std::int64_t>(tuples), tuples_per_group));
}

// DeepSeek-V4: full MLA layers of several page sizes and sliding-window MLA layers; groups of
// uniform type whose layers fit the same set of pages. REQUIRES: a layer of the second kind.
Result<std::vector<KVCacheGroupSpec>> mla_window_groups(const LayerSpecs& layers) {
  LayerSpecs full;
  // Windows that need the same token slots, in order of first appearance.
  std::vector<std::pair<std::pair<std::int64_t, std::int64_t>, LayerSpecs>> window_kinds;
  for (const NamedSpec& layer : layers) {
    if (!is_mla_window(layer.spec.kind)) {
      if (!has_single_rows(layer.spec))
        return fail("{}: a {} layer cannot be grouped with MLA windows", layer.name,
                    name_of(layer.spec.kind));
      full.push_back(layer);
      continue;
    }
    const std::pair key{layer.spec.block_size, layer.spec.sliding_window};
    auto kind = std::ranges::find_if(window_kinds, [&](const auto& k) { return k.first == key; });
    if (kind == window_kinds.end()) kind = window_kinds.insert(kind, {key, {}});
    kind->second.push_back(layer);
  }
  if (full.empty() || !is_uniform_type(full))
    return fail("MLA windows need full MLA layers of one block size");

  std::vector<std::int64_t> tuples{num_layer_tuples(full)};
  for (const auto& [key, windows] : window_kinds) tuples.push_back(num_layer_tuples(windows));
  const std::int64_t tuples_per_group = approximate_gcd(tuples, tuples.front());
  const PageBuckets pages = by_page_size(full, page_size_bytes);
  std::vector<KVCacheGroupSpec> groups{uniform_type_group(full)};
  for (const auto& [key, windows] : window_kinds) {
    LS_ASSIGN_OR_RETURN(auto padded, padded_to_pages(windows, pages));
    LS_ASSIGN_OR_RETURN(auto dealt, deal_tuples(padded, tuples_per_group));
    groups.insert(groups.end(), dealt.begin(), dealt.end());
  }
  return groups;
}

// Specs raised to one page size by growing the block size of the smaller ones.
Result<LayerSpecs> with_equal_pages(LayerSpecs layers) {
  std::int64_t largest = 0;
  for (const NamedSpec& layer : layers) largest = std::max(largest, page_size_bytes(layer.spec));
  for (NamedSpec& layer : layers) {
    const std::int64_t page = page_size_bytes(layer.spec);
    if (page == largest) continue;
    if (is_state_kind(layer.spec.kind) || layer.spec.page_size_padded)
      return fail(
          "{}: its page of {} bytes cannot grow to {} bytes by holding more tokens; pad it to that",
          layer.name, page, largest);
    if (largest % page != 0) {
      std::int64_t ratio = largest / page;
      while (largest % ratio != 0) --ratio;
      return fail(
          "{}: its page of {} bytes does not divide the largest page, {} bytes; the next page that "
          "does has {} bytes",
          layer.name, page, largest, largest / ratio);
    }
    layer.spec.block_size *= largest / page;
  }
  return layers;
}

// Refused: packing without states, or more layers to a page than the model has attention layers.
Result<bool> check_packable(const LayerSpecs& layers, std::int64_t attn_pack) {
  const auto count = [&](auto&& matches) {
    return std::ranges::count_if(layers, [&](const NamedSpec& l) { return matches(l.spec); });
  };
  const auto packed =
      count([&](const KVCacheSpec& spec) { return layers_per_page(spec, attn_pack) > 1; });
  if (count([](const KVCacheSpec& spec) { return is_state_kind(spec.kind); }) == 0)
    return fail(
        "attn_pack {}: only a model with state layers has pages large enough to pack; use 1",
        attn_pack);
  if (packed < attn_pack)
    return fail("attn_pack {}: the model has {} attention layers to pack; use at most {}",
                attn_pack, packed, std::max<std::int64_t>(packed, 1));
  return true;
}

// Refused: pages that are not one pool page each once attention is packed.
Result<LayerSpecs> with_packed_pages(const LayerSpecs& layers, std::int64_t attn_pack) {
  std::int64_t pool_page = 0;
  const auto page_of = [&](const KVCacheSpec& spec) {
    return page_size_bytes(spec) * layers_per_page(spec, attn_pack);
  };
  for (const NamedSpec& layer : layers) pool_page = std::max(pool_page, page_of(layer.spec));
  for (const NamedSpec& layer : layers)
    if (page_of(layer.spec) != pool_page)
      return fail(
          "{}: a page of {} bytes where {} packed attention layers make {}; block sizes must be "
          "aligned with packing counted in",
          layer.name, page_of(layer.spec), attn_pack, pool_page);
  return layers;
}

// Attention layers in packs, every kind round robin over its groups.
std::vector<KVCacheGroupSpec> deal_out(const std::vector<LayerSpecs>& kinds,
                                       const PlanOptions& options) {
  const auto units_of = [&](const LayerSpecs& kind) {
    return cdiv(std::ssize(kind), layers_per_page(kind.front().spec, options.attn_pack));
  };
  std::vector<std::int64_t> units;
  for (const LayerSpecs& kind : kinds) units.push_back(units_of(kind));
  const std::int64_t group_size = layers_per_group(units);
  std::vector<KVCacheGroupSpec> groups;
  for (const LayerSpecs& kind : kinds) {
    const std::int64_t num_groups = cdiv(units_of(kind), group_size);
    for (std::int64_t i = 0; i < num_groups; ++i) {
      KVCacheGroupSpec& group = groups.emplace_back();
      group.spec = kind.front().spec;
      group.layers_per_page = layers_per_page(group.spec, options.attn_pack);
      for (std::int64_t layer = 0; layer < std::ssize(kind); ++layer)
        if (layer / group.layers_per_page % num_groups == i)
          group.layer_names.push_back(kind[static_cast<std::size_t>(layer)].name);
    }
  }
  return groups;
}

Result<std::vector<KVCacheGroupSpec>> equal_page_groups(const LayerSpecs& layers,
                                                        const PlanOptions& options) {
  LayerSpecs hidden;
  LayerSpecs others;
  for (const NamedSpec& layer : layers)
    (is_hidden_state(layer.spec.kind) ? hidden : others).push_back(layer);
  if (others.empty())
    return fail("hidden-state layers of different shapes need a model with other layers");
  LS_ASSIGN_OR_RETURN(auto equal, options.attn_pack > 1
                                      ? with_packed_pages(others, options.attn_pack)
                                      : with_equal_pages(others));
  std::vector<KVCacheGroupSpec> groups = deal_out(by_equal_spec(equal), options);
  const std::int64_t common_page = pool_page_size_bytes(groups.front());
  for (const NamedSpec& layer : hidden) {
    const KVCacheSpec& spec = layer.spec;
    const std::int64_t bytes_per_token =
        spec.num_kv_heads * spec.head_size * itemsize_bytes(spec.dtype);
    if (bytes_per_token > common_page)
      return fail(
          "{}: one token takes {} bytes and the common page has {}; extract fewer layers at a "
          "time, or use longer blocks",
          layer.name, bytes_per_token, common_page);
    KVCacheGroupSpec& group = groups.emplace_back();
    group.layer_names = {layer.name};
    group.spec = spec;
    group.spec.block_size = std::max<std::int64_t>(common_page / bytes_per_token, 1);
    group.spec.page_size_padded = common_page;
  }
  return groups;
}

}  // namespace

Result<std::vector<KVCacheGroupSpec>> kv_cache_groups(const LayerSpecs& all_layers,
                                                      const PlanOptions& options) {
  LayerSpecs layers;
  for (const NamedSpec& layer : all_layers)
    if (!keeps_nothing(layer.spec.kind)) layers.push_back(layer);
  if (layers.empty()) return std::vector<KVCacheGroupSpec>{};
  for (const NamedSpec& layer : layers)
    LS_CHECK(layer.spec.block_size > 0, "{}: block_size {}", layer.name, layer.spec.block_size);
  if (options.attn_pack > 1) LS_RETURN_IF_ERROR(check_packable(layers, options.attn_pack));

  if (options.disable_hybrid_kv_cache_manager) {
    LS_ASSIGN_OR_RETURN(auto converted, without_hybrid_manager(std::move(layers)));
    layers = std::move(converted);
  }
  LS_ASSIGN_OR_RETURN(const auto one, merged_spec(layers));
  if (one.has_value()) return std::vector{one_spec_group(layers, *one)};
  if (is_uniform_type(layers)) return std::vector{uniform_type_group(layers)};
  if (std::ranges::any_of(layers, [](const NamedSpec& l) { return is_mla_window(l.spec.kind); }))
    return mla_window_groups(layers);
  return equal_page_groups(layers, options);
}

}  // namespace lockstep
