// The source of decisions: this model's scheduler, or another engine's. The simulator's loop calls
// only this interface, so it judges a real engine exactly as it replays the model.
//
// Invariants of every implementation
// (1) schedule() and update_from_output() alternate as reference/schedule/scheduler.h requires.
// (2) A RequestId names one request from add_request() until the step that reports it in
//     SchedulerOutput::finished. Only then may the id be reused.
// (3) Another engine may fail. It then stops deciding, and failure() describes the error.
//
// Not here: what only the model can report (its pool, reference counts). Callers that need it use
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

// Methods with a default body are optional for an engine. Spans and references stay valid until the
// next call that changes the source.
class DecisionSource {
 public:
  virtual ~DecisionSource() = default;

  // Adds a request to the waiting queue. Errors: an invalid prompt or length.
  virtual Result<RequestId> add_request(RequestSpec request) = 0;
  // Ends a request before its end. Ignores a request that has finished.
  virtual void abort_request(RequestId request) = 0;
  // Empties the prefix cache. False: blocks are in use. `preempts_running`: frees all running
  // requests' blocks first.
  virtual bool reset_prefix_cache(bool preempts_running) = 0;
  // Limits the requests that the next steps schedule.
  virtual void set_pause_state(PauseState state) = 0;
  // Decides the next step, possibly an empty one.
  virtual const SchedulerOutput& schedule() = 0;
  // Passes the model's output of the oldest step in flight to the source. Returns the requests that
  // it ended.
  virtual std::span<const StoppedRequest> update_from_output(const ModelOutput& output) = 0;

  // State that the loop needs, in the engine's order.
  virtual bool has_unfinished_requests() const = 0;
  virtual std::span<const RequestId> running() const = 0;
  virtual std::span<const RequestId> waiting() const = 0;
  // Prompt and accepted output of a live request, or of one that the last output ended.
  virtual std::int64_t num_tokens(RequestId request) const = 0;
  // Free blocks of the device pool, cached ones included.
  virtual std::int64_t num_free_blocks() const = 0;
  // The name of a live or held request.
  virtual std::string_view name(RequestId request) const = 0;
  // Block tables, if the source reports them with its last decision.
  virtual bool shows_table(RequestId request) const = 0;
  virtual std::span<const BlockId> block_table(RequestId request, std::int32_t group) const = 0;
  // Block sizes that the engine derives from groups and configuration, in tokens.
  virtual std::int64_t scheduler_block_size() const = 0;
  virtual std::int64_t hash_block_size() const = 0;
  // With a KV connector: requests ahead of `waiting`, in order.
  virtual std::vector<SkippedRequest> skipped() const { return {}; }
  // Requests of either queue that were passed over, if skipped() lists those that hold blocks.
  // Absent: skipped() lists all that were passed over.
  virtual std::optional<std::vector<RequestId>> deferred() const { return std::nullopt; }
  // With a KV connector: finished requests that keep blocks.
  virtual std::vector<HeldRequest> held() const { return {}; }
  // Stale outputs of the last update_from_output(), if the source reports them.
  virtual std::span<const StaleOutput> stale_outputs() const { return {}; }
  // Counters and events since the last call, if the source counts.
  virtual CacheCounters take_cache_counters() { return {}; }
  virtual std::vector<CacheEvent> take_cache_events() { return {}; }
  // Null: no failure. Otherwise the source decides nothing more.
  virtual const EngineFailure* failure() const { return nullptr; }
  // The model's scheduler if it decides; otherwise null.
  virtual const Scheduler* model() const { return nullptr; }
  // Name of the deciding engine if it has no release profile (SGLang), whatever the configuration
  // names; empty: it has one.
  virtual std::string_view name_without_profile() const { return {}; }
  // With a KV connector and prefix caching: keys of the full hash blocks of a live request. They
  // identify its tokens; another engine's own hashes may differ.
  virtual std::span<const BlockKey> block_keys(RequestId) const { return {}; }
  // Lines about what the source did not report, so that it was not checked.
  virtual std::vector<std::string> not_checked() const { return {}; }
};

// The engine that a DecisionsFactory creates a source for.
struct EngineToDecide {
  const EngineConfig& engine;
  const KVCacheConfig& plan;
  KVTransfer transfer;
  std::vector<std::string_view> features = {};  // of the scheduler protocol that its events need
};
// Creates the decision source of an engine. Errors: an unsupported configuration, an engine that
// does not start.
using DecisionsFactory =
    std::function<Result<std::unique_ptr<DecisionSource>>(const EngineToDecide& engine)>;

}  // namespace lockstep
