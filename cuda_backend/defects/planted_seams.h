// The defects of backend_mutants.h by the seam that they are planted in. Each function makes the
// seams of one run: what a defect remembers from step to step is its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// What a device in front of all others changes in launches and uploads, and in the use of captured
// graphs. Members that are null, or false, change nothing: everything else goes through as it is,
// at the same place in the order of the calls.
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

// Seams of a device with a plant.
inline Seams on_device(DevicePlant plant) {
  return {.device = [plant = std::move(plant)](std::unique_ptr<Device> device, Device& base) {
    return make_planted_device(std::move(device), base, plant);
  }};
}

// What the configuration must have, or a defect has nothing to change.
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
