#include "base/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

tl::unexpected<Error> refuse(const std::string& path, std::string_view what) {
  return fail(fmt::format("{}: cannot be {}: {}", path, what, std::strerror(errno)));
}

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

AtomicFile::AtomicFile(std::string path, std::string partial_path, int fd)
    : path_(std::move(path)), partial_path_(std::move(partial_path)), fd_(fd) {}

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  const std::string partial = fmt::format("{}.partial-{}", path, ::getpid());
  const int fd = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return refuse(path, "written");
  return AtomicFile(path, partial, fd);
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      partial_path_(std::move(other.partial_path_)),
      fd_(std::exchange(other.fd_, -1)) {}

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  if (this == &other) return *this;
  abandon();
  path_ = std::move(other.path_);
  partial_path_ = std::move(other.partial_path_);
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

AtomicFile::~AtomicFile() { abandon(); }

void AtomicFile::abandon() {
  if (fd_ < 0) return;
  ::close(std::exchange(fd_, -1));
  ::unlink(partial_path_.c_str());
}

Result<void> AtomicFile::write(std::string_view bytes) {
  LS_CHECK(fd_ >= 0, "{} is closed", path_);
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return refuse(path_, "written");
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

Result<void> AtomicFile::commit() {
  LS_CHECK(fd_ >= 0, "{} is closed", path_);
  if (::fsync(fd_) != 0) return refuse(path_, "flushed to the disk");
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) return refuse(path_, "given its name");
  ::close(std::exchange(fd_, -1));
  // The new name is durable once its folder is; a folder that cannot be opened still has the file.
  if (const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
  return {};
}

Result<void> write_file_atomically(const std::string& path, std::string_view bytes) {
  LS_ASSIGN_OR_RETURN(auto file, AtomicFile::create(path));
  LS_RETURN_IF_ERROR(file.write(bytes));
  return file.commit();
}

}  // namespace lockstep
