#include "base/byte_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/stop_signal.h"

namespace lockstep {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

bool starts_as_gzip(int fd) {
  char magic[2];
  return ::pread(fd, magic, 2, 0) == 2 && std::string_view(magic, 2) == "\x1f\x8b";
}

// read() of a pipe restarts after a signal; poll() returns.
ssize_t read_some(int fd, char* to) {
  pollfd end{.fd = fd, .events = POLLIN, .revents = 0};
  ssize_t got = 0;
  do {
    got = ::poll(&end, 1, -1) < 0 ? -1 : ::read(fd, to, kChunkBytes);
  } while (got < 0 && errno == EINTR && !stop_requested());
  return got;
}

}  // namespace

Result<ByteSource> ByteSource::open(const std::string& path) {
  ByteSource source;
  source.path_ = path;
  source.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (source.fd_ < 0)
    return fail(fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  struct stat status {};
  if (::fstat(source.fd_, &status) == 0 && S_ISDIR(status.st_mode))
    return fail(fmt::format("{}: found a folder; expected a file", path));
  if (S_ISREG(status.st_mode) && starts_as_gzip(source.fd_)) {
    source.gzip_ = ::gzdopen(source.fd_, "rb");
    if (source.gzip_ == nullptr) return fail(fmt::format("{}: no memory to unpack it", path));
    source.fd_ = -1;
  }
  return source;
}

ByteSource::ByteSource(ByteSource&& other) noexcept { *this = std::move(other); }

ByteSource& ByteSource::operator=(ByteSource&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(gzip_, other.gzip_);
  return *this;
}

ByteSource::~ByteSource() {
  if (fd_ >= 0) ::close(fd_);
  if (gzip_ != nullptr) ::gzclose(gzip_);
}

Result<bool> ByteSource::read_more(std::string& buffer) {
  const std::size_t size = buffer.size();
  buffer.resize(size + kChunkBytes);
  char* const to = buffer.data() + size;
  const ssize_t got = gzip_ != nullptr ? ::gzread(gzip_, to, kChunkBytes) : read_some(fd_, to);
  buffer.resize(size + static_cast<std::size_t>(got < 0 ? 0 : got));
  if (got > 0) return true;
  int error = Z_OK;
  if (gzip_ != nullptr) ::gzerror(gzip_, &error);
  if (error == Z_BUF_ERROR)
    return fail(fmt::format("{}: the gzip data ends early; expected a whole file", path_));
  if (error != Z_OK && error != Z_ERRNO)
    return fail(fmt::format("{}: the gzip data is damaged", path_));
  if (got < 0) return fail(fmt::format("{}: cannot be read: {}", path_, std::strerror(errno)));
  return false;
}

}  // namespace lockstep
