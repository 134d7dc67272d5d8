// What must hold of a scheduler and its pool after every step, whatever it decides: the pool's
// counts agree with the block tables, and the tables with the decision. Checks public state only,
// not how the scheduler reached it.
//
// After a decision (before anything of it has run):
//   conservation    held and free blocks and the null block are the whole pool, each once
//   ref_cnt         a block's count is the number of table entries that name it: those of requests
//                   that run, that wait with blocks that were or are being loaded, and finished
//                   requests whose blocks are sent or loaded into
//   one_group       a block is in the tables of one group
//   null_block      block 0 is never free, cached, or zeroed
//   hash_to_block   a lookup finds a cached block by its key, or another of equal content
//   one_writer      a block that the step or a load writes has one request that writes it; what a
//                   load in flight writes is in no other table
//   table_covers    the table of a scheduled request reaches its last token in every group
//   hit             a hit leaves a token to compute, and its blocks are cached by the request's
//                   own hashes
//   published       newly published content is computed by a request of this very step, or by one
//                   that the step has preempted, or was loaded for a waiting request
//   queue_front     new blocks come from the front of the free queue
//   planned_blocks  no request holds more blocks of a group than the pool is planned for
//   limits          budgets, and no request scheduled twice or while waiting
// After its output:
//   free_order      blocks of ended requests join the queue tail first, as in a naive model;
//                   with a connector, the order of several requests is not checked
// At the end:
//   leak            with no request left, all blocks are free except those still being sent
// With host pages, host_pages.h checks the tables of its source, whose blocks are another pool's,
// and of its device pages, which may be shared, or free and still read. A block that they may hold
// has no exact count: it is held at least as often as the other tables state. The queue's front is
// then not checked.
// Not checked: content of blocks (the audit and the backend check it), and liveness.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/engine/step_observer.h"
#include "traces/formats/recording.h"

namespace lockstep {

struct Violation {
  std::string_view name;
  std::int64_t step = -1;
  std::string request;
  std::string what;
};

class Invariants {
 public:
  // REQUIRES: engine.engine names a profile. Both must outlive this.
  Invariants(const EngineConfig& engine, const KVCacheConfig& plan);

  // `answers`: the KV connector's answers in the step.
  void decided(const StepView& view, std::span<const RecordedConnectorAnswer> answers = {});
  void finished(const StepView& view);
  // REQUIRES: no live request, unless the run was cut short.
  void end(const Scheduler& decisions);

  // The first one; later calls look at nothing once there is one.
  const std::optional<Violation>& violation() const { return violation_; }

 private:
  // A request with blocks, after the decision.
  struct Held {
    RequestId id{};
    std::vector<std::vector<BlockId>> tables;  // by group
  };
  // What the tables say about a block.
  struct Holders {
    std::int32_t count = 0;  // table entries that name it
    std::int32_t group = -1;
  };

  void fail(std::string_view name, std::string request, std::string what);
  std::int64_t block_size(std::int64_t group) const;
  // Whether host pages lie in it, which others look at.
  bool is_left_out(std::int64_t group) const { return left_out_[static_cast<std::size_t>(group)]; }
  static std::vector<RequestId> holding(const StepView& view, std::vector<RequestId> ids = {});
  const Held* find_held(RequestId id) const;
  void look(const StepView& view);
  bool is_asked(const StepView& view, RequestId id) const;
  std::int64_t num_found_here(const StepView& view, const ScheduledRequest& scheduled) const;
  std::int64_t num_hit(std::size_t group, std::int64_t found) const;
  void count_holders(const StepView& view);
  void check_pool(const StepView& view);
  void check_cache(const StepView& view);
  void check_limits(const StepView& view);
  void check_request(const StepView& view, std::size_t index);
  void check_encoder_blocks(const ScheduledRequest& scheduled, const std::string& name,
                            std::size_t group, std::span<const BlockId> table);
  void check_hit(const StepView& view, RequestId id, std::int64_t num_tokens);
  void check_loads(const StepView& view);
  void check_load(const StepView& view, RequestId id, std::int64_t num_tokens);
  void check_published(const StepView& view);
  bool was_computed(const StepView& view, std::int32_t group, BlockId block) const;
  bool was_loaded(const StepView& view, std::int32_t group, BlockId block) const;
  void check_queue_front(const StepView& view);
  void check_new_blocks(const StepView& view, RequestId id, std::span<const BlockId> blocks,
                        std::span<const BlockId> staying);
  void check_planned(const StepView& view);
  void check_free_order(const StepView& view);
  bool puts_unhashed_first(CacheKind kind) const;
  void check_free_order_beside_transfers(const StepView& view);
  void remember();

  const EngineConfig& engine_;
  const KVCacheConfig& plan_;
  const EngineProfile& profile_;
  std::int64_t scheduler_block_size_ = 0;
  std::int64_t step_ = -1;
  std::int32_t in_flight_max_ = 1;
  IdVector<BlockId, Holders> holders_;
  IdVector<BlockId, std::int32_t> writers_;           // requests of the step that write it
  std::span<const RecordedConnectorAnswer> answers_;  // of the current step
  bool has_connector_ = false;                        // one has been asked
  bool has_pages_;                                    // of host pages
  std::map<RequestId, std::int64_t> loads_from_;  // loads in flight: tokens before them, found here
  IdVector<RequestId, std::int64_t> replayed_to_;  // behind what of its hit it computes again
  std::vector<std::uint8_t> left_out_;             // by group
  std::vector<RequestId> holding_;                 // requests with blocks, after this decision
  std::vector<Held> held_;                         // after the previous decision
  // Running requests and their tokens, after the previous step.
  std::vector<std::pair<RequestId, std::int64_t>> computed_;
  std::vector<BlockId> queue_, queue_before_;  // the free queue now, and as last remembered
  std::vector<std::uint8_t> is_free_;          // by block
  std::vector<std::int32_t> late_;             // holders that a step in flight stands for
  std::vector<std::int64_t> planned_;  // blocks of a group that a request is planned to hold
  // What blocks are cached as, likewise.
  IdVector<BlockId, std::optional<CachedBlock>> cached_, cached_before_;
  std::optional<Violation> violation_;
};

}  // namespace lockstep
