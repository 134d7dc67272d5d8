// The views of caches that overlay one allocation, in one of the six orders of [layers, blocks,
// heads, tokens, content]. Each backend defines heads and rows, as elsewhere, but K and V of a
// token and head are one content, and all groups start at byte 0.
//
// Invariants:
// 1. storage_offset counts from the start of the allocation.
// 2. Blocks are the first dimension of every view, K and V the second, then heads, tokens, a row.
// 3. The allocation is described as consecutive tensors with a page per block each: one tensor with
//    blocks outermost, one per layer with layers outermost, one per head slot of a layer in order
//    LHBNC.
// Independent of the reference's plan (reference/placement/) and closed form.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "cuda_backend/views/views.h"

namespace lockstep::cuda {

// Bytes of the page of each tensor of rule 3.
std::vector<std::int64_t> overlaid_pages(const KVCacheConfig& plan, const ViewOptions& options);

// The plan with the tensors of rule 3 in place of its own.
KVCacheConfig overlaid_plan(KVCacheConfig plan, const ViewOptions& options);

class OverlaidDeriver : public ViewDeriver {
 public:
  OverlaidDeriver(const KVCacheConfig& plan, const ViewOptions& options);

 protected:
  // The pages of one layer. Layers of a group with the same spec are adjacent.
  struct Pages {
    std::int64_t heads = 0, rows = 0, content = 0;  // of one page
    std::int64_t first_byte = 0;                    // of block 0
    std::int64_t block_stride = 0, head_stride = 0, row_stride = 0;
    bool is_padded = false;
  };
  // In kernel blocks; `splits` of them are a block.
  virtual Result<Pages> pages(std::size_t group, std::size_t layer, std::int64_t splits) const;
  // Kernel blocks of `bytes` from a block to the next one, where a layer's table is mapped.
  virtual std::int64_t kernel_blocks_apart(const Pages& at, std::int64_t bytes) const {
    return at.block_stride / bytes;
  }
  // Bytes from a layer to the next one with the same spec.
  virtual std::int64_t layer_stride(const KVCacheSpec& spec, const Pages& at) const;

  Result<LayerViews> layer_views(std::size_t group, std::size_t layer) const override;
  Result<void> update_layouts() override { return {}; }
  void allocate() override;

 private:
  Result<LayerViews> row_views(const KVCacheSpec& spec, const Pages& at, std::int64_t splits,
                               const std::string& name) const;
  // `whole`, which shows manager blocks, in kernel blocks of `tokens`.
  Result<LayerViews> mapped_views(LayerViews whole, const KVCacheSpec& spec, const Pages& at,
                                  std::int64_t tokens, const std::string& name) const;

  const bool blocks_outermost_;
  const bool heads_inside_;  // a token's heads are adjacent
};

}  // namespace lockstep::cuda
