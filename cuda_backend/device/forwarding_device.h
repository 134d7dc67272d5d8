// A device in front of an inner one that does the work. Calls that a subclass does not override are
// forwarded at once.
//
// Invariants:
// 1. The first failure of the inner device becomes this device's own at the next finish(), or at an
//    allocate() without memory.
// 2. Both devices have the same launch place.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {
    place_ = inner_->place();
  }

  std::string_view name() const override { return inner_->name(); }
  std::string description() const override { return inner_->description(); }
  const KernelTable& kernels() const override { return inner_->kernels(); }
  const EngineKernels& engine_kernels() const override { return inner_->engine_kernels(); }
  std::byte* allocate(std::int64_t size_bytes, std::string what) override {
    std::byte* memory = inner_->allocate(size_bytes, std::move(what));
    if (inner_->failed()) finish_inner();
    return memory;
  }
  void release(std::byte* memory) override { inner_->release(memory); }
  std::byte* allocate_host(std::int64_t size_bytes, std::string what) override {
    std::byte* memory = inner_->allocate_host(size_bytes, std::move(what));
    if (inner_->failed()) finish_inner();
    return memory;
  }
  void release_host(std::byte* memory) override { inner_->release_host(memory); }
  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    inner_->upload(target, source, size_bytes);
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    inner_->download(target, source, size_bytes);
  }
  void zero(void* target, std::int64_t size_bytes) override { inner_->zero(target, size_bytes); }
  void run(const Operation& operation, const Launch& launch) override {
    inner_->run(operation, launch);
  }
  bool wants_operations() const override { return inner_->wants_operations(); }
  Result<void> finish() override { return finish_inner(); }

  void begin_step(std::int64_t step) override { inner_->begin_step(step); }
  void take_reports(std::vector<DeviceReport>& reports) override { inner_->take_reports(reports); }
  std::optional<DeviceWriter> who_wrote(const std::byte* address) override {
    return inner_->who_wrote(address);
  }
  std::vector<KernelStatistics> kernel_statistics() const override {
    return inner_->kernel_statistics();
  }
  const std::byte* memory_begin() const override { return inner_->memory_begin(); }
  std::string_view memory_handle() const override { return inner_->memory_handle(); }
  bool watches_accesses() const override { return inner_->watches_accesses(); }
  int launch_graph(CapturedGraph& graph, const LaunchPlace& place) override {
    return inner_->launch_graph(graph, place);
  }
  std::int32_t padded_batch(std::int32_t count) const override {
    return inner_->padded_batch(count);
  }
  bool captures(std::int32_t size) const override { return inner_->captures(size); }
  void run_captured(std::string_view part, std::int32_t size,
                    const std::function<void()>& issue) override {
    inner_->run_captured(part, size, issue);
  }
  void run_eagerly(bool eagerly) override { inner_->run_eagerly(eagerly); }
  void forget_captured() override { inner_->forget_captured(); }
  GraphStatistics graph_statistics() const override { return inner_->graph_statistics(); }
  int num_streams() const override { return inner_->num_streams(); }

 protected:
  Device& inner() { return *inner_; }
  const Device& inner() const { return *inner_; }
  Result<void> finish_inner() {
    if (auto done = inner_->finish(); !done) fail_with(done.error().message);
    if (failed()) return tl::unexpected(*failure());
    return {};
  }

 private:
  std::unique_ptr<Device> inner_;
};

// A device that keeps operations instead of running them: keep(operation, start) in call order.
// `start` runs the operation on the inner device; an upload's bytes are kept with it.
class DeferringDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    const auto* bytes = static_cast<const std::byte*>(source);
    keep(Operation{}.named("upload").write(range_of(target, size_bytes)),
         [this, target, kept = std::vector<std::byte>(bytes, bytes + size_bytes)] {
           inner().upload(target, kept.data(), static_cast<std::int64_t>(kept.size()));
         });
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    keep(Operation{}.named("download").read(range_of(source, size_bytes)),
         [=, this] { inner().download(target, source, size_bytes); });
  }
  void zero(void* target, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    keep(Operation{}.named("memset").write(range_of(target, size_bytes)),
         [=, this] { inner().zero(target, size_bytes); });
  }
  void run(const Operation& operation, const Launch& launch) override {
    if (failed()) return;
    keep(operation, [this, operation, launch] { inner().run(operation, launch); });
  }

 private:
  virtual void keep(Operation operation, std::function<void()> start) = 0;
};

}  // namespace lockstep::cuda
