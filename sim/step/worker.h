// The worker's side of the requests, from the decisions that it receives and nothing else: rows of
// a batch, a block table per group, tokens with their contents.
//
// Invariants
// (1) A table is what the decisions sent: replaced when a request is new or resumed, otherwise
//     extended. Blocks that the scheduler has retired since stay in it, as they do on a worker.
// (2) A request has a row while it runs: from the step that schedules it first, or again, to the
//     step that reports it preempted or finished. The lowest free row is taken.
// (3) `prefix` holds the known tokens, and after begin_step() the step's drafts after them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/memory/memory_model.h"
#include "reference/memory/prefix_content.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

// Where the inputs that convolutions have kept lie: in this table entry's block, from this row on.
struct ConvPlace {
  std::int64_t entry = -1;
  std::int64_t offset = 0;
};

// What a worker keeps of a request for its drafter: draft_planner.h.
struct DrafterState {
  // Of modules: positions whose inputs are kept to be run again, the last one behind the others;
  // -1: none, or another request's.
  std::vector<std::int64_t> window;
  std::int64_t num_read = 0;  // rows before were found right, or wrong, when they were first read
  std::int64_t end = 0;       // one past the last position that a pass of the last step reached
};

struct WorkerRequest {
  std::string name;
  Prompt prompt;              // until its tokens are needed
  WriterId writer = kNobody;  // kNobody: never scheduled
  std::int32_t row = -1;      // -1: not in the batch
  std::int64_t num_prompt = 0;
  std::int64_t num_known = 0;  // prompt and sampled tokens
  PrefixContent prefix;
  std::vector<PromptItem> items;             // encoder inputs, in addition to the prompt
  PrefixContent encoder;                     // rows of the items that it encoded since admission
  std::vector<std::vector<BlockId>> tables;  // per group
  // HiSparse: per resident group, where each page lies; the null block: on the host alone.
  std::vector<std::vector<BlockId>> residency;
  std::vector<std::int64_t> state_entry;  // per group: table entry of the running state; -1: none
  std::vector<ConvPlace> conv_places;     // per group: together with state_entry
  std::int32_t num_drafts = 0;            // of the last step
  std::int64_t scheduled_end = 0;         // position after the last token of the last step
  std::int64_t first_own = 0;             // position of the first token computed since admission
  // position after the last token of any step since, drafts included
  std::int64_t scheduled_max = 0;
  std::vector<std::int64_t> next_probe;  // per layer: the position that is read next
  DrafterState drafter;
};

class Worker {
 public:
  Worker(std::int32_t num_rows, const ContextRank& context, MemoryModel& model);

  void add_request(RequestId id, const RequestSpec& spec);
  // What the engine keeps of a step: `num_accepted` drafts and the token behind them.
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens);

  WorkerRequest& at(RequestId id);
  // The same, with its tokens' contents and a writer's name, whether it has run or not.
  WorkerRequest& know(RequestId id);
  // The engine has dropped what was sampled behind its first `num_tokens` tokens.
  void drop_sampled(RequestId id, std::int64_t num_tokens);
  bool is_known(RequestId id) const;
  // Takes a request out of the batch; its row, or -1 when it had none.
  std::int32_t leave_row(RequestId id);
  void forget(RequestId id);
  // Gives it the lowest free row, empty tables and its content ids. False: no row is free.
  bool enter_row(RequestId id);

  std::int64_t num_groups() const { return num_groups_; }
  // Which rank it is to the tokens of a group.
  ContextRank context(std::int32_t group) const {
    return model_.is_dealt_out_group(group) ? context_ : ContextRank{};
  }

 private:
  MemoryModel& model_;
  const ContextRank context_;
  std::int64_t num_groups_ = 0;
  std::vector<std::uint8_t> row_taken_;
  IdVector<RequestId, std::unique_ptr<WorkerRequest>> requests_;
};

}  // namespace lockstep
