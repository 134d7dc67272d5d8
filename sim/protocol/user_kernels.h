// The user's own kernels as a backend calls them. A launch on a device becomes a call into another
// process that maps the device's memory (sim/worker/kernel_process.h), or into a plugin
// (cuda_backend/plugin/plugin_kernels.h).
//
// Invariants
// (1) Tensors are views of the device's memory. A call copies none of their bytes.
// (2) A call's work is complete when call() returns, or is ordered in KernelCall::stream.
//
// Not here: what each function does with its arguments (docs/check_your_kernels.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// A layer of the rank's plan, as the kernels receive it before a run. Zeros: no window, no chunk.
struct KernelLayer {
  std::string name;
  std::string_view kind;
  std::string_view dtype;     // of the cache's elements
  std::string kv_quant_mode;  // of write(); "none": rows are stored unchanged
  std::int32_t index = 0, group = 0;
  std::int64_t sliding_window = 0, attention_chunk_size = 0;  // tokens
  std::int64_t num_kv_heads = 0, head_size = 0;
  std::string declined;  // why the executor's kernels run this layer; empty: the user's do
};

// Returns the name of the quantization that write() applies to a row of this cache, or "none". With
// Numbers::words rows are patterns, not numbers, so every kernel stores them unchanged. A named
// cache dtype has its own row format and comes before the quantization mode. Other caches of
// one-byte elements have one scale per layer.
inline std::string_view quantises(Numbers numbers, const KVCacheSpec& spec) {
  if (numbers == Numbers::words || is_state_kind(spec.kind)) return "none";
  if (!spec.cache_dtype_str.empty()) return spec.cache_dtype_str;  // "fp8_ds_mla"
  if (spec.kv_quant_mode != KVQuantMode::none) return name_of(spec.kv_quant_mode);
  if (spec.dtype == DType::int8) return "int8_per_tensor";
  return itemsize_bytes(spec.dtype) == 1 ? "fp8_per_tensor" : "none";
}

// Returns the layers of a rank's plan, group by group, with `index` as their position. Layers whose
// rows are not one per token are declined: the functions receive slots of tokens, not of rows.
inline std::vector<KernelLayer> kernel_layers(const KVCacheConfig& plan, Numbers numbers) {
  std::vector<KernelLayer> layers;
  for (std::size_t g = 0; g < plan.groups.size(); ++g)
    for (std::size_t i = 0; i < plan.groups[g].layer_names.size(); ++i) {
      const KVCacheSpec& spec = plan.groups[g].layer_spec(i);
      layers.push_back(
          {.name = plan.groups[g].layer_names[i],
           .kind = name_of(spec.kind),
           .dtype = name_of(spec.dtype),
           .kv_quant_mode = std::string(quantises(numbers, spec)),
           .index = static_cast<std::int32_t>(layers.size()),
           .group = static_cast<std::int32_t>(g),
           .sliding_window = is_sliding_window(spec.kind) ? spec.sliding_window : 0,
           .attention_chunk_size = is_chunked(spec.kind) ? spec.attention_chunk_size : 0,
           .num_kv_heads = spec.num_kv_heads,
           .head_size = spec.head_size,
           .declined = is_one_row(spec.tokens_per_state) ? "" : "rows are not one per token"});
    }
  return layers;
}

// A tensor argument. Strides are in bytes, one per dimension.
struct KernelTensor {
  std::string name;
  const std::byte* address = nullptr;
  std::string_view dtype;
  std::vector<std::int64_t> shape, strides;
};

// An array of integers, such as slots or block ids, in host memory.
struct KernelIntegers {
  std::string_view name;
  std::vector<std::int32_t> values;
  const std::int32_t* on_device = nullptr;  // the same array for kernels in this process
};

// One call with all its arguments. Everything that it references lives until call() returns.
struct KernelCall {
  std::string_view function;
  std::int32_t layer = 0;  // in the rank's plan; -1: a whole group
  std::int32_t group = -1;
  std::vector<KernelTensor> tensors = {};
  std::vector<KernelIntegers> integers = {};
  double scale = 0;                     // of attention scores, or of the delta rule's outputs
  const std::byte* memory = nullptr;    // start of the shared memory
  std::string_view memory_handle = {};  // opens a GPU's memory in another process
  void* stream = nullptr;               // cudaStream_t; null on a CPU
};

// A failed call. `kind` is "exception", "fault" (a result that no caller can use), "crash" or
// "hang"; or "harness" if Lockstep's own code failed. `what` describes it in one line.
struct KernelFailure {
  std::string kind, what;
};

// Base class of both kinds of user kernels. layer() and has() are constant after construction, so a
// backend decides once which of its own kernels it replaces.
class UserKernels {
 public:
  explicit UserKernels(std::vector<KernelLayer> layers) : layers_(std::move(layers)) {}
  virtual ~UserKernels() = default;
  virtual std::string_view name() const = 0;  // "kernels:module:Class"
  // Returns true if the user's class defines the function. Others run on the executor's kernels.
  virtual bool has(std::string_view function) const = 0;
  const KernelLayer& layer(std::int32_t number) const {
    return layers_.at(static_cast<std::size_t>(number));
  }
  // Returns false if the functions take offsets into memory that another process maps.
  virtual bool in_process() const { return true; }
  virtual std::string memory() const { return {}; }  // the file to map; the device sets its size
  virtual bool on_gpu() const { return false; }      // True if the memory is the first GPU's
  // Runs a function. Returns nothing if it succeeded. REQUIRES: has(call.function).
  virtual std::optional<KernelFailure> call(const KernelCall& call) = 0;

 protected:
  // Leaves a layer to the executor's kernels. The first reason is kept.
  void decline(std::size_t layer, std::string_view why) {
    if (layers_.at(layer).declined.empty()) layers_[layer].declined = why;
  }
  std::vector<KernelLayer> layers_;
};

}  // namespace lockstep
