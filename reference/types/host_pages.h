// Messages between HiSparse's scheduler and its workers in one step. Pages of sparse attention have
// their home in a host pool, and copies on the device for a while; a page is one block of either
// pool. Names are vLLM's (vllm/v1/hisparse/types.py). The rules follow
// vllm/v1/hisparse/coordinator.py and layout.py; the workers follow
// vllm/distributed/kv_transfer/kv_connector/v1/hisparse. Plain types:
// reference/cache/page_coordinator.h decides their content.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// The feature's word in keys, options and connector names, and the configuration key of its pool.
inline constexpr const char* kHostPagesWord = "hisparse";
inline constexpr const char* kHostBlocksKey = "hisparse_host_num_blocks";

// Roles of KV cache groups. Source: rows whose home is the host pool. Indexer: the keys that select
// which of those rows attention reads; they stay on the device.
inline constexpr const char* kPageSourceRole = "hisparse_source";
inline constexpr const char* kPageIndexerRole = "hisparse_indexer";
// Roles that only memory plans have (reference/plan/page_groups.h): pages on the device, and
// regions of the rows that a request reads.
inline constexpr const char* kResidentRole = "hisparse_resident";
inline constexpr const char* kHotRole = "hisparse_hot";

// True if the group is the pages' home in the host pool, or holds device copies of them.
inline bool belongs_to_pages(const KVCacheGroupSpec& group) {
  return group.role == kPageSourceRole || keeps_pages(group.spec);
}

// Pages at the end of a request's table that stay pinned: a step in flight may still write them
// (vLLM 0.33.0, v1/hisparse/types.py, ACTIVE_TAIL_PAGES).
inline constexpr std::int32_t kActiveTailPages = 2;

// One page of every resident group, copied to the host after the step's forward pass, or restored
// from the host before it. `id` counts up from 0 and is never reused in a run.
struct PageTransfer {
  std::int64_t id = 0;
  BlockId host{};                   // in the host pool
  std::vector<BlockId> resident{};  // per resident group, in the device pool
  bool restores = false;            // true: from the host to the device
  bool operator==(const PageTransfer&) const = default;
};

// Rows that a step writes and also copies to the host, one span within a page. A row number is
// block * rows per block + the row's offset in the block.
struct RowMirror {
  std::vector<std::int64_t> sources{};  // first row, per resident group
  std::int64_t destination = 0;         // first row in the host pool
  std::int32_t num_rows = 0;
  bool operator==(const RowMirror&) const = default;
};

// New device blocks of some of a request's pages. The null block: the page is on the host only.
struct ResidencyUpdate {
  std::vector<std::int32_t> pages{};           // page numbers of the request
  std::vector<std::vector<BlockId>> blocks{};  // [num_resident_groups][pages.size()]
  bool operator==(const ResidencyUpdate&) const = default;
};

// The page work of one scheduled request.
struct HostPageRow {
  RequestId id{};
  std::vector<RowMirror> mirrors{};
  ResidencyUpdate residency{};  // empty: no change
  bool operator==(const HostPageRow&) const = default;
};

// The page work of a whole step, as the scheduler sends it to every worker.
struct HostPageCommand {
  bool is_told = false;  // true if the engine has HiSparse groups
  std::vector<PageTransfer> transfers{};
  std::vector<HostPageRow> rows{};  // in the order of SchedulerOutput::scheduled
  bool all_resident = false;        // true if no row of the step is read from the host
  std::int64_t num_free_host_blocks = 0;
  bool operator==(const HostPageCommand&) const = default;
};

// Workers that submitted, or completed, the transfer since the last report. A transfer is done when
// as many have completed it as have submitted it.
struct TransferCount {
  std::int64_t id = 0;
  std::int32_t count = 0;
  bool operator==(const TransferCount&) const = default;
};

}  // namespace lockstep
