#include "reference/cache/cache_events.h"

namespace lockstep {

void CacheEventLog::removed(BlockId block) {
  const auto names = names_.find(block);
  if (names == names_.end()) return;
  for (auto& [group, hash] : names->second) {
    CacheEvent event;
    event.kind = CacheEvent::Kind::removed;
    event.group = group;
    event.block_hashes.push_back(std::move(hash));
    events_.push_back(std::move(event));
  }
  names_.erase(names);
}

void CacheEventLog::cleared() {
  names_.clear();
  CacheEvent event;
  event.kind = CacheEvent::Kind::cleared;
  events_.push_back(std::move(event));
}

}  // namespace lockstep
