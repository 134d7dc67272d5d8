#include "sim/connectors/peer_transfers.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep {

std::vector<BlockTransfer> blocks_of(const DecidedStep& step, RequestId request, std::int64_t first,
                                     std::int64_t last) {
  std::vector<BlockTransfer> blocks;
  for (std::size_t g = 0; g < step.block_tokens.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const std::int64_t tokens = step.block_tokens[g];
    const std::span<const BlockId> table = step.scheduler.block_table(request, group);
    const std::int64_t end =
        std::min<std::int64_t>(std::ssize(table), (last + tokens - 1) / tokens);
    for (std::int64_t entry = first / tokens; entry < end; ++entry) {
      const BlockId block = table[static_cast<std::size_t>(entry)];
      if (block == kNullBlock) continue;
      blocks.push_back({.request = request,
                        .group = group,
                        .entry = static_cast<std::int32_t>(entry),
                        .block = block,
                        .num_tokens = last});
    }
  }
  return blocks;
}

ExternalHit PeerTransfers::get_num_new_matched_tokens(const ExternalQuery& query) {
  const ExternalHit hit = connector_.get_num_new_matched_tokens(query);
  const std::int64_t first = query.num_local_tokens;
  asked_[query.request] = {query.request, first, first + hit.num_tokens.value_or(0), hit.is_async};
  return hit;
}

void PeerTransfers::update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                             std::int32_t num_external_tokens) {
  connector_.update_state_after_alloc(request, blocks, num_external_tokens);
  if (num_external_tokens == 0) return;
  const auto asked = asked_.find(request);
  LS_CHECK(asked != asked_.end(), "request {} loads unasked", index_of(request));
  begun_.push_back(asked->second);
}

bool PeerTransfers::request_finished(RequestId request, std::string_view name) {
  const bool is_kept = connector_.request_finished(request, name);
  num_frees_delayed_ += is_kept ? 1 : 0;
  return is_kept;
}

void PeerTransfers::plan(const DecidedStep& step, StepTransfers& transfers) {
  lost_.insert(step.report.invalid_block_ids.begin(), step.report.invalid_block_ids.end());
  for (const Load& load : std::exchange(begun_, {})) {
    const auto blocks = moved(blocks_of(step, load.request, load.first, load.last));
    transfers.begun.insert(transfers.begun.end(), blocks.begin(), blocks.end());
    if (load.is_async)
      loading_[load.request] = blocks;
    else
      carry_out(blocks, transfers);
  }
  for (const RequestId request : step.report.finished_recving)
    if (const auto load = loading_.extract(request)) carry_out(load.mapped(), transfers);
  if (loading_.empty()) lost_.clear();
  for (const RequestId request : step.report.finished_sending) send(step, request, transfers);
  transfers.num_frees_delayed = num_frees_delayed_;
}

std::vector<BlockTransfer> PeerTransfers::moved(std::vector<BlockTransfer> blocks) const {
  if (!takes_several_groups_)
    std::erase_if(blocks, [](const BlockTransfer& block) { return block.group != 0; });
  return blocks;
}

void PeerTransfers::carry_out(const std::vector<BlockTransfer>& blocks, StepTransfers& transfers) {
  for (BlockTransfer block : blocks) {
    if (lost_.erase(block.block) > 0) continue;
    block.host = HostBlockId{index_of(block.block)};
    transfers.brought.push_back(block);
    transfers.loads.push_back(block);
  }
}

// Two requests that share a block may be sent at once; it is stored for one of them.
void PeerTransfers::send(const DecidedStep& step, RequestId request, StepTransfers& transfers) {
  // Drafts may be counted as computed where a client has left while the step was in flight.
  const std::int64_t known =
      std::min(step.scheduler.num_computed_tokens(request), step.scheduler.num_tokens(request));
  for (BlockTransfer block : moved(blocks_of(step, request, 0, known))) {
    if (std::ranges::count(transfers.stores, block.block, &BlockTransfer::block) > 0) continue;
    block.host = HostBlockId{index_of(block.block)};
    transfers.stores.push_back(block);
  }
}

}  // namespace lockstep
