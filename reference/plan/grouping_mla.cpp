// Groups of DeepSeek-V4: layers in tuples of several page sizes (main rows, indexer rows,
// compressed rows); window layers are dealt into tuples of the same sizes, so that tensors can be
// shared.

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "reference/plan/grouping.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

bool is_mla_window(const KVCacheSpec& spec) {
  return spec.kind == CacheKind::sliding_window && spec.mla_rows;
}

// Layers of each page size, sizes in order of first appearance.
using PageBuckets = std::vector<std::pair<std::int64_t, LayerSpecs>>;

PageBuckets by_page_size(const LayerSpecs& layers) {
  PageBuckets buckets;
  for (const NamedSpec& layer : layers) {
    const std::int64_t page = page_size_bytes(layer.spec);
    auto bucket = std::ranges::find(buckets, page, &PageBuckets::value_type::first);
    if (bucket == buckets.end()) bucket = buckets.insert(buckets.end(), {page, {}});
    bucket->second.push_back(layer);
  }
  return buckets;
}

// Layers of the commonest page size: how many tuples the layers make.
std::int64_t num_layer_tuples(const LayerSpecs& layers) {
  std::size_t most = 0;
  for (const auto& [page, bucket] : by_page_size(layers)) most = std::max(most, bucket.size());
  return static_cast<std::int64_t>(most);
}

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
          fmt::format("{}: its page of {} bytes is larger than any of the full layers, at "
                      "most {} bytes; use a smaller block size",
                      layer.name, page, largest));
    if (page < next) layer.spec.page_size_padded = next;
  }
  return windows;
}

// Tuple t holds the t-th layer of every page size; group i takes tuples i, i + n, ...
Result<std::vector<KVCacheGroupSpec>> deal_tuples(const LayerSpecs& windows,
                                                  std::int64_t tuples_per_group) {
  const PageBuckets buckets = by_page_size(windows);
  const std::size_t tuples = buckets.front().second.size();
  for (const auto& [page, bucket] : buckets)
    if (bucket.size() != tuples)
      return fail(
          fmt::format("window layers of {} bytes a page are {}, others {}; a tuple takes one "
                      "of each",
                      page, bucket.size(), tuples));
  const auto num_groups =
      static_cast<std::size_t>(cdiv(static_cast<std::int64_t>(tuples), tuples_per_group));
  std::vector<KVCacheGroupSpec> groups;
  for (std::size_t i = 0; i < num_groups; ++i) {
    LayerSpecs members;
    for (std::size_t t = i; t < tuples; t += num_groups)
      for (const auto& [page, bucket] : buckets) members.push_back(bucket[t]);
    groups.push_back(uniform_type_group(members));
  }
  return groups;
}

}  // namespace

bool has_mla_windows(const LayerSpecs& layers) {
  return std::ranges::any_of(layers, [](const NamedSpec& l) { return is_mla_window(l.spec); });
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

Result<std::vector<KVCacheGroupSpec>> mla_window_groups(const LayerSpecs& layers) {
  LayerSpecs full;
  // Windows that need the same token slots, in order of first appearance.
  std::vector<std::pair<std::pair<std::int64_t, std::int64_t>, LayerSpecs>> window_kinds;
  for (const NamedSpec& layer : layers) {
    if (!is_mla_window(layer.spec)) {
      if (!has_single_rows(layer.spec))
        return fail(fmt::format("{}: a {} layer cannot be grouped with MLA windows", layer.name,
                                name_of(layer.spec.kind)));
      full.push_back(layer);
      continue;
    }
    const std::pair key{layer.spec.block_size, layer.spec.sliding_window};
    auto kind = std::ranges::find_if(window_kinds, [&](const auto& k) { return k.first == key; });
    if (kind == window_kinds.end()) kind = window_kinds.insert(kind, {key, {}});
    kind->second.push_back(layer);
  }
  if (full.empty() || !is_uniform_type(full))
    return fail("MLA windows need full MLA layers of one block size beside them");

  std::vector<std::int64_t> tuples{num_layer_tuples(full)};
  for (const auto& [key, windows] : window_kinds) tuples.push_back(num_layer_tuples(windows));
  const std::int64_t tuples_per_group = approximate_gcd(tuples, tuples.front());
  const PageBuckets pages = by_page_size(full);
  std::vector<KVCacheGroupSpec> groups{uniform_type_group(full)};
  for (const auto& [key, windows] : window_kinds) {
    auto padded = padded_to_pages(windows, pages);
    if (!padded) return tl::unexpected(padded.error());
    auto dealt = deal_tuples(*padded, tuples_per_group);
    if (!dealt) return tl::unexpected(dealt.error());
    groups.insert(groups.end(), dealt->begin(), dealt->end());
  }
  return groups;
}

}  // namespace lockstep
