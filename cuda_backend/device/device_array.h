// An array in device memory that grows: the place of one kind of input or result of a step. Named,
// so that a memory report says which one; its own allocation, so that running past it is found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

template <class T>
class DeviceArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  DeviceArray(Device& device, std::string name) : device_(&device), name_(std::move(name)) {}
  ~DeviceArray() { device_->release(reinterpret_cast<std::byte*>(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Room for `count` elements; what was there is gone when it had to grow.
  T* reserve(std::int64_t count) {
    LS_CHECK(count >= 0, "{}: {}", name_, count);
    if (count <= capacity_) return data_;
    device_->release(reinterpret_cast<std::byte*>(data_));
    capacity_ = std::max(count, 2 * capacity_);
    data_ = reinterpret_cast<T*>(
        device_->allocate(capacity_ * static_cast<std::int64_t>(sizeof(T)), name_));
    return data_;
  }
  T* upload(std::span<const T> values) {
    if (values.empty()) return data_;
    reserve(static_cast<std::int64_t>(values.size()));
    device_->upload(data_, values.data(), static_cast<std::int64_t>(values.size_bytes()));
    return data_;
  }
  T* data() const { return data_; }
  MemoryRange range() const {
    return range_of(data_, capacity_ * static_cast<std::int64_t>(sizeof(T)));
  }

 private:
  Device* device_;
  std::string name_;
  T* data_ = nullptr;
  std::int64_t capacity_ = 0;
};

}  // namespace lockstep::cuda
