#include "reference/memory/hot_regions.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace lockstep {

std::vector<HotRegions::Swap> HotRegions::read(std::int32_t row, std::int64_t num_slots,
                                               std::span<const std::int32_t> positions) {
  LS_CHECK(std::ssize(positions) <= num_slots, "{} positions, {} slots", positions.size(),
           num_slots);
  Region& region = regions_[row];
  if (region.order.empty()) {
    region.order.resize(static_cast<std::size_t>(num_slots));
    std::iota(region.order.begin(), region.order.end(), 0);
    region.positions.assign(static_cast<std::size_t>(num_slots), -1);
  }
  std::vector<bool> is_used(region.order.size());
  for (const std::int32_t position : positions)
    if (const auto at = region.slots.find(position); at != region.slots.end())
      is_used[static_cast<std::size_t>(at->second)] = true;
  std::vector<Swap> swaps;
  std::vector<std::int32_t> used;
  auto next = region.order.begin();
  for (const std::int32_t position : positions) {
    auto at = region.slots.find(position);
    if (at == region.slots.end()) {
      while (is_used[static_cast<std::size_t>(*next)]) ++next;
      const std::int32_t slot = *next++;
      std::int32_t& held = region.positions[static_cast<std::size_t>(slot)];
      region.slots.erase(std::exchange(held, position));
      at = region.slots.emplace(position, slot).first;
      swaps.push_back({position, slot});
    }
    used.push_back(at->second);
  }
  for (const std::int32_t slot : used) is_used[static_cast<std::size_t>(slot)] = true;
  std::erase_if(region.order,
                [&](std::int32_t slot) { return is_used[static_cast<std::size_t>(slot)]; });
  region.order.insert(region.order.end(), used.begin(), used.end());
  return swaps;
}

}  // namespace lockstep
