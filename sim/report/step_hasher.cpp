#include "sim/report/step_hasher.h"

#include "base/check.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// One hash per group, over the length and all block ids of the request's table.
static HashedTable table_hashes(const StepView& view, RequestId id) {
  HashedTable table;
  table.request = view.name(id);
  for (std::int32_t group = 0; group < view.decision.num_groups; ++group) {
    StateHashChain chain;
    const std::span<const BlockId> blocks = view.decisions.block_table(id, group);
    chain.add(blocks.size());
    for (const BlockId block : blocks) chain.add(static_cast<std::uint64_t>(index_of(block)));
    table.groups.push_back(to_hex(chain.value()));
  }
  return table;
}

bool StepHasher::decided(const StepView& view) {
  step_ = {};
  step_.step = view.decision.step;
  StateHashChain chain;
  SchedulerOutput decision = view.decision;
  decision.common_prefix_blocks.clear();  // a hint that releases before 0.33.0 still compute
  chain.add(decision);
  // The number of free blocks shows frees that change no table of a scheduled request.
  chain.add(static_cast<std::uint64_t>(view.decisions.num_free_blocks()));
  step_.decision = to_hex(chain.value());
  for (const ScheduledRequest& scheduled : view.decision.scheduled)
    if (view.decisions.shows_table(scheduled.id))
      step_.tables.push_back(table_hashes(view, scheduled.id));
  return true;
}

void StepHasher::begin(const BackendConfig& /*config*/, std::span<const RankMemory> ranks,
                       RunSummary& /*summary*/) {
  for (const RankMemory& rank : ranks) ranks_.push_back(rank);
}

// Only pages that the step wrote are hashed: the others are unchanged, and reading all is
// expensive.
Checked StepHasher::step_compared() {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::span<const ModelPage> pages = ranks_[rank].model.written_pages();
    std::vector<PageId> ids;
    for (const ModelPage& page : pages)
      ids.push_back({.tensor = page.tensor, .block = BlockId{page.index}});
    std::vector<Fingerprint> found(ids.size());
    LS_RETURN_IF_ERROR(ranks_[rank].backend.fingerprint_pages(ids, found));
    for (std::size_t i = 0; i < pages.size(); ++i)
      step_.pages.push_back({.rank = static_cast<std::int32_t>(rank),
                             .tensor = pages[i].tensor,
                             .block = pages[i].index,
                             .fingerprint = to_hex(StateHash{found[i].a, found[i].b})});
  }
  return {};
}

bool StepHasher::finished(const StepView& view) {
  LS_CHECK(step_.step == view.decision.step, "step {} was decided, and {} ends", step_.step,
           view.decision.step);
  step_.hash = to_hex(view.state_hash);
  for (const StoppedRequest& stopped : view.stopped)
    step_.ended.emplace_back(view.name(stopped.id));
  written_ = writer_.write(step_);
  num_steps_ += written_ ? 1 : 0;
  return written_.has_value();
}

Result<void> StepHasher::close(const RunSummary& summary, bool is_interrupted) {
  LS_RETURN_IF_ERROR(written_);
  StepHashesEnd end{.steps = num_steps_, .verdict = std::string(name_of(summary.verdict))};
  if (summary.divergence) end.check = name_of(summary.divergence->phase);
  if (is_interrupted && summary.verdict == Verdict::agreed) end.verdict = "interrupted";
  return writer_.close(end);
}

}  // namespace lockstep
