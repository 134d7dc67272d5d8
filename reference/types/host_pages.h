// Messages between HiSparse's scheduler and its workers in a step. Pages of sparse attention are
// stored in a host pool, and temporarily on the device; a page is a block of both. Names are vLLM's
// (vllm/v1/hisparse/types.py); the rules follow vllm/v1/hisparse/coordinator.py and layout.py, the
// workers vllm/distributed/kv_transfer/kv_connector/v1/hisparse. Plain types.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// The feature in keys, options and names of connectors, and the key of its pool.
inline constexpr const char* kHostPagesWord = "hisparse";
inline constexpr const char* kHostBlocksKey = "hisparse_host_num_blocks";

// Roles of KV cache groups: rows that live in the host pool, and the keys that choose among them.
inline constexpr const char* kPageSourceRole = "hisparse_source";
inline constexpr const char* kPageIndexerRole = "hisparse_indexer";
// ... as memory sees them: pages on the device, regions of read rows
// (reference/plan/page_groups.h).
inline constexpr const char* kResidentRole = "hisparse_resident";
inline constexpr const char* kHotRole = "hisparse_hot";

// The home of the pages in the host pool, or their places on the device.
inline bool belongs_to_pages(const KVCacheGroupSpec& group) {
  return group.role == kPageSourceRole || keeps_pages(group.spec);
}

// Pages at the end of a request's table that stay pinned: a step in flight may write them.
inline constexpr std::int32_t kActiveTailPages = 2;

// Copies one page of every resident group, to the host after the step's forward pass, or back
// before it.
struct PageTransfer {
  std::int64_t id = 0;
  BlockId host{};                   // of the host pool
  std::vector<BlockId> resident{};  // per resident group, of the device's pool
  bool restores = false;            // from the host
  bool operator==(const PageTransfer&) const = default;
};

// Copies rows that a step writes to the host, one span within a page. A row is block * rows of a
// block + its place there.
struct RowMirror {
  std::vector<std::int64_t> sources{};  // first row, per resident group
  std::int64_t destination = 0;         // first row in the host pool
  std::int32_t num_rows = 0;
  bool operator==(const RowMirror&) const = default;
};

// Where some of a request's pages lie from now on; the null block: on the host alone.
struct ResidencyUpdate {
  std::vector<std::int32_t> pages{};
  std::vector<std::vector<BlockId>> blocks{};  // per resident group, one a page
  bool operator==(const ResidencyUpdate&) const = default;
};

// Of one scheduled request.
struct HostPageRow {
  RequestId id{};
  std::vector<RowMirror> mirrors{};
  ResidencyUpdate residency{};  // empty: nothing has changed
  bool operator==(const HostPageRow&) const = default;
};

struct HostPageCommand {
  bool is_told = false;  // the engine has such groups
  std::vector<PageTransfer> transfers{};
  std::vector<HostPageRow> rows{};  // in the order of SchedulerOutput::scheduled
  bool all_resident = false;        // no row of the step reads from the host
  std::int64_t num_free_host_blocks = 0;
  bool operator==(const HostPageCommand&) const = default;
};

// Number of workers that have submitted, or completed, that transfer since the last report.
struct TransferCount {
  std::int64_t id = 0;
  std::int32_t count = 0;
  bool operator==(const TransferCount&) const = default;
};

}  // namespace lockstep
