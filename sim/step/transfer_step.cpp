#include "sim/step/transfer_step.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "reference/plan/rank_plan.h"

namespace lockstep {

ContentId void_content(ContentId content) { return mix(content ^ 0x766F696400000000ull); }

// The model fills a received block with the request's expected rows on top of the received bytes. A
// backend gets the received bytes, or the model's where no peer has sent any.
Result<void> TransferStep::begin(const StepTransfers& transfers, StepProgram& program) {
  for (std::size_t i = 0; i < transfers.brought.size(); ++i) {
    const BlockTransfer& block = transfers.brought[i];
    const std::vector<ContentId> contents = contents_of(block);
    const std::int64_t first = block.entry * model_.block_size(block.group);
    std::span<const std::uint8_t> bytes;
    if (!transfers.payloads.empty()) bytes = own_part(block.group, transfers.payloads[i]);
    model_.fill_host_block(block.group, block.host, first, contents,
                           worker_.at(block.request).writer, bytes);
    if (bytes.empty())
      bytes =
          std::span(*model_.host_block(block.host).bytes).first(model_.host_bytes_of(block.group));
    LS_RETURN_IF_ERROR(backend_.write_host_block(block.group, block.host, bytes));
  }
  for (const BlockTransfer& block : transfers.loads)
    program.loads.push_back({block.group, block.block, block.host});
  for (const BlockTransfer& block : transfers.stores)
    if (keeps_any(block)) program.stores.push_back({block.group, block.block, block.host});
  return {};
}

std::span<const std::uint8_t> TransferStep::own_part(std::int32_t group,
                                                     std::span<const std::uint8_t> payload) const {
  const auto size = static_cast<std::size_t>(model_.host_bytes_of(group));
  const std::size_t begin = static_cast<std::size_t>(tp_rank_) * size;
  LS_CHECK(begin + size <= payload.size(), "bytes {} to {} of a payload of {}", begin, begin + size,
           payload.size());
  return payload.subspan(begin, size);
}

// A rank of context parallelism may keep nothing of a block that is not full: with 2 ranks and
// interleave 16, a block of 10 tokens is only on rank 0. Such a rank stores nothing.
bool TransferStep::keeps_any(const BlockTransfer& block) const {
  const ContextRank rank = worker_.context(block.group);
  const auto [first, last] = positions_of(block);
  return num_kept(rank, last) > num_kept(rank, first);
}

std::pair<std::int64_t, std::int64_t> TransferStep::positions_of(const BlockTransfer& block) const {
  const std::int64_t tokens =
      model_.block_size(block.group) * worker_.context(block.group).num_ranks;
  const std::int64_t first = block.entry * tokens;
  return {first, std::min(block.num_tokens, first + tokens)};
}

// Returns the contents of the request's tokens in the block, as far as this rank keeps them, in row
// order.
std::vector<ContentId> TransferStep::contents_of(const BlockTransfer& block) const {
  const PrefixContent& prefix = worker_.know(block.request).prefix;
  const ContextRank rank = worker_.context(block.group);
  const auto [first, last] = positions_of(block);
  LS_CHECK(last <= prefix.size(), "{} tokens of {}, which has {}", last,
           worker_.at(block.request).name, prefix.size());
  std::vector<ContentId> contents;
  for (std::int64_t p = first; p < last; ++p)
    if (keeps(rank, p)) contents.push_back(prefix.content(p));
  return contents;
}

Checked TransferStep::check_loads(const StepTransfers& transfers, std::int64_t step) const {
  return check(transfers.loads, "loaded", step);
}
Checked TransferStep::check_stores(const StepTransfers& transfers, std::int64_t step) const {
  return check(transfers.stores, "stored", step);
}

// The request has finished, or another request has its id: the block is not held for it.
Divergence TransferStep::gone(const BlockTransfer& block, std::string_view verb,
                              std::int64_t step) {
  Divergence found{.phase = Phase::transfer,
                   .step = step,
                   .group = block.group,
                   .block = index_of(block.block),
                   .host_block = index_of(block.host)};
  found.message =
      fmt::format("block {} is {} through host block {} for a request that has ended and freed it",
                  index_of(block.block), verb, index_of(block.host));
  return found;
}

// Compares each host block's rows with the contents of the request's tokens. Slots of other tokens
// in the block are not compared: nothing reads them for this request.
Checked TransferStep::check(std::span<const BlockTransfer> blocks, std::string_view verb,
                            std::int64_t step) const {
  for (const BlockTransfer& block : blocks) {
    // Recurrent states have no rows to compare.
    if (model_.is_state_group(block.group)) continue;
    const HostContent& host = model_.host_block(block.host);
    if (!worker_.is_known(block.request) ||
        worker_.know(block.request).prefix.size() < block.num_tokens)
      return gone(block, verb, step);
    const std::vector<ContentId> contents = contents_of(block);
    for (std::size_t i = 0; i < contents.size(); ++i) {
      const SlotContent* slot =
          host.group == block.group && i < host.slots.size() ? &host.slots[i] : nullptr;
      if (slot != nullptr && slot->writer != kNobody && slot->content == contents[i]) continue;
      const bool written = slot != nullptr && slot->writer != kNobody;
      Divergence found;
      found.phase = Phase::transfer;
      found.step = step;
      found.request = worker_.at(block.request).name;
      found.group = block.group;
      found.block = index_of(block.block);
      found.host_block = index_of(block.host);
      found.token = block.entry * model_.block_size(block.group) + static_cast<std::int64_t>(i);
      found.owner = written
                        ? fmt::format("{}'s token {} of step {}", model_.writer_name(slot->writer),
                                      slot->position, slot->step)
                        : "nothing";
      found.doing = fmt::format("{} blocks are {} in the step", blocks.size(), verb);
      found.message = fmt::format(
          "block {} of {} is {} through host block {}, where row {} should be its token {} and is "
          "{}",
          index_of(block.block), found.request, verb, index_of(block.host), i, found.token,
          found.owner);
      return found;
    }
  }
  return {};
}

}  // namespace lockstep
