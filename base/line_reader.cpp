#include "base/line_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/json_reader.h"
#include "base/stop_signal.h"

namespace lockstep {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

Result<int> open_for_reading(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail(fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  struct stat status {};
  if (::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) {
    ::close(fd);
    return fail(fmt::format("{}: found a folder; expected a file", path));
  }
  return fd;
}

// Appends up to one chunk; false at the end of the file.
Result<bool> read_chunk(int fd, const std::string& path, std::string& buffer) {
  const std::size_t size = buffer.size();
  buffer.resize(size + kChunkBytes);
  ssize_t got = 0;
  pollfd end{.fd = fd, .events = POLLIN, .revents = 0};
  do {
    // read() of a pipe restarts after a signal; poll() returns.
    got = ::poll(&end, 1, -1) < 0 ? -1 : ::read(fd, buffer.data() + size, kChunkBytes);
  } while (got < 0 && errno == EINTR && !stop_requested());
  buffer.resize(size + static_cast<std::size_t>(got < 0 ? 0 : got));
  if (got < 0) return fail(fmt::format("{}: cannot be read: {}", path, std::strerror(errno)));
  return got > 0;
}

}  // namespace

Result<LineReader> LineReader::open(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const auto fd, open_for_reading(path));
  LineReader reader(path, fd);
  LS_RETURN_IF_ERROR(reader.fill());
  LS_RETURN_IF_ERROR(reader.check_start());
  return reader;
}

Result<LineReader> LineReader::of_text(std::string name, std::string text) {
  LineReader reader(std::move(name), -1);
  reader.buffer_ = std::move(text);
  reader.at_end_of_file_ = true;
  LS_RETURN_IF_ERROR(reader.check_start());
  return reader;
}

Result<void> LineReader::check_start() const {
  if (buffer_.empty()) return fail(fmt::format("{}: found an empty file; expected records", path_));
  if (buffer_.starts_with("\xef\xbb\xbf"))
    return fail(fmt::format("{}:1: found a byte-order mark; expected UTF-8 without one", path_));
  return {};
}

LineReader::LineReader(LineReader&& other) noexcept { *this = std::move(other); }

LineReader& LineReader::operator=(LineReader&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(buffer_, other.buffer_);
  std::swap(begin_, other.begin_);
  std::swap(at_end_of_file_, other.at_end_of_file_);
  std::swap(number_, other.number_);
  std::swap(cut_off_, other.cut_off_);
  return *this;
}

LineReader::~LineReader() {
  if (fd_ >= 0) ::close(fd_);
}

tl::unexpected<Error> LineReader::refuse(std::string_view reason) const {
  return fail(fmt::format("{}:{}: {}", path_, number_, reason));
}

Result<void> LineReader::fill() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  LS_ASSIGN_OR_RETURN(const auto more, read_chunk(fd_, path_, buffer_));
  at_end_of_file_ = !more;
  return {};
}

Result<bool> LineReader::next(std::string_view& line) {
  ++number_;
  std::size_t searched = 0;
  std::size_t end = buffer_.find('\n', begin_);
  while (end == std::string::npos && !at_end_of_file_) {
    searched = buffer_.size() - begin_;
    if (searched > kJsonTextBytesMax) break;
    LS_RETURN_IF_ERROR(fill());
    end = buffer_.find('\n', searched);
  }
  if (end == std::string::npos && begin_ == buffer_.size()) return false;
  cut_off_ = end == std::string::npos;
  if (cut_off_) end = buffer_.size();
  line = std::string_view(buffer_).substr(begin_, end - begin_);
  begin_ = cut_off_ ? end : end + 1;
  if (line.size() > kJsonTextBytesMax) {
    return refuse(fmt::format("found a line of more than {0} bytes; expected at most {0}",
                              kJsonTextBytesMax));
  }
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line.find_first_not_of(" \t") == line.npos)
    return refuse("found an empty line; expected a record");
  return true;
}

Result<std::string> read_text_file(const std::string& path, std::size_t bytes_max) {
  LS_ASSIGN_OR_RETURN(const auto fd, open_for_reading(path));
  std::string text;
  Result<bool> more = true;
  while (more && *more && text.size() <= bytes_max) more = read_chunk(fd, path, text);
  ::close(fd);
  LS_RETURN_IF_ERROR(more);
  if (text.empty()) return fail(fmt::format("{}: found an empty file; expected text", path));
  if (text.size() > bytes_max) {
    return fail(
        fmt::format("{0}: found more than {1} bytes; expected at most {1}", path, bytes_max));
  }
  return text;
}

}  // namespace lockstep
