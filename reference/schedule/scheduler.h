// The scheduler of one engine: which requests run in a step, with how many tokens, on which blocks.
//
// It decides as the engine named by EngineConfig::engine, in every field of a recording. Left out:
// encoder inputs within a prompt, LoRA limits, structured output.
//
// A step is schedule() followed by update_from_output(). With async_scheduling one step stays in
// flight: schedule() of step n + 1 precedes update_from_output() of step n; outputs are always
// processed in order. An empty step is never in flight and has no output, except the reports of a
// KV connector's workers; with both options it is in flight like any other step.
//
// Invariants
// (1) Every live request is in exactly one queue: waiting, skipped (with a connector), or running.
// (2) Only running requests hold blocks. With a connector, scheduler_parts.h lists the others, and
//     freed_late() the blocks that wait for an in-flight step.
// (3) The same calls with the same arguments give the same decisions: no clock, no randomness, no
//     pointer order.
//
// A step without preemptions costs O(running requests * groups), in addition to the prefix lookups
// of waiting requests and the hashes of new tokens.
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
  // Creates the scheduler of a configuration. Errors: a configuration that the engine refuses (a
  // pool of one block, block sizes that do not divide) or that the model does not support, such as
  // a connector with most releases. `parts`: other parts than the usual ones; needed only during
  // the call.
  static Result<Scheduler> create(const EngineConfig& config,
                                  const std::vector<KVCacheGroupSpec>& groups,
                                  std::int64_t num_blocks, const KVTransfer& transfer = {},
                                  const SchedulerParts* parts = nullptr);
  Scheduler(Scheduler&&) noexcept;
  Scheduler& operator=(Scheduler&&) noexcept;
  ~Scheduler() override;

  // Allocates blocks in this order instead of 1, 2, 3, ... No decision except block ids may depend
  // on it, which a relation checks. REQUIRES: no decision was made; every block except the null
  // block occurs once. Blocks of sinks stay allocated.
  void order_free_blocks(std::span<const BlockId> order);

  // Errors: a prompt that is empty or longer than max_model_len, or max_tokens below 1.
  Result<RequestId> add_request(RequestSpec request) override;
  // Ignores a request that is not live, as the engine does. A request that only keeps blocks for a
  // connector is not live.
  void abort_request(RequestId request) override;
  // Limits the pool's blocks in use; 0: no block is allocated. Simulates a pool that loses
  // capacity.
  void limit_blocks_in_use(std::int64_t num_blocks);
  // False: some blocks are in use, and nothing was reset. `preempts_running`: first moves all
  // running requests to the head of the queue and drops their in-flight output.
  bool reset_prefix_cache(bool preempts_running = false) override;
  // Takes effect in the next step.
  void set_pause_state(PauseState state) override;

  // Decides the next step. The reference stays valid until the next call.
  const SchedulerOutput& schedule() override;
  // Processes the model's output of the oldest step in flight; returns the requests that it ended,
  // in order. Rows of `output` follow that step's SchedulerOutput::scheduled. REQUIRES: at most
  // num_sampled_max() tokens per row, and num_spec_tokens drafts. REQUIRES: a step in flight; or a
  // connector without async_scheduling, no rows, and a step that scheduled nothing. The connector's
  // reports may name: as received, requests that are loading or held; as sent, held requests;
  // invalid blocks, only in an engine of one group.
  std::span<const StoppedRequest> update_from_output(const ModelOutput& output) override;

  std::span<const StaleOutput> stale_outputs() const override;

  // The maximum of tokens that the model returns for a row of the step last decided: none for a
  // prefill chunk that is not the last, otherwise one and its drafts. REQUIRES: the step is in
  // flight and has that row.
  std::int32_t num_sampled_max(std::size_t row) const;

  bool has_unfinished_requests() const override;
  // Steps decided whose output has not been processed: 0 or 1, and 2 between schedule() and
  // update_from_output() with async_scheduling.
  std::int32_t num_steps_in_flight() const;

  // State as a recording shows it, in the engine's order.
  std::span<const RequestId> running() const override;
  std::span<const RequestId> waiting() const override;
  std::vector<SkippedRequest> skipped()
      const override;  // come before `waiting`; none without a connector
  std::optional<std::vector<RequestId>> deferred() const override;
  std::vector<HeldRequest> held() const override;
  // Blocks without a reference that are not free, because an in-flight step may write them. A block
  // that several requests freed is listed once per request.
  std::vector<BlockId> freed_late() const;
  std::int64_t num_free_blocks() const override;
  // Free blocks of the host pool; 0: no host pool.
  std::int64_t num_free_host_blocks() const;
  // True if the next step sends host pages to the workers; true if pages are planned or in flight.
  bool has_pages_to_send() const;
  bool has_pages_under_way() const;
  const BlockPool& pool() const;
  bool is_cached(BlockId block) const;  // true if a prefix hit can find it
  std::int32_t ref_cnt(BlockId block) const;
  // The content that the block is cached as; absent: it is not cached, or no hit can end there.
  std::optional<CachedBlock> cached_as(BlockId block) const;
  // The same for every block. REQUIRES: `cached` has one entry per block of the pool.
  void all_cached(IdVector<BlockId, std::optional<CachedBlock>>& cached) const;
  // True if the block is cached as `content`, as its first or a further content: where hits can end
  // inside blocks, a block has several.
  bool is_cached_as(BlockId block, const CachedBlock& content) const;
  // Tokens of the prefix that ends in a cached block, where hits can end inside blocks; 0: the
  // block is not cached.
  std::int32_t num_cached_tokens(BlockId block) const;
  // The block that a lookup of the content finds; the null block: none.
  BlockId find_cached(const CachedBlock& content) const;
  bool shows_table(RequestId) const override { return true; }
  std::span<const BlockId> block_table(RequestId request, std::int32_t group) const override;
  std::span<const BlockKey> block_keys(RequestId request) const override;
  // Counters since the last call.
  CacheCounters take_cache_counters() override;
  // Cache events since the last call; none unless EngineConfig::hash_algorithm is vLLM's.
  std::vector<CacheEvent> take_cache_events() override;

  // State of one live request.
  std::string_view name(RequestId request) const override;
  RequestStatus status(RequestId request) const;
  std::int64_t num_prompt_tokens(RequestId request) const;
  std::int64_t num_tokens(RequestId request) const override;  // prompt and accepted output
  std::int64_t num_computed_tokens(RequestId request) const;
  std::int32_t token(RequestId request, std::int64_t position) const;
  // Drafts that the request keeps for its next step. With asynchronous scheduling, placeholders
  // (-1) for the drafts that the last step will propose.
  std::span<const std::int32_t> drafts(RequestId request) const;
  std::int32_t num_spec_tokens() const;  // 0: no request has drafts

  const Scheduler* model() const override { return this; }

  // Block sizes that the engine derives from groups and configuration.
  std::int64_t scheduler_block_size() const override;
  std::int64_t hash_block_size() const override;

  struct Impl;  // scheduler_impl.h, for the scheduler's own files and those that plant defects

 private:
  explicit Scheduler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
