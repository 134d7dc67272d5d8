#include "reference/placement/cache_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "reference/plan/grouping.h"
#include "reference/plan/page_groups.h"

namespace lockstep {
namespace {

std::vector<KVCacheSpec> values_of(const NamedCacheSpecs& specs) {
  std::vector<KVCacheSpec> values;
  for (const auto& [name, spec] : specs) values.push_back(spec);
  return values;
}

std::vector<std::string> names_of(const NamedCacheSpecs& specs) {
  std::vector<std::string> names;
  for (const auto& [name, spec] : specs) names.push_back(name);
  return names;
}

PlacedGroup group_of(std::vector<std::string> names, KVCacheSpec spec) {
  PlacedGroup group;
  group.layer_names = std::move(names);
  group.spec = std::move(spec);
  return group;
}

bool is_one_type(const NamedCacheSpecs& specs) {
  return std::ranges::all_of(
      specs, [&](const NamedCacheSpec& s) { return is_uniform_type(specs[0].second, s.second); });
}

template <class Predicate>
bool any_type(const NamedCacheSpecs& specs, Predicate predicate) {
  return std::ranges::any_of(specs,
                             [&](const NamedCacheSpec& s) { return predicate(s.second.kind); });
}

// Windows and chunks as full attention: the same pages, all blocks kept.
Result<NamedCacheSpecs> promoted(const NamedCacheSpecs& specs) {
  const auto is_settled = [](const NamedCacheSpecs& all) -> Result<bool> {
    const Merged merged = merge_specs(values_of(all));
    if (!merged.refused.empty()) return fail(merged.refused);
    return merged.spec.has_value() || is_one_type(all);
  };
  LS_ASSIGN_OR_RETURN(const bool settled, is_settled(specs));
  if (settled) return specs;
  NamedCacheSpecs result = specs;
  std::set<std::int64_t> full_blocks;
  for (const auto& [name, spec] : specs)
    if (is_full_attention(spec.kind)) full_blocks.insert(spec.block_size);
  if (!full_blocks.empty() && any_type(specs, is_windowed)) {
    for (auto& [name, spec] : result) {
      if (!is_windowed(spec.kind)) continue;
      if (is_mla_window(spec.kind))
        return fail(
            fmt::format("layer {}: windows of MLA rows cannot be kept as full attention; "
                        "enable the hybrid manager",
                        name));
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
        "without the hybrid manager all layers must take one type of cache, and these "
        "cannot; enable it");
  return result;
}

// Sharded and replicated caches apart.
Result<void> promote_all(NamedCacheSpecs& specs) {
  for (const bool replicated : {false, true}) {
    NamedCacheSpecs part;
    for (const NamedCacheSpec& s : specs)
      if ((is_attention(s.second.kind) && !s.second.dcp_sharded) == replicated) part.push_back(s);
    if (part.empty()) continue;
    LS_ASSIGN_OR_RETURN(const NamedCacheSpecs changed, promoted(part));
    for (const auto& [name, spec] : changed)
      std::ranges::find(specs, name, &NamedCacheSpec::first)->second = spec;
  }
  return {};
}

// Pages made equal: states and plain rows padded, blocks multiplied where the page divides.
// `is_final`: the engine stops at an assertion here and tries nothing else.
Result<NamedCacheSpecs> equal_pages(NamedCacheSpecs specs, bool& is_final) {
  std::int64_t page = 0;
  for (const auto& [name, spec] : specs) page = std::max(page, page_bytes(spec));
  for (auto& [name, spec] : specs) {
    const std::int64_t own = page_bytes(spec);
    if (own == page) continue;
    if (auto has_rows = check_page(name, spec); !has_rows) {
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
          fmt::format("layer {}: its page of {} bytes does not divide the largest page of "
                      "{} bytes, and rows of MLA cannot be padded; use an order with "
                      "blocks outermost",
                      name, own, page));
    }
    is_final = page_bytes(spec) != page || unpadded_page_bytes(spec) > page;
    if (is_final)
      return fail(fmt::format("layer {}: its page cannot be made {} bytes", name, page));
  }
  return specs;
}

// Equal pages in groups of equal size, layers split round robin.
Result<std::vector<PlacedGroup>> equal_page_groups(const NamedCacheSpecs& specs) {
  struct Bucket {
    std::vector<KVCacheSpec> specs;
    NamedCacheSpecs layers;
  };
  std::vector<Bucket> same;  // layers of one spec
  for (const NamedCacheSpec& layer : specs) {
    auto at = std::ranges::find_if(
        same, [&](const Bucket& bucket) { return bucket.specs[0] == layer.second; });
    if (at == same.end()) at = same.insert(same.end(), Bucket{{layer.second}, {}});
    at->layers.push_back(layer);
  }
  std::vector<Bucket> buckets;
  for (Bucket& bucket : same) {
    const auto takes = [&](const Bucket& other) {
      std::vector<KVCacheSpec> all = other.specs;
      all.push_back(bucket.specs[0]);
      return merge_specs(all).spec.has_value();
    };
    const auto at = std::ranges::find_if(buckets, takes);
    if (at == buckets.end()) {
      buckets.push_back(std::move(bucket));
      continue;
    }
    at->specs.push_back(bucket.specs[0]);
    at->layers.insert(at->layers.end(), bucket.layers.begin(), bucket.layers.end());
  }
  std::vector<std::int64_t> layers_of_kind;
  for (const Bucket& bucket : buckets) layers_of_kind.push_back(std::ssize(bucket.layers));
  const std::int64_t group_size = layers_per_group(layers_of_kind);
  std::vector<PlacedGroup> groups;
  for (const Bucket& bucket : buckets) {
    const auto count = static_cast<std::size_t>(cdiv(std::ssize(bucket.layers), group_size));
    for (std::size_t g = 0; g < count; ++g) {
      NamedCacheSpecs layers;
      for (std::size_t i = g; i < bucket.layers.size(); i += count)
        layers.push_back(bucket.layers[i]);
      const Merged merged = merge_specs(values_of(layers));
      if (!merged.spec) return fail("layers of one group do not share a spec");
      groups.push_back(group_of(names_of(layers), *merged.spec));
    }
  }
  return groups;
}

// Plain windows and MLA rows, whose pages cannot be made equal: all become full attention.
std::optional<PlacedGroup> full_allocation(const NamedCacheSpecs& specs) {
  if (any_type(specs, is_hidden_state) || any_type(specs, is_mla_window) ||
      any_type(specs, is_chunked))
    return std::nullopt;
  if (!any_type(specs, is_mla) || !any_type(specs, is_sliding_window)) return std::nullopt;
  const auto changed = promoted(specs);
  if (!changed || !is_one_type(*changed)) return std::nullopt;
  return uniform_group(*changed);
}

// A group for each layer of hidden states, in pages of the common size.
Result<void> add_hidden_groups(const NamedCacheSpecs& hidden, std::vector<PlacedGroup>& groups) {
  const auto token_bytes = [](const KVCacheSpec& spec) {
    return spec.num_kv_heads * spec.head_size * itemsize_bytes(spec.dtype);
  };
  LS_RETURN_IF_ERROR(check_page(groups[0].layer_names[0], groups[0].spec));
  std::int64_t page = page_bytes(groups[0].spec);
  std::int64_t largest = 0;
  for (const auto& [name, spec] : hidden) largest = std::max(largest, token_bytes(spec));
  if (largest > page) {
    const std::int64_t scale = cdiv(largest, page);
    page *= scale;
    for (PlacedGroup& group : groups) {
      if (group.spec.page_size_padded) *group.spec.page_size_padded *= scale;
      group.spec = with_block_size(group.spec, group.spec.block_size * scale);
    }
  }
  std::int64_t common = 0;
  for (const PlacedGroup& group : groups) common = std::gcd(common, group.spec.block_size);
  for (auto [name, spec] : hidden) {
    std::int64_t block = std::min(common, std::max<std::int64_t>(page / token_bytes(spec), 1));
    while (common % block != 0) --block;
    spec.block_size = block;
    spec.page_size_padded = page;
    groups.push_back(group_of({name}, spec));
  }
  return {};
}

Result<std::vector<PlacedGroup>> group_layers(NamedCacheSpecs& specs, CacheLayout order,
                                              const PlacementOptions& options) {
  if (options.disable_hybrid) LS_RETURN_IF_ERROR(promote_all(specs));
  if (specs.empty()) return std::vector<PlacedGroup>{};
  if (options.host_pages && any_type(specs, is_mla)) return host_page_groups(specs, order, options);
  const Merged merged = merge_specs(values_of(specs));
  if (!merged.refused.empty()) return fail(merged.refused);
  if (merged.spec) return std::vector{group_of(names_of(specs), *merged.spec)};
  if (is_one_type(specs)) return std::vector{uniform_group(specs)};
  NamedCacheSpecs hidden, others;
  std::set<std::int64_t> pages;
  for (const NamedCacheSpec& layer : specs) {
    const bool is_apart = is_hidden_state(layer.second.kind);
    (is_apart ? hidden : others).push_back(layer);
    if (!is_apart) pages.insert(page_bytes(layer.second));
  }
  if (is_block_outermost(order) && pages.size() > 1) {
    LS_ASSIGN_OR_RETURN(std::vector<PlacedGroup> groups, packed_groups(others));
    for (const auto& [name, spec] : hidden) groups.push_back(group_of({name}, spec));
    return groups;
  }
  bool is_final = false;
  auto equal = equal_pages(others, is_final);
  if (!equal) {
    const auto fallback = is_final ? std::nullopt : full_allocation(specs);
    if (!fallback) return tl::unexpected(equal.error());
    return std::vector{*fallback};
  }
  LS_ASSIGN_OR_RETURN(std::vector<PlacedGroup> groups, equal_page_groups(*equal));
  if (!hidden.empty()) LS_RETURN_IF_ERROR(add_hidden_groups(hidden, groups));
  return groups;
}

}  // namespace

Result<void> check_page(const std::string& name, const KVCacheSpec& spec) {
  if (page_bytes(spec) != 0) return {};
  return fail(
      fmt::format("layer {}: blocks of {} tokens do not hold one KV entry; choose a larger "
                  "--block-size",
                  name, spec.block_size));
}

PlacedGroup uniform_group(NamedCacheSpecs specs) {
  PlacedGroup group = group_of(names_of(specs), specs[0].second);
  group.is_uniform = true;
  group.by_layer = std::move(specs);
  return group;
}

namespace {

// Layers that may share a group, with pages of several sizes.
struct Bucket {
  NamedCacheSpecs layers;
  std::vector<std::pair<std::int64_t, NamedCacheSpecs>> by_page;  // in order of appearance
  bool is_pattern = true;   // as many layers of each page size
  std::size_t repeats = 0;  // layers of the commonest page size

  std::int64_t num_layers() const { return std::ssize(layers); }
};

std::vector<Bucket> buckets_of(const NamedCacheSpecs& specs) {
  std::vector<Bucket> buckets;
  for (const NamedCacheSpec& layer : specs) {
    auto at = std::ranges::find_if(buckets, [&](const Bucket& bucket) {
      return is_uniform_type(bucket.layers[0].second, layer.second);
    });
    if (at == buckets.end()) at = buckets.insert(buckets.end(), Bucket{});
    at->layers.push_back(layer);
    const std::int64_t page = page_bytes(layer.second);
    auto of_page =
        std::ranges::find(at->by_page, page, &std::pair<std::int64_t, NamedCacheSpecs>::first);
    if (of_page == at->by_page.end())
      of_page = at->by_page.insert(at->by_page.end(), {page, NamedCacheSpecs{}});
    of_page->second.push_back(layer);
  }
  for (Bucket& bucket : buckets)
    for (const auto& [page, layers] : bucket.by_page) {
      bucket.is_pattern &= layers.size() == bucket.by_page[0].second.size();
      bucket.repeats = std::max(bucket.repeats, layers.size());
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
                          std::vector<PlacedGroup>& groups) {
  if (count == 1) {
    groups.push_back(uniform_group(bucket.layers));
    return {};
  }
  if (!bucket.is_pattern)
    return fail(
        fmt::format("{} layers like {} have pages of different sizes in different numbers and "
                    "cannot be split into {} groups; use an order with layers outermost",
                    bucket.layers.size(), bucket.layers[0].first, count));
  for (std::int64_t g = 0; g < count; ++g) {
    NamedCacheSpecs layers;
    for (auto r = static_cast<std::size_t>(g); r < bucket.repeats;
         r += static_cast<std::size_t>(count))
      for (const auto& [page, of_page] : bucket.by_page) layers.push_back(of_page[r]);
    groups.push_back(uniform_group(layers));
  }
  return {};
}

}  // namespace

Result<std::vector<PlacedGroup>> packed_groups(const NamedCacheSpecs& specs) {
  const std::vector<Bucket> buckets = buckets_of(specs);
  const std::int64_t per_group = repeats_per_group(buckets);
  const auto groups_of = [&](const Bucket& bucket) -> std::int64_t {
    if (!bucket.is_pattern || per_group == 0) return 1;
    return cdiv(static_cast<std::int64_t>(bucket.repeats), per_group);
  };
  const auto can_shrink = [&](const Bucket& bucket) {
    const CacheKind kind = bucket.layers[0].second.kind;
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
  std::vector<PlacedGroup> groups;
  for (const Bucket& bucket : buckets) {
    std::int64_t count = groups_of(bucket);
    if (anchor != 0 && can_shrink(bucket)) {
      const auto& [name, spec] = bucket.layers[0];
      LS_RETURN_IF_ERROR(check_page(name, spec));
      const std::int64_t fit = std::max<std::int64_t>(anchor / page_bytes(spec), 1);
      count = std::max(count, cdiv(bucket.num_layers(), fit));
    }
    LS_RETURN_IF_ERROR(split_bucket(bucket, count, groups));
  }
  return groups;
}

Result<std::vector<PlacedGroup>> cache_groups(NamedCacheSpecs specs, CacheLayout order,
                                              const PlacementOptions& options) {
  for (auto& [name, spec] : specs)
    if (is_sliding_window(spec.kind))
      spec.extra_retained_tokens = options.mtp_modules > 1 ? options.drafted_tokens() - 1 : 0;
  LS_ASSIGN_OR_RETURN(std::vector<PlacedGroup> groups, group_layers(specs, order, options));
  if (options.spec_method == "dflash" || options.spec_method.empty()) return groups;
  std::set<std::string> drafts;
  for (const auto& [name, spec] : specs)
    if (spec.plan.is_draft.value) drafts.insert(name);
  for (PlacedGroup& group : groups)
    group.is_eagle_group = std::ranges::any_of(
        group.layer_names, [&](const std::string& name) { return drafts.contains(name); });
  return groups;
}

namespace {

PlacedGroup device_group(const NamedCacheSpecs& layers, std::string_view suffix, CacheKind type,
                         std::int64_t blocks_per_request) {
  PlacedGroup group;
  for (const auto& [name, spec] : layers) group.layer_names.push_back(name + std::string(suffix));
  group.spec.kind = type;
  group.spec.block_size = layers[0].second.block_size;
  group.spec.page_copy_bytes = page_bytes(layers[0].second);
  group.spec.blocks_per_request = blocks_per_request;
  group.spec.dcp_sharded = false;
  group.enable_kv_transfer = false;
  return group;
}

}  // namespace

Result<std::vector<PlacedGroup>> host_page_groups(const NamedCacheSpecs& specs, CacheLayout order,
                                                  const PlacementOptions& options) {
  NamedCacheSpecs sources, indexers, others;
  for (const NamedCacheSpec& layer : specs) {
    if (!has_layer_views(layer.second.kind)) continue;  // laid out again
    if (!is_mla(layer.second.kind))
      others.push_back(layer);
    else
      (layer.second.plan.is_indexer ? indexers : sources).push_back(layer);
  }
  if (sources.empty() || indexers.empty())
    return fail("HiSparse needs sparse MLA layers and their indexers");
  const std::int64_t block = sources[0].second.block_size;
  std::int64_t top_k = 0, indexer_bytes = 0;
  for (const auto& [name, spec] : sources) top_k = std::max(top_k, spec.plan.topk_buffer_width);
  for (const auto& [name, spec] : indexers) indexer_bytes += page_bytes(spec);
  const std::int64_t queries = 1 + options.drafted_tokens();
  const std::int64_t rows = options.host_pages->device_buffer_size.value_or((queries + 1) * top_k);
  if (rows < queries * top_k || rows > 32768)
    return fail(fmt::format("HiSparse: a device buffer of {} rows; {} to 32768 serve this model",
                            rows, queries * top_k));
  std::vector<PlacedGroup> groups(2), resident, hot;
  groups[0] = uniform_group(sources);
  groups[0].host_resident = true;
  groups[0].role = "hisparse_source";
  groups[1] = uniform_group(indexers);
  groups[1].role = "hisparse_indexer";
  NamedCacheSpecs current;
  std::int64_t current_bytes = 0;
  const auto close = [&] {
    resident.push_back(device_group(current, kResidentSuffix, CacheKind::hisparse_resident, 0));
    hot.push_back(device_group(current, kHotSuffix, CacheKind::hisparse_hot, cdiv(rows, block)));
    current.clear();
    current_bytes = 0;
  };
  // Layers that share an index stay together: a leader opens a unit.
  for (std::size_t i = 0; i < sources.size();) {
    std::size_t end = i + 1;
    while (end < sources.size() && !sources[end].second.plan.is_index_group_leader) ++end;
    std::int64_t unit_bytes = 0;
    for (std::size_t l = i; l < end; ++l) unit_bytes += page_bytes(sources[l].second);
    if (!current.empty() && current_bytes + unit_bytes > indexer_bytes) close();
    for (; i < end; ++i) current.push_back(sources[i]);
    current_bytes += unit_bytes;
  }
  close();
  for (auto& group : resident) groups.push_back(std::move(group));
  for (auto& group : hot) groups.push_back(std::move(group));
  if (!others.empty()) {
    PlacementOptions plain = options;
    plain.host_pages.reset();
    LS_ASSIGN_OR_RETURN(std::vector<PlacedGroup> regular, cache_groups(others, order, plain));
    for (auto& group : regular) groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace lockstep
