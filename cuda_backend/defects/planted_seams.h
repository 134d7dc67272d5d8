// The defects of backend_mutants.h by seam. Each function makes the seams of one run, with their
// own memory of earlier steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/defects/kernels/defect_table.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// Changes that a device in front of all others makes to launches, uploads and captured graphs. Null
// and false members change nothing. The order of calls does not change.
struct DevicePlant {
  // Changes the parameters of every launch. `behind`: the device that runs it.
  std::function<void(LaunchParams, Operation&, Device& behind)> launch = nullptr;
  // Changes the bytes of every upload. `allocation`: the name of its target.
  std::function<void(const std::string& allocation, std::span<std::byte>, Device& behind)> upload =
      nullptr;
  // Puts launchers with a defect in the place of the product's.
  std::function<void(KernelTable&, EngineKernels&, const DefectKernels&)> launchers = nullptr;
  // A batch uses the largest graph that is not larger than it.
  bool smaller_graphs = false;
  // Graphs survive the release of memory that they point into.
  bool keeps_graphs = false;
  // Extra bytes of each allocation whose name contains "block table of", for rows that spill.
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

// Seams of a device with a plant.
inline Seams on_device(DevicePlant plant) {
  return {.device = [plant = std::move(plant)](std::unique_ptr<Device> device, Device& base) {
    return make_planted_device(std::move(device), base, plant);
  }};
}

// Seams that change the parameters of one kind of launch: edit(Params&).
template <class Params, class Edit>
Seams in_launches(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) mutable {
    if (auto** own = std::get_if<Params*>(&params)) edit(**own);
  }});
}

// Seams with a launcher of DefectKernels in the place of one of the product's.
template <auto kOwn, auto kDefect>
Seams in_launcher(const BackendConfig&) {
  return on_device(
      {.launchers = [](KernelTable& kernels, EngineKernels& engine, const DefectKernels& defects) {
        if constexpr (requires { kernels.*kOwn; })
          kernels.*kOwn = defects.*kDefect;
        else
          engine.*kOwn = defects.*kDefect;
      }});
}

// The name of the block tables' descriptors, an upload of GroupTable.
inline constexpr std::string_view kTables = "block table descriptors";

// Descriptors of block tables that replace the step's in launches of one kind.
struct OwnTables {
  std::optional<DeviceArray<GroupTable>> tables;
  std::optional<DeviceArray<std::int32_t>> lengths;  // of rows; empty: the step's
};
// Launches with these parameters look blocks up through edit(span<GroupTable>, OwnTables&,
// Device&).
template <class Params, class Edit>
Seams in_lookups_of(Edit edit) {
  auto own = std::make_shared<OwnTables>();
  return on_device(
      {.launch =
           [own](LaunchParams params, Operation& operation, Device&) {
             auto** found = std::get_if<Params*>(&params);
             if (found == nullptr) return;
             (*found)->groups = own->tables->data();
             operation.read(own->tables->range());
             if (own->lengths) operation.read(own->lengths->range());
           },
       .upload =
           [own, edit](const std::string& name, std::span<std::byte> bytes, Device& behind) {
             if (name != kTables) return;
             const auto tables = elements_of<GroupTable>(bytes);
             std::vector<GroupTable> edited(tables.begin(), tables.end());
             edit(std::span(edited), *own, behind);
             own->tables.emplace(behind, "block table descriptors of one kernel");
             own->tables->upload(edited);
           }});
}

// What a configuration needs for the defect to have an effect.
enum class Needs : std::uint8_t { nothing, streams, graphs, numbers, words };

struct PlantedDefect {
  std::string_view id;
  Seams (*make)(const BackendConfig&);
  Needs needs = Needs::nothing;
};

std::span<const PlantedDefect> defects_of_programs();
std::span<const PlantedDefect> defects_of_launches();
std::span<const PlantedDefect> defects_of_plans();
std::span<const PlantedDefect> defects_of_drafters();
std::span<const PlantedDefect> defects_of_pages();
std::span<const PlantedDefect> defects_of_shares();

}  // namespace lockstep::cuda
