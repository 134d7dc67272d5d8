// What one operation of a step does to device memory: the ranges that it may read and those that it
// may write. Neither the graph that orders operations on streams (step_graph.h) nor the check of
// that order (stream_order.h) knows more about them.
//
// 1. Ranges may be wider than what is touched, never narrower: a range too many costs concurrency,
//    a range too few is a missing edge. The SIMT executor reports accesses outside of them.
// 2. An operation that was not described touches everything.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::cuda {

// Bytes [begin, end) of device memory.
struct MemoryRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool operator==(const MemoryRange&) const = default;
};

inline MemoryRange range_of(const void* memory, std::int64_t size_bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  return {begin, begin + static_cast<std::uintptr_t>(size_bytes)};
}

struct Operation {
  std::string name = "a launch";
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  bool touches_everything = true;

  // Starts the description: only memory that is added afterwards is touched.
  Operation& named(std::string what) {
    name = std::move(what);
    touches_everything = false;
    return *this;
  }
  Operation& read(MemoryRange range) {
    if (range.begin != range.end) reads.push_back(range);
    return *this;
  }
  Operation& write(MemoryRange range) {
    if (range.begin != range.end) writes.push_back(range);
    return *this;
  }
  // Arrays with range() (device.h).
  template <class... Arrays>
  Operation& read_all(const Arrays&... arrays) {
    (read(arrays.range()), ...);
    return *this;
  }
  template <class... Arrays>
  Operation& write_all(const Arrays&... arrays) {
    (write(arrays.range()), ...);
    return *this;
  }
};

}  // namespace lockstep::cuda
