// Relations about positions in memory: changes that an engine's decisions do not depend on, and
// changes that move every block.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "properties/relations/relations.h"
#include "properties/shrink/case_parts.h"
#include "reference/plan/kernel_blocks.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

constexpr std::array kBackends = {AttentionBackend::flash_attn, AttentionBackend::flashinfer,
                                  AttentionBackend::triton_attn};

// The case under another attention backend; nothing: it takes other blocks than these.
Changed under(const SavedCase& saved, AttentionBackend backend) {
  const auto sizes = kernel_block_sizes(saved.cache, backend);
  if (!sizes || backend == saved.attention_backend) return std::nullopt;
  SavedCase other = saved;
  other.attention_backend = backend;
  other.kernel_block_sizes = *sizes;
  return other;
}

Changed other_layout(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    using enum CacheLayout;
    constexpr std::array kOthers = {HND, NHD, BLHNC, BLNHC, BHLNC, LBHNC, LBNHC, LHBNC};
    other.layout = kOthers[static_cast<std::size_t>(other.layout)];
  });
}

Changed other_backend(const SavedCase& saved) {
  for (const AttentionBackend backend : kBackends)
    if (Changed other = under(saved, backend);
        other && other->kernel_block_sizes == saved.kernel_block_sizes)
      return other;
  return std::nullopt;
}

Changed other_kernel_blocks(const SavedCase& saved) {
  for (const AttentionBackend backend : kBackends)
    if (Changed other = under(saved, backend);
        other && other->kernel_block_sizes != saved.kernel_block_sizes)
      return other;
  return std::nullopt;
}

Changed without_padding(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { plan_again(other); });
}

Changed unpacked(const SavedCase& saved) {
  const bool packed = std::ranges::any_of(
      saved.cache.groups, [](const KVCacheGroupSpec& group) { return group.layers_per_page > 1; });
  if (!packed) return std::nullopt;
  return changed(saved, [](SavedCase& other) {
    for (KVCacheGroupSpec& group : other.cache.groups) group.layers_per_page = 1;
    plan_again(other);
  });
}

Changed over_streams(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.num_streams = 4;
    other.delay_streams = true;
  });
}

Changed shuffled_blocks(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.block_order = 1; });
}

constexpr std::array kPlaceRelations = std::to_array<Relation>({
    {"other layout", "whether heads or tokens come first in a block is the device's business",
     other_layout, false, false, "layout-two-heads"},
    {"other backend", "and so is which attention backend's rules a page follows", other_backend,
     false, false, "wrong-stride"},
    {"other kernel blocks", "a block cut into other kernel blocks holds the same tokens",
     other_kernel_blocks, false, false, "kernel-block-unsplit"},
    {"no padding", "nothing lies in the padding of a page", without_padding, false, false,
     "wrong-stride"},
    {"no packing", "layers that share a page do not meet in it", unpacked, false, false,
     "pack-offset"},
    {"shuffled blocks", "block ids are names: where a block lies says nothing", shuffled_blocks,
     false, false, "wrong-stride"},
    {"several streams", "what is ordered by what it needs needs no other order", over_streams, true,
     false, "copy-unordered"},
});

}  // namespace

std::span<const Relation> place_relations() { return kPlaceRelations; }

namespace {

Result<std::vector<RecordedStep>> decided(const SavedCase& saved) {
  std::vector<RecordedStep> steps;
  std::optional<RunRecorder> recorder;
  const auto attach = [&](std::int32_t, Workload* workload) {
    recorder.emplace(*workload, [&](const RecordedStep& step) { steps.push_back(step); });
    return Onlooker{.workload = &*recorder, .observer = &*recorder};
  };
  LS_ASSIGN_OR_RETURN(const auto session, open_undisturbed(saved, config_of(saved), {}, attach));
  LS_RETURN_IF_ERROR(session->run());
  return steps;
}

using Names = std::vector<BlockId>;  // [block id of the one run] = of the other

void rename(std::vector<BlockId>& blocks, const Names& names) {
  for (BlockId& block : blocks) block = names[index_of(block)];
}

RecordedStep renamed(RecordedStep step, const Names& names) {
  for (RecordedScheduled& scheduled : step.scheduled)
    if (scheduled.blocks)
      for (std::vector<BlockId>& blocks : *scheduled.blocks) rename(blocks, names);
  for (auto* tables : {&step.tables, &step.loading})
    if (*tables)
      for (RecordedTable& table : **tables)
        for (std::vector<BlockId>& blocks : table.blocks) rename(blocks, names);
  if (step.worker) rename(step.worker->invalid_blocks, names);
  rename(step.zero, names);
  for (KVCacheBlockCopy& copy : step.copies)
    copy = {.from = names[index_of(copy.from)], .to = names[index_of(copy.to)]};
  return step;
}

}  // namespace

Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved) {
  SavedCase other = saved;
  other.block_order = 1;
  LS_ASSIGN_OR_RETURN(auto one, decided(saved));
  LS_ASSIGN_OR_RETURN(auto two, decided(other));
  Names names = {kNullBlock};
  const Names order = free_order_of(other);
  names.insert(names.end(), order.begin(), order.end());
  for (std::size_t i = 0; i < std::max(one.size(), two.size()); ++i) {
    if (i < one.size() && i < two.size()) {
      RecordedStep expected = renamed(one[i], names);
      RecordedStep found = two[i];
      std::ranges::sort(expected.zero);
      std::ranges::sort(found.zero);
      if (expected == found) continue;
    }
    return Breach{.request = "",
                  .index = static_cast<std::int64_t>(i),
                  .what = fmt::format("step {} is decided otherwise when blocks have other ids "
                                      "(shuffled blocks: block ids are names)",
                                      i)};
  }
  return std::optional<Breach>();
}

}  // namespace lockstep
