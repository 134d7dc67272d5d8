// Defects planted in HiSparse's pages: in their program, and in the copies and lookups of their
// rows.
#include <memory>
#include <utility>
#include <vector>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {
namespace {

Seams page_mirror_short(const BackendConfig&) {
  return in_launches<MirrorRowsParams>([](MirrorRowsParams& params) { --params.num_tokens; });
}
// Evicted pages are still read on the device.
Seams page_residency_kept(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    std::erase_if(program.residency,
                  [](const TableEdit& edit) { return edit.block == kNullBlock; });
  }};
}
Seams page_restore_dropped(const BackendConfig& config) {
  std::vector<bool> is_resident;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_resident.push_back(is_resident_pages(group.spec.kind));
  return {.program = [is_resident](StepProgram& program) {
    std::erase_if(program.loads, [&](const HostTransfer& load) {
      return is_resident[static_cast<std::size_t>(load.group)];
    });
  }};
}
// Rows on the host are read from the null block.
Seams page_host_unread(const BackendConfig&) {
  return on_device(
      {.upload = [](const std::string& allocation, std::span<std::byte> bytes, Device&) {
        if (allocation != "layer caches") return;
        for (RowCache& rows : elements_of<RowCache>(bytes)) rows.away = nullptr;
      }});
}
// A request reuses the hot region of the previous request in its batch row.
Seams hot_region_kept(const BackendConfig&) {
  // The first launch initialises all regions.
  const auto is_first = std::make_shared<bool>(true);
  return in_launches<ClearRegionsParams>([is_first](ClearRegionsParams& params) {
    if (!std::exchange(*is_first, false)) params.num_rows = 0;
  });
}
constexpr PlantedDefect kOfPages[] = {
    {"rows-mirror-short", page_mirror_short},
    {"rows-residency-kept", page_residency_kept},
    {"rows-restore-dropped", page_restore_dropped},
    {"rows-host-unread", page_host_unread},
    {"hot-region-kept", hot_region_kept},
    {"hot-evicts-used", in_launcher<&KernelTable::hot_reads, &DefectKernels::evict_used>},
    {"hot-row-by-slot", in_launcher<&KernelTable::swap_rows, &DefectKernels::swap_by_slot>},
};

}  // namespace

std::span<const PlantedDefect> defects_of_pages() { return kOfPages; }

}  // namespace lockstep::cuda
