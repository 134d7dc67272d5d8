#include "sim/worker/facts_taker.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "reference/memory/page_image.h"

namespace lockstep {
namespace {

// Returns the bytes of one row, through the worker's own view.
std::span<const std::uint8_t> row_of(std::span<const std::uint8_t> memory, const WorkerLayer& layer,
                                     BlockId block, std::size_t part, std::int64_t slot,
                                     std::int64_t head) {
  const std::int64_t at =
      PageMap::row_offset(layer, block, static_cast<std::int64_t>(part), slot, head);
  return memory.subspan(static_cast<std::size_t>(at),
                        static_cast<std::size_t>(layer.parts[part].row_bytes));
}

// Returns true if `holds` is true for every row of a slot: each part and head.
template <class Holds>
bool of_slot(const WorkerLayer& layer, std::int64_t slot, const Holds& holds) {
  for (std::size_t part = 0; part < layer.parts.size(); ++part) {
    const WorkerView& view = layer.parts[part];
    for (std::int64_t head = 0; head < view.heads; ++head)
      if (slot < view.tokens * view.kernel_blocks && !holds(part, slot, head)) return false;
  }
  return true;
}

}  // namespace

// Every page of the pool is compared, not only those of the step: a write elsewhere is what a
// recording must show.
WorkerStepFacts FactsTaker::after(std::span<const std::uint8_t> memory, const WorkerFacts& said,
                                  const WorkerStep& told) {
  WorkerStepFacts facts;
  for (std::size_t i = 0; i < said.rows.size(); ++i)
    facts.rows.push_back({.id = said.rows[i], .tokens = said.num_tokens[i]});
  facts.positions = said.positions;
  for (const WorkerGroupFacts& group : said.groups) {
    GroupFacts& taken = facts.groups.emplace_back();
    taken.slots = group.slots;
    for (const std::vector<std::int32_t>& table : group.tables) {
      std::vector<BlockId>& blocks = taken.tables.emplace_back();
      for (const std::int32_t block : table) blocks.push_back(BlockId{block});
    }
  }
  for (std::int32_t t = 0; t < map_.num_tensors(); ++t)
    for (std::int32_t b = 0; b < plan_.num_blocks; ++b) take_page(memory, t, BlockId{b}, facts);
  for (const BlockId block : told.zero)
    if (is_zeroed(memory, block, facts)) facts.zeroed.push_back(block);
  return facts;
}

void FactsTaker::take_page(std::span<const std::uint8_t> memory, std::int32_t tensor, BlockId block,
                           WorkerStepFacts& facts) {
  const std::int32_t group = group_of_block_[index_of(block)];
  const auto size = static_cast<std::size_t>(map_.page_size_bytes(tensor));
  page_.resize(size);
  page_before_.resize(size);
  map_.gather(memory, tensor, block, group, page_);
  map_.gather(before_, tensor, block, group, page_before_);
  if (page_ == page_before_) return;
  const PageSum sum = page_sum(page_);
  ChangedPage& changed = facts.changed.emplace_back();
  changed.tensor = tensor;
  changed.block = block;
  changed.digest = fmt::format("{:016x}{:016x}", sum.a, sum.b);
  // No group has allocated the block, so every change in it is unexpected.
  if (group < 0) {
    changed.beside = true;
    return;
  }
  const std::vector<bool>& used = map_.used_bytes(tensor, group);
  // Bytes outside the group's rows are padding, or another group's. A change there is marked.
  for (std::size_t i = 0; i < size && !changed.beside; ++i)
    changed.beside = page_[i] != page_before_[i] && !used[i];
  const std::int64_t slots = plan_.groups[group].spec.block_size;
  for (std::int64_t slot = 0; slot < slots; ++slot)
    for (std::size_t l = 0; l < layout_.layers.size(); ++l) {
      const LayerMemory& model = layout_.layers[l];
      if (std::cmp_not_equal(model.group, group) || model.tensor != tensor) continue;
      const WorkerLayer& layer = views_[l];
      const bool same =
          of_slot(layer, slot, [&](std::size_t part, std::int64_t at, std::int64_t head) {
            return std::ranges::equal(row_of(memory, layer, block, part, at, head),
                                      row_of(before_, layer, block, part, at, head));
          });
      if (same) continue;
      changed.slots.push_back(static_cast<std::int32_t>(slot));
      break;
    }
}

// Slots that the step wrote no longer show whether they were zeroed first.
bool FactsTaker::is_zeroed(std::span<const std::uint8_t> memory, BlockId block,
                           const WorkerStepFacts& facts) const {
  const std::int32_t group = group_of_block_[index_of(block)];
  const auto is_zero = [](std::uint8_t byte) { return byte == 0; };
  if (group < 0) return true;  // no rows that could be read
  const std::int64_t slots = plan_.groups[group].spec.block_size;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const Slot of_pool = static_cast<Slot>(index_of(block)) * slots + slot;
    const bool is_written =
        !facts.groups.empty() &&
        std::ranges::find(facts.groups[group].slots, of_pool) != facts.groups[group].slots.end();
    for (std::size_t l = 0; l < layout_.layers.size() && !is_written; ++l) {
      if (std::cmp_not_equal(layout_.layers[l].group, group)) continue;
      const WorkerLayer& layer = views_[l];
      if (!of_slot(layer, slot, [&](std::size_t part, std::int64_t at, std::int64_t head) {
            return std::ranges::all_of(row_of(memory, layer, block, part, at, head), is_zero);
          }))
        return false;
    }
  }
  return true;
}

}  // namespace lockstep
