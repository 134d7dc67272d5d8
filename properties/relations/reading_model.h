// A language model in a page: every answer is a hash of all that attention reads from the cache.
// Only decisions drive its cache. A wrong block of the scheduler therefore changes a token, and
// what is irrelevant to a request cannot change its tokens.
//
// Invariants
// (1) The row of a token depends on the token, its position and every row that attention reads
//     before it. The next token depends on the rows of all groups. A wrong row thus has a permanent
//     effect.
// (2) A slot keeps its row until another one is written there. Reallocating a block clears nothing,
//     as in a real cache.
// (3) With its own cache that is never cut, a request is answered as UndisturbedRequest defines.
// (4) A KV connector loads the rows that it was given to store, or, from peers, the rows that the
//     request would have computed on its own. The engine drops what is sampled after rows that did
//     not arrive, and so does this model.
// (5) Context parallel ranks store their shares of a block next to each other, as one memory.
//
// A compressed row counts as the rows of its tokens.
//
// Left out: groups of states, because the worker moves them (the audit follows them); rings, which
// attention does not read; drafts in flight, which the recorded decisions do not show.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reference/types/kv_cache_spec.h"
#include "sim/engine/step_observer.h"
#include "sim/engine/workload.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// Rows and tokens of one request that has a cache of its own. Rows are computed when they are first
// needed; each costs time linear in the positions that it reads.
class UndisturbedRequest {
 public:
  UndisturbedRequest(const std::vector<KVCacheGroupSpec>& groups, std::vector<std::int32_t> tokens)
      : groups_(groups), tokens_(std::move(tokens)), rows_(groups.size()) {}
  void append(std::int32_t token) { tokens_.push_back(token); }
  // Returns the token after the first `count` tokens. REQUIRES: 1 <= count <= number of tokens.
  std::int32_t next_token(std::int64_t count);
  // Returns the row of a position. REQUIRES: position < number of tokens.
  std::uint64_t row(std::size_t group, std::int64_t position);
  // Drops all tokens from `count` onward, with their rows. No effect if there are fewer.
  void truncate(std::int64_t count);
  const std::vector<std::int32_t>& tokens() const { return tokens_; }

 private:
  const std::vector<KVCacheGroupSpec>& groups_;
  std::vector<std::int32_t> tokens_;
  // [num_groups][position]; may be shorter than tokens_
  std::vector<std::vector<std::uint64_t>> rows_;
};

struct Answers {
  // Output tokens by request, if it was answered.
  std::map<std::string, std::vector<std::int32_t>> tokens;
  // Step in which a request stopped, by request.
  std::map<std::string, std::int64_t> ended_in;
  std::int64_t steps = 0;
  Verdict verdict = Verdict::agreed;
};

// Wraps a workload: events and times are the workload's, tokens are the model's. As an observer it
// receives the block tables of every step, and as a transfer planner the blocks that a connector
// moves.
//
// Invariants
// (1) rows_ holds the tables as they were when the step was decided; later changes do not affect
//     what the step reads.
// (2) Loads take effect before the step's own rows, stores after them.
class ReadingModel final : public Workload, public StepObserver, public TransferPlanner {
 public:
  // `inner` and `saved` must outlive it.
  ReadingModel(Workload& inner, const SavedCase& saved);
  ~ReadingModel() override;

  // Tokens and ends only; answers_of() adds the rest after the run.
  const Answers& answers() const { return answers_; }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override;
  KVConnector* connector() override { return inner_.connector(); }
  Result<void> connector_report(KVConnectorOutput& report) override {
    return inner_.connector_report(report);
  }
  TransferPlanner* transfers() override { return inner_.transfers() == nullptr ? nullptr : this; }
  void plan(const DecidedStep& step, StepTransfers& transfers) override;
  void while_running(std::vector<WorkloadEvent>& events) override;
  std::optional<bool> output_comes_in(std::int64_t step) const override {
    return inner_.output_comes_in(step);
  }
  void step_done(std::int64_t scheduled_tokens) override { inner_.step_done(scheduled_tokens); }
  void request_left(std::string_view name, std::uint64_t ticket) override;
  std::int64_t now_ns() const override { return inner_.now_ns(); }
  std::int64_t records_consumed() const override { return inner_.records_consumed(); }
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;

 private:
  struct Row;
  struct Request;
  void take(const std::vector<WorkloadEvent>& events);
  std::uint64_t read(const Row& row, std::size_t group, std::int64_t position) const;
  std::int32_t compute(const Row& row, std::int64_t position, std::int32_t token);
  void sample_row(const Row& row, const SampledRow& sampled, Request& request,
                  std::vector<std::int32_t>& tokens);
  void drop_void_tokens(const StepView& view, RequestId id);
  std::span<std::uint64_t> rows_of(const BlockTransfer& block);
  void copy_block(const KVCacheBlockCopy& copy);
  void propose(const Request& request, std::int64_t num_drafts, ModelOutput& output) const;

  Workload& inner_;
  const SavedCase& saved_;
  std::vector<std::int64_t> tokens_in_block_;      // per group, all ranks together
  std::vector<std::vector<std::uint64_t>> slots_;  // per group: [num_blocks * tokens_in_block]
  // By name; with a connector also ended ones.
  std::map<std::string, std::unique_ptr<Request>> requests_;
  std::vector<Row> rows_;  // in scheduling order
  // Rows by block of the host tier.
  std::map<HostBlockId, std::vector<std::uint64_t>> host_rows_;
  std::vector<BlockTransfer> stores_;  // of the current step
  Answers answers_;
};

// Returns why the model cannot answer the case; empty: it can.
std::string why_not_answered(const SavedCase& saved);

// Runs the case with the model and returns its answers. `decisions`: another engine's; absent: the
// model's. Errors: the engine or the reader refuses the case, or the engine fails. REQUIRES:
// why_not_answered(saved) is empty.
Result<Answers> answers_of(const SavedCase& saved, const DecisionsFactory& decisions = {});

}  // namespace lockstep
