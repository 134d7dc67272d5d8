// Changes of the prefix cache, as an engine streams them to routers: blocks stored, blocks removed,
// everything cleared (vllm/distributed/kv_events.py). Events carry the engine's own hashes, so they
// are kept only when EngineConfig::hash_algorithm is one of vLLM's.
//
// Invariants
// (1) Events are in the order of the decisions: the removal of a reallocated block precedes what is
//     stored in it.
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

struct CacheEvent {
  enum class Kind : std::uint8_t { stored, removed, cleared };
  Kind kind = Kind::stored;
  std::int32_t group = 0;
  // stored: of the blocks in table order, those that cannot be hit left out; removed: one. The hash
  // of a block longer than the hash block is the hashes of its parts, one after the other.
  std::vector<ExternalBlockHash> block_hashes{};
  std::optional<ExternalBlockHash>
      parent{};                           // stored: of the block before; absent at the beginning
  std::vector<std::int32_t> token_ids{};  // stored: of the whole range, left-out blocks included
  std::int32_t block_size = 0;            // stored: tokens of one block
  std::vector<std::optional<std::string>>
      extra_keys{};  // stored: per hash; the cache salt of block 0
  bool operator==(const CacheEvent&) const = default;
};

// The pool's book of events: which hashes a block is known by to the outside.
class CacheEventLog {
 public:
  void stored(CacheEvent event) { events_.push_back(std::move(event)); }
  void names(BlockId block, std::int32_t group, ExternalBlockHash hash) {
    names_[block].emplace_back(group, std::move(hash));
  }
  // Moves the names of one block to another. No event reports it.
  void moved(BlockId from, BlockId to) {
    const auto names = names_.find(from);
    if (names == names_.end() || from == to) return;
    auto moving = std::move(names->second);
    names_.erase(names);
    auto& there = names_[to];
    for (auto& name : moving) there.push_back(std::move(name));
  }
  // Reports that no lookup can hit the block, under any of its hashes.
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
  void cleared() {
    names_.clear();
    events_.push_back({.kind = CacheEvent::Kind::cleared});
  }
  std::vector<CacheEvent> take() { return std::exchange(events_, {}); }

 private:
  std::map<BlockId, std::vector<std::pair<std::int32_t, ExternalBlockHash>>> names_;
  std::vector<CacheEvent> events_;
};

}  // namespace lockstep
