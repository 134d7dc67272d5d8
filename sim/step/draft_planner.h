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
  settled,       // from known tokens only
  of_drafts,     // from known tokens and the drafts after them, with target hidden states
  proposed,      // by a pass for one draft, from the draft model's own hidden states
  rejected,      // for a rejected draft, by the pass over the step's tokens
  wrong_token,   // from a token that is not the next one
  wrong_window,  // recomputed with another token's inputs
};
inline constexpr std::uint64_t kDraftMarks = 15;

// Returns the content of a row: a hash of the last token that it depends on, and its origin in the
// lowest 4 bits.
constexpr ContentId drafter_row(ContentId last_token, DraftMark mark) {
  return (mix(last_token ^ 0x6472616674657200ull) & ~kDraftMarks) |
         static_cast<std::uint64_t>(mark);
}
constexpr DraftMark mark_of(ContentId row) { return static_cast<DraftMark>(row & kDraftMarks); }
// Returns true if the row equals what a draft model that knew all tokens would have written,
// `settled` up to the mark. A row of accepted drafts is right too.
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

// How the engine's draft model runs over the plan's draft_modules. A shape of none has a reason in
// `why_not`, which is empty if the plan has no draft model.
struct FollowedDrafter {
  DrafterConfig config;
  std::string why_not{};
};
// `has_connector`: with a connector, rows may be loaded whose origin is unknown.
FollowedDrafter followed_drafter(const EngineConfig& engine, const BackendConfig& backend,
                                 bool has_connector);

// Plans the passes of each step, applies them to the memory model, and checks what they read.
class DraftPlanner {
 public:
  DraftPlanner(const EngineConfig& engine, const BackendConfig& config, MemoryModel& model,
               Worker& worker, RunCounts& counts);

  bool is_followed() const { return drafter_.shape != DraftShape::none; }
  // Writes the passes of a decided and sampled step into its program. `requests` are those of
  // program.rows, in the order of the decision's. REQUIRES: the builder has built the program.
  void plan(const SchedulerOutput& decision, const ModelOutput& output,
            std::span<const RequestId> requests, StepProgram& program);
  // Runs the passes on the memory model and checks the rows that they read. REQUIRES: the step's
  // own rows are written.
  Checked apply(const StepProgram& program, std::span<const RequestId> requests);

 private:
  // A request's tokens around the end of a step, by their contents.
  struct Tokens {
    std::int64_t last = 0;          // L of DraftShape
    std::int64_t num_rejected = 0;  // drafts of the step after it
    std::int64_t num_before = 0;    // tokens that the worker knew before the step
    std::vector<ContentId> sampled;
    std::vector<ContentId> drafts;  // the token at L + 1, and the drafts after it
    bool is_next_cached = false;    // see is_next_cached()
    std::int64_t num_known() const { return num_before + std::ssize(sampled); }
  };
  // Returns the tokens after a step that sampled `sampled` and proposed `proposed` for the next
  // one.
  Tokens tokens_of(const ScheduledRequest& scheduled, const WorkerRequest& request,
                   std::span<const std::int32_t> sampled,
                   std::span<const std::int32_t> proposed) const;
  // Returns the content at a position: known before the step, sampled by it, or a draft after it.
  static ContentId content_at(const WorkerRequest& request, const Tokens& tokens,
                              std::int64_t position);
  void add_passes(const RowSlice& slice, const WorkerRequest& request, const Tokens& tokens,
                  StepProgram& program) const;
  void add_modules(const RowSlice& slice, WorkerRequest& request, const Tokens& tokens,
                   StepProgram& program);
  // Marks the rows of a step in which the draft model did not run.
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
  // Returns true if any block of the pool holds the token at `position`. O(num_blocks).
  bool holds_token(const WorkerRequest& request, const Tokens& tokens, std::int32_t group,
                   std::int64_t position, bool by_another) const;
  // Returns true if the release itself leaves the row wrong, so that it is counted, not reported.
  bool is_left_so(const WorkerRequest& request, const Tokens& tokens, std::int32_t group,
                  std::int64_t position, const SlotContent* slot) const;

  const DrafterConfig drafter_;
  const bool drops_a_block_;  // of each hit; false: its hashes look ahead
  const std::vector<KVCacheGroupSpec>& groups_;
  MemoryModel& model_;
  Worker& worker_;
  RunCounts& counts_;
  const std::int64_t block_size_;                   // tokens
  std::vector<std::vector<std::int32_t>> modules_;  // [group]: modules with layers there
  std::vector<Tokens> tokens_;                      // per row of the program
  // Rows of steps in which the draft model did not run. By block: 1 for each slot not written
  // since.
  std::map<BlockId, std::vector<std::uint8_t>> skipped_;
};

// The digest of rule (4) over a draft model's rows, as the memory model has them. Positions up to
// the last unwritten one are left out: [first, last) starts after it.
struct DraftProbe {
  std::int64_t first = 0;
  std::uint64_t digest = 0;
};
DraftProbe draft_probe(const MemoryModel& model, const WorkerRequest& request,
                       const ModelLayer& layer, std::int64_t first, std::int64_t last);

}  // namespace lockstep
