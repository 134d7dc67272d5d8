// Defects planted in HiSparse's pages: in what the backend is told of them, and in how their rows
// are moved and looked up.
#include <memory>
#include <utility>
#include <vector>

#include "cuda_backend/defects/planted_seams.h"

namespace lockstep::cuda {
namespace {

template <class Params, class Edit>
Seams in_page_launches(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) {
    if (auto** found = std::get_if<Params*>(&params)) edit(**found);
  }});
}

Seams page_mirror_short(const BackendConfig&) {
  return in_page_launches<MirrorRowsParams>([](MirrorRowsParams& params) { --params.num_tokens; });
}
// Pages that have left the device are still read there.
Seams page_residency_kept(const BackendConfig&) {
  return {.program = [](StepProgram& program) {
    std::erase_if(program.residency,
                  [](const TableEdit& edit) { return edit.block == kNullBlock; });
  }};
}
Seams page_restore_dropped(const BackendConfig& config) {
  std::vector<bool> is_resident;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    is_resident.push_back(group.spec.kind == CacheKind::hisparse_resident);
  return {.program = [is_resident](StepProgram& program) {
    std::erase_if(program.loads, [&](const HostTransfer& load) {
      return is_resident[static_cast<std::size_t>(load.group)];
    });
  }};
}
// The null block is read for what lies on the host.
Seams page_host_unread(const BackendConfig&) {
  return on_device(
      {.upload = [](const std::string& allocation, std::span<std::byte> bytes, Device&) {
        if (allocation != "layer caches") return;
        for (RowCache& rows : elements_of<RowCache>(bytes)) rows.away = nullptr;
      }});
}
// Who takes a row of the batch goes on with the region of who had it before.
Seams hot_region_kept(const BackendConfig&) {
  // The first launch is that of the start.
  const auto is_first = std::make_shared<bool>(true);
  return in_page_launches<ClearRegionsParams>([is_first](ClearRegionsParams& params) {
    if (!std::exchange(*is_first, false)) params.num_rows = 0;
  });
}
Seams hot_evicts_used(const BackendConfig&) {
  return on_device({.kernel = KernelDefect::hot_evicts_used});
}
Seams hot_row_by_slot(const BackendConfig&) {
  return on_device({.kernel = KernelDefect::hot_row_by_slot});
}

constexpr PlantedDefect kOfPages[] = {
    {"rows-mirror-short", page_mirror_short},       {"rows-residency-kept", page_residency_kept},
    {"rows-restore-dropped", page_restore_dropped}, {"rows-host-unread", page_host_unread},
    {"hot-region-kept", hot_region_kept},           {"hot-evicts-used", hot_evicts_used},
    {"hot-row-by-slot", hot_row_by_slot},
};

}  // namespace

std::span<const PlantedDefect> defects_of_pages() { return kOfPages; }

}  // namespace lockstep::cuda
