#include <utility>
#include <vector>

#include "reference/defects/planted_parts.h"

namespace lockstep {
namespace {

// Drops the request's blocks without freeing them.
void lose_blocks(Request& request) {
  for (GroupBlocks& held : request.groups) held.clear();
  request.rest = {};
}

struct PlantedScheduler final : Scheduler::Impl {
  PlantedScheduler(SchedulerDefect planted, const EngineConfig& engine,
                   const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
                   std::int64_t num_blocks, const KVTransfer& transfer, const CacheParts& parts)
      : Impl(engine, groups, sizes, num_blocks, transfer, parts), defect(planted) {
    if (is(SchedulerDefect::state_wrong_boundary)) splits_at_state_blocks = false;
    // The hash of one rank's tokens for a block of all ranks' tokens.
    if (is(SchedulerDefect::hash_cp_granularity))
      hash_rule.hash_block_size /= config.dcp * config.pcp;
    if (is(SchedulerDefect::hash_next_token)) hash_rule.num_lookahead_tokens = 0;
  }

  bool is(SchedulerDefect other) const { return defect == other; }

  RequestId insert(RequestSpec spec) override {
    if (is(SchedulerDefect::hash_extra_keys)) {
      spec.cache_salt.clear();
      spec.keys = {};
    }
    return Impl::insert(std::move(spec));
  }

  void cancel(RequestId id) override {
    Request& request = at(id);
    if (is(SchedulerDefect::abort_in_flight_kept) && request.num_in_flight_tokens > 0)
      lose_blocks(request);
    // Ends a request a second time while a connector still holds its blocks.
    if (is(SchedulerDefect::abort_twice) && request.status == RequestStatus::finished) {
      waiting.remove(id, request);
      if (remote != nullptr) remote->remove(id, request);
      return retire(id);
    }
    Impl::cancel(id);
  }

  void send_back(RequestId victim, bool drops_stale_output) override {
    Request& request = at(victim);
    if (is(SchedulerDefect::free_preempted_lost)) lose_blocks(request);
    const std::vector<std::int32_t> drafts = request.spec_tokens;
    Impl::send_back(victim, drops_stale_output);
    if (is(SchedulerDefect::drafts_outlive_preemption)) request.spec_tokens = drafts;
  }

  // The victim stays in the step.
  void drop_from_output(RequestId id) override {
    if (!is(SchedulerDefect::free_in_flight)) Impl::drop_from_output(id);
  }

  void emit(RequestId id, std::int32_t num_tokens, Handed handed, bool keeps_drafts) override {
    const bool appends = is(SchedulerDefect::resume_appended) && at(id).num_preemptions > 0 &&
                         handed == Handed::whole_table;
    Impl::emit(id, num_tokens, appends ? Handed::added : handed, keeps_drafts);
  }

  void update_row(const InFlightRow& row, std::span<const std::int32_t> tokens) override {
    if (is(SchedulerDefect::stale_output_taken)) at(row.id).drops_stale_output = false;
    Impl::update_row(row, tokens);
  }

  void take_back_rejected(Request& request, std::int32_t num_rejected) override {
    if (!is(SchedulerDefect::drafts_kept)) Impl::take_back_rejected(request, num_rejected);
  }

  // It was computed before: its rows were in blocks that now belong to others.
  void encode(Request& request) override {
    if (is(SchedulerDefect::encoder_skipped_on_resume) && request.num_preemptions > 0) return;
    Impl::encode(request);
  }

  SchedulerDefect defect;
};

}  // namespace

std::unique_ptr<Scheduler::Impl> PlantedParts::scheduler(
    const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
    std::int64_t num_blocks, const KVTransfer& transfer) const {
  return std::make_unique<PlantedScheduler>(defect_, engine, groups, sizes, num_blocks, transfer,
                                            *this);
}

}  // namespace lockstep
