#include "reference/placement/cache_backends.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

const std::vector<CacheBackend>& cache_backends() {
  using enum CacheLayout;
  using enum PageBinding;
  static const std::vector<CacheBackend> rows_of_backends = {
      {"flash_attn", {}, 16},
      {"triton_attn", {}, 16},
      {"flashinfer", {16, 32, 64}},
      {"flex_attention", {}, 16, {LBNHC}},
      {"cpu_attn", {}, 32, {LBHNC}},
      {"turboquant", {16, 32, 64, 128}, 0, {LBNHC}},
      {"cache_only", {}, 1},
      {"triton_mla", {}, 16, {}, rows, true},
      {"flashmla", {64}, 0, {}, rows, true},
      {"flashinfer_mla", {32, 64}, 0, {}, rows, true},
      {"flash_attn_mla", {}, 16, {}, rows},
      {"cutlass_mla", {128}, 0, {}, rows},
      {"tokenspeed_mla", {32, 64}, 0, {}, rows},
      {"flashmla_sparse", {}, 64, {}, rows, true},
      {"flash_attn_mla_sparse", {}, 64, {}, rows},
      {"flashinfer_mla_sparse", {}, 32, {}, rows, true},
      {"indexer_v32", {64}, 0, {}, rows, true},
      {"indexer_v4", {256}, 0, {BLHNC, BLNHC}, rows, true},
      {"indexer_kpool", {32, 64}, 0, {}, rows, true},  // KV entries, each of several tokens
      {"kpool_tail", {}, 1, {BLHNC}, rows, true},
      {"indexer_v41", {128}, 0, {BLHNC, BLNHC}, rows, true},
      {"indexer_v41_sparse", {128}, 0, {BLHNC, BLNHC}, rows, true},
      {"indexer_m3", {128}, 0, {}, rows},
      {"minimax_m3_sparse", {128}},
      {"sparse_swa", {}, 32, {}, rows},
      {"compressor_v4", {}, 1, {}, rows},
      {"compressor_v41", {}, 1, {}, rows, true},
      {"v4_flashmla", {256}, 0, {}, rows},
      {"v4_flashinfer", {256}, 0, {}, rows},
      {"v41_flashmla", {128}, 0, {}, rows},
      {"v41_flashinfer", {128}, 0, {}, rows},
      {"qsa_state", {}, 1, {BLNHC, BLHNC}, rows_then_head},
      {"flash_attn_diffkv", {}, 16},
      {"inkling_sconv", {}, 1},
      {"gdn", {}, 1, {}, states},
      {"mamba1", {}, 1, {}, states},
      {"mamba2", {}, 1, {}, states},
      {"linear", {}, 1, {}, states},
      {"short_conv", {}, 1, {}, states},
  };
  return rows_of_backends;
}

}  // namespace

bool KernelSizes::takes(std::int64_t block_size) const {
  return std::ranges::find(listed, block_size) != listed.end() ||
         (multiple_of != 0 && block_size % multiple_of == 0);
}

std::int64_t KernelSizes::smallest() const {
  return multiple_of != 0 ? multiple_of : *std::ranges::min_element(listed);
}

const CacheBackend* find_cache_backend(std::string_view name) {
  const auto at = std::ranges::find(cache_backends(), name, &CacheBackend::name);
  return at == cache_backends().end() ? nullptr : &*at;
}

KernelSizes kernel_sizes(const CacheBackend& backend, DeviceFamily device,
                         const KVCacheSpec& spec) {
  const bool by_device = backend.name == "indexer_v41" || backend.name == "indexer_v41_sparse" ||
                         backend.name == "v41_flashmla";
  if (by_device && device == DeviceFamily::sm90) return {{64}, 0};
  if (backend.name == "indexer_kpool") {
    KernelSizes sizes{backend.listed, 0};
    for (std::int64_t& size : sizes.listed) size = tokens_in(spec.tokens_per_state, size);
    return sizes;
  }
  if (backend.name == "flashmla_sparse" && device == DeviceFamily::sm100 &&
      spec.kv_quant_mode != KVQuantMode::none)
    return {{64}, 0};
  return {backend.listed, backend.multiple_of};
}

std::vector<CacheLayout> declared_orders(const CacheBackend& backend, DeviceFamily device) {
  if (backend.name == "flashinfer" && device == DeviceFamily::sm100)
    return {CacheLayout::LBHNC, CacheLayout::BLHNC};
  return backend.orders;
}

bool is_state_backend(const CacheBackend& backend) {
  return backend.binding == PageBinding::states;
}

Result<std::int64_t> common_kernel_block(std::int64_t block_size,
                                         const std::vector<KernelSizes>& sizes) {
  const auto all_take = [&](std::int64_t size) {
    return std::ranges::all_of(sizes, [&](const KernelSizes& s) { return s.takes(size); });
  };
  if (all_take(block_size)) return block_size;
  std::set<std::int64_t, std::greater<>> candidates;
  for (const KernelSizes& s : sizes)
    for (const std::int64_t size : s.listed)
      if (block_size % size == 0) candidates.insert(size);
  for (const std::int64_t size : candidates)
    if (all_take(size)) return size;
  return fail(
      fmt::format("no kernel block size divides blocks of {} tokens and suits every "
                  "backend of the group; choose another --block-size",
                  block_size));
}

}  // namespace lockstep
