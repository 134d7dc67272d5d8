#include "sim/pair/engine_memory.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "sim/step/model_step.h"

namespace lockstep {

std::vector<ContentId> contents_of(const Prompt& prompt) {
  std::vector<ContentId> contents;
  ContentId prefix = kEmptyPrefix;
  for (const std::int32_t token : prompt.materialize())
    contents.push_back(prefix = next_content(prefix, token));
  return contents;
}

EngineMemory::EngineMemory(const KVCacheConfig& plan) : groups_(plan.groups) {
  for (const KVCacheGroupSpec& group : groups_)
    slots_per_block_ = std::max<std::int64_t>(slots_per_block_, group.spec.block_size);
  group_of_.assign(static_cast<std::size_t>(plan.num_blocks), -1);
  slots_.assign(static_cast<std::size_t>(plan.num_blocks * slots_per_block_), 0);
}

void EngineMemory::add_request(RequestId request, const Prompt& prompt) {
  contents_[request] = contents_of(prompt);
}

void EngineMemory::append_sampled(RequestId request, std::span<const std::int32_t> tokens) {
  std::vector<ContentId>& contents = contents_.at(request);
  for (const std::int32_t token : tokens)
    contents.push_back(next_content(contents.empty() ? kEmptyPrefix : contents.back(), token));
}

ContentId* EngineMemory::slots_of(std::int32_t group, BlockId block) {
  LS_CHECK(block != kNullBlock && index_of(block) < std::ssize(group_of_), "block {} is written",
           index_of(block));
  const std::span slots =
      std::span(slots_).subspan(static_cast<std::size_t>(index_of(block) * slots_per_block_),
                                static_cast<std::size_t>(slots_per_block_));
  std::int32_t& owner = group_of_[static_cast<std::size_t>(index_of(block))];
  if (owner != group) std::ranges::fill(slots, 0);
  owner = group;
  return slots.data();
}

const ContentId* EngineMemory::find(std::int32_t group, BlockId block) const {
  if (group_of_[static_cast<std::size_t>(index_of(block))] != group) return nullptr;
  return &slots_[static_cast<std::size_t>(index_of(block) * slots_per_block_)];
}

std::optional<std::string> EngineMemory::step(const SchedulerOutput& decision,
                                              const Scheduler& scheduler) {
  for (std::int32_t g = 0; g < decision.num_groups; ++g) {
    for (const ScheduledRequest& row : decision.scheduled) {
      const auto table = scheduler.block_table(row.id, g);
      const std::vector<ContentId>& contents = contents_.at(row.id);
      for (std::int64_t p = row.computed; p < row.computed + row.num_tokens; ++p)
        slots_of(g, table[static_cast<std::size_t>(p / block_size(g))])[p % block_size(g)] =
            contents[static_cast<std::size_t>(p)];
    }
  }
  for (const ScheduledRequest& row : decision.scheduled) {
    if (!row.is_new || row.computed == 0) continue;
    if (auto wrong = check_computed(row.id, row.computed, scheduler)) return wrong;
  }
  return std::nullopt;
}

std::optional<std::string> EngineMemory::check_computed(RequestId request,
                                                        std::int64_t num_computed,
                                                        const Scheduler& scheduler) const {
  const std::vector<ContentId>& contents = contents_.at(request);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const auto table = scheduler.block_table(request, group);
    for (std::int64_t p = first_attended(groups_[g].spec, num_computed); p < num_computed; ++p) {
      const BlockId block = table[static_cast<std::size_t>(p / block_size(group))];
      const ContentId* slots = find(group, block);
      if (slots != nullptr && slots[p % block_size(group)] == contents[static_cast<std::size_t>(p)])
        continue;
      return fmt::format(
          "token {} of {} counts as computed, and its slot in block {} of group {} holds {}", p,
          scheduler.name(request), index_of(block), g,
          slots == nullptr ? "nothing of that group" : "something else");
    }
  }
  return std::nullopt;
}

std::vector<std::uint8_t> EngineMemory::read_block(std::int32_t group, BlockId block) const {
  const ContentId* slots = find(group, block);
  std::vector<std::uint8_t> bytes;
  for (std::int64_t i = 0; i < block_size(group); ++i)
    for (int shift = 0; shift < 64; shift += 8)
      bytes.push_back(slots == nullptr ? std::uint8_t{0}
                                       : static_cast<std::uint8_t>(slots[i] >> shift));
  return bytes;
}

void EngineMemory::write_block(std::int32_t group, BlockId block,
                               std::span<const ContentId> contents) {
  LS_CHECK(std::ssize(contents) <= block_size(group), "{} contents for a block of {} slots",
           contents.size(), block_size(group));
  std::ranges::copy(contents, slots_of(group, block));
}

}  // namespace lockstep
