// Memory that another process maps too, without a file that could be left behind.
//
// Invariants
// (1) The other process opens path() while this object lives, gives it its size and maps it.
// (2) bytes() is empty until map().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"

namespace lockstep {

class SharedBytes {
 public:
  // Errors: the system gives none.
  static Result<std::unique_ptr<SharedBytes>> create();
  SharedBytes(const SharedBytes&) = delete;
  ~SharedBytes();

  const std::string& path() const { return path_; }
  // Errors: the other process has made it smaller than `size`.
  Result<void> map(std::size_t size);
  std::span<std::uint8_t> bytes() const { return bytes_; }

 private:
  SharedBytes() = default;
  int fd_ = -1;
  std::string path_;
  std::span<std::uint8_t> bytes_;
};

}  // namespace lockstep
