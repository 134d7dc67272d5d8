#include "base/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "base/stop_signal.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kLinksMax = 40;  // links that Linux follows before it reports ELOOP

int standard_output = STDOUT_FILENO;  // descriptor that "-" writes to

tl::unexpected<Error> refuse(const std::string& path, std::string_view what) {
  return fail("{}: cannot be {}: {}", path, what, std::strerror(errno));
}

// "." for a file without a folder, so that the result can always be opened.
std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Returns the path after all symbolic links; the file need not exist. rename(2) onto a link would
// replace the link instead of its target. A relative link starts at the folder of the link, not of
// the process.
std::string target_of(std::string path) {
  std::error_code error;
  for (int links = 0; links < kLinksMax && fs::is_symlink(path, error); ++links) {
    const fs::path next = fs::read_symlink(path, error);
    if (error) break;
    path = (fs::path(path).parent_path() / next).string();
  }
  return path;
}

// Returns the temporary file's path. It is in the target's folder, because rename(2) does not cross
// file systems. The process id separates two commands that write the same file. A long name leaves
// no space for it, so a number replaces it.
std::string partial_of(const std::string& target) {
  std::string name = fs::path(target).filename().string();
  static std::atomic<int> num_long = 0;
  if (name.size() > 200) name = fmt::format("output{}", ++num_long);
  return fmt::format("{}/{}.partial-{}", folder_of(target), name, ::getpid());
}

bool same_file(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

// Returns the descriptor that already writes `path`; -1: none. Opening such a file again and
// truncating it would destroy what has been printed.
int open_already(const std::string& path) {
  if (path == "-") return standard_output;
  struct stat file, open;
  if (::stat(path.c_str(), &file) != 0) return -1;
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO})
    if (::fstat(fd, &open) == 0 && same_file(file, open)) return fd;
  return -1;
}

// Creates the temporary file with the mode and owner of the file that it replaces. -1 with errno:
// that is impossible, and no file is left.
int open_partial(const std::string& partial, const struct stat* replaced) {
  const int fd = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0 || replaced == nullptr) return fd;
  struct stat made;
  // fchown() to one's own id needs no permission, but some file systems refuse every fchown().
  const bool same_owner =
      ::fstat(fd, &made) == 0 && made.st_uid == replaced->st_uid && made.st_gid == replaced->st_gid;
  if ((same_owner || ::fchown(fd, replaced->st_uid, replaced->st_gid) == 0) &&
      ::fchmod(fd, replaced->st_mode & 07777) == 0)
    return fd;
  const int why = errno;
  ::close(fd);
  ::unlink(partial.c_str());
  errno = why;
  return -1;
}

// write(2) may accept a part of the bytes, or none before a signal.
Result<void> write_all(int fd, const std::string& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return refuse(path, "written");
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

}  // namespace

OutputFile::OutputFile(std::string path, std::string target, std::string partial_path, int fd)
    : path_(std::move(path)),
      target_(std::move(target)),
      partial_path_(std::move(partial_path)),
      fd_(fd) {}

Result<OutputFile> OutputFile::create(const std::string& path) {
  if (const int already = open_already(path); already >= 0) {
    std::fflush(stdout);
    // A duplicate, so that closing the output does not close standard output for later messages.
    const int fd = ::fcntl(already, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return refuse(path, "written");
    return OutputFile(path, path, "", fd);
  }
  LS_RETURN_IF_ERROR(check_output(path));
  const std::string target = target_of(path);
  struct stat file;
  const bool exists = ::stat(target.c_str(), &file) == 0;
  if (!exists || S_ISREG(file.st_mode)) {
    std::string partial = partial_of(target);
    const int fd = open_partial(partial, exists ? &file : nullptr);
    if (fd >= 0) return OutputFile(path, target, std::move(partial), fd);
    if (!exists) return refuse(path, "written");
  }
  // A device or FIFO is opened without O_TRUNC, which has no meaning for it.
  const int truncates = S_ISREG(file.st_mode) ? O_TRUNC : 0;
  // O_NONBLOCK: open() of a FIFO without a reader would wait, and restart after a stop signal.
  const int flags = O_WRONLY | O_CLOEXEC | truncates;
  int fd = ::open(target.c_str(), flags | O_NONBLOCK);
  for (; fd < 0 && errno == ENXIO && !stop_requested(); ::usleep(10'000))
    fd = ::open(target.c_str(), flags | O_NONBLOCK);
  if (fd < 0) return refuse(path, "written");
  ::fcntl(fd, F_SETFL, flags);
  return OutputFile(path, target, "", fd);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      partial_path_(std::move(other.partial_path_)),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  if (this == &other) return *this;
  abandon();
  path_ = std::move(other.path_);
  target_ = std::move(other.target_);
  partial_path_ = std::move(other.partial_path_);
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

OutputFile::~OutputFile() { abandon(); }

void OutputFile::abandon() {
  if (fd_ < 0) return;
  ::close(std::exchange(fd_, -1));
  if (!partial_path_.empty()) ::unlink(partial_path_.c_str());
}

Result<void> OutputFile::write(std::string_view bytes) {
  LS_CHECK(fd_ >= 0, "{} is closed", path_);
  return write_all(fd_, path_, bytes);
}

Result<void> OutputFile::commit() {
  LS_CHECK(fd_ >= 0, "{} is closed", path_);
  // No fsync(): pipes and terminals refuse it.
  if (partial_path_.empty())  // a pipe reports a lost reader here or never
    return ::close(std::exchange(fd_, -1)) == 0 ? Result<void>() : refuse(path_, "written");
  if (::fsync(fd_) != 0) return refuse(path_, "flushed to the disk");
  if (::rename(partial_path_.c_str(), target_.c_str()) != 0) return refuse(path_, "renamed");
  ::close(std::exchange(fd_, -1));
  // The new name is durable once the folder is flushed. A folder that cannot be opened is not an
  // error: the file is complete.
  if (const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
  return {};
}

Result<void> write_output(const std::string& path, std::string_view bytes) {
  LS_ASSIGN_OR_RETURN(auto file, OutputFile::create(path));
  LS_RETURN_IF_ERROR(file.write(bytes));
  return file.commit();
}

// Follows links like open(2) does, so it needs no target_of().
Result<void> append_output(const std::string& path, std::string_view bytes) {
  if (open_already(path) >= 0) return write_output(path, bytes);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return refuse(path, "written");
  const auto written = write_all(fd, path, bytes);
  ::close(fd);
  return written;
}

Result<void> check_output(const std::string& path) {
  if (open_already(path) >= 0) return {};
  const std::string target = target_of(path);
  std::error_code error;
  if (target.ends_with('/') || fs::is_directory(target, error))
    return fail("{}: is a folder; give the name of a file", path);
  const std::string folder = folder_of(target);
  if (!fs::is_directory(folder, error)) return fail("{}: no folder {}", path, folder);
  struct stat file;
  if (::stat(target.c_str(), &file) != 0 && errno == ENAMETOOLONG) return refuse(path, "written");
  // An existing file may be rewritten in place, so its own permission is enough; a new file needs
  // that of its folder.
  const std::string& written = fs::exists(target, error) ? target : folder;
  return ::access(written.c_str(), W_OK) == 0 ? Result<void>() : refuse(path, "written");
}

Result<void> check_output_folder(const std::string& path) {
  std::error_code error;
  fs::path there = fs::absolute(path, error);
  // The nearest existing parent: create_directories() will make the rest.
  while (!fs::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  if (!fs::is_directory(there, error)) return fail("{}: {} is not a folder", path, there.string());
  return ::access(there.c_str(), W_OK) == 0 ? Result<void>() : refuse(path, "written");
}

Result<void> make_output_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  return error ? Result<void>(fail("{}: {}", path, error.message())) : Result<void>();
}

void keep_standard_output_for_files() {
  // The original standard output becomes a descriptor above 2, and descriptor 1 a copy of standard
  // error, so that printing code needs no change.
  if (standard_output != STDOUT_FILENO) return;
  std::fflush(stdout);
  standard_output = ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  LS_CHECK(standard_output >= 0, "standard output is not open");
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
}

Result<void> finish_standard_output() {
  // An earlier failed write has already dropped its bytes; fflush() would not report it again, and
  // errno is of a later call.
  const bool lost = std::ferror(stdout) != 0;
  if (std::fflush(stdout) != 0) return refuse("standard output", "written");
  if (lost) return fail("standard output: cannot be written: a part of it is lost");
  return {};
}

}  // namespace lockstep
