// A device in front of all others that changes what is launched and uploaded, and how captured
// graphs are used: planted defects of launches.
//
// 1. What no plant changes goes through as it is, at the same place in the order of the calls.
// 2. An upload is known by the name of the allocation that it goes to.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// Members that are null, or false, change nothing.
struct DevicePlant {
  // The parameters of every launch; `behind`: the device that runs it.
  std::function<void(LaunchParams, Operation&, Device& behind)> launch = nullptr;
  // The bytes of every upload.
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

}  // namespace lockstep::cuda
