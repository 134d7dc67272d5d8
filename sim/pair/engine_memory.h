// What lies in the blocks of one engine, as content ids, and whether its requests find there what
// they count as computed. It knows the engine's decisions and the tokens, and nothing else: not how
// blocks come from elsewhere.
//
// (1) After a step, every slot that it computed holds the content id of its token's prefix.
// (2) A request that comes in with computed tokens finds, in every slot that its next token reads,
//     the content of its own prefix; so it does when it ends.
// (3) A block that is written for another group than before holds nothing else any more.
//
// Not checked: bytes (a backend does), states (no engine with a connector has them).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reference/memory/content.h"
#include "reference/schedule/scheduler.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

class EngineMemory {
 public:
  explicit EngineMemory(const KVCacheConfig& plan);

  void add_request(RequestId request, const Prompt& prompt);
  void append_sampled(RequestId request, std::span<const std::int32_t> tokens);
  void forget(RequestId request) { contents_.erase(request); }

  // A step that was just decided. A sentence when rule (2) is broken.
  std::optional<std::string> step(const SchedulerOutput& decision, const Scheduler& scheduler);
  // Rule (2) of a request that has ended. REQUIRES: its table is still there.
  std::optional<std::string> check_computed(RequestId request, std::int64_t num_computed,
                                            const Scheduler& scheduler) const;

  // One block's content ids, little-endian, slot after slot: what is sent where no backend has the
  // bytes.
  std::vector<std::uint8_t> read_block(std::int32_t group, BlockId block) const;
  // What has come for the first slots of a block.
  void write_block(std::int32_t group, BlockId block, std::span<const ContentId> contents);
  std::span<const ContentId> contents(RequestId request) const { return contents_.at(request); }

 private:
  ContentId* slots_of(std::int32_t group, BlockId block);
  const ContentId* find(std::int32_t group, BlockId block) const;  // null: another group's
  std::int64_t block_size(std::int32_t group) const {
    return groups_[static_cast<std::size_t>(group)].spec.block_size;
  }

  const std::vector<KVCacheGroupSpec> groups_;
  std::int64_t slots_per_block_ = 0;    // of the largest block
  std::vector<std::int32_t> group_of_;  // per block; -1: nothing was written
  std::vector<ContentId> slots_;
  std::map<RequestId, std::vector<ContentId>> contents_;
};

// Content ids of a prompt.
std::vector<ContentId> contents_of(const Prompt& prompt);

}  // namespace lockstep
