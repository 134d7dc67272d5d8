#include "sim/decision_source.h"

#include <utility>

#include "reference/scheduler.h"

namespace lockstep {
namespace {

class ReferenceDecisions final : public DecisionSource {
 public:
  explicit ReferenceDecisions(Scheduler scheduler) : scheduler_(std::move(scheduler)) {}

  Result<RequestId> add_request(RequestSpec request) override {
    return scheduler_.add_request(std::move(request));
  }
  void abort_request(RequestId request) override { scheduler_.abort_request(request); }
  bool reset_prefix_cache() override { return scheduler_.reset_prefix_cache(); }
  void limit_blocks_in_use(std::int64_t num_blocks) override {
    scheduler_.limit_blocks_in_use(num_blocks);
  }
  const SchedulerOutput& schedule() override { return scheduler_.schedule(); }
  std::span<const StoppedRequest> update_from_output(const ModelOutput& output) override {
    return scheduler_.update_from_output(output);
  }
  std::int32_t num_sampled_max(std::size_t row) const override {
    return scheduler_.num_sampled_max(row);
  }
  bool has_unfinished_requests() const override { return scheduler_.has_unfinished_requests(); }
  std::int32_t num_steps_in_flight() const override { return scheduler_.num_steps_in_flight(); }
  std::span<const RequestId> running() const override { return scheduler_.running(); }
  std::vector<RequestId> waiting() const override { return scheduler_.waiting(); }
  std::vector<SkippedRequest> skipped() const override { return scheduler_.skipped(); }
  std::vector<HeldRequest> held() const override { return scheduler_.held(); }
  std::string_view name(RequestId request) const override { return scheduler_.name(request); }
  RequestStatus status(RequestId request) const override { return scheduler_.status(request); }
  std::int64_t num_free_blocks() const override { return scheduler_.num_free_blocks(); }
  bool is_cached(BlockId block) const override { return scheduler_.is_cached(block); }
  std::int32_t ref_cnt(BlockId block) const override { return scheduler_.ref_cnt(block); }
  std::vector<BlockId> free_queue() const override { return scheduler_.free_queue(); }
  std::optional<CachedBlock> cached_as(BlockId block) const override {
    return scheduler_.cached_as(block);
  }
  BlockId find_cached(const CachedBlock& content) const override {
    return scheduler_.find_cached(content);
  }
  std::span<const BlockId> block_table(RequestId request, std::int32_t group) const override {
    return scheduler_.block_table(request, group);
  }
  std::span<const BlockKey> block_keys(RequestId request) const override {
    return scheduler_.block_keys(request);
  }
  CacheCounters take_cache_counters() override { return scheduler_.take_cache_counters(); }
  std::vector<CacheEvent> take_cache_events() override { return scheduler_.take_cache_events(); }
  std::int64_t num_computed_tokens(RequestId request) const override {
    return scheduler_.num_computed_tokens(request);
  }
  std::int64_t num_tokens(RequestId request) const override {
    return scheduler_.num_tokens(request);
  }
  std::int64_t scheduler_block_size() const override { return scheduler_.scheduler_block_size(); }
  std::int64_t hash_block_size() const override { return scheduler_.hash_block_size(); }

 private:
  Scheduler scheduler_;
};

}  // namespace

Result<std::unique_ptr<DecisionSource>> make_reference_decisions(
    const EngineConfig& config, const std::vector<KVCacheGroupSpec>& groups,
    std::int64_t num_blocks, const KVTransfer& transfer, SchedulerDefect defect,
    std::span<const BlockId> free_order) {
  auto scheduler = Scheduler::create(config, groups, num_blocks, transfer, defect);
  if (!scheduler) return tl::unexpected(scheduler.error());
  if (!free_order.empty()) scheduler->order_free_blocks(free_order);
  return std::make_unique<ReferenceDecisions>(std::move(*scheduler));
}

}  // namespace lockstep
