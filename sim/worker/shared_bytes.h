// Memory that another process also maps, without a file that could be left behind after a crash.
//
// Invariants
// (1) The other process opens path() while this object lives, sets its size and maps it.
// (2) bytes() is empty until map().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"

namespace lockstep {

// An anonymous file in memory (memfd_create), which the kernel frees with its last user.
class SharedBytes {
 public:
  // Creates the file with size 0. Errors: the system has none available.
  static Result<std::unique_ptr<SharedBytes>> create();
  SharedBytes(const SharedBytes&) = delete;
  ~SharedBytes();

  // Returns a path under /proc of this process: valid only while it runs.
  const std::string& path() const { return path_; }
  // Maps the first `size` bytes. Errors: the other process has made the file smaller. REQUIRES:
  // called once.
  Result<void> map(std::size_t size);
  std::span<std::uint8_t> bytes() const { return bytes_; }

 private:
  SharedBytes() = default;
  int fd_ = -1;
  std::string path_;
  std::span<std::uint8_t> bytes_;
};

}  // namespace lockstep
