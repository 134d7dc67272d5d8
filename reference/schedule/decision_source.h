// The source of decisions: this model's scheduler, or another engine's.
//
// Invariants of every implementation
// (1) schedule() and update_from_output() alternate as reference/schedule/scheduler.h requires.
// (2) A RequestId names one request from add_request() until the step that reports it in
//     SchedulerOutput::finished. Only then may the id be reused.
// (3) Another engine may fail. It then stops deciding, and failure() describes the error.
//
// Not here: what only the model can report (its pool, tables, block keys). Callers that need it use
// the Scheduler.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/cache/cache_events.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

class Scheduler;

class DecisionSource {
 public:
  virtual ~DecisionSource() = default;

  virtual Result<RequestId> add_request(RequestSpec request) = 0;
  virtual void abort_request(RequestId request) = 0;
  virtual bool reset_prefix_cache(bool preempts_running) = 0;
  virtual void set_pause_state(PauseState state) = 0;
  virtual const SchedulerOutput& schedule() = 0;
  virtual std::span<const StoppedRequest> update_from_output(const ModelOutput& output) = 0;

  // What the loop has to know, in the engine's order.
  virtual bool has_unfinished_requests() const = 0;
  virtual std::span<const RequestId> running() const = 0;
  virtual std::vector<RequestId> waiting() const = 0;
  // Of a live request, or of one that the last output ended: prompt and accepted output.
  virtual std::int64_t num_tokens(RequestId request) const = 0;
  virtual std::int64_t num_free_blocks() const = 0;
  // Of a live request, or one that is held.
  virtual std::string_view name(RequestId request) const = 0;
  // Block tables, where the source shows them with its last decision.
  virtual bool shows_table(RequestId request) const = 0;
  virtual std::span<const BlockId> block_table(RequestId request, std::int32_t group) const = 0;
  // What the engine derives from groups and configuration, in tokens.
  virtual std::int64_t scheduler_block_size() const = 0;
  virtual std::int64_t hash_block_size() const = 0;
  // With a KV connector: requests ahead of `waiting`, and finished requests that keep blocks.
  virtual std::vector<SkippedRequest> skipped() const { return {}; }
  // Requests of either queue that were passed over, where skipped() lists those that hold blocks.
  // Absent: skipped() lists all that were passed over.
  virtual std::optional<std::vector<RequestId>> deferred() const { return std::nullopt; }
  virtual std::vector<HeldRequest> held() const { return {}; }
  // Of the last update_from_output(), where the source tells them.
  virtual std::span<const StaleOutput> stale_outputs() const { return {}; }
  // Since the last call, where the source counts.
  virtual CacheCounters take_cache_counters() { return {}; }
  virtual std::vector<CacheEvent> take_cache_events() { return {}; }
  // null: no failure
  virtual const EngineFailure* failure() const { return nullptr; }
  // The model's scheduler, where it is the one that decides; else null.
  virtual const Scheduler* model() const { return nullptr; }
  // False: the deciding engine has no release profile (SGLang), whatever the configuration names.
  virtual bool has_profile() const { return true; }
};

// Makes the decision source of an engine. Errors: an unsupported configuration.
struct EngineToDecide {
  const EngineConfig& engine;
  const KVCacheConfig& plan;
  KVTransfer transfer;
};
using DecisionsFactory =
    std::function<Result<std::unique_ptr<DecisionSource>>(const EngineToDecide& engine)>;

}  // namespace lockstep
