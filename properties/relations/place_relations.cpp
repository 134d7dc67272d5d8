// Relations about where things lie: the changes that an engine's decisions know nothing of, and
// those that move every block.
#include <algorithm>
#include <array>
#include <utility>

#include "properties/relations/relations.h"
#include "properties/shrink/case_parts.h"
#include "reference/plan/kernel_blocks.h"

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
    other.layout = other.layout == CacheLayout::NHD ? CacheLayout::HND : CacheLayout::NHD;
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

}  // namespace lockstep
