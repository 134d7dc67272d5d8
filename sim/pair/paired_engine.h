// One of two engines that run side by side: a lockstep run whose requests, time, sampled tokens and
// connector reports come from the pair.
//
// Invariants
// (1) The pair starts each step at its own time. The step takes as long as the step time model
//     states, and the engine is not called before it ends.
// (2) Every added request is reported to the pair once: it ended, or it was refused.
// (3) EngineMemory tracks the content of the engine's blocks and checks it in each step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/memory/content.h"
#include "reference/schedule/scheduler.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/pair/transfer_protocol.h"
#include "sim/session/session.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// The configuration of two engines and their network, and what is refused.

struct PairOptions {
  // Both: engine vllm-0.22.1, the same groups; pools may differ. With backends num_host_blocks is
  // the size of each one's staging buffer.
  LockstepConfig prefill;
  LockstepConfig decode;
  // A backend for each tensor parallel rank of both, or of neither, made with their configurations;
  // they outlive the run. With them pages are sent and compared, without them content ids.
  std::vector<Backend*> prefill_ranks;
  std::vector<Backend*> decode_ranks;
  std::int64_t staging_blocks = 64;  // that a step stores or loads at most
  NetworkOptions network;
  TransferTimes times;
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;
  std::int32_t attempts_max = 3;
  // Of a prompt's tokens, in whole blocks, that the prefill engine offers: caches may keep parts.
  std::int32_t offer_percent = 100;
  StepTimeModel step_time;
  std::int64_t steps_max = 0;  // of both engines together; 0: no limit
  bool is_apart = true;        // false: the decode engine does everything, nothing is transferred
  TransferDefect defect = TransferDefect::none;

  bool has_pages() const { return !decode_ranks.empty(); }
};

// Refused: blocks that are not transferred, engines that cannot read one another's blocks, ranks of
// other kinds than tensor parallel ones.
Result<void> check_pair(const PairOptions& options);

// The content ids in one engine's blocks, and whether its requests find there what they count as
// computed. It uses the engine's decisions and the tokens only, not the transfers.
//
// Invariants
// (1) After a step, every slot that it computed holds the content id of its token's prefix.
// (2) A request admitted with computed tokens finds the content of its own prefix in every slot
//     that its next token reads. The same holds when it ends.
// (3) A block written for a different group than before holds nothing else.
//
// Not checked: bytes (a backend does), states (no engine with a connector has them).
class EngineMemory {
 public:
  explicit EngineMemory(const KVCacheConfig& plan);

  void add_request(RequestId request, const Prompt& prompt);
  void append_sampled(RequestId request, std::span<const std::int32_t> tokens);
  void forget(RequestId request) { contents_.erase(request); }

  // A step that was just decided. A divergence where rule (2) is broken.
  Checked step(const SchedulerOutput& decision, const Scheduler& scheduler);

  // A block's content ids, little-endian, slot by slot: sent where no backend has the bytes.
  std::vector<std::uint8_t> read_block(std::int32_t group, BlockId block) const;
  // What has come for the first slots of a block.
  void write_block(std::int32_t group, BlockId block, std::span<const ContentId> contents);
  std::span<const ContentId> contents(RequestId request) const { return contents_.at(request); }

 private:
  Checked check_computed(RequestId request, std::int64_t num_computed,
                         const Scheduler& scheduler) const;
  ContentId* slots_of(std::int32_t group, BlockId block);
  const ContentId* find(std::int32_t group, BlockId block) const;  // null: another group's
  std::int64_t block_size(std::int32_t group) const { return groups_[group].spec.block_size; }

  const std::vector<KVCacheGroupSpec> groups_;
  std::int64_t slots_per_block_ = 0;          // of the largest block
  IdVector<BlockId, std::int32_t> group_of_;  // -1: nothing was written
  std::vector<ContentId> slots_;
  std::map<RequestId, std::vector<ContentId>> contents_;
};

// Content ids of a prompt.
std::vector<ContentId> contents_of(const Prompt& prompt);

class PairedEngine;

class EngineOwner {
 public:
  virtual ~EngineOwner() = default;
  // The model's output of a step, as Workload::sample().
  virtual Result<void> sample(PairedEngine& engine, std::int64_t step,
                              std::span<const SampledRow> rows, ModelOutput& output) = 0;
  virtual void report(PairedEngine& engine, KVConnectorOutput& report) = 0;
  virtual void ended(PairedEngine& engine, const std::string& name, FinishReason reason) = 0;
  virtual void refused(PairedEngine& engine, const std::string& name, const Error& why) = 0;
  // A request that counts as computed what is not in its blocks.
  virtual void misread(PairedEngine& engine, std::string what) = 0;
};

// What an engine of a pair is connected to. All of it outlives the engine.
struct PairedParts {
  KVTransfer transfer;                   // with a connector
  TransferPlanner* transfers = nullptr;  // that the connector's loads and stores come from
  std::vector<Backend*> ranks;           // empty: decisions only
};

class PairedEngine final : public Workload, public StepObserver {
 public:
  // Errors: what the engine refuses to start with.
  static Result<std::unique_ptr<PairedEngine>> create(const LockstepConfig& config,
                                                      const PairedParts& parts,
                                                      StepTimeModel step_time, EngineOwner& owner);

  void add(RequestSpec spec, std::uint64_t ticket);
  void abort_request(const std::string& name);
  void reset_prefix_cache();

  // Something would come of a step.
  bool wants_step(bool connector_has_news) const;
  std::int64_t ready_ns() const { return ready_ns_; }
  // False: the run has ended.
  Result<bool> step(std::int64_t now_ns);
  // No further arrivals: sets the verdict.
  Result<void> close();
  Result<RunReport> finish() { return run_->finish(); }

  const Scheduler& scheduler() const { return session_->scheduler(); }
  const RunSummary& summary() const { return run_->summary(); }
  EngineMemory& memory() { return memory_; }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override;
  KVConnector* connector() override { return parts_.transfer.connector; }
  TransferPlanner* transfers() override { return parts_.transfers; }
  Result<void> connector_report(KVConnectorOutput& report) override;
  void step_done(std::int64_t scheduled_tokens) override;
  void request_left(std::string_view name, std::uint64_t ticket) override;
  void request_refused(std::string_view name, std::uint64_t ticket, const Error& why) override;
  std::int64_t now_ns() const override { return now_ns_; }
  std::int64_t records_consumed() const override { return 0; }

  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;

 private:
  PairedEngine(const LockstepConfig& config, const PairedParts& parts, StepTimeModel step_time,
               EngineOwner& owner)
      : parts_(parts), step_time_(step_time), owner_(owner), memory_(config.backend.plan) {}

  const PairedParts parts_;
  const StepTimeModel step_time_;
  EngineOwner& owner_;
  EngineMemory memory_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<LockstepRun> run_;

  std::vector<WorkloadEvent> inbox_;
  std::map<std::string, Prompt, std::less<>> prompts_;  // of requests that were never scheduled
  std::vector<RequestId> scheduled_;                    // in this step
  std::map<std::string, FinishReason, std::less<>> reasons_;  // of those that ended in this step
  std::int64_t now_ns_ = 0;
  std::int64_t ready_ns_ = 0;
  bool has_reported_ = false;  // in the last step: a request may be able to continue
  bool is_closing_ = false;
};

}  // namespace lockstep
