#include "sim/engine/device_side.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "base/stopwatch.h"
#include "reference/memory/attention_oracle.h"
#include "sim/check/comparer.h"
#include "sim/hidden_states/hidden_state_extraction.h"
#include "sim/hidden_states/watched_files.h"
#include "sim/ranks/rank_model.h"
#include "sim/ranks/rank_union.h"
#include "sim/step/model_step.h"
#include "sim/step/probe_planner.h"
#include "sim/step/program_builder.h"
#include "sim/step/transfer_step.h"
#include "sim/step/worker.h"

namespace lockstep {
namespace {

// One rank.
class LockstepDevice final {
 public:
  LockstepDevice(const LockstepConfig& config, MemoryModel model, Backend& backend,
                 RunSummary& summary)
      : config_(config),
        model_(std::move(model)),
        backend_(backend),
        summary_(summary),
        worker_(config_.device.num_rows, config_.device.context, model_),
        builder_(config_.engine, config_.device, model_, worker_),
        model_step_(model_, worker_),
        transfer_step_(model_, worker_, backend_, config_.device.parallel.tp_rank),
        planner_(config_.device, model_, worker_, config_.budget.probe_rows,
                 backend.answers_queries() ? config_.budget.query_rows : 0),
        comparer_(config_.device, model_, worker_, backend_, config_.budget.untouched_pages,
                  summary_),
        extraction_(model_, worker_) {}

  void add_request(RequestId id, const RequestSpec& spec) { worker_.add_request(id, spec); }
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens) {
    if (tokens.empty()) return;
    builder_.settle_states(id, std::ssize(tokens));
    worker_.append_sampled(id, tokens);
  }

  void drop_sampled(RequestId id, std::int64_t num_tokens) { worker_.drop_sampled(id, num_tokens); }
  void release(std::span<const HeldRequest> held) { builder_.release(held); }

  Result<std::optional<Divergence>> run_step(const SchedulerOutput& decision,
                                             const StepTransfers& transfers,
                                             const AgreedBatch& agreed, StateHashChain& chain);
  Result<std::optional<Divergence>> extract(std::span<const StoppedRequest> stopped);
  std::span<const HiddenStates> extracted() const { return extracted_; }
  Result<std::optional<Divergence>> finish(bool agreed);

  const MemoryModel& model() const { return model_; }
  Backend& backend() const { return backend_; }
  const StepProgram& program() const { return program_; }

 private:
  void say_what_was_not_checked(bool agreed);
  std::optional<Divergence> check_hits(const SchedulerOutput& decision);

  const LockstepConfig config_;
  MemoryModel model_;
  Backend& backend_;
  RunSummary& summary_;
  Worker worker_;
  ProgramBuilder builder_;
  ModelStep model_step_;
  TransferStep transfer_step_;
  ProbePlanner planner_;
  Comparer comparer_;
  HiddenStateExtraction extraction_;
  std::vector<HiddenStates> extracted_;
  StepProgram program_;
  StepExpectation expected_;
  StepReadback readback_;
};

Result<std::optional<Divergence>> LockstepDevice::run_step(const SchedulerOutput& decision,
                                                           const StepTransfers& transfers,
                                                           const AgreedBatch& agreed,
                                                           StateHashChain& chain) {
  Stopwatch watch;
  if (auto finding = builder_.build(decision, transfers, program_)) return finding;
  program_.num_padded_tokens = std::max(program_.num_padded_tokens, agreed.num_tokens);
  program_.agreed = agreed;
  if (auto done = transfer_step_.begin(transfers, program_); !done)
    return tl::unexpected(done.error());
  if (auto finding = transfer_step_.check_loads(transfers, decision.step)) return finding;
  summary_.seconds.program += watch.lap();
  const auto requests = builder_.row_requests();
  auto found = comparer_.check_reused(program_, requests);
  summary_.seconds.compare += watch.lap();
  if (!found || *found) return found;
  if (auto finding = model_step_.apply(program_, requests, expected_)) return finding;
  if (auto finding = transfer_step_.check_stores(transfers, decision.step)) return finding;
  if (auto finding = check_hits(decision)) return finding;
  planner_.plan(program_, requests, [&](std::size_t i) { return builder_.is_void(i); });
  summary_.seconds.program += watch.lap();
  if (auto done = backend_.execute(program_, readback_); !done) return tl::unexpected(done.error());
  summary_.seconds.execute += watch.lap();
  found = comparer_.check_step(program_, requests, expected_, planner_, readback_, chain);
  summary_.seconds.compare += watch.lap();
  return found;
}

std::optional<Divergence> LockstepDevice::check_hits(const SchedulerOutput& decision) {
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const ScheduledRequest& scheduled = decision.scheduled[i];
    if ((!scheduled.is_new && !scheduled.is_resumed) || builder_.is_void(i)) continue;
    if (auto finding = check_hit(model_, worker_.context(), worker_.at(scheduled.id),
                                 config_.device.plan, decision.step, scheduled.computed))
      return finding;
  }
  return std::nullopt;
}

Result<std::optional<Divergence>> LockstepDevice::extract(std::span<const StoppedRequest> stopped) {
  extraction_.begin(program_.step);
  for (const StoppedRequest& request : stopped) extraction_.add(request.id);
  extracted_.clear();
  if (extraction_.program().extractions.empty()) return std::optional<Divergence>();
  Stopwatch watch;
  if (auto done = backend_.execute(extraction_.program(), readback_); !done)
    return tl::unexpected(done.error());
  summary_.seconds.execute += watch.lap();
  auto found = extraction_.compare(readback_);
  if (found && !*found) extracted_ = extraction_.states(readback_);
  summary_.seconds.compare += watch.lap();
  return found;
}

Result<std::optional<Divergence>> LockstepDevice::finish(bool agreed) {
  Stopwatch watch;
  Result<std::optional<Divergence>> found = std::optional<Divergence>();
  if (agreed && program_.step >= 0) found = comparer_.check_all_pages();
  summary_.seconds.compare += watch.lap();
  summary_.rows_read += planner_.rows_read();
  summary_.rows_extracted += extraction_.rows_compared();
  for (const KernelStatistics& kernel : backend_.kernel_statistics())
    add_kernel(kernel, summary_.kernels);
  const GraphStatistics graphs = backend_.graph_statistics();
  summary_.graphs.captured += graphs.captured;
  summary_.graphs.replayed += graphs.replayed;
  summary_.graphs.dropped += graphs.dropped;
  // The ranks leave out the same things for the same reasons: one of them says so.
  const ParallelRank& at = config_.device.parallel;
  if (config_.device.context.rank == 0 && at.tp_rank == 0 && at.pp_rank == 0)
    say_what_was_not_checked(agreed);
  return found;
}

void LockstepDevice::say_what_was_not_checked(bool agreed) {
  std::vector<std::string>& not_checked = summary_.not_checked;
  if (planner_.rows_left_out() > 0)
    not_checked.push_back(
        fmt::format("attention digests read {} of {} rows that the steps could have read; the "
                    "budget is {} a step",
                    planner_.rows_read(), planner_.rows_read() + planner_.rows_left_out(),
                    config_.budget.probe_rows));
  if (extraction_.requests_without_a_row() > 0)
    not_checked.push_back(fmt::format("hidden states of {} requests that ended while preempted",
                                      extraction_.requests_without_a_row()));
  if (builder_.ignored_zeros() > 0)
    not_checked.push_back(
        fmt::format("zeroing of {} blocks whose request was preempted in the same step",
                    builder_.ignored_zeros()));
  for (std::string& sentence : backend_.not_checked()) not_checked.push_back(std::move(sentence));
  for (const ModelLayer& layer : model_.layers())
    if (layer.layout.num_kv > 0 && !has_attention_oracle(layer))
      not_checked.push_back(fmt::format("attention outputs of layer {}: {}", layer.name,
                                        layer.layout.kind == CacheKind::hidden_state
                                            ? "hidden states are not attended to"
                                            : "its elements are not numbers within +-1"));
  if (config_.device.check == CheckMode::fast)
    not_checked.push_back(
        "single accesses of threads (bounds, races, uninitialised reads): the check mode is fast");
  if (!agreed) not_checked.push_back("everything after the divergence");
}

// All ranks, one after the other: each has its own backend and memory, all follow the same
// decisions. What they hold together is looked at beside, and so are the files of hidden states
// that one rank holds alone.
class AllRanks final : public DeviceSide {
 public:
  AllRanks(const LockstepConfig& config, RunSummary& summary)
      : device_(config.device),
        summary_(summary),
        together_(config.device),
        files_(config.device.seed, config.hidden_state_defect) {}

  void add(std::unique_ptr<LockstepDevice> rank) {
    together_.add_rank(rank->model(), rank->backend());
    ranks_.push_back(std::move(rank));
  }

  void add_request(RequestId id, const RequestSpec& spec) override {
    for (const auto& rank : ranks_) rank->add_request(id, spec);
  }
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens) override {
    for (const auto& rank : ranks_) rank->append_sampled(id, tokens);
  }
  void drop_sampled(RequestId id, std::int64_t num_tokens) override {
    for (const auto& rank : ranks_) rank->drop_sampled(id, num_tokens);
  }
  void release(std::span<const HeldRequest> held) override {
    for (const auto& rank : ranks_) rank->release(held);
  }
  Result<std::optional<Divergence>> run_step(const SchedulerOutput& decision,
                                             const StepTransfers& transfers,
                                             const AgreedBatch& agreed,
                                             StateHashChain& chain) override {
    auto found = first_found(
        [&](LockstepDevice& rank) { return rank.run_step(decision, transfers, agreed, chain); });
    if (!found || *found || ranks_.size() == 1) return found;
    together_.apply(ranks_.front()->program());
    return together_.check_next();
  }
  Result<std::optional<Divergence>> extract(std::span<const StoppedRequest> stopped,
                                            std::int64_t now_ns) override {
    auto found = first_found([&](LockstepDevice& rank) { return rank.extract(stopped); });
    if (!found || *found) return found;
    if (auto seen = files_.look(now_ns)) return seen;
    for (const HiddenStates& states : extracted())
      files_.save(now_ns, ranks_.front()->program().step, states);
    return found;
  }
  std::span<const HiddenStates> extracted() const override {
    if (ranks_.size() > 1) return {};
    return ranks_.front()->extracted();
  }
  Result<std::optional<Divergence>> finish(bool agreed) override {
    auto found = first_found([&](LockstepDevice& rank) { return rank.finish(agreed); });
    if (!found || *found || !agreed) return found;
    if (auto seen = files_.finish()) return seen;
    summary_.hidden_files_seen += files_.num_seen();
    if (ranks_.size() == 1) return found;
    if (summary_.rows_extracted > 0)
      summary_.not_checked.push_back(
          "files of hidden states: every rank reads its own part out of the cache, and none is "
          "whole");
    found = together_.check_all();
    summary_.union_rows_checked += together_.rows_checked();
    if (together_.blocks_left_out() > 0)
      summary_.not_checked.push_back(
          fmt::format("{} blocks at the end of what all ranks hold together; {} are looked at",
                      together_.blocks_left_out(), RankUnion::kBlocksAtEnd));
    return found;
  }

 private:
  // Of the lowest rank that diverges; an error ends it.
  template <class Call>
  Result<std::optional<Divergence>> first_found(const Call& call) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      Result<std::optional<Divergence>> found = call(*ranks_[rank]);
      if (!found) return found;
      if (!*found) continue;
      if (ranks_.size() > 1) set_rank(static_cast<std::int32_t>(rank), **found);
      return found;
    }
    return std::optional<Divergence>();
  }

  void set_rank(std::int32_t rank, Divergence& found) const {
    const BackendConfig own = device_of_rank(device_, rank);
    found.rank = rank;
    if (own.parallel.tp_size > 1) found.tp_rank = own.parallel.tp_rank;
    if (own.parallel.pp_size > 1) found.pp_rank = own.parallel.pp_rank;
    if (own.context.num_ranks > 1) found.cp_rank = own.context.rank;
  }

  const BackendConfig device_;
  RunSummary& summary_;
  RankUnion together_;
  WatchedFiles files_;
  std::vector<std::unique_ptr<LockstepDevice>> ranks_;
};

}  // namespace

Result<std::unique_ptr<DeviceSide>> DeviceSide::create(const LockstepConfig& config,
                                                       std::span<Backend* const> ranks,
                                                       RunSummary& summary) {
  if (const auto reason = ProgramBuilder::why_not_supported(config.engine, config.device.plan))
    return fail(fmt::format("{}; replay it with `--backend none`", *reason));
  LS_CHECK(std::ssize(ranks) == num_ranks(config.device), "{} backends for {} ranks", ranks.size(),
           num_ranks(config.device));
  if (auto sound = check_ranks(config.device); !sound) return tl::unexpected(sound.error());
  auto all = std::make_unique<AllRanks>(config, summary);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    LockstepConfig own = config;
    auto one = rank_model(config.device, static_cast<std::int32_t>(rank));
    if (!one) return tl::unexpected(one.error());
    own.device = std::move(one->device);
    all->add(std::make_unique<LockstepDevice>(own, std::move(one->model), *ranks[rank], summary));
  }
  if (config.engine.dcp * config.engine.pcp != config.device.context.num_ranks)
    summary.not_checked.push_back(
        fmt::format("{} further ranks of prefill context parallelism, which hold the same cache",
                    config.engine.dcp * config.engine.pcp - config.device.context.num_ranks));
  return all;
}

}  // namespace lockstep
