// A plugin around published kernels: K and V are written by FlashInfer's AppendPagedKVCache,
// compiled from the headers of its Python package. docs/check_your_kernels.md says how it is built:
//   a C++ compiler   the kernel's threads run one after the other (cuda_on_host.h); no GPU needed
//   nvcc -x cu       the launcher of the package runs on a GPU
//
// FlashInfer finds a token's page by request and position: a block table is its array of page ids,
// and every row of the table ends where the next one begins.
#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "docs/examples/cuda_on_host.h"
#endif

#include <cstdio>
#include <flashinfer/page.cuh>
#include <map>
#include <string>
#include <string_view>

#include "cuda_backend/plugin/plugin.h"

#ifndef FLASHINFER_PLUGIN_BUG
#define FLASHINFER_PLUGIN_BUG 0  // 1: pages are treated as dense
#endif

namespace {

struct run {
  std::map<int32_t, lockstep_call> steps;  // of each group: the last begin_step()
  std::map<int64_t, int32_t*> row_ends;    // by width of a table, where the kernel can address them
  std::string error;
};
run* own(void* self) { return static_cast<run*>(self); }

void* open_run(const lockstep_layer* layers, int32_t num_layers, char* error, size_t error_bytes) {
  for (int32_t l = 0; l < num_layers; ++l) {
    const int32_t d = layers[l].head_size;
    if (d == 64 || d == 128 || d == 256 || d == 512) continue;
    std::snprintf(error, error_bytes,
                  "FlashInfer appends heads of 64, 128, 256 or 512; %s has heads of %d elements",
                  layers[l].name, d);
    return nullptr;
  }
  return new run;
}

// row_ends[i] = i * width
int32_t* row_ends(run* self, const lockstep_tensor& table) {
  constexpr int32_t kRows = 1 << 16;
  int32_t*& ends = self->row_ends[table.shape[1]];
  if (ends != nullptr) return ends;
#ifdef __CUDACC__
  if (cudaMallocManaged(&ends, kRows * sizeof(int32_t)) != cudaSuccess) return nullptr;
#else
  ends = new int32_t[kRows];
#endif
  for (int32_t row = 0; row < kRows; ++row) ends[row] = row * static_cast<int32_t>(table.shape[1]);
  return ends;
}

void close_run(void* self) {
  for (const auto& [width, ends] : own(self)->row_ends) {
#ifdef __CUDACC__
    cudaFree(ends);
#else
    delete[] ends;
#endif
  }
  delete own(self);
}

const char* why_append_failed(void* self) { return own(self)->error.c_str(); }

int begin_step(void* self, const lockstep_call* call) {
  own(self)->steps[call->group] = *call;
  return 0;
}

template <class Element>
cudaError_t append(run* self, const lockstep_call* call) {
  const lockstep_call& step = self->steps[call->layer->group];
  const lockstep_tensor &cache = call->kv_cache, &table = step.block_table;
  const int64_t size = sizeof(Element), head_size = cache.shape[4];
  const int64_t dense = cache.shape[2] * cache.shape[3] * head_size;
  const int64_t strides[] = {FLASHINFER_PLUGIN_BUG ? dense : cache.strides[1] / size,
                             cache.strides[2] / size, cache.strides[3] / size};
  auto* keys = static_cast<Element*>(cache.data);
  int32_t* ends = row_ends(self, table);
  const flashinfer::paged_kv_t<Element, int32_t> pages{static_cast<uint32_t>(cache.shape[3]),
                                                       static_cast<uint32_t>(cache.shape[2]),
                                                       static_cast<uint32_t>(head_size),
                                                       static_cast<uint32_t>(table.shape[0]),
                                                       flashinfer::QKVLayout::kNHD,
                                                       keys,
                                                       keys + cache.strides[0] / size,
                                                       strides,
                                                       static_cast<int32_t*>(table.data),
                                                       ends,
                                                       ends};
  const auto num_tokens = static_cast<uint32_t>(step.positions.shape[0]);
  auto* key = static_cast<Element*>(call->key.data);
  auto* value = static_cast<Element*>(call->value.data);
  auto* rows = static_cast<int32_t*>(step.batch_indices.data);
  auto* positions = static_cast<int32_t*>(step.positions.data);
  const auto stride_n = static_cast<size_t>(call->key.strides[0] / size);
  const auto stride_h = static_cast<size_t>(call->key.strides[1] / size);
#ifdef __CUDACC__
  return flashinfer::AppendPagedKVCache(pages, key, value, rows, positions, num_tokens, stride_n,
                                        stride_h, stride_n, stride_h,
                                        static_cast<cudaStream_t>(call->stream));
#else
  constexpr uint32_t kCtas = 3;  // each takes every third token, as on a GPU of three SMs
  DISPATCH_HEAD_DIM(head_size, HEAD_DIM, {
    constexpr uint32_t vec_size = std::max(16 / sizeof(Element), HEAD_DIM / 32);
    run_grid(kCtas, dim3(HEAD_DIM / vec_size, static_cast<uint32_t>(cache.shape[3])), [&] {
      flashinfer::AppendPagedKVCacheKernel<HEAD_DIM, vec_size, Element, int32_t>(
          pages, key, value, rows, positions, num_tokens, stride_n, stride_h, stride_n, stride_h);
    });
  });
  return cudaSuccess;
#endif
}

const char* declines(void*, const lockstep_layer* layer) {
  return std::string_view(layer->kv_quant_mode) == "none" ? nullptr : "rows to quantise";
}

int write(void* self, const lockstep_call* call) {
  const std::string_view dtype = call->key.dtype;
  const cudaError_t status = dtype == "fp32"   ? append<float>(own(self), call)
                             : dtype == "bf16" ? append<nv_bfloat16>(own(self), call)
                             : dtype == "fp16" ? append<half>(own(self), call)
                                               : append<__nv_fp8_e4m3>(own(self), call);
  own(self)->error = "AppendPagedKVCache: CUDA error " + std::to_string(status);
  return status;
}

lockstep_plugin with_append() {
  lockstep_plugin plugin{};
  plugin.version = LOCKSTEP_PLUGIN_VERSION;
  plugin.struct_bytes = sizeof plugin;
  plugin.name = "FlashInfer's AppendPagedKVCache";
#ifdef __CUDACC__
  plugin.on_gpu = 1;
#endif
  plugin.open = open_run;
  plugin.close = close_run;
  plugin.error_text = why_append_failed;
  plugin.declines = declines;
  plugin.begin_step = begin_step;
  plugin.write = write;
  return plugin;
}

}  // namespace

extern "C" const lockstep_plugin* lockstep_plugin_open() {
  static const lockstep_plugin plugin = with_append();
  return &plugin;
}
