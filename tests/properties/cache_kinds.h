// Kinds of cache in the memory of releases whose groups overlay one allocation, and the orders that
// the engine takes each of them in.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "reference/types/view_types.h"
#include "traces/formats/saved_case.h"

namespace lockstep::tests {

using Orders = std::set<CacheLayout>;

struct CacheKindCase {
  std::string name;
  std::vector<KVCacheGroupSpec> groups;
  Orders orders;  // that the engine takes; all others are refused
  AttentionBackend backend = AttentionBackend::any_size;
  std::int64_t num_blocks = 41;
  bool is_packed = false;         // adjacent pages of different sizes, without padding
  std::int32_t times_longer = 1;  // than busy requests are
  int num_modules = 0;            // of a drafter, each of which has one of the last layers
};
std::vector<CacheKindCase> cache_kinds();
inline constexpr auto kMapped = "rows in parts of a packed block";
inline constexpr auto kWithRing = "compressed, replayed, ring";
inline constexpr auto kWithEncoder = "cross attention";
inline constexpr auto kWithSinks = "sinks";
inline constexpr auto kWithWholeCaches = "replicated on every rank";
inline constexpr auto kWithReferenceWindow = "reference windows";

// Busy requests on such a cache.
SavedCase case_in(const CacheKindCase& kind, CacheLayout order);

// A group of `layers` layers that are called after `number`.
KVCacheGroupSpec group_of(KVCacheSpec spec, int number, int layers = 2);
// Rows of 8 bf16 elements.
KVCacheSpec rows_of_heads(std::int64_t heads = 2, std::int64_t block_size = 4);

}  // namespace lockstep::tests
