// The defects of backend_mutants.h by seam, a row each.
//
// Invariants:
// 1. Seams that share memory are made per run. All others are copied per run, with their state.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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

// T of an edit that is called with T&.
template <class F, class T>
T edited_by(void (F::*edit)(T&) const);
template <class F, class T>
T edited_by(void (F::*edit)(T&));
template <class Edit>
using Edited = decltype(edited_by(&Edit::operator()));

// Seams that change the step's program: edit(StepProgram&).
template <class Edit>
Seams in_program(Edit edit) {
  return {.program = std::move(edit)};
}

// Seams that change the parameters of one kind of launch: edit(Params&).
template <class Edit>
Seams in_launches(Edit edit) {
  return on_device({.launch = [edit](LaunchParams params, Operation&, Device&) mutable {
    if (auto** own = std::get_if<Edited<Edit>*>(&params)) edit(**own);
  }});
}

// Seams that change what is uploaded to one allocation: edit(std::span<T>).
template <class T, class Edit>
Seams in_upload(std::string_view allocation, Edit edit) {
  return on_device(
      {.upload = [allocation, edit](const std::string& name, std::span<std::byte> bytes, Device&) {
        if (name == allocation) edit(elements_of<T>(bytes));
      }});
}
// The same, element by element: edit(T&).
template <class Edit>
Seams in_elements(std::string_view allocation, Edit edit) {
  using T = Edited<Edit>;
  return in_upload<T>(allocation, [edit](std::span<T> all) { std::ranges::for_each(all, edit); });
}

// Seams with a launcher of DefectKernels in the place of one of the product's.
template <auto kOwn, auto kDefect>
Seams in_launcher() {
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

// The edited copy of an upload.
template <class T>
struct OwnCopy {
  std::optional<DeviceArray<T>> elements;
  std::optional<DeviceArray<std::int32_t>> lengths;  // of rows of block tables; empty: the step's
};
// Launches of one kind receive an edited copy of an upload at `member` of their parameters:
// edit(std::span<T>, OwnCopy<T>&, Device&). Makes the seams of one run.
template <class Params, class T, class Edit>
auto in_copy_of(std::string_view allocation, const T* Params::*member, Edit edit) {
  return [=](const BackendConfig&) {
    auto own = std::make_shared<OwnCopy<T>>();
    return on_device({.launch =
                          [own, member](LaunchParams params, Operation& operation, Device&) {
                            auto** found = std::get_if<Params*>(&params);
                            if (found == nullptr) return;
                            (*found)->*member = own->elements->data();
                            operation.read(own->elements->range());
                            if (own->lengths) operation.read(own->lengths->range());
                          },
                      .upload =
                          [=](const std::string& name, std::span<std::byte> bytes, Device& behind) {
                            if (name != allocation) return;
                            const auto given = elements_of<T>(bytes);
                            std::vector<T> edited(given.begin(), given.end());
                            edit(std::span(edited), *own, behind);
                            own->elements.emplace(behind,
                                                  std::string(allocation) + " of one kernel");
                            own->elements->upload(edited);
                          }});
  };
}

// of(group, number in the group) for each layer of the plan.
template <class Of>
auto by_layer(const KVCacheConfig& plan, Of of) {
  std::vector<std::decay_t<decltype(of(plan.groups.front(), std::size_t{}))>> all;
  for (const KVCacheGroupSpec& group : plan.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) all.push_back(of(group, i));
  return all;
}

// Makes the seams of one run, with their own memory of earlier steps.
class MakeSeams {
 public:
  // Each run has its own copy of the seams.
  MakeSeams(Seams seams) : make_([seams](const BackendConfig&) { return seams; }) {}
  template <std::invocable<const BackendConfig&> Make>
  MakeSeams(Make make) : make_(std::move(make)) {}
  Seams operator()(const BackendConfig& config) const { return make_(config); }

 private:
  std::function<Seams(const BackendConfig&)> make_;
};

// What a configuration needs for the defect to have an effect.
enum class Needs : std::uint8_t { nothing, streams, graphs, numbers, words };

struct PlantedDefect {
  std::string_view id;
  MakeSeams make;
  Needs needs = Needs::nothing;
};
std::span<const PlantedDefect> defects_of_programs();
std::span<const PlantedDefect> defects_of_launches();
std::span<const PlantedDefect> defects_of_plans();

}  // namespace lockstep::cuda
