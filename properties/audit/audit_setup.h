// What a recording's header says about the engine, and which rules apply. Constant during an audit.
//
// Invariants:
// (1) Every group has a block size: the tokens of one table entry over all ranks of its context.
// (2) `profile` is null for an engine whose release is not known; rules of a release then do not
//     apply.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "properties/audit/audit.h"
#include "properties/audit/audit_requests.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

// What every slot and every state page of a pool holds, as content ids.
//
// Invariants:
// (1) A content id stands for a token and all tokens before it. 0: nothing was written since the
//     block was allocated.
// (2) A block has `block_size` slots of the group that it was last allocated to.
// (3) The slots of a run hold consecutive tokens of one prefix: the last one is right only if all
//     are.
//
// A state page has two parts, which the worker writes and copies at different times: the recurrent
// state, and the inputs of the next convolution.

struct PoolSlot {
  std::uint64_t content = 0;
  std::int32_t writer = -1;  // index of the request that wrote it
  std::int32_t position = -1;
  // Of the last following token that the draft model's entry depends on, in the writer's prefix.
  std::uint64_t next_content = 0;
};
// Instead of a `next_content`: none yet; a draft that the next step may accept; a rejected draft.
inline constexpr std::uint64_t kNothingBehind = 0;
inline constexpr std::uint64_t kDraftBehind = 1;
inline constexpr std::uint64_t kWrongDraftBehind = 2;

struct PoolState {
  std::uint64_t content = 0;     // of the last token in the recurrent state
  std::int32_t num_tokens = -1;  // in the recurrent state; -1: nothing was written
  std::int32_t writer = -1;
  // Inputs before token `inputs_before`, by the content of the previous token. With drafts, each
  // further entry is one token later.
  std::vector<std::uint64_t> inputs;
  std::int32_t inputs_before = -1;
};

// A request that a block was allocated to, and the step.
struct BlockOwner {
  std::int32_t request = -1;  // index; -1: none
  std::int64_t since = -1;
};

struct PoolBlock {
  std::int32_t group = -1;  // -1: never allocated
  std::int32_t num_slots = 0;
  std::int64_t zeroed_in = -1;
  std::int64_t not_loaded_in = -1;
  std::array<BlockOwner, 2> holders;
  std::vector<PoolSlot> slots;  // up to the last written one; the others are empty
  // The last run that was written: (3).
  std::int32_t first_of_run = 0;
  std::int32_t end_of_run = 0;
  PoolState state;
};

class PoolContents {
 public:
  // Allocates memory only for written blocks: a header may state any pool.
  explicit PoolContents(std::int64_t num_blocks) : num_blocks_(num_blocks) {}

  std::int64_t num_blocks() const { return num_blocks_; }
  // Gives the block to `group`, with `block_size` empty slots, and to request `holder`.
  void allocate(BlockId block, std::int32_t group, std::int32_t block_size, std::int32_t holder,
                std::int64_t step) {
    Block& b = at(block);
    b.holders = {BlockOwner{holder, step}, b.holders[0]};
    b.group = group;
    b.num_slots = block_size;
    b.not_loaded_in = -1;
    b.slots.clear();
    b.first_of_run = b.end_of_run = 0;
    b.state = {};
  }
  // Empties the block. Its group and its holders stay.
  void zero(BlockId block, std::int64_t step) {
    Block& b = at(block);
    b.slots.clear();
    b.first_of_run = b.end_of_run = 0;
    b.state = {};
    b.zeroed_in = step;
  }
  // The last request that the block was allocated to, and the previous one.
  const std::array<BlockOwner, 2>& holders(BlockId block) const { return at(block).holders; }
  // Last step that zeroed the block; -1: none.
  std::int64_t zeroed_in(BlockId block) const { return at(block).zeroed_in; }
  bool belongs_to(BlockId block, std::int32_t group) const { return at(block).group == group; }

  // Contents of the tokens of `writer` from `position` on; `before` is that of the previous one.
  // REQUIRES: slots below the block size (2).
  void write(BlockId block, std::int32_t offset, std::span<const std::uint64_t> contents,
             std::int32_t writer, std::int32_t position, std::uint64_t before) {
    Block& b = at(block);
    const std::int32_t end = offset + static_cast<std::int32_t>(contents.size());
    LS_CHECK(offset >= 0 && end <= b.num_slots, "slots [{}, {}) of {} in block {}", offset, end,
             b.num_slots, index_of(block));
    if (std::cmp_greater(end, b.slots.size()))
      b.slots.resize(std::min(b.num_slots, std::max(2 * end, 64)));
    for (const std::uint64_t content : contents) {
      const bool is_same = b.slots[offset].content == content && offset < b.end_of_run;
      b.slots[offset] = {content, writer, position++};
      const bool continues = offset > b.first_of_run && offset <= b.end_of_run &&
                             b.slots[offset - 1].content == before;
      if (!is_same && !continues) b.first_of_run = offset;
      if (!is_same) b.end_of_run = offset + 1;
      before = content;
      ++offset;
    }
  }
  // Sets what is known of the following tokens.
  void set_behind(BlockId block, std::int32_t offset, std::uint64_t next_content) {
    Block& b = at(block);
    if (std::cmp_less(offset, b.slots.size())) b.slots[offset].next_content = next_content;
  }
  // True if slots [first, end) of a block of `group` are part of a run (3) that has this content at
  // its end.
  bool is_run_of(BlockId block, std::int32_t group, std::int32_t first, std::int32_t end,
                 std::uint64_t content) const {
    const Block& b = at(block);
    return first >= b.first_of_run && end <= b.end_of_run && b.group == group &&
           b.slots[static_cast<std::size_t>(end) - 1].content == content;
  }
  PoolSlot read(BlockId block, std::int32_t offset) const {
    const Block& b = at(block);
    return static_cast<std::size_t>(offset) < b.slots.size()
               ? b.slots[static_cast<std::size_t>(offset)]
               : PoolSlot{};
  }

  // Up to the last one that was written.
  std::span<const PoolSlot> slots(BlockId block) const { return at(block).slots; }

  PoolState& state(BlockId block) { return at(block).state; }

  // Records that a load did not write the block.
  void set_not_loaded(BlockId block, std::int64_t step) { at(block).not_loaded_in = step; }
  // Last step whose load did not write the block, since it was allocated; -1: none.
  std::int64_t not_loaded_in(BlockId block) const { return at(block).not_loaded_in; }

  // Visits every request that holds or wrote a block.
  template <typename Visit>
  void for_each_request(const Visit& visit) const {
    for (const Block& block : blocks_) {
      for (const BlockOwner& holder : block.holders)
        if (holder.request >= 0) visit(holder.request);
      if (block.state.writer >= 0) visit(block.state.writer);
      for (const PoolSlot& slot : block.slots)
        if (slot.writer >= 0) visit(slot.writer);
    }
  }

  // Copies the contents of `from`, its group and its holders.
  void copy(BlockId from, BlockId to) {
    Block copied = at(from);
    at(to) = std::move(copied);
  }

 private:
  using Block = PoolBlock;
  inline static const Block kNeverAllocated;
  Block& at(BlockId block) {
    LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks_, "block {} of {}",
             index_of(block), num_blocks_);
    if (std::cmp_greater_equal(index_of(block), blocks_.size()))
      blocks_.resize(index_of(block) + 1);
    return blocks_[index_of(block)];
  }
  const Block& at(BlockId block) const {
    return std::cmp_less(index_of(block), blocks_.size()) ? blocks_[index_of(block)]
                                                          : kNeverAllocated;
  }

  std::int64_t num_blocks_;
  std::vector<Block> blocks_;  // up to the last one that was used
};

struct AuditSetup {
  AuditSetup(const RecordingHeader& header, AuditScope scope, AuditedRules rules);

  EngineConfig config;
  std::vector<KVCacheGroupSpec> groups;
  std::vector<std::int32_t> block_sizes;   // (1)
  const EngineProfile* profile = nullptr;  // (2)
  AuditScope scope;
  AuditedRules rules;
  bool has_connector = false;
  // Tokens after a hit that the engine's block hashes cover, so that the hit proves them; 0: none.
  std::int32_t hash_lookahead = 0;
  bool drops_last_block = false;  // EAGLE without hashes that look ahead
  std::int32_t hash_block_size = 1;
  std::int64_t scheduler_block_size = 1;
  std::int32_t hit_alignment = 1;  // hits end at multiples of it
  // Slots after the tokens of a step that the draft model writes: one per draft of EAGLE, MTP and
  // draft models; n-grams need none (vllm/config/speculative.py, v1/core/sched/scheduler.py).
  std::int32_t draft_slots = 0;
  std::int32_t num_replayed = 0;  // tokens of a hit that windows compute again; 0: none

  bool checks_rules() const { return scope != AuditScope::hits_only; }
  bool is_recording() const { return scope == AuditScope::whole_recording; }
  // The release reports every end to client and worker, and at once.
  bool names_ends() const { return is_recording() && profile != nullptr; }
  // A step is decided before the accepted drafts of the previous one are known.
  bool has_drafts_in_flight() const {
    return config.async_scheduling && config.num_spec_tokens > 0;
  }
  // First position that attention at `position` reads.
  std::int32_t first_read(std::size_t group, std::int32_t position) const;
};

// True if the header gives the option.
bool is_given(const RecordingHeader& header, std::string_view option);

inline bool is_state(const KVCacheSpec& spec) { return is_state_kind(spec.kind); }
// Slots of tokens by position, which attention reads.
inline bool keeps_tokens(const KVCacheSpec& spec) {
  return !is_state(spec) && !is_ring(spec) && !is_cross_attention(spec);
}
// Every token of a prefix, as long as the request runs.
inline bool keeps_all_tokens(const KVCacheSpec& spec) {
  return is_full_attention(spec.kind) && spec.rswa_window == 0;
}
inline std::int32_t ceil_div32(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

// The findings of an audit, one per cause.
//
// Invariants:
// (1) A cause is reported once: further reports raise the count of its first finding.
// (2) After a wrong block, what a request reads and writes in that group follows from it and is not
//     reported.
// (3) Without the rules about policy, none of their findings is kept.

class FindingList {
 public:
  FindingList(const AuditSetup& setup, AuditRequests& requests, const PoolContents& pool)
      : setup_(setup), requests_(requests), pool_(pool) {}

  void begin_step(std::int64_t step) { step_ = step; }
  std::int64_t step() const { return step_; }
  void begin(const AuditRequest& request) { wrong_.begin(request).resize(setup_.groups.size()); }
  // (2)
  bool is_wrong(const AuditRequest& request, std::size_t group) const {
    return wrong_[request][group];
  }

  // A finding at a token of a request, and its block.
  void report(AuditRule rule, const AuditRequest& request, std::size_t group, std::int64_t token,
              BlockId block, std::string what);
  // A finding of a request, or of none. `cause` tells several findings of one rule apart.
  void report(AuditRule rule, const std::string& request, std::string what,
              std::string_view cause = {});
  void add(AuditFinding finding, std::string cause);
  // Adds "; request b has had the block since step 7".
  void name_holders(AuditFinding& finding) const;
  std::string cause_of(AuditRule rule, const std::string& request, std::string_view detail) const;

  // The number of the next finding, and a new text for one that was not taken yet.
  std::size_t next_number() const { return num_taken_ + findings_.size(); }
  void replace_text(std::size_t number, std::string what);
  std::vector<AuditFinding> take();

 private:
  const AuditSetup& setup_;
  AuditRequests& requests_;
  const PoolContents& pool_;
  std::int64_t step_ = -1;
  PerRequest<std::vector<bool>> wrong_;  // per group
  std::vector<AuditFinding> findings_;
  std::size_t num_taken_ = 0;
  std::map<std::string, std::size_t> numbers_;  // by cause
};

// What the ledgers of an audit share. Each ledger adds its own state of each request and checks the
// rules about it: `begin` takes what happened before a step's decision, `step` the decision, `end`
// its outputs. auditor.cpp calls them in the order of the worker.

struct AuditCore {
  AuditCore(const RecordingHeader& header, AuditScope scope, AuditedRules rules)
      : setup(header, scope, rules), pool(header.num_blocks) {}

  AuditSetup setup;
  PoolContents pool;
  AuditRequests requests;
  FindingList findings{setup, requests, pool};
  std::int64_t num_reads = 0;     // slots and states that were checked
  std::int64_t last_output = -1;  // last step whose output the engine has received
};

// What the model returned for a request of the step; empty for a chunk of a prompt.
std::span<const std::int32_t> sampled_of(const RecordedStep& step, const std::string& name);

class Ledger {
 protected:
  explicit Ledger(AuditCore& core)
      : core_(core),
        setup_(core.setup),
        pool_(core.pool),
        requests_(core.requests),
        findings_(core.findings) {}

  std::int32_t block_size(std::size_t group) const { return setup_.block_sizes[group]; }
  std::size_t num_groups() const { return setup_.groups.size(); }
  const KVCacheSpec& spec_of(std::size_t group) const { return setup_.groups[group].spec; }
  std::int64_t step_number() const { return findings_.step(); }
  void report(AuditRule rule, const AuditRequest& request, std::size_t group, std::int64_t token,
              BlockId block, std::string what) const {
    findings_.report(rule, request, group, token, block, std::move(what));
  }
  void report(AuditRule rule, const std::string& request, std::string what,
              std::string_view cause = {}) const {
    findings_.report(rule, request, std::move(what), cause);
  }
  // The block of a token; the null block: none, or a block of another group.
  BlockId block_of(const AuditRequest& request, std::size_t group, std::int32_t position) const {
    const std::vector<BlockId>& table = request.tables[group];
    const auto index = static_cast<std::size_t>(position / block_size(group));
    const bool is_there = index < table.size() && table[index] != kNullBlock &&
                          pool_.belongs_to(table[index], static_cast<std::int32_t>(group));
    return is_there ? table[index] : kNullBlock;
  }

  AuditCore& core_;
  const AuditSetup& setup_;
  PoolContents& pool_;
  AuditRequests& requests_;
  FindingList& findings_;
};

}  // namespace lockstep
