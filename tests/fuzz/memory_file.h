// A file without a name, for readers that want a path.
#pragma once

#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <span>
#include <string>

#include "base/check.h"

namespace lockstep {

class MemoryFile {
 public:
  explicit MemoryFile(std::span<const std::uint8_t> bytes) : file_(memfd_create("fuzz", 0)) {
    LS_CHECK(file_ >= 0, "no file in memory");
    LS_CHECK(write(file_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    path_ = fmt::format("/proc/self/fd/{}", file_);
  }
  explicit MemoryFile(const std::string& text)
      : MemoryFile(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size())) {}
  ~MemoryFile() { close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  int file_;
  std::string path_;
};

}  // namespace lockstep
