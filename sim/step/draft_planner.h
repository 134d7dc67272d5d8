// The passes of a draft model after a step: rule (24) of sim/protocol/backend.h. The contents of
// its rows, their positions by the reference's own arithmetic, and whether what it reads is right.
//
// Invariants
// (1) A row is right if it equals what a draft model with all of the request's tokens writes: made
//     of the tokens up to the next one (DraftShape), by the target's hidden states.
// (2) Each row that a request continues after is checked once: when the request is admitted with a
//     hit, or when the next step runs. A wrong row is a finding that names its writer. Rows that
//     the release itself leaves wrong are counted (RunCounts, stale_draft_rows).
// (3) Rows written for drafts are overwritten by the next step's first pass before they are read.
//
// Not checked here: bytes (comparer.h). Drafts without known tokens (a chunk of a prompt,
// asynchronous scheduling) are invented, and so are inputs that a runner leaves undefined, the same
// for both sides.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// The meaning of a draft model's row: rule (24) of sim/protocol/backend.h. Its content is made of
// the last token that went into it and of how it was made: a mark in the lowest bits, so that a row
// that is read describes its own origin.
//
// Invariants
// (1) Exactly the right rows have the mark `settled` or `of_drafts`: the latter is made of
//     unverified drafts, and right if they are accepted.

enum class DraftMark : std::uint8_t {
  settled,       // of tokens that stand
  of_drafts,     // of tokens that stand and of drafts behind them, by the target's hidden states
  proposed,      // by a pass for one draft, out of the drafter's own hidden states
  rejected,      // of a draft that was rejected, by the pass over the step's tokens
  wrong_token,   // of another token than the one behind it
  wrong_window,  // run again with another token's inputs
};
inline constexpr std::uint64_t kDraftMarks = 15;

constexpr ContentId drafter_row(ContentId last_token, DraftMark mark) {
  return (mix(last_token ^ 0x6472616674657200ull) & ~kDraftMarks) |
         static_cast<std::uint64_t>(mark);
}
constexpr DraftMark mark_of(ContentId row) { return static_cast<DraftMark>(row & kDraftMarks); }
// Whether a row holds what a drafter that knew all tokens would have written.
constexpr bool is_right(ContentId row, ContentId settled) {
  return mark_of(row) <= DraftMark::of_drafts && (row | kDraftMarks) == (settled | kDraftMarks);
}

constexpr std::string_view words_of(DraftMark mark) {
  switch (mark) {
    case DraftMark::settled:
      return "a row made of other tokens";
    case DraftMark::of_drafts:
      return "a row made of drafts that were not accepted";
    case DraftMark::proposed:
      return "a row written while proposing";
    case DraftMark::rejected:
      return "a row of a rejected draft";
    case DraftMark::wrong_token:
      return "a row made of another token than the next one";
    case DraftMark::wrong_window:
      return "a row run again with another token's inputs";
  }
  return "a row";
}

// How the engine's drafter runs over the plan's draft_modules. A shape of none comes with words
// that say why, or without any where the plan has no drafter.
struct FollowedDrafter {
  DrafterConfig config;
  std::string why_not{};
};
FollowedDrafter followed_drafter(const EngineConfig& engine, const BackendConfig& backend,
                                 bool has_connector);

class DraftPlanner {
 public:
  DraftPlanner(const EngineConfig& engine, const BackendConfig& config, MemoryModel& model,
               Worker& worker, RunCounts& counts);

  bool is_followed() const { return drafter_.shape != DraftShape::none; }
  // After the builder: writes the passes of a decided and sampled step into its program. `requests`
  // are those of program.rows, in the order of the decision's.
  void plan(const SchedulerOutput& decision, const ModelOutput& output,
            std::span<const RequestId> requests, StepProgram& program);
  // After the step's own rows: the passes on the memory model, and what they read.
  Checked apply(const StepProgram& program, std::span<const RequestId> requests);

 private:
  // A request's tokens around the end of a step, by their contents.
  struct Tokens {
    std::int64_t last = 0;          // L of DraftShape
    std::int64_t num_rejected = 0;  // drafts of the step behind it
    std::int64_t num_before = 0;    // tokens that the worker knew before the step
    std::vector<ContentId> sampled;
    std::vector<ContentId> drafts;  // the token at L + 1, and what is drafted behind it
    bool is_next_cached = false;    // before the step, the token after a hit: in the dropped block
    std::int64_t num_known() const { return num_before + std::ssize(sampled); }
  };
  Tokens tokens_of(const ScheduledRequest& scheduled, const WorkerRequest& request,
                   std::span<const std::int32_t> sampled,
                   std::span<const std::int32_t> proposed) const;
  static ContentId content_at(const WorkerRequest& request, const Tokens& tokens,
                              std::int64_t position);
  void add_passes(const RowSlice& slice, const WorkerRequest& request, const Tokens& tokens,
                  StepProgram& program) const;
  void add_modules(const RowSlice& slice, WorkerRequest& request, const Tokens& tokens,
                   StepProgram& program);
  void skip_rows(const StepProgram& program, std::span<const RequestId> requests);

  Checked write_passes(const StepProgram& program, const DraftRow& row, WorkerRequest& request);
  Checked write_row(const StepProgram& program, const WorkerRequest& request, std::int32_t module,
                    std::int64_t position, ContentId now);
  Checked check_reads(const StepProgram& program, const RowSlice& slice, WorkerRequest& request,
                      const Tokens& tokens);
  Checked check_read(const StepProgram& program, const WorkerRequest& request, std::int32_t group,
                     std::int32_t module, std::int64_t position, const Tokens& tokens);
  bool is_next_cached(const WorkerRequest& request, const Tokens& tokens,
                      const ScheduledRequest& scheduled) const;
  bool holds_token(const WorkerRequest& request, const Tokens& tokens, std::int32_t group,
                   std::int64_t position, bool by_another) const;
  bool is_left_so(const WorkerRequest& request, const Tokens& tokens, std::int32_t group,
                  std::int64_t position, const SlotContent* slot) const;

  const DrafterConfig drafter_;
  const bool drops_a_block_;  // of each hit, in place of hashes that look ahead
  const std::vector<KVCacheGroupSpec>& groups_;
  MemoryModel& model_;
  Worker& worker_;
  RunCounts& counts_;
  const std::int64_t block_size_;                   // tokens
  std::vector<std::vector<std::int32_t>> modules_;  // of each group, those that run there
  std::vector<Tokens> tokens_;                      // of each row of the program
  // Rows that a step was to write and whose drafter did not run: by block, 1 a slot.
  std::map<BlockId, std::vector<std::uint8_t>> skipped_;
};

// Rule (4) over a drafter's rows as the memory model has them, [first, last) cut to what is written
// behind its last gap.
struct DraftProbe {
  std::int64_t first = 0;
  std::uint64_t digest = 0;
};
DraftProbe draft_probe(const MemoryModel& model, const WorkerRequest& request,
                       const ModelLayer& layer, std::int64_t first, std::int64_t last);

}  // namespace lockstep
