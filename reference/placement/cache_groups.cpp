#include "reference/placement/placement.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "reference/plan/grouping.h"
#include "reference/plan/page_groups.h"

namespace lockstep {
namespace {

template <class Predicate>
bool any_type(const LayerSpecs& specs, Predicate predicate) {
  return std::ranges::any_of(specs, [&](const NamedSpec& s) { return predicate(s.spec.kind); });
}

// Windows and chunks as full attention: the same pages, all blocks kept.
Result<LayerSpecs> promoted(const LayerSpecs& specs) {
  const auto is_settled = [](const LayerSpecs& all) -> Result<bool> {
    LS_ASSIGN_OR_RETURN(const auto merged, merge_specs(all));
    return merged.has_value() || is_uniform_type(all, true);
  };
  LS_ASSIGN_OR_RETURN(const bool settled, is_settled(specs));
  if (settled) return specs;
  LayerSpecs result = specs;
  std::set<std::int64_t> full_blocks;
  for (const NamedSpec& layer : specs)
    if (is_full_attention(layer.spec.kind)) full_blocks.insert(layer.spec.block_size);
  if (!full_blocks.empty() && any_type(specs, is_windowed)) {
    for (NamedSpec& layer : result) {
      KVCacheSpec& spec = layer.spec;
      if (!is_windowed(spec.kind)) continue;
      if (is_mla_window(spec.kind))
        return fail(
            "layer {}: windows of MLA rows cannot be kept as full attention; enable the hybrid "
            "manager",
            layer.name);
      const std::int64_t block = full_blocks.size() == 1 ? *full_blocks.begin() : spec.block_size;
      if (spec.page_size_padded)
        spec.page_size_padded =
            std::max(*spec.page_size_padded, unpadded_page_bytes(spec) * block / spec.block_size);
      spec.kind = CacheKind::full_attention;
      spec.extra_retained_tokens = 0;
      spec = with_block_size(spec, block);
    }
  }
  LS_ASSIGN_OR_RETURN(const bool done, is_settled(result));
  if (!done)
    return fail(
        "without the hybrid manager all layers must take one type of cache, and these cannot; "
        "enable it");
  return result;
}

// Sharded and replicated caches apart.
Result<void> promote_all(LayerSpecs& specs) {
  for (const bool replicated : {false, true}) {
    LayerSpecs part;
    for (const NamedSpec& s : specs)
      if ((is_attention(s.spec.kind) && !s.spec.dcp_sharded) == replicated) part.push_back(s);
    if (part.empty()) continue;
    LS_ASSIGN_OR_RETURN(const LayerSpecs changed, promoted(part));
    for (const NamedSpec& layer : changed)
      std::ranges::find(specs, layer.name, &NamedSpec::name)->spec = layer.spec;
  }
  return {};
}

// Pages made equal: states and plain rows padded, blocks multiplied where the page divides.
// `is_final`: the engine stops at an assertion here and tries nothing else.
Result<LayerSpecs> equal_pages(LayerSpecs specs, bool& is_final) {
  std::int64_t page = 0;
  for (const NamedSpec& layer : specs) page = std::max(page, page_bytes(layer.spec));
  for (NamedSpec& layer : specs) {
    KVCacheSpec& spec = layer.spec;
    const std::int64_t own = page_bytes(spec);
    if (own == page) continue;
    if (auto has_rows = check_page(layer.name, spec); !has_rows) {
      is_final = true;
      return tl::unexpected(has_rows.error());
    }
    if (is_state_kind(spec.kind)) {
      spec.page_size_padded = page;
    } else if (page % own == 0) {
      spec = with_block_size(spec, spec.block_size * (page / own));
    } else if (is_attention(spec.kind) && !is_mla(spec.kind)) {
      spec.page_size_padded = page;
      apply_alignment(spec);  // its own alignment wins
    } else {
      return fail(
          "layer {}: its page of {} bytes does not divide the largest page of {} bytes, and rows "
          "of MLA cannot be padded; use a layout with blocks outermost",
          layer.name, own, page);
    }
    is_final = page_bytes(spec) != page || unpadded_page_bytes(spec) > page;
    if (is_final) return fail("layer {}: its page cannot be made {} bytes", layer.name, page);
  }
  return specs;
}

// Equal pages in groups of equal size, layers split round robin.
Result<std::vector<KVCacheGroupSpec>> equal_page_groups(const LayerSpecs& specs) {
  std::vector<LayerSpecs> buckets;  // layers that share a spec
  for (const LayerSpecs& kind : by_equal_spec(specs)) {
    const auto at = std::ranges::find_if(buckets, [&](LayerSpecs bucket) {
      bucket.push_back(kind.front());
      const auto merged = merge_specs(bucket);
      return merged && merged->has_value();
    });
    if (at == buckets.end())
      buckets.push_back(kind);
    else
      at->insert(at->end(), kind.begin(), kind.end());
  }
  std::vector<std::int64_t> layers_of_kind;
  for (const LayerSpecs& bucket : buckets) layers_of_kind.push_back(std::ssize(bucket));
  const std::int64_t group_size = layers_per_group(layers_of_kind);
  std::vector<KVCacheGroupSpec> groups;
  for (const LayerSpecs& bucket : buckets) {
    const auto count = static_cast<std::size_t>(cdiv(std::ssize(bucket), group_size));
    for (std::size_t g = 0; g < count; ++g) {
      LayerSpecs layers;
      for (std::size_t i = g; i < bucket.size(); i += count) layers.push_back(bucket[i]);
      const auto merged = merge_specs(layers);
      if (!merged || !*merged) return fail("layers of one group do not share a spec");
      groups.push_back(one_spec_group(layers, **merged));
    }
  }
  return groups;
}

// Plain windows and MLA rows, whose pages cannot be made equal: all become full attention.
std::optional<KVCacheGroupSpec> full_allocation(const LayerSpecs& specs) {
  if (any_type(specs, is_hidden_state) || any_type(specs, is_mla_window) ||
      any_type(specs, is_chunked))
    return std::nullopt;
  if (!any_type(specs, is_mla) || !any_type(specs, is_sliding_window)) return std::nullopt;
  const auto changed = promoted(specs);
  if (!changed || !is_uniform_type(*changed, true)) return std::nullopt;
  return uniform_type_group(*changed);
}

// A group for each layer of hidden states, in pages of the common size.
Result<void> add_hidden_groups(const LayerSpecs& hidden, std::vector<KVCacheGroupSpec>& groups) {
  const auto token_bytes = [](const KVCacheSpec& spec) {
    return spec.num_kv_heads * spec.head_size * itemsize_bytes(spec.dtype);
  };
  LS_RETURN_IF_ERROR(check_page(groups[0].layer_names[0], groups[0].spec));
  std::int64_t page = page_bytes(groups[0].spec);
  std::int64_t largest = 0;
  for (const NamedSpec& layer : hidden) largest = std::max(largest, token_bytes(layer.spec));
  if (largest > page) {
    const std::int64_t scale = cdiv(largest, page);
    page *= scale;
    for (KVCacheGroupSpec& group : groups) {
      if (group.spec.page_size_padded) *group.spec.page_size_padded *= scale;
      group.spec = with_block_size(group.spec, group.spec.block_size * scale);
    }
  }
  std::int64_t common = 0;
  for (const KVCacheGroupSpec& group : groups) common = std::gcd(common, group.spec.block_size);
  for (const NamedSpec& layer : hidden) {
    std::int64_t block =
        std::min(common, std::max<std::int64_t>(page / token_bytes(layer.spec), 1));
    while (common % block != 0) --block;
    KVCacheSpec& spec = groups.emplace_back(one_spec_group({layer}, layer.spec)).spec;
    spec.block_size = block;
    spec.page_size_padded = page;
  }
  return {};
}

// Layers that may share a group, with pages of several sizes.
struct Bucket {
  LayerSpecs layers;
  PageBuckets by_page;
  bool is_pattern = true;   // as many layers of each page size
  std::size_t repeats = 0;  // layers of the commonest page size

  std::int64_t num_layers() const { return std::ssize(layers); }
};

std::vector<Bucket> buckets_of(const LayerSpecs& specs) {
  std::vector<Bucket> buckets;
  for (const NamedSpec& layer : specs) {
    auto at = std::ranges::find_if(buckets, [&](const Bucket& bucket) {
      return need_same_slots(bucket.layers[0].spec, layer.spec, true);
    });
    if (at == buckets.end()) at = buckets.insert(buckets.end(), Bucket{});
    at->layers.push_back(layer);
  }
  for (Bucket& bucket : buckets) {
    bucket.by_page = by_page_size(bucket.layers, page_bytes);
    for (const auto& [page, layers] : bucket.by_page) {
      bucket.is_pattern &= layers.size() == bucket.by_page[0].second.size();
      bucket.repeats = std::max(bucket.repeats, layers.size());
    }
  }
  return buckets;
}

// Repeats of the patterns that a group has; 0: no pattern has different pages.
std::int64_t repeats_per_group(const std::vector<Bucket>& buckets) {
  std::int64_t least = 0;
  std::vector<std::int64_t> repeats;
  for (const Bucket& bucket : buckets) {
    if (!bucket.is_pattern) continue;
    repeats.push_back(static_cast<std::int64_t>(bucket.repeats));
    if (bucket.by_page.size() > 1) least = std::max(least, repeats.back());
  }
  return least == 0 ? 0 : approximate_gcd(repeats, least);
}

// The bucket in `count` groups. The engine distributes repeats of a pattern; with different counts
// it would lose layers, and stops.
Result<void> split_bucket(const Bucket& bucket, std::int64_t count,
                          std::vector<KVCacheGroupSpec>& groups) {
  if (count == 1) {
    groups.push_back(uniform_type_group(bucket.layers));
    return {};
  }
  if (!bucket.is_pattern)
    return fail(
        "{} layers like {} have pages of different sizes in different numbers and cannot be split "
        "into {} groups; use a layout with layers outermost",
        bucket.layers.size(), bucket.layers[0].name, count);
  std::ranges::move(dealt_groups(bucket.by_page, count), std::back_inserter(groups));
  return {};
}

// Packing (_get_packed_kv_cache_groups): different pages next to each other in one block. Requires
// a block-outer layout and more than one page size.
// An Error: windows or states of different pages that must be split and have different counts.
Result<std::vector<KVCacheGroupSpec>> packed_groups(const LayerSpecs& specs) {
  const std::vector<Bucket> buckets = buckets_of(specs);
  const std::int64_t per_group = repeats_per_group(buckets);
  const auto groups_of = [&](const Bucket& bucket) -> std::int64_t {
    if (!bucket.is_pattern || per_group == 0) return 1;
    return cdiv(static_cast<std::int64_t>(bucket.repeats), per_group);
  };
  const auto can_shrink = [&](const Bucket& bucket) {
    const CacheKind kind = bucket.layers[0].spec.kind;
    return is_state_kind(kind) || is_ring(kind) || (per_group == 0 && is_sliding_window(kind));
  };
  // Bytes that a block holds however the buckets that can shrink are split.
  std::int64_t anchor = 0;
  for (const Bucket& bucket : buckets) {
    const std::int64_t count = can_shrink(bucket) ? bucket.num_layers() : groups_of(bucket);
    std::int64_t bytes = 0;
    for (const auto& [page, layers] : bucket.by_page)
      bytes += cdiv(std::ssize(layers), count) * page;
    anchor = std::max(anchor, bytes);
  }
  std::vector<KVCacheGroupSpec> groups;
  for (const Bucket& bucket : buckets) {
    std::int64_t count = groups_of(bucket);
    if (anchor != 0 && can_shrink(bucket)) {
      const NamedSpec& first = bucket.layers[0];
      LS_RETURN_IF_ERROR(check_page(first.name, first.spec));
      const std::int64_t fit = std::max<std::int64_t>(anchor / page_bytes(first.spec), 1);
      count = std::max(count, cdiv(bucket.num_layers(), fit));
    }
    LS_RETURN_IF_ERROR(split_bucket(bucket, count, groups));
  }
  return groups;
}

KVCacheGroupSpec device_group(const LayerSpecs& layers, const PageKind& pages,
                              std::int64_t blocks_per_request) {
  KVCacheGroupSpec group;
  for (const NamedSpec& layer : layers)
    group.layer_names.push_back(layer.name + std::string(pages.suffix));
  group.spec.kind = pages.kind;
  group.spec.block_size = layers[0].spec.block_size;
  group.spec.page_copy_bytes = page_bytes(layers[0].spec);
  group.spec.blocks_per_request = blocks_per_request;
  group.spec.dcp_sharded = false;
  return group;
}

Result<std::vector<KVCacheGroupSpec>> group_layers(LayerSpecs& specs, CacheLayout order,
                                                   const PlacementOptions& options) {
  if (options.disable_hybrid_kv_cache_manager) LS_RETURN_IF_ERROR(promote_all(specs));
  if (specs.empty()) return std::vector<KVCacheGroupSpec>{};
  if (options.has_host_pages() && any_type(specs, is_mla))
    return host_page_groups(specs, order, options);
  LS_ASSIGN_OR_RETURN(const auto merged, merge_specs(specs));
  if (merged) return std::vector{one_spec_group(specs, *merged)};
  if (is_uniform_type(specs, true)) return std::vector{uniform_type_group(specs)};
  LayerSpecs hidden, others;
  std::set<std::int64_t> pages;
  for (const NamedSpec& layer : specs) {
    const bool is_apart = is_hidden_state(layer.spec.kind);
    (is_apart ? hidden : others).push_back(layer);
    if (!is_apart) pages.insert(page_bytes(layer.spec));
  }
  if (is_block_outermost(order) && pages.size() > 1) {
    LS_ASSIGN_OR_RETURN(std::vector<KVCacheGroupSpec> groups, packed_groups(others));
    for (const NamedSpec& layer : hidden) groups.push_back(one_spec_group({layer}, layer.spec));
    return groups;
  }
  bool is_final = false;
  auto equal = equal_pages(others, is_final);
  if (!equal) {
    const auto fallback = is_final ? std::nullopt : full_allocation(specs);
    if (!fallback) return tl::unexpected(equal.error());
    return std::vector{*fallback};
  }
  LS_ASSIGN_OR_RETURN(std::vector<KVCacheGroupSpec> groups, equal_page_groups(*equal));
  if (!hidden.empty()) LS_RETURN_IF_ERROR(add_hidden_groups(hidden, groups));
  return groups;
}

}  // namespace

Result<void> check_page(const std::string& name, const KVCacheSpec& spec) {
  if (page_bytes(spec) != 0) return {};
  return fail(
      "layer {}: blocks of {} tokens do not hold one KV entry; choose a larger --block-size", name,
      spec.block_size);
}

Result<std::vector<KVCacheGroupSpec>> cache_groups(LayerSpecs specs, CacheLayout order,
                                                   const PlacementOptions& options) {
  for (NamedSpec& layer : specs)
    if (is_sliding_window(layer.spec.kind))
      layer.spec.extra_retained_tokens = options.mtp_modules > 1 ? options.drafted_tokens() - 1 : 0;
  LS_ASSIGN_OR_RETURN(std::vector<KVCacheGroupSpec> groups, group_layers(specs, order, options));
  if (options.spec_method == "dflash" || options.spec_method.empty()) return groups;
  std::set<std::string> drafts;
  for (const NamedSpec& layer : specs)
    if (layer.spec.plan.is_draft.value) drafts.insert(layer.name);
  for (KVCacheGroupSpec& group : groups)
    group.is_eagle_group = std::ranges::any_of(
        group.layer_names, [&](const std::string& name) { return drafts.contains(name); });
  return groups;
}

Result<std::vector<KVCacheGroupSpec>> host_page_groups(const LayerSpecs& specs, CacheLayout order,
                                                       const PlacementOptions& options) {
  LayerSpecs sources, indexers, others;
  for (const NamedSpec& layer : specs) {
    if (!has_layer_views(layer.spec.kind)) continue;  // laid out again
    if (!is_mla(layer.spec.kind))
      others.push_back(layer);
    else
      (layer.spec.plan.is_indexer ? indexers : sources).push_back(layer);
  }
  if (sources.empty() || indexers.empty())
    return fail("host pages need sparse MLA layers and their indexers");
  const std::int64_t block = sources[0].spec.block_size;
  std::int64_t top_k = 0, indexer_bytes = 0;
  for (const NamedSpec& layer : sources) top_k = std::max(top_k, layer.spec.plan.topk_buffer_width);
  for (const NamedSpec& layer : indexers) indexer_bytes += page_bytes(layer.spec);
  const std::int64_t queries = 1 + options.drafted_tokens();
  const std::int64_t rows = options.device_buffer_rows.value_or((queries + 1) * top_k);
  if (rows < queries * top_k || rows > 32768)
    return fail("host pages: a device buffer of {} rows; {} to 32768 serve this model", rows,
                queries * top_k);
  std::vector<KVCacheGroupSpec> groups(2), resident, hot;
  groups[0] = uniform_type_group(sources);
  groups[0].residence = Residence::host;
  groups[0].role = kPageSourceRole;
  groups[1] = uniform_type_group(indexers);
  groups[1].role = kPageIndexerRole;
  LayerSpecs current;
  std::int64_t current_bytes = 0;
  const auto close = [&] {
    resident.push_back(device_group(current, kResidentPages, 0));
    hot.push_back(device_group(current, kHotPages, cdiv(rows, block)));
    current.clear();
    current_bytes = 0;
  };
  // Layers that share an index stay together: a leader opens a unit.
  for (std::size_t i = 0; i < sources.size();) {
    std::size_t end = i + 1;
    while (end < sources.size() && !sources[end].spec.plan.is_index_group_leader) ++end;
    std::int64_t unit_bytes = 0;
    for (std::size_t l = i; l < end; ++l) unit_bytes += page_bytes(sources[l].spec);
    if (!current.empty() && current_bytes + unit_bytes > indexer_bytes) close();
    for (; i < end; ++i) current.push_back(sources[i]);
    current_bytes += unit_bytes;
  }
  close();
  for (auto& group : resident) groups.push_back(std::move(group));
  for (auto& group : hot) groups.push_back(std::move(group));
  if (!others.empty()) {
    PlacementOptions plain = options;
    plain.host_pool_bytes = 0;
    LS_ASSIGN_OR_RETURN(std::vector<KVCacheGroupSpec> regular, cache_groups(others, order, plain));
    for (auto& group : regular) groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace lockstep
