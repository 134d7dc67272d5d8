// The views of a plan as an engine makes them: each backend defines a shape and an order of the raw
// buffer, which are padded, re-strided and sliced. Independent of the reference's closed form
// (reference/plan/layout.h); the prover shows that both address the same bytes.
//
// Invariants:
// 1. Offsets and strides are in elements of the view's dtype and in 64 bits.
// 2. Every layer of a plan gets its views, or the plan is refused with a reason.
// 3. The backend names the block dimension. It is never guessed from a size of 2.
// Not checked here: that a view stays inside its buffer and its pages (sim/check/plan_prover.h).
// Steps: _reshape_kv_cache_tensors and _update_hybrid_attention_mamba_layout of vLLM 0.22.1's
// gpu_model_runner.py; packing: vLLM pull request 35703.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "cuda_backend/kernels/params.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep::cuda {

// The shape and order of each attention backend's cache, as the engine's backend classes define
// them.
//
// 1. shape() is the logical shape; stride_order()[i] is the logical dimension that is i-th in
//    memory.
// 2. A layers dimension is the first logical dimension.
// 3. The block dimension is found with a number of blocks that no other dimension has, never
//    guessed.
// Sources: get_kv_cache_shape and get_kv_cache_stride_order of vllm/v1/attention/backends/.

using Dims = std::vector<std::int64_t>;
using Order = std::vector<std::int32_t>;

// Which backend shapes this layer when `chosen` runs the model's attention; none for states.
std::optional<AttentionBackend> backend_of(const KVCacheSpec& spec, AttentionBackend chosen);

// Tokens that a kernel of this backend takes as one block: the listed sizes, or every multiple of
// 16 (or 1) where the list is empty.
struct KernelSizes {
  std::vector<std::int64_t> listed;  // descending
  std::int64_t base = 1;
  bool takes(std::int64_t size) const;
};
KernelSizes kernel_sizes(AttentionBackend backend, bool hybrid_fp32);

Dims cache_shape(AttentionBackend backend, const KVCacheSpec& spec, std::int64_t num_blocks,
                 std::int64_t block_size);
Order stride_order(AttentionBackend backend, CacheLayout layout, bool layers_dimension);

// Rows that `tokens` tokens from the start of a block take.
constexpr std::int64_t stored_rows(const KVCacheSpec& spec, std::int64_t tokens) {
  return rows_before(token_rows(spec.tokens_per_state), tokens);
}

std::int64_t numel(std::span<const std::int64_t> dims);
// Strides of a dense array of this shape, last dimension innermost.
Dims dense_strides(const Dims& shape);
// Strides of the logical dimensions when they lie in memory in the order `order`.
Dims ordered_strides(const Dims& shape, const Order& order);

// Which logical dimension is what: cache_shape asked with telling numbers.
struct DimRoles {
  std::int32_t block = 0;
  std::int32_t kv = -1;
  std::int32_t token = -1;
  std::int32_t head = -1;
};
DimRoles dim_roles(AttentionBackend backend);

struct ViewOptions {
  AttentionBackend backend = AttentionBackend::flash_attn;
  CacheLayout layout = CacheLayout::NHD;
  LayoutRule rule = LayoutRule::isolated;
  // Tokens of a layer's own kernel blocks, where they are a part of its group's (overlaid layouts).
  std::map<std::string, std::int64_t> mapped_kernel_blocks = {};
};

// An overlaid layout: overlaid_views.h. Refused: no kernel takes a part of a block; a page that a
// view cannot stride over; K and V rows of different lengths.
Result<PoolViews> derive_views(const KVCacheConfig& plan, const ViewOptions& options);

// Bytes of one block of a layer in its buffer: its shape's bytes, or the padded page.
std::int64_t page_bytes(const KVCacheSpec& spec, AttentionBackend chosen);

// Byte offset in the raw buffer of the element at `index`, one entry a dimension of the view.
std::int64_t view_byte_offset(const TensorView& view, std::span<const std::int64_t> index);

// A layer's tensor, and its place among the layers of a pack.
struct TensorPlace {
  std::size_t tensor = 0;
  std::int64_t place = 0;
};

// The steps by which an engine turns a plan into views. A subclass overrides the steps in which a
// version of an engine differs. derive_views() uses the steps of this class.
class ViewDeriver {
 public:
  // Both must live as long as this object.
  ViewDeriver(const KVCacheConfig& plan, const ViewOptions& options);
  virtual ~ViewDeriver() = default;
  ViewDeriver(const ViewDeriver&) = delete;
  ViewDeriver& operator=(const ViewDeriver&) = delete;

  Result<PoolViews> derive();

 protected:
  // The engine's buffers: a page of every block, for each tensor.
  virtual void allocate();
  // Pages of layers that a tensor is allocated for, of each block.
  virtual std::int64_t layers_allocated(const KVCacheGroupSpec& group) const {
    return group.layers_per_page;
  }
  // The block itself where all kernels of the group take it, else the largest listed size that
  // divides it and that all take; 0: none.
  virtual std::int64_t kernel_size(const KVCacheGroupSpec& group) const;
  virtual Result<LayerViews> layer_views(std::size_t group, std::size_t layer) const;
  // The view of a token cache whose layer is at `at`; `pack`: layers per page.
  virtual Result<LayerViews> token_views(const KVCacheSpec& spec, std::int64_t kernel_size,
                                         std::int64_t pack, TensorPlace at,
                                         const std::string& name) const;
  virtual std::int64_t kernel_blocks(std::int64_t splits) const {
    return plan_.num_blocks * splits;
  }
  virtual Order cache_order(AttentionBackend backend, bool packed) const {
    return stride_order(backend, options_.layout, packed);
  }
  virtual std::int64_t place_in_pack(TensorPlace at) const { return at.place; }
  // Bytes from a block's states to the next one's.
  virtual std::int64_t state_stride_bytes(const KVCacheSpec& spec) const {
    return page_bytes(spec, options_.backend);
  }
  // Where a state begins, in elements; itemsize_before: of the state before it, 0 for the first.
  virtual std::int64_t state_offset(std::int64_t offset_bytes, std::int64_t itemsize,
                                    std::int64_t /*itemsize_before*/) const {
    return offset_bytes / itemsize;
  }
  // After all views are made: re-strides pair-first views where pages are shared.
  virtual Result<void> update_layouts();

  // States whose page begins at first_byte in block 0, and stride_bytes further in every block.
  Result<LayerViews> state_views(const KVCacheSpec& spec, std::int64_t first_byte,
                                 std::int64_t stride_bytes, const std::string& name) const;
  // Layer `layer` of a group among the tensors of the plan.
  TensorPlace placement(const KVCacheGroupSpec& group, std::size_t layer) const;
  // The K and the V of a block side by side: [2, num_blocks, ...] with strides (h, 2h, ...).
  static void lay_pair_in_page(TensorView& view);
  bool has_states_and_attention() const { return has_states_ && has_attention_; }
  template <class Function>
  void for_each_token_cache(Function&& function) {
    for (std::size_t g = 0; g < pool_.groups.size(); ++g)
      for (LayerViews& views : pool_.groups[g])
        if (views.kernel_block_size > 0) function(plan_.groups[g], views);
  }

  const KVCacheConfig& plan_;
  const ViewOptions& options_;
  std::vector<std::int64_t> kernel_size_of_group_;
  PoolViews pool_;

 private:
  Result<void> choose_kernel_sizes();
  bool pages_are_shared() const;

  bool has_states_ = false;
  bool has_attention_ = false;
  bool hybrid_fp32_ = false;
};

// Bytes of one block of one layer that its shape holds.
std::int64_t dense_page_bytes(const KVCacheSpec& spec, AttentionBackend chosen);

}  // namespace lockstep::cuda
