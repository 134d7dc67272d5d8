// The scheduler of one engine: which requests run in a step, with how many tokens, on which blocks.
//
// It decides as the engine named by EngineConfig::engine, in every field of a recording. Left out:
// encoder inputs, LoRA limits, structured output.
//
// A step is schedule() followed by update_from_output(). With async_scheduling one step stays in
// flight: schedule() n+1 precedes update_from_output() of step n; outputs are always processed in
// order. An empty step is never in flight and has no output, except the reports of a KV connector's
// workers; with both options it is in flight like any other step.
//
// Invariants
// (1) Every live request is in exactly one queue: waiting, skipped (with a connector), or running.
// (2) Only running requests hold blocks. With a connector, scheduler_parts.h lists the others, and
//     freed_late() the blocks that wait for an in-flight step.
// (3) The same calls with the same arguments give the same decisions: no clock, no randomness, no
//     pointer order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/cache/block_pool.h"
#include "reference/cache/cache_events.h"
#include "reference/schedule/decision_source.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

struct SchedulerParts;  // scheduler_impl.h

class Scheduler final : public DecisionSource {
 public:
  // Refuses configurations that the engine refuses (a pool of one block, block sizes that do not
  // divide), and connectors where they are not modelled. `parts`: of another make than the usual.
  static Result<Scheduler> create(const EngineConfig& config,
                                  const std::vector<KVCacheGroupSpec>& groups,
                                  std::int64_t num_blocks, const KVTransfer& transfer = {},
                                  const SchedulerParts* parts = nullptr);
  Scheduler(Scheduler&&) noexcept;
  Scheduler& operator=(Scheduler&&) noexcept;
  ~Scheduler() override;

  // Allocates blocks in this order instead of 1, 2, 3, ...: no other decision may depend on it.
  // REQUIRES: no decision was made; every block except the null block occurs once. Blocks of sinks
  // stay allocated.
  void order_free_blocks(std::span<const BlockId> order);

  // Refuses a prompt that is empty or longer than max_model_len allows.
  Result<RequestId> add_request(RequestSpec request) override;
  // A request that is not live is ignored, as the engine does.
  void abort_request(RequestId request) override;
  // Limits the pool's blocks in use from now on; 0: no block is allocated.
  void limit_blocks_in_use(std::int64_t num_blocks);
  // False: some blocks are in use and nothing was reset. `preempts_running`: first moves all
  // running requests to the head of the queue and drops their output in flight.
  bool reset_prefix_cache(bool preempts_running = false) override;
  // From the next step on.
  void set_pause_state(PauseState state) override;

  // The next step's decision. The reference stays valid until the next call.
  const SchedulerOutput& schedule() override;
  // Hands the model's output of the oldest step in flight to the scheduler; returns the requests
  // that it ended, in order. Rows of `output` follow that step's SchedulerOutput::scheduled.
  // REQUIRES: at most num_sampled_max() tokens a row, and num_spec_tokens drafts.
  // REQUIRES: a step in flight; or a connector without async_scheduling, no rows, and a step that
  // scheduled nothing.
  // Reported as received: requests that are loading or held; as sent: requests that are held;
  // invalid blocks: in an engine of one group.
  std::span<const StoppedRequest> update_from_output(const ModelOutput& output) override;

  std::span<const StaleOutput> stale_outputs() const override;

  // Tokens that the model can return at most for a row of the step last decided: none for a chunk
  // of a prompt, else one and its drafts. REQUIRES: the step is in flight and has that row.
  std::int32_t num_sampled_max(std::size_t row) const;

  bool has_unfinished_requests() const override;
  std::int32_t num_steps_in_flight() const;

  // What a recording shows of the state, in the engine's order.
  std::span<const RequestId> running() const override;
  std::vector<RequestId> waiting() const override;
  std::vector<SkippedRequest> skipped()
      const override;  // come before `waiting`; none without a connector
  std::optional<std::vector<RequestId>> deferred() const override;
  std::vector<HeldRequest> held() const override;
  // Blocks without a holder that are not free, because an in-flight step may write them. A block
  // that several requests freed is listed once per request.
  std::vector<BlockId> freed_late() const;
  std::int64_t num_free_blocks() const override;
  // Of the host pool; 0: there is none.
  std::int64_t num_free_host_blocks() const;
  // True if the next step sends host pages to the workers; pages of that step, and all in
  // flight.
  bool has_pages_to_send() const;
  bool has_pages_under_way() const;
  const BlockPool& pool() const;
  bool is_cached(BlockId block) const;  // a prefix hit may find it
  std::int32_t ref_cnt(BlockId block) const;
  std::vector<BlockId> free_queue() const;  // next block to allocate first
  // What a block is cached as, and the block that a lookup of it finds; the null block: none.
  std::optional<CachedBlock> cached_as(BlockId block) const;
  // The same of every block, into `cached`. REQUIRES: an entry per block of the pool.
  void all_cached(IdVector<BlockId, std::optional<CachedBlock>>& cached) const;
  // A block has further contents where hits can end inside blocks.
  bool is_cached_as(BlockId block, const CachedBlock& content) const;
  // Of the prefix that ends in a cached block, where hits can end inside blocks; 0: where the
  // block ends.
  std::int32_t num_cached_tokens(BlockId block) const;
  BlockId find_cached(const CachedBlock& content) const;
  bool shows_table(RequestId) const override { return true; }
  std::span<const BlockId> block_table(RequestId request, std::int32_t group) const override;
  std::span<const BlockKey> block_keys(RequestId request) const;  // of its full hash blocks
  // Counts since the last call.
  CacheCounters take_cache_counters() override;
  // Cache events since the last call; none unless EngineConfig::hash_algorithm is an engine's own.
  std::vector<CacheEvent> take_cache_events() override;

  // One live request.
  std::string_view name(RequestId request) const override;
  RequestStatus status(RequestId request) const;
  std::int64_t num_prompt_tokens(RequestId request) const;
  std::int64_t num_tokens(RequestId request) const override;  // prompt and accepted output
  std::int64_t num_computed_tokens(RequestId request) const;
  std::int32_t token(RequestId request, std::int64_t position) const;
  // Drafts that it keeps for a later step; of a request that the last step scheduled, those that
  // asynchronous scheduling expects.
  std::span<const std::int32_t> drafts(RequestId request) const;
  std::int32_t num_spec_tokens() const;  // 0: no request has drafts

  const Scheduler* model() const override { return this; }

  // What the engine derives from groups and configuration.
  std::int64_t scheduler_block_size() const override;
  std::int64_t hash_block_size() const override;

  struct Impl;  // scheduler_impl.h, for the scheduler's own files and those that plant defects

 private:
  explicit Scheduler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
