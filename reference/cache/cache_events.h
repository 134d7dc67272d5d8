// Changes of the prefix cache, as an engine streams them to routers: blocks stored, blocks removed,
// everything cleared (vllm/distributed/kv_events.py). Events carry the engine's own hashes, so the
// log exists only if EngineConfig::hash_algorithm is one of vLLM's.
//
// Invariants
// (1) Events are in the order of the decisions: the removal of a reallocated block precedes the
//     content that is stored in it next.
// (2) Each stored hash is removed once, by removed() or cleared(). moved() changes only the block
//     that removes it.
//
// Not modelled: BlockStored for reused blocks (kv_cache_report_mode "full"), session ids, media
// other than the device.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "reference/cache/block_hash.h"

namespace lockstep {

// One event. Fields that a kind does not use are empty.
struct CacheEvent {
  enum class Kind : std::uint8_t { stored, removed, cleared };
  Kind kind = Kind::stored;
  std::int32_t group = 0;
  // stored: the hashes of the blocks in table order, without those that no lookup can hit. removed:
  // one hash. Releases before 0.24.0 name a block of several hash blocks by all their hashes,
  // joined (EngineProfile::joins_hashes_of_long_blocks).
  std::vector<ExternalBlockHash> block_hashes{};
  std::optional<ExternalBlockHash>
      parent{};  // stored: the hash of the previous block; absent: the range starts at token 0
  std::vector<std::int32_t> token_ids{};  // stored: of the whole range, omitted blocks included
  std::int32_t block_size = 0;            // stored: tokens per block
  std::vector<std::optional<std::string>>
      extra_keys{};  // stored: one per hash; for block 0 the cache salt, if there is one
  bool operator==(const CacheEvent&) const = default;
};

// The pool's log of events, and the hashes that each block is known by outside.
class CacheEventLog {
 public:
  // Appends an event. names() registers the hashes of its blocks, for their later removal.
  void stored(CacheEvent event) { events_.push_back(std::move(event)); }
  void names(BlockId block, std::int32_t group, ExternalBlockHash hash) {
    names_[block].emplace_back(group, std::move(hash));
  }
  // Moves the hashes of one block to another, as PrefixCache::move_keys() does. Emits no event: the
  // content stays findable (vLLM 0.33.0, v1/core/block_pool.py, move_block_hashes()).
  void moved(BlockId from, BlockId to) {
    const auto names = names_.find(from);
    if (names == names_.end() || from == to) return;
    auto moving = std::move(names->second);
    names_.erase(names);
    auto& there = names_[to];
    for (auto& name : moving) there.push_back(std::move(name));
  }
  // Emits one event per hash of the block: no lookup can hit it now. A block without hashes emits
  // none.
  void removed(BlockId block) {
    const auto names = names_.find(block);
    if (names == names_.end()) return;
    for (auto& [group, hash] : names->second) {
      CacheEvent event{.kind = CacheEvent::Kind::removed, .group = group};
      event.block_hashes.push_back(std::move(hash));
      events_.push_back(std::move(event));
    }
    names_.erase(names);
  }
  // The prefix cache was reset: one event, none per block.
  void cleared() {
    names_.clear();
    events_.push_back({.kind = CacheEvent::Kind::cleared});
  }
  // Returns the events since the last call, in order.
  std::vector<CacheEvent> take() { return std::exchange(events_, {}); }

 private:
  std::map<BlockId, std::vector<std::pair<std::int32_t, ExternalBlockHash>>> names_;
  std::vector<CacheEvent> events_;
};

}  // namespace lockstep
