// The positions of the model's pages in an engine worker's memory: derived from the views that its
// kernels write through, and checked against the views that the model derives.
//
// Invariants
// (1) A page of the model is a page of the worker with as many bytes, block by block, tensor by
//     tensor. Its bytes may have another order, which may differ from group to group; a block has
//     the order of the group that last allocated it. A view in kernel blocks divides each block
//     into equal parts, back to back in its page. In 0.22.1 a tensor may have K of all blocks
//     before V of all blocks: a page is then two halves.
// (2) Every byte of a page has one position: rows where the views put them, and the bytes of no row
//     in address order. States have the model's positions in every layout.
// (3) Views that leave their block's page, overlap, or differ from the model's are findings; no map
//     exists then.
//
// Supported layouts: that of 0.22.1 (the model's own, reference/plan/layout.h) and, of later
// releases (vllm/v1/kv_cache_layout.py), LBNHC, LBHNC, BLNHC and BLHNC. Not supported: BHLNC and
// LHBNC, whose pages are not contiguous.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/plan/memory_plan.h"

namespace lockstep {

// K or V of a layer, as the kernel that writes it addresses it. Offsets and strides in bytes. A row
// of slot s and head h is at offset + kernel block * block_stride + s * token_stride + h *
// head_stride.
struct WorkerView {
  std::int64_t offset = 0;
  std::int64_t blocks = 0, tokens = 0, heads = 0, row_bytes = 0;
  std::int64_t block_stride = 0, token_stride = 0, head_stride = 0;
  // Kernel blocks per block of the pool. `blocks` and `tokens` count kernel blocks.
  std::int64_t kernel_blocks = 1;
};

// A state tensor of a layer. The elements of a block are contiguous. All in bytes.
struct WorkerState {
  std::int64_t offset = 0;
  std::int64_t blocks = 0, bytes = 0;
  std::int64_t block_stride = 0;
};

// A layer as the worker reports it when it opens its caches.
struct WorkerLayer {
  std::string name;
  std::int64_t page_offset = 0;  // of block 0, in the worker's memory
  std::int64_t page_stride = 0;
  std::vector<WorkerView> parts;    // K, V; only one for rows without V; none for states
  std::vector<WorkerState> states;  // of a recurrent layer
};

// The map of one worker. gather() and scatter() convert one page; they cost O(page bytes).
class PageMap {
 public:
  // Derives the map. `layers`: in the plan's order. `order`: the worker's layout; empty: that of
  // 0.22.1. Errors: pages of different sizes, an unknown layout. Other differences become findings.
  static Result<PageMap> create(const KVCacheConfig& plan, const MemoryPlan& layout,
                                std::span<const WorkerLayer> layers, std::string_view order,
                                std::int64_t memory_bytes);

  // Differences between the worker's views and the model's, one line each; empty: the map holds.
  const std::vector<std::string>& findings() const { return findings_; }

  std::int64_t page_size_bytes(std::int32_t tensor) const { return tensors_[tensor].page_bytes; }
  std::int32_t num_tensors() const { return static_cast<std::int32_t>(tensors_.size()); }
  // Copies a page between the worker's memory and the model's order. `group`: the group whose order
  // the block has; -1: none yet. REQUIRES: no findings; `page` has page_size_bytes().
  void gather(std::span<const std::uint8_t> memory, std::int32_t tensor, BlockId block,
              std::int32_t group, std::span<std::uint8_t> page) const;
  void scatter(std::span<std::uint8_t> memory, std::int32_t tensor, BlockId block,
               std::int32_t group, std::span<const std::uint8_t> page) const;
  // Returns, per byte of the model's page, true if rows of the group use it; or rows of any group.
  const std::vector<bool>& used_bytes(std::int32_t tensor, std::int32_t group) const;
  const std::vector<bool>& used_bytes_of_any(std::int32_t tensor) const {
    return tensors_[tensor].used_by_any;
  }

  // Returns the offset of one row in the worker's memory, through the worker's own view.
  static std::int64_t row_offset(const WorkerLayer& layer, BlockId block, std::int64_t part,
                                 std::int64_t slot, std::int64_t head);

 private:
  // A run of bytes with one offset in both orders.
  struct Segment {
    // in_memory: relative to the page's first byte, of which V's half follows K's
    std::int64_t in_page = 0, in_memory = 0, size = 0;
  };
  // The byte order of one group's blocks. Without segments: the model's order.
  struct Order {
    std::vector<Segment> segments;
    std::vector<bool> used;  // per byte: true if a row has it
  };
  struct Tensor {
    std::int64_t page_bytes = 0;
    std::int64_t stride = 0;       // from page to page
    std::int64_t offset = -1;      // of block 0; -1: no layer uses it
    std::int64_t from_k_to_v = 0;  // bytes from a block's K to its V; 0: in one page
    std::vector<Order> order;      // by group
    std::vector<bool> used_by_any;
  };

  // Checks one layer and adds its bytes to its group's order.
  Result<void> add_layer(const LayerMemory& model, const WorkerLayer& layer, std::string_view order,
                         std::int64_t memory_bytes);
  void add_rows(const LayerMemory& model, const WorkerLayer& layer, std::int64_t part,
                std::string_view order, const Tensor& tensor, Order& made);
  Result<void> add_states(const LayerMemory& model, const WorkerLayer& layer, const Tensor& tensor,
                          Order& made);
  // Calls copy(byte in the page, byte in memory, bytes) for each run of the block's bytes.
  template <class Copy>
  void each_run(const Tensor& tensor, BlockId block, std::int32_t group, const Copy& copy) const;
  // Adds a finding about a layer, up to a limit.
  void find(const WorkerLayer& layer, std::string_view what);
  // Maps the bytes of no row, checks for overlaps, and joins adjacent runs.
  void complete(Tensor& tensor, std::size_t group);

  std::int64_t num_blocks_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<std::string> findings_;
};

}  // namespace lockstep
