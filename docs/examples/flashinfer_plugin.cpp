// A plugin around published kernels: K and V are written by FlashInfer's
// AppendPagedKVCache, compiled from the headers of its Python package. Everything else is the loops
// of plain_plugin.cpp. docs/check_your_kernels.md says how it is built:
//   a C++ compiler   the kernel's threads run one after the other (cuda_on_host.h); no GPU needed
//   nvcc -x cu       the launcher of the package runs on a GPU, in managed memory
//
// FlashInfer finds a token's page by request and position; it gets the block tables as one array
// of page ids with an end for every row, and the strides of the plan.
#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <new>

template <class T>
struct managed_memory {
  using value_type = T;
  managed_memory() = default;
  template <class U>
  managed_memory(const managed_memory<U>&) {}
  T* allocate(size_t count) {
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, count * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { cudaFree(memory); }
  template <class U>
  bool operator==(const managed_memory<U>&) const {
    return true;
  }
};
#define PLAIN_PLUGIN_ALLOCATOR managed_memory
#else
#include "docs/examples/cuda_on_host.h"
#endif

#define PLAIN_PLUGIN_AS_BASE
#include <cstdio>
#include <flashinfer/page.cuh>
#include <string>

#include "docs/examples/plain_plugin.cpp"

#ifndef FLASHINFER_PLUGIN_BUG
#define FLASHINFER_PLUGIN_BUG 0  // 1: pages are treated as dense
#endif

namespace {

using page_ids = std::vector<int32_t, PLAIN_PLUGIN_ALLOCATOR<int32_t>>;

struct flashinfer_backend : lockstep_backend {
  page_ids positions, rows;            // of the tokens of the last map_slots()
  page_ids indices, indptr, last_len;  // kernel block ids of all rows of a group, row by row
  tensor_bytes keys, values;           // where the kernel can address them
  std::string error;
};

flashinfer_backend* own(lockstep_backend* b) { return static_cast<flashinfer_backend*>(b); }

lockstep_backend* create_flashinfer(const lockstep_plan* plan, char* error, size_t error_bytes) {
  for (int32_t l = 0; l < plan->num_layers; ++l) {
    const lockstep_layer& layer = plan->layers[l];
    const int32_t d = layer.head_size;
    if (layer.num_parts == 2 && (d == 64 || d == 128 || d == 256 || d == 512)) continue;
    std::snprintf(error, error_bytes,
                  "FlashInfer appends K and V with heads of 64, 128, 256 or 512; %s has %d parts "
                  "of %d elements",
                  layer.name, layer.num_parts, d);
    return nullptr;
  }
  lockstep_backend* plain = create(plan, error, error_bytes);
  auto* b = new flashinfer_backend{std::move(*plain), {}, {}, {}, {}, {}, {}, {}, {}};
  destroy(plain);
  return b;
}

void destroy_flashinfer(lockstep_backend* b) { delete own(b); }

const char* why_append_failed(lockstep_backend* b) { return own(b)->error.c_str(); }

int map_slots_and_keep_tokens(lockstep_backend* b, const int32_t* positions, const int32_t* rows,
                              int32_t num_tokens, int32_t num_padded_tokens, int64_t* slots) {
  own(b)->positions.assign(positions, positions + num_tokens);
  own(b)->rows.assign(rows, rows + num_tokens);
  return map_slots(b, positions, rows, num_tokens, num_padded_tokens, slots);
}

void flatten_tables(flashinfer_backend* b, int32_t group_index) {
  const lockstep_group& group = b->plan->groups[group_index];
  b->indices.clear();
  b->indptr.assign(1, 0);
  for (const std::vector<int32_t>& table : b->tables[group_index]) {
    for (const int32_t block : table)
      for (int32_t i = 0; i < group.blocks_per_kv_block; ++i)
        b->indices.push_back(block * group.blocks_per_kv_block + i);
    b->indptr.push_back(static_cast<int32_t>(b->indices.size()));
  }
  b->last_len.assign(b->tables[group_index].size(), group.kernel_block_size);
}

// The rows of a layer as FlashInfer describes a cache; strides count elements.
template <class Element>
flashinfer::paged_kv_t<Element, int32_t> cache_of(flashinfer_backend* b,
                                                  const lockstep_layer& layer) {
  const int64_t size = sizeof(Element);
  const int64_t dense = int64_t{b->plan->groups[layer.group].kernel_block_size} *
                        layer.num_kv_heads * layer.head_size;
  const int64_t strides[] = {FLASHINFER_PLUGIN_BUG ? dense : layer.block_stride / size,
                             layer.token_stride / size, layer.head_stride / size};
  unsigned char* keys = b->tensors[layer.tensor].data() + layer.offset;
  return {static_cast<uint32_t>(layer.num_kv_heads),
          static_cast<uint32_t>(b->plan->groups[layer.group].kernel_block_size),
          static_cast<uint32_t>(layer.head_size),
          static_cast<uint32_t>(b->last_len.size()),
          flashinfer::QKVLayout::kNHD,
          reinterpret_cast<Element*>(keys),
          reinterpret_cast<Element*>(keys + layer.part_stride),
          strides,
          b->indices.data(),
          b->indptr.data(),
          b->last_len.data()};
}

template <class Element>
cudaError_t append(flashinfer_backend* b, const lockstep_layer& layer, uint32_t num_tokens) {
  const auto cache = cache_of<Element>(b, layer);
  auto* keys = reinterpret_cast<Element*>(b->keys.data());
  auto* values = reinterpret_cast<Element*>(b->values.data());
  const size_t stride_h = layer.head_size, stride_n = stride_h * layer.num_kv_heads;
#ifdef __CUDACC__
  const cudaError_t launched =
      flashinfer::AppendPagedKVCache(cache, keys, values, b->rows.data(), b->positions.data(),
                                     num_tokens, stride_n, stride_h, stride_n, stride_h);
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
#else
  constexpr uint32_t kCtas = 3;  // each takes every third token, as on a GPU of three SMs
  DISPATCH_HEAD_DIM(layer.head_size, HEAD_DIM, {
    constexpr uint32_t vec_size = std::max(16 / sizeof(Element), HEAD_DIM / 32);
    run_grid(kCtas, dim3(HEAD_DIM / vec_size, layer.num_kv_heads), [&] {
      flashinfer::AppendPagedKVCacheKernel<HEAD_DIM, vec_size, Element, int32_t>(
          cache, keys, values, b->rows.data(), b->positions.data(), num_tokens, stride_n, stride_h,
          stride_n, stride_h);
    });
  });
  return cudaSuccess;
#endif
}

int append_rows(lockstep_backend* plain, int32_t layer_index, const void* keys, const void* values,
                int32_t num_tokens) {
  flashinfer_backend* b = own(plain);
  const lockstep_layer& layer = b->plan->layers[layer_index];
  const size_t size = size_t(num_tokens) * layer.num_kv_heads * layer.row_bytes;
  const auto bytes = [&](const void* rows) { return static_cast<const unsigned char*>(rows); };
  b->keys.assign(bytes(keys), bytes(keys) + size);
  b->values.assign(bytes(values), bytes(values) + size);
  flatten_tables(b, layer.group);
  cudaError_t status = cudaSuccess;
  switch (layer.row_bytes / layer.head_size) {
    case 4:
      status = append<float>(b, layer, num_tokens);
      break;
    case 2:
      status = append<nv_bfloat16>(b, layer, num_tokens);
      break;
    default:
      status = append<__nv_fp8_e4m3>(b, layer, num_tokens);
  }
  if (status != cudaSuccess) b->error = "AppendPagedKVCache: CUDA error " + std::to_string(status);
  return status == cudaSuccess ? 0 : 1;
}

lockstep_plugin with_append() {
  lockstep_plugin plugin = kPlugin;
  plugin.name = "FlashInfer's AppendPagedKVCache";
  plugin.create = create_flashinfer;
  plugin.destroy = destroy_flashinfer;
  plugin.error_text = why_append_failed;
  plugin.map_slots = map_slots_and_keep_tokens;
  plugin.write_rows = append_rows;
  return plugin;
}

}  // namespace

extern "C" const lockstep_plugin* lockstep_plugin_open() {
  static const lockstep_plugin plugin = with_append();
  return &plugin;
}
