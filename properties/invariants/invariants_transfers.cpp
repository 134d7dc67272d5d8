// Effects of a KV connector: waiting requests hold blocks, loads write them, and completed
// transfers free blocks.
#include <fmt/core.h>

#include <algorithm>

#include "properties/invariants/invariants.h"

namespace lockstep {
namespace {

std::int64_t place_in(std::span<const BlockId> queue, BlockId block) {
  return std::ranges::find(queue, block) - queue.begin();
}

bool sees_everything(const KVCacheSpec& spec) { return !is_windowed(spec.kind); }

}  // namespace

// Every request with a table that may name a block.
std::vector<RequestId> Invariants::holding(const StepView& view, std::vector<RequestId> ids) {
  const auto running = view.decisions.running();
  ids.assign(running.begin(), running.end());
  for (const SkippedRequest& request : view.decisions.skipped()) ids.push_back(request.id);
  for (const HeldRequest& request : view.decisions.held()) ids.push_back(request.id);
  return ids;
}

bool Invariants::is_asked(const StepView& view, RequestId id) const {
  return std::ranges::find(answers_, view.model().name(id), &RecordedConnectorAnswer::id) !=
         answers_.end();
}

// Tokens at the head of a request that enters that were hit here. One that has loaded before was
// looked at when its load began.
std::int64_t Invariants::num_found_here(const StepView& view,
                                        const ScheduledRequest& scheduled) const {
  const std::int64_t computed = scheduled.computed;
  if (!has_connector_) return computed;
  const auto answer =
      std::ranges::find(answers_, view.model().name(scheduled.id), &RecordedConnectorAnswer::id);
  return answer == answers_.end() ? 0 : std::min<std::int64_t>(answer->local, computed);
}

void Invariants::check_loads(const StepView& view) {
  std::map<RequestId, std::int64_t> under_way;
  for (const SkippedRequest& request : view.decisions.skipped()) {
    if (!request.is_loading) continue;
    const auto before = loads_from_.find(request.id);
    const auto answer =
        std::ranges::find(answers_, view.model().name(request.id), &RecordedConnectorAnswer::id);
    if (answer == answers_.end() && before == loads_from_.end())
      return fail("limits", std::string(view.model().name(request.id)),
                  "it waits for a load that the connector was not asked for");
    const std::int64_t from = answer == answers_.end() ? before->second : answer->local;
    under_way[request.id] = from;
    if (answer != answers_.end()) check_hit(view, request.id, from);
    check_load(view, request.id, from);
  }
  loads_from_ = std::move(under_way);
}

// What a load in flight writes: blocks that no other request has.
void Invariants::check_load(const StepView& view, RequestId id, std::int64_t num_tokens) {
  for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
    if (is_left_out(static_cast<std::int64_t>(g)) || keeps_pages(plan_.groups[g].spec)) continue;
    const auto table = view.model().block_table(id, static_cast<std::int32_t>(g));
    for (std::int64_t i = num_tokens / block_size(g); i < std::ssize(table); ++i) {
      const BlockId block = table[i];
      if (block == kNullBlock) continue;
      if (holders_[block].count != 1 || writers_[block]++ > 0)
        return fail("one_writer", std::string(view.model().name(id)),
                    fmt::format("a load writes block {} of group {}, which is in {} table entries",
                                index_of(block), g, holders_[block].count));
    }
  }
}

// By the load of a request that waits with its blocks, for lack of blocks to continue.
bool Invariants::was_loaded(const StepView& view, std::int32_t group, BlockId block) const {
  for (const SkippedRequest& request : view.decisions.skipped()) {
    if (request.status == RequestStatus::waiting_for_remote_kvs) continue;
    const auto table = view.model().block_table(request.id, group);
    const auto entry = std::ranges::find(table, block);
    const std::int64_t end = (entry - table.begin() + 1) * block_size(group);
    // The last token of a request is computed here, loaded or not.
    const std::int64_t computed = view.model().num_computed_tokens(request.id);
    const std::int64_t loaded =
        computed + 1 == view.decisions.num_tokens(request.id) ? computed + 1 : computed;
    if (entry != table.end() && end <= loaded) return true;
  }
  return false;
}

// Blocks come free in the order in which transfers end, which is the connector's. But they go
// behind those that were free, and of what one table alone has the tail goes before the head; a
// window's head may have gone before.
void Invariants::check_free_order_beside_transfers(const StepView& view) {
  const std::vector<BlockId>& actual = queue_;
  if (profile_.freed_blocks == FreedBlocks::append) {
    const auto [at, place] = std::ranges::mismatch(actual, queue_before_);
    if (place != queue_before_.end())
      return fail("free_order", {},
                  fmt::format("block {} was free before, but another block is now at its position "
                              "{} in the free queue",
                              index_of(*place), place - queue_before_.begin()));
  }
  const std::vector<RequestId> holders = holding(view);
  for (const Held& held : held_) {
    if (std::ranges::find(holders, held.id) != holders.end()) continue;
    for (std::size_t g = 0; g < held.tables.size(); ++g) {
      if (!sees_everything(plan_.groups[g].spec) || is_left_out(static_cast<std::int64_t>(g)))
        continue;
      std::int64_t head = std::ssize(actual);
      for (const BlockId block : held.tables[g]) {
        const std::int64_t place = place_in(actual, block);
        const bool is_shared = holders_[block].count != 1;
        if (is_shared || place == std::ssize(actual)) continue;
        if (place > head)
          return fail(
              "free_order", {},
              fmt::format(
                  "block {} of group {} is in the free queue after its predecessor in the table",
                  index_of(block), g));
        head = place;
      }
    }
  }
}

}  // namespace lockstep
