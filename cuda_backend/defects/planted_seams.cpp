#include "cuda_backend/defects/planted_seams.h"

#include <map>

#include "base/check.h"
#include "cuda_backend/device/forwarding_device.h"

namespace lockstep::cuda {
namespace {

class PlantedDevice final : public ForwardingDevice {
 public:
  PlantedDevice(std::unique_ptr<Device> device, Device& base, DevicePlant plant)
      : ForwardingDevice(std::move(device)), base_(base), plant_(std::move(plant)) {
    if (plant_.launchers) {
      kernels_ = ForwardingDevice::kernels();
      engine_kernels_ = ForwardingDevice::engine_kernels();
      plant_.launchers(kernels_, engine_kernels_, defect_kernels_of(ForwardingDevice::kernels()));
    }
    if (plant_.launch)
      edit_launches([this](LaunchParams params, Operation& operation) {
        plant_.launch(params, operation, inner());
      });
  }

  const KernelTable& kernels() const override {
    return plant_.launchers ? kernels_ : ForwardingDevice::kernels();
  }
  const EngineKernels& engine_kernels() const override {
    return plant_.launchers ? engine_kernels_ : ForwardingDevice::engine_kernels();
  }

  std::byte* allocate(std::int64_t size_bytes, std::string what) override {
    const bool is_table = what.find("block table of") != std::string::npos;
    std::byte* memory =
        ForwardingDevice::allocate(size_bytes + (is_table ? plant_.spare_table_bytes : 0), what);
    if (memory != nullptr) names_[memory] = std::move(what);
    return memory;
  }
  void release(std::byte* memory) override {
    names_.erase(memory);
    if (plant_.keeps_graphs)
      base_.release(memory);
    else
      ForwardingDevice::release(memory);
  }
  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    const auto name = names_.find(static_cast<std::byte*>(target));
    if (!plant_.upload || name == names_.end())
      return ForwardingDevice::upload(target, source, size_bytes);
    const auto* begin = static_cast<const std::byte*>(source);
    std::vector<std::byte> bytes(begin, begin + size_bytes);
    plant_.upload(name->second, bytes, inner());
    ForwardingDevice::upload(target, bytes.data(), size_bytes);
  }

  std::int32_t padded_batch(std::int32_t count) const override {
    const std::int32_t size = ForwardingDevice::padded_batch(count);
    if (!plant_.smaller_graphs || size == count) return size;
    std::int32_t smaller = count;
    while (smaller > 0 && !captures(smaller)) --smaller;
    return smaller > 0 ? smaller : size;
  }
  void forget_captured() override {
    if (!plant_.keeps_graphs) ForwardingDevice::forget_captured();
  }

 private:
  Device& base_;
  DevicePlant plant_;
  KernelTable kernels_{};  // with the plant's launchers, where it has any
  EngineKernels engine_kernels_{};
  std::map<std::byte*, std::string> names_;  // of allocations, by address
};

}  // namespace

#if LOCKSTEP_HAVE_CUDA
// Compiled by nvcc; host code declares only the CPU's variants.
namespace simt_cuda {
extern const KernelTable kernel_table;
extern const DefectKernels defect_kernels;
}  // namespace simt_cuda
#endif

const DefectKernels& defect_kernels_of(const KernelTable& kernels) {
  if (&kernels == &simt_checked::kernel_table) return simt_checked::defect_kernels;
#if LOCKSTEP_HAVE_CUDA
  if (&kernels == &simt_cuda::kernel_table) return simt_cuda::defect_kernels;
#endif
  LS_CHECK(&kernels == &simt_fast::kernel_table, "a device without kernels of defects");
  return simt_fast::defect_kernels;
}

std::unique_ptr<Device> make_planted_device(std::unique_ptr<Device> device, Device& base,
                                            DevicePlant plant) {
  return std::make_unique<PlantedDevice>(std::move(device), base, std::move(plant));
}

}  // namespace lockstep::cuda
