// The views of caches that overlay one allocation: what a worker makes of a plan in one of the six
// orders of [layers, blocks, heads, tokens, content]. It asks each backend for heads and rows as
// ever, but K and V of a token and head are one content, and all groups begin at byte 0.
//
// 1. storage_offset counts from the begin of the allocation, whatever tensor that is in.
// 2. Blocks are the first dimension of every view, K and V the second, then heads, tokens, a row.
// 3. The allocation is told in tensors that follow one another, a page of every block each: one
//    with blocks outermost, one for each layer with layers outermost, one for each head slot of a
//    layer in order LHBNC.
// Nothing here knows the reference's plan (reference/placement/) or closed form.
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
  // Where the pages of one layer lie: the layers of its group that are alike stand together.
  struct Pages {
    std::int64_t heads = 0, rows = 0, content = 0;  // of one page
    std::int64_t first_byte = 0;                    // of block 0
    std::int64_t block_stride = 0, head_stride = 0, row_stride = 0;
    bool is_padded = false;
  };
  // In kernel blocks, of which `splits` are a block.
  virtual Result<Pages> pages(std::size_t group, std::size_t layer, std::int64_t splits) const;
  // Kernel blocks of `bytes` from a block to the next one, where a layer's table is mapped.
  virtual std::int64_t kernel_blocks_apart(const Pages& at, std::int64_t bytes) const {
    return at.block_stride / bytes;
  }
  // Bytes from a layer to the next one that is like it.
  virtual std::int64_t layer_stride(const KVCacheSpec& spec, const Pages& at) const;

  Result<LayerViews> layer_views(std::size_t group, std::size_t layer) const override;
  Result<void> update_layouts() override { return {}; }
  void allocate() override;

 private:
  bool heads_inside_tokens() const;
  bool blocks_outermost() const;
  Result<LayerViews> row_views(const KVCacheSpec& spec, const Pages& at, std::int64_t splits,
                               const std::string& name) const;
  // `whole`, which shows manager blocks, in kernel blocks of `tokens`.
  Result<LayerViews> mapped_views(LayerViews whole, const KVCacheSpec& spec, const Pages& at,
                                  std::int64_t tokens, const std::string& name) const;
  Result<LayerViews> views_of_states(const KVCacheSpec& spec, const Pages& at,
                                     const std::string& name) const;
};

}  // namespace lockstep::cuda
