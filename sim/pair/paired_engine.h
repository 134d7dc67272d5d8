// One of the two engines of a pair: a lockstep run whose requests, time, sampled tokens and
// connector reports come from the pair.
//
// Invariants
// (1) The pair starts each step at a time of its choice. The step takes as long as the step time
//     model states, and the engine is not called before it ends.
// (2) Every added request is reported to the pair once: it ended, or it was refused.
// (3) EngineMemory tracks the content of the engine's blocks and checks it in each step.
//
// Not checked: the protocol between the engines (transfer_ledger.h), the bytes of pages (a
// backend).
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

// Configuration of two engines and their network. check_pair() states what is refused.
struct PairOptions {
  // Both engines: engine vllm-0.22.1 and the same groups; the pool sizes may differ. With backends,
  // num_host_blocks is the size of each engine's staging buffer and at least staging_blocks.
  LockstepConfig prefill;
  LockstepConfig decode;
  // One backend per tensor parallel rank, for both engines or for neither, created with the
  // configurations above. They outlive the run. With backends, pages are sent and compared; without
  // them, content ids.
  std::vector<Backend*> prefill_ranks;
  std::vector<Backend*> decode_ranks;
  std::int64_t staging_blocks = 64;  // blocks that one step stores or loads at most
  NetworkOptions network;
  TransferTimes times;
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;
  std::int32_t attempts_max = 3;  // prefills of one request, the first included
  // Share of a prompt's tokens that the prefill engine offers, rounded down to whole blocks. Values
  // below 100 model a cache that keeps only parts; the decode engine computes the rest.
  std::int32_t offer_percent = 100;
  StepTimeModel step_time;
  std::int64_t steps_max = 0;  // steps of both engines together; 0: no limit
  bool is_apart = true;  // false: the decode engine prefills and decodes, nothing is transferred
  TransferDefect defect = TransferDefect::none;

  bool has_pages() const { return !decode_ranks.empty(); }
};

// Refuses configurations that this simulation cannot transfer. Errors: caches other than attention,
// drafts, ranks other than tensor parallel ones, engines with different groups or block layouts, a
// staging buffer without room, partial offers to engines that cannot recompute lost blocks.
// REQUIRES: with backends, one backend per rank.
Result<void> check_pair(const PairOptions& options);

// The content ids in one engine's blocks. Answers: does a request find in its blocks what it counts
// as computed? Uses only the engine's decisions and the tokens, not the transfers, so an error of
// the protocol cannot hide itself here.
//
// Invariants
// (1) After a step, every slot that it computed holds the content id of its token's prefix.
// (2) A request admitted with computed tokens finds the content of its own prefix in every slot
//     that its next token reads.
// (3) A block written for a different group than before holds nothing else.
//
// Not checked: bytes (a backend does), recurrent states (refused by check_pair()), requests after
// their admission: the steps themselves write what they compute.
class EngineMemory {
 public:
  explicit EngineMemory(const KVCacheConfig& plan);

  // Starts tracking a request. REQUIRES: before the first step() that schedules it.
  void add_request(RequestId request, const Prompt& prompt);
  // Extends the request's prefix by the tokens that a step sampled; none for a chunk of its prompt.
  void append_sampled(RequestId request, std::span<const std::int32_t> tokens);
  void forget(RequestId request) { contents_.erase(request); }

  // Applies a step that was just decided: writes the contents of its tokens, then checks the
  // requests that it admits. Returns a divergence if rule (2) is broken.
  Checked step(const SchedulerOutput& decision, const Scheduler& scheduler);

  // Returns a block's content ids, 8 bytes per slot, little-endian: the payload of runs without
  // backends. Zeros for a block that `group` has not written.
  std::vector<std::uint8_t> read_block(std::int32_t group, BlockId block) const;
  // Stores received contents in the first slots of a block. REQUIRES: at most block_size contents.
  void write_block(std::int32_t group, BlockId block, std::span<const ContentId> contents);
  // Contents of the request's tokens, prompt and output, by position.
  std::span<const ContentId> contents(RequestId request) const { return contents_.at(request); }

 private:
  // Checks rule (2) for a request with `num_computed` computed tokens.
  Checked check_computed(RequestId request, std::int64_t num_computed,
                         const Scheduler& scheduler) const;
  // Returns the slots of a block that `group` writes, cleared if another group wrote it before.
  ContentId* slots_of(std::int32_t group, BlockId block);
  const ContentId* find(std::int32_t group, BlockId block) const;  // null: `group` did not write it
  std::int64_t block_size(std::int32_t group) const { return groups_[group].spec.block_size; }

  const std::vector<KVCacheGroupSpec> groups_;
  std::int64_t slots_per_block_ = 0;          // block_size of the largest group
  IdVector<BlockId, std::int32_t> group_of_;  // the group that wrote the block last; -1: none
  std::vector<ContentId> slots_;              // [num_blocks, slots_per_block_]
  std::map<RequestId, std::vector<ContentId>> contents_;
};

// Returns the content id of each prefix of a prompt, one per token.
std::vector<ContentId> contents_of(const Prompt& prompt);

class PairedEngine;

// What a paired engine calls back: the pair supplies its outputs and receives its results.
class EngineOwner {
 public:
  virtual ~EngineOwner() = default;
  // The model's output of a step, as Workload::sample().
  virtual Result<void> sample(PairedEngine& engine, std::int64_t step,
                              std::span<const SampledRow> rows, ModelOutput& output) = 0;
  // Appends the connector's report for the step just decided.
  virtual void report(PairedEngine& engine, KVConnectorOutput& report) = 0;
  // Reports the end of an added request, once. `reason` is abort if no step of the engine stopped
  // it.
  virtual void ended(PairedEngine& engine, const std::string& name, FinishReason reason) = 0;
  // Reports a request that the engine does not admit, in place of ended().
  virtual void refused(PairedEngine& engine, const std::string& name, const Error& why) = 0;
  // Reports a request that counts tokens as computed whose contents are not in its blocks.
  virtual void misread(PairedEngine& engine, std::string what) = 0;
};

// What an engine of a pair is connected to. Everything outlives the engine.
struct PairedParts {
  KVTransfer transfer;                   // with a connector
  TransferPlanner* transfers = nullptr;  // plans the connector's loads and stores
  std::vector<Backend*> ranks;           // empty: decisions only
};

// One engine as the pair drives it. It is its own engine's workload: next_turn() passes on the
// events that add(), abort_request() and control() have collected since the last step.
class PairedEngine final : public Workload, public StepObserver {
 public:
  // Creates the session and the run, and executes no step. Errors: any reason for which the engine
  // refuses to start.
  static Result<std::unique_ptr<PairedEngine>> create(const LockstepConfig& config,
                                                      const PairedParts& parts,
                                                      StepTimeModel step_time, EngineOwner& owner);

  // Each collects an event for the next step; none of them changes the engine at once.
  void add(RequestSpec spec, std::uint64_t ticket);
  void abort_request(const std::string& name);
  void control(const WorkloadEvent& event);  // a reset or a pause

  // Returns true if a step may change something: events wait, the last step was not idle, or the
  // connector has something to report. After a step with a report one more step follows, because
  // the report may allow a waiting request to continue.
  bool wants_step(bool connector_has_news) const;
  // End of the last step. Equals its start if it scheduled no token.
  std::int64_t ready_ns() const { return ready_ns_; }
  // Runs one step. Returns false if the run has ended. REQUIRES: now_ns >= ready_ns().
  Result<bool> step(std::int64_t now_ns);
  // Declares that no further requests arrive, so that the run can decide between `agreed` and
  // `liveness`. Does nothing after a divergence.
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

  std::vector<WorkloadEvent> inbox_;                    // events for the next step
  std::map<std::string, Prompt, std::less<>> prompts_;  // prompts of requests not scheduled yet
  std::vector<RequestId> scheduled_;                    // requests of this step, in row order
  std::map<std::string, FinishReason, std::less<>> reasons_;  // of requests stopped in this step
  std::int64_t now_ns_ = 0;
  std::int64_t ready_ns_ = 0;
  bool has_reported_ = false;  // True if the connector reported something in the last step
  bool is_closing_ = false;    // True if no further events follow
};

}  // namespace lockstep
