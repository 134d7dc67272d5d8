// Host pages on the device: rule (25) of sim/protocol/backend.h. Tables of residency in
// addition to the block tables, hot regions, and the copies of rows between the host and both.
//
// Invariants:
// 1. groups_, entries_ and residency_ have one entry per group of resident pages.
// 2. sparse_ has one entry per layer of the source, in its order: a resident and a hot layer whose
//    rows have the same size and stride. place_ maps the plan's layers to it.
// 3. Readers of resident layers look a page up in the table of residency. Where it has the null
//    block, they read through away_of_layer().
// 4. The device chooses the slot of a region that a row takes. The host has no copy of the regions.
// 5. num_reads_ counts every read of the run. A slot's last use is such a number, and 0 is never
//    one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/pool/host_tier.h"
#include "cuda_backend/step/block_tables.h"
#include "cuda_backend/views/layer_caches.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

class SparsePages {
 public:
  // Null without host pages. Errors: no host tier; rows that are padded within a page; regions of
  // different sizes. REQUIRES: all arguments outlive the object.
  static Result<std::unique_ptr<SparsePages>> create(Device& device, const BackendConfig& config,
                                                     const LayerCaches& layers,
                                                     const BlockTables& tables,
                                                     const HostTier* tier);

  // Edits the residency and clears the regions of cleared rows. After the block tables.
  void apply(const StepProgram& program);
  // Copies the step's rows to the host. After they are written.
  void mirror(const StepProgram& program);
  // Copies the rows that are read into hot regions. After mirror().
  void swap_in(const StepProgram& program);

  bool is_resident(std::size_t layer) const { return place_[layer] >= 0; }
  // The layer's table of residency.
  const GroupTable& residency(std::size_t layer) const {
    LS_CHECK(is_resident(layer), "layer {} has no resident pages", layer);
    return residency_.host[static_cast<std::size_t>(sparse_[place_[layer]].table)];
  }
  const AwayRows* away_of_layer(std::size_t layer) const {
    LS_CHECK(is_resident(layer), "layer {} has no resident pages", layer);
    return away_.data() + place_[layer];
  }
  // Adds the memory that readers of resident layers read.
  void add_reads(Operation& operation) const;

 private:
  struct Layer {
    std::size_t resident = 0, hot = 0;  // of the plan
    std::int32_t region = 0;            // of the resident layer's pages
    std::int32_t table = 0;             // of residency
  };
  SparsePages(Device& device, const BackendConfig& config, const LayerCaches& layers,
              const BlockTables& tables, const HostTier& tier);
  Result<void> start();
  Result<AwayRows> away_rows(const Layer& layer) const;
  void clear_regions(const std::vector<std::int32_t>& rows);
  std::int32_t source() const { return source_group(config_.plan.groups); }
  MemoryRange cache_range() const;

  Device& device_;
  const BackendConfig& config_;
  const LayerCaches& layers_;
  const BlockTables& tables_;
  const HostTier& tier_;
  std::vector<std::int32_t> groups_;  // resident, by table
  std::vector<Layer> sparse_;         // in the order of the source's layers
  std::vector<std::int32_t> place_;   // of each layer of the plan in sparse_; -1: none
  std::int32_t num_slots_ = 0;
  std::int64_t max_row_bytes_ = 0;
  std::vector<std::unique_ptr<DeviceArray<std::int32_t>>> entries_;  // of residency_
  StagedItems<GroupTable> residency_{device_, "residency descriptors"};
  DeviceArray<AwayRows> away_{device_, "rows that are not on the device"};
  // [num_rows, num_slots_]
  DeviceArray<std::int32_t> held_{device_, "rows held by hot regions"},
      order_{device_, "slots of hot regions by last use"}, used_{device_, "last uses of slots"};
  DeviceArray<std::int32_t> places_{device_, "slots by position"};  // [num_rows, positions]
  StagedItems<TableEntry> edits_{device_, "residency edits"};
  DeviceArray<std::int32_t> cleared_{device_, "hot regions to clear"},
      positions_{device_, "positions read from the host"};
  StagedItems<RowMirrorItem> mirrors_{device_, "rows to mirror"};
  StagedItems<MirrorLayer> mirror_layers_{device_, "layers to mirror"};
  StagedItems<HotReadItem> reads_{device_, "reads of hot regions"};
  DeviceArray<HotSwap> swaps_{device_, "rows to swap in"};
  std::int32_t num_reads_ = 0;  // so far
};

}  // namespace lockstep::cuda
