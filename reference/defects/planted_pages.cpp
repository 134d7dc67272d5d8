// HiSparse's pages with one step done wrong.
#include <memory>
#include <utility>
#include <vector>

#include "reference/cache/hisparse_coordinator.h"
#include "reference/defects/planted_parts.h"

namespace lockstep {
namespace {

class PlantedPages final : public HiSparseCoordinator {
 public:
  PlantedPages(SchedulerDefect defect, const EngineConfig& config, std::unique_ptr<BlockPool> host,
               BlockPool& device)
      : HiSparseCoordinator(config, std::move(host), device), defect_(defect) {}

 protected:
  bool plan_transfer(const std::shared_ptr<State>& state, std::int32_t page,
                     bool restores) override {
    if (is(SchedulerDefect::page_restore_dropped) && restores) return false;
    if (!HiSparseCoordinator::plan_transfer(state, page, restores)) return false;
    Transfer& transfer = pending_.rbegin()->second;
    if (is(SchedulerDefect::page_host_held_twice)) host_pool().touch({&transfer.host, 1});
    if (is(SchedulerDefect::page_copy_unheld))
      device_pool().free_blocks(std::exchange(transfer.resident, {}));
    return true;
  }

  ResidencyUpdate take_residency(Request& request) override {
    if (is(SchedulerDefect::page_loss_untold)) state_of(request)->stale.clear();
    ResidencyUpdate update = HiSparseCoordinator::take_residency(request);
    if (!is(SchedulerDefect::page_last_untold) || update.pages.empty()) return update;
    update.pages.pop_back();
    for (std::vector<BlockId>& blocks : update.blocks) blocks.pop_back();
    return update;
  }

  void lose_page(const Page& page) override {
    if (!is(SchedulerDefect::page_loss_forgotten)) HiSparseCoordinator::lose_page(page);
  }

  // Content of a reallocated block still counts as a copy.
  void drop_copy(const CopyKey& key) override {
    if (!is(SchedulerDefect::page_copy_stale)) HiSparseCoordinator::drop_copy(key);
  }

  std::vector<RowMirror> mirrors_of(Request& request, std::int32_t begin,
                                    std::int32_t end) const override {
    std::vector<RowMirror> mirrors = HiSparseCoordinator::mirrors_of(request, begin, end);
    if (is(SchedulerDefect::page_mirror_short) && mirrors.size() > 1) mirrors.pop_back();
    return mirrors;
  }

  bool can_read_from_host(const Request& request) const override {
    return is(SchedulerDefect::page_without_hot_region) ||
           HiSparseCoordinator::can_read_from_host(request);
  }

  bool all_resident(std::span<const Row> rows) override {
    return HiSparseCoordinator::all_resident(rows) || is(SchedulerDefect::page_all_resident);
  }

 private:
  bool is(SchedulerDefect other) const { return defect_ == other; }

  SchedulerDefect defect_;
};

}  // namespace

std::unique_ptr<HiSparseCoordinator> PlantedParts::hisparse(const EngineConfig& config,
                                                            std::unique_ptr<BlockPool> host,
                                                            BlockPool& device) const {
  return std::make_unique<PlantedPages>(defect_, config, std::move(host), device);
}

}  // namespace lockstep
