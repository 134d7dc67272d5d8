// The defects of backend_mutants.h by the seam that they are planted in. Each function makes the
// seams of one run: what a defect remembers from step to step is its own.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/defects/planted_views.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/views/layer_caches.h"

namespace lockstep::cuda {

// What a device in front of all others changes in launches and uploads, and in the use of captured
// graphs. Members that are null, or false, change nothing: everything else goes through as it is, at
// the same place in the order of the calls.
struct DevicePlant {
  // The parameters of every launch; `behind`: the device that runs it.
  std::function<void(LaunchParams, Operation&, Device& behind)> launch = nullptr;
  // The bytes of every upload, which is known by the name of the allocation that it goes to.
  std::function<void(const std::string& allocation, std::span<std::byte>, Device& behind)> upload =
      nullptr;
  KernelDefect kernel = KernelDefect::none;
  // A batch takes the graph of the largest size that is not above it.
  bool smaller_graphs = false;
  // Graphs live on, with pointers into memory that was given back.
  bool keeps_graphs = false;
  // Further bytes of each allocation whose name contains "block table of": room for rows that
  // spill.
  std::int64_t spare_table_bytes = 0;
};

// `base`: the device below captured graphs, within `device`.
std::unique_ptr<Device> make_planted_device(std::unique_ptr<Device> device, Device& base,
                                            DevicePlant plant);

// The elements of an upload.
template <class T>
std::span<T> elements_of(std::span<std::byte> bytes) {
  return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
}

using MakeSeams = Seams (*)(const BackendConfig&);

// planted_programs.cpp
Seams zero_lost(const BackendConfig&);
Seams state_copy_lost(const BackendConfig&);
Seams state_draft_reuse(const BackendConfig&);
Seams conv_offset_ignored(const BackendConfig&);
Seams stale_table_entry(const BackendConfig&);
Seams table_edit_lost(const BackendConfig&);
Seams table_async_upload(const BackendConfig&);
Seams transfer_wrong_end(const BackendConfig&);
Seams stale_nan(const BackendConfig&);

// planted_launches.cpp
Seams drop_slot(const BackendConfig&);
Seams uninitialised_read(const BackendConfig&);
Seams race(const BackendConfig&);
Seams table_late_clear(const BackendConfig&);
Seams slot_pad_rows(const BackendConfig&);
Seams dp_idle_writes(const BackendConfig&);
Seams slot_interleave_ignored(const BackendConfig&);
Seams slot_stale_tail(const BackendConfig&);
Seams graph_stale_param(const BackendConfig&);
Seams graph_too_small(const BackendConfig&);
Seams graph_stale_pointer(const BackendConfig&);
Seams hidden_flatten(const BackendConfig&);
Seams hidden_chunk_save(const BackendConfig&);
Seams scale_of_other_head(const BackendConfig&);
Seams window_off_by_one(const BackendConfig&);
Seams copy_unordered(const BackendConfig&);
template <KernelDefect kDefect>
Seams in_kernel(const BackendConfig&) {
  return {.device = [](std::unique_ptr<Device> device, Device& base) {
    return make_planted_device(std::move(device), base, {.kernel = kDefect});
  }};
}

// planted_launches.cpp: uploads
Seams slot_wrong_block_size(const BackendConfig&);
Seams slot_past_row(const BackendConfig&);
Seams hidden_slot_mapping(const BackendConfig&);
Seams transfer_flatten(const BackendConfig&);
Seams scale_of_other_layer(const BackendConfig&);
Seams state_targets_last(const BackendConfig&);

// planted_plans.cpp
Seams table_width(const BackendConfig&);
Seams layout_order_lost(const BackendConfig&);
Seams wrong_stride(const BackendConfig&);
Seams write_past_page(const BackendConfig&);
Seams tp_head_offset(const BackendConfig&);
Seams tp_heads_not_replicated(const BackendConfig&);
Seams pp_layer_offset(const BackendConfig&);
template <ViewDefect kDefect>
Seams in_views(const BackendConfig&) {
  return {.views = [](const BackendConfig& config) {
    return planted_views(config.plan, view_options(config), kDefect);
  }};
}

// Seams of a device with a plant.
inline Seams on_device(DevicePlant plant) {
  return {.device = [plant = std::move(plant)](std::unique_ptr<Device> device, Device& base) {
    return make_planted_device(std::move(device), base, plant);
  }};
}

}  // namespace lockstep::cuda
