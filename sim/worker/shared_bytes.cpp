#include "sim/worker/shared_bytes.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace lockstep {

Result<std::unique_ptr<SharedBytes>> SharedBytes::create() {
  std::unique_ptr<SharedBytes> shared(new SharedBytes);
  shared->fd_ = ::memfd_create("lockstep", MFD_CLOEXEC);
  if (shared->fd_ < 0) return fail(fmt::format("no memory to share: {}", std::strerror(errno)));
  // The other process opens the descriptor through /proc; it inherits none.
  shared->path_ = fmt::format("/proc/{}/fd/{}", ::getpid(), shared->fd_);
  return shared;
}

SharedBytes::~SharedBytes() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  if (fd_ >= 0) ::close(fd_);
}

Result<void> SharedBytes::map(std::size_t size) {
  LS_CHECK(bytes_.empty() && size > 0, "{} bytes, {} mapped", size, bytes_.size());
  // Access to a mapping past the end of its file raises SIGBUS, so the size is checked first.
  struct stat found {};
  if (::fstat(fd_, &found) != 0 || static_cast<std::size_t>(found.st_size) < size)
    return fail(fmt::format("memory to share has {} bytes; expected {}", found.st_size, size));
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) return fail(fmt::format("memory to share: {}", std::strerror(errno)));
  bytes_ = {static_cast<std::uint8_t*>(at), size};
  return {};
}

}  // namespace lockstep
