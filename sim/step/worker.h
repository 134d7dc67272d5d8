// The worker's side of the requests, derived only from the decisions that it receives: rows of a
// batch, a block table per group, tokens with their contents.
//
// Invariants
// (1) A table is what the decisions sent: replaced when a request is new or resumed, otherwise
//     extended. Blocks that the scheduler has retired since stay in it, as on a real worker.
// (2) A request has a row while it runs: from the step that schedules it, first or after a
//     preemption, to the step that reports it preempted or finished. It takes the lowest free row.
// (3) `prefix` holds the known tokens, and after ProgramBuilder::build() also the step's drafts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

// The content ids of one request's tokens, and the attention digests of any range of them in O(1).
//
// Invariants
// (1) content(p) depends only on the tokens 0..p.
// (2) Digests are prefix sums per layer, extended on demand: each position costs its rows once per
//     layer, and 8 bytes per queried layer.

class PrefixContent {
 public:
  PrefixContent() = default;
  // Digests cover the tokens that this rank keeps.
  explicit PrefixContent(const ContextRank& rank) : rank_(rank) {}
  void append(std::int32_t token);
  // Keeps the first `size` tokens, after a rejected draft. REQUIRES: size <= size().
  void truncate(std::int64_t size);
  std::int64_t size() const { return static_cast<std::int64_t>(contents_.size()); }
  // Returns the content of the prefix that ends with the token at `position`; -1: the empty prefix.
  ContentId content(std::int64_t position) const {
    return position < 0 ? kEmptyPrefix : contents_[position];
  }
  std::span<const ContentId> contents() const { return contents_; }
  // Returns the content at a position of the layer's attention, where its sinks come first.
  ContentId content_in(const ModelLayer& layer, std::int64_t position) const {
    return position < layer.num_sinks ? sink_content(position)
                                      : content(position - layer.num_sinks);
  }

  // Returns the digest of rule (4) of sim/protocol/backend.h over positions [first, last), on this
  // rank. Positions include sinks. REQUIRES: 0 <= first <= last <= size() plus the layer's sinks.
  std::uint64_t attention_digest(const ModelLayer& layer, std::int64_t first, std::int64_t last);

 private:
  ContextRank rank_;
  std::vector<ContentId> contents_;
  std::vector<std::vector<std::uint64_t>> digests_;  // [layer][n]: sum over the first n positions
};

// Returns the digest's sum over the rows of one token: K and V of every head.
std::uint64_t token_digest(const ModelLayer& layer, ContentId content, std::int64_t position);

// Position of the inputs that convolutions keep: a table entry's block, and a row in it.
struct ConvPlace {
  std::int64_t entry = -1;
  std::int64_t offset = 0;
};

// A worker's state of one request's draft model: draft_planner.h.
struct DrafterState {
  // For modules: positions whose inputs are kept for a recomputation, ascending; -1: none, or
  // another request's.
  std::vector<std::int64_t> window;
  std::int64_t num_read = 0;  // rows before this position were checked at their first read
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
  PrefixContent encoder;                     // rows encoded since its admission
  std::vector<std::vector<BlockId>> tables;  // per group
  // The tables before a prefix cache replaced them; empty: not replaced, or sent again since.
  std::vector<std::vector<BlockId>> replaced_tables;
  // Host pages: device block of each page, per resident group; the null block: only on the host.
  std::vector<std::vector<BlockId>> residency;
  std::vector<std::int64_t> state_entry;  // per group: table entry of the running state; -1: none
  std::vector<ConvPlace> conv_places;     // per group: together with state_entry
  std::int32_t num_drafts = 0;            // of the last step
  std::int64_t scheduled_end = 0;         // position after the last token of the last step
  std::int64_t first_own = 0;             // first position computed since admission
  // Position after the last token of any step since admission, drafts included.
  std::int64_t scheduled_max = 0;
  std::vector<std::int64_t> next_probe;  // per layer: position of the next probe
  DrafterState drafter;
};

// All live requests, by id.
class Worker {
 public:
  Worker(std::int32_t num_rows, const ContextRank& context, MemoryModel& model);

  void add_request(RequestId id, const RequestSpec& spec);
  // Appends what the engine keeps of a step: the accepted drafts and the token after them.
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens);

  WorkerRequest& at(RequestId id);
  // Returns the request with its contents and a writer's name, also if it has never run.
  WorkerRequest& know(RequestId id);
  // Drops what was sampled after the request's first `num_tokens` tokens, as the engine has done.
  void drop_sampled(RequestId id, std::int64_t num_tokens);
  bool is_known(RequestId id) const;
  // Removes a request from the batch. Returns its row, or -1 if it had none.
  std::int32_t leave_row(RequestId id);
  void forget(RequestId id);
  // Gives the request the lowest free row, empty tables and its contents. Returns false if no row
  // is free.
  bool enter_row(RequestId id);

  std::int64_t num_groups() const { return num_groups_; }
  // Returns this worker's rank for the tokens of a group; the only rank if the group is replicated.
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
