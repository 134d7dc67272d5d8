// Who decides what a step does: the reference scheduler, or something that speaks for it.
//
// Invariants of every implementation
// (1) schedule() and update_from_output() alternate as reference/scheduler.h says.
// (2) A RequestId names one request from add_request() until the step that reports it in
//     SchedulerOutput::finished; only then may the id be given out again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/cache_events.h"
#include "reference/engine_config.h"
#include "reference/kv_cache_spec.h"
#include "reference/prefix_cache.h"
#include "reference/result.h"
#include "reference/scheduler_defect.h"
#include "reference/scheduler_types.h"

namespace lockstep {

class DecisionSource {
 public:
  virtual ~DecisionSource() = default;

  virtual Result<RequestId> add_request(RequestSpec request) = 0;
  virtual void abort_request(RequestId request) = 0;
  virtual bool reset_prefix_cache() = 0;
  // A fault: from now on at most so many blocks are in use at once.
  virtual void limit_blocks_in_use(std::int64_t num_blocks) = 0;
  virtual const SchedulerOutput& schedule() = 0;
  virtual std::span<const StoppedRequest> update_from_output(const ModelOutput& output) = 0;

  virtual std::int32_t num_sampled_max(std::size_t row) const = 0;

  virtual bool has_unfinished_requests() const = 0;
  virtual std::int32_t num_steps_in_flight() const = 0;
  virtual std::span<const RequestId> running() const = 0;
  virtual std::vector<RequestId> waiting() const = 0;
  // With a KV connector: who comes before `waiting`, and who has finished and keeps its blocks.
  virtual std::vector<SkippedRequest> skipped() const = 0;
  virtual std::vector<HeldRequest> held() const = 0;
  // One live or held request.
  virtual std::string_view name(RequestId request) const = 0;
  virtual RequestStatus status(RequestId request) const = 0;
  virtual std::int64_t num_free_blocks() const = 0;
  virtual bool is_cached(BlockId block) const = 0;
  // The pool's own books, for whoever checks them against one another.
  virtual std::int32_t ref_cnt(BlockId block) const = 0;
  virtual std::vector<BlockId> free_queue() const = 0;  // next to be handed out first
  virtual std::optional<CachedBlock> cached_as(BlockId block) const = 0;
  virtual BlockId find_cached(const CachedBlock& content) const = 0;  // the null block: nowhere
  virtual std::span<const BlockId> block_table(RequestId request, std::int32_t group) const = 0;
  virtual std::span<const BlockKey> block_keys(RequestId request) const = 0;
  virtual CacheCounters take_cache_counters() = 0;
  // Since the last call; none unless the block hashes are the engine's own (HashAlgorithm).
  virtual std::vector<CacheEvent> take_cache_events() = 0;
  virtual std::int64_t num_computed_tokens(RequestId request) const = 0;
  virtual std::int64_t num_tokens(RequestId request) const = 0;
  virtual std::int64_t scheduler_block_size() const = 0;
  virtual std::int64_t hash_block_size() const = 0;
};

// The reference scheduler, with a defect planted in it if one is named. Refuses what it refuses.
// `free_order`: as Scheduler::order_free_blocks; empty: the engine's own.
Result<std::unique_ptr<DecisionSource>> make_reference_decisions(
    const EngineConfig& config, const std::vector<KVCacheGroupSpec>& groups,
    std::int64_t num_blocks, const KVTransfer& transfer = {},
    SchedulerDefect defect = SchedulerDefect::none, std::span<const BlockId> free_order = {});

}  // namespace lockstep
