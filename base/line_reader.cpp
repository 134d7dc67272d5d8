#include "base/line_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/json_reader.h"
#include "base/stop_signal.h"

namespace lockstep {
namespace {

// 1 MiB: fewer system calls than small chunks, and still bounded memory.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;

// pread(), so that the position stays at the start.
bool starts_as_gzip(int fd) {
  char magic[2];
  return ::pread(fd, magic, 2, 0) == 2 && std::string_view(magic, 2) == "\x1f\x8b";
}

// Reads up to one chunk; an error after a stop signal. read() of a pipe restarts after a signal,
// because the handler is installed with SA_RESTART, but poll() returns. The command can therefore
// be interrupted while a pipe is silent.
Result<std::size_t> read_some(int fd, const std::string& path, char* to) {
  pollfd end{.fd = fd, .events = POLLIN, .revents = 0};
  ssize_t got = 0;
  do {
    got = ::poll(&end, 1, -1) < 0 ? -1 : ::read(fd, to, kChunkBytes);
  } while (got < 0 && errno == EINTR && !stop_requested());
  if (got < 0) return fail("{}: cannot be read: {}", path, std::strerror(errno));
  return static_cast<std::size_t>(got);
}

}  // namespace

// inflate() and not gzread(), which drops what follows the last member without an error.
struct ByteSource::Gzip {
  Gzip() { ::inflateInit2(&stream, 16 + MAX_WBITS); }  // 16: gzip's format
  ~Gzip() { ::inflateEnd(&stream); }
  z_stream stream{};  // total_in is 0 between members
  std::string input = std::string(kChunkBytes, '\0');
};

// Unpacks up to one chunk; 0 at the end of the file, where inflate() may still have output.
Result<std::size_t> ByteSource::unpack(char* to) const {
  z_stream& stream = gzip_->stream;
  stream.next_out = reinterpret_cast<Bytef*>(to);
  stream.avail_out = kChunkBytes;
  while (stream.avail_out == kChunkBytes) {
    if (stream.avail_in == 0) {
      LS_ASSIGN_OR_RETURN(const std::size_t got, read_some(fd_, path_, gzip_->input.data()));
      if (got == 0 && stream.total_in == 0) return 0;
      stream.next_in = reinterpret_cast<Bytef*>(gzip_->input.data());
      stream.avail_in = static_cast<uInt>(got);
    }
    if (stream.total_in == 0) {
      for (; stream.avail_in > 0 && *stream.next_in == 0; ++stream.next_in) --stream.avail_in;
      if (stream.avail_in == 0) continue;
      if (*stream.next_in != 0x1f)
        return fail("{}: found other bytes after the gzip data; gzip -dc keeps what is good",
                    path_);
    }
    const int status = ::inflate(&stream, Z_NO_FLUSH);
    if (status == Z_STREAM_END)
      ::inflateReset(&stream);
    else if (status != Z_OK)
      return fail("{}: the gzip data {}", path_,
                  status == Z_BUF_ERROR ? "ends early; expected a whole file" : "is damaged");
  }
  return kChunkBytes - stream.avail_out;
}

Result<ByteSource> ByteSource::open(const std::string& path) {
  ByteSource source;
  source.path_ = path;
  // O_NONBLOCK: open() of a FIFO without a writer would wait, and restart after a stop signal.
  // Without it, reading waits in poll().
  source.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (source.fd_ < 0) return fail("{}: cannot be opened: {}", path, std::strerror(errno));
  ::fcntl(source.fd_, F_SETFL, ::fcntl(source.fd_, F_GETFL) & ~O_NONBLOCK);
  struct stat status {};
  if (::fstat(source.fd_, &status) == 0 && S_ISDIR(status.st_mode))
    return fail("{}: found a folder; expected a file", path);
  // Only a regular file can be read again from its start.
  if (S_ISREG(status.st_mode) && starts_as_gzip(source.fd_)) source.gzip_ = new Gzip;
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
  delete gzip_;
}

// A gzip file that ends inside its data is an error and not an end: the missing records would go
// unnoticed.
Result<bool> ByteSource::read_more(std::string& buffer) {
  const std::size_t size = buffer.size();
  buffer.resize(size + kChunkBytes);
  char* const to = buffer.data() + size;
  const Result<std::size_t> got = gzip_ != nullptr ? unpack(to) : read_some(fd_, path_, to);
  buffer.resize(size + got.value_or(0));
  return got.map([](std::size_t bytes) { return bytes > 0; });
}

Result<LineReader> LineReader::open(const std::string& path, std::vector<std::string> more) {
  LS_ASSIGN_OR_RETURN(auto source, ByteSource::open(path));
  LineReader reader(path);
  reader.source_ = std::move(source);
  reader.more_ = std::move(more);
  LS_RETURN_IF_ERROR(reader.fill());
  LS_RETURN_IF_ERROR(reader.check_start());
  return reader;
}

Result<LineReader> LineReader::of_text(std::string name, std::string text) {
  LineReader reader(std::move(name));
  reader.buffer_ = std::move(text);
  reader.at_end_of_file_ = true;
  LS_RETURN_IF_ERROR(reader.check_start());
  return reader;
}

Result<void> LineReader::check_start() const {
  if (buffer_.empty()) return fail("{}: found an empty file; expected records", path_);
  if (buffer_.starts_with("\xef\xbb\xbf"))
    return fail("{}:1: found a byte-order mark; expected UTF-8 without one", path_);
  return {};
}

// Swaps every member, so a moved-from reader owns the resources of the target and closes them.
LineReader::LineReader(LineReader&& other) noexcept { *this = std::move(other); }

LineReader& LineReader::operator=(LineReader&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(source_, other.source_);
  std::swap(buffer_, other.buffer_);
  std::swap(begin_, other.begin_);
  std::swap(at_end_of_file_, other.at_end_of_file_);
  std::swap(number_, other.number_);
  std::swap(cut_off_, other.cut_off_);
  std::swap(more_, other.more_);
  std::swap(header_, other.header_);
  return *this;
}

tl::unexpected<Error> LineReader::refuse(std::string_view reason) const {
  return fail("{}:{}: {}", path_, number_, reason);
}

Result<void> LineReader::fill() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  LS_ASSIGN_OR_RETURN(const auto more, source_.read_more(buffer_));
  at_end_of_file_ = !more;
  return {};
}

// At the end of a file, replaces this reader by one of the next file. An empty file is refused, so
// the recursion makes progress.
Result<bool> LineReader::next(std::string_view& line) {
  LS_ASSIGN_OR_RETURN(const bool found, next_of_file(line));
  if (found || more_.empty()) return found;
  LS_ASSIGN_OR_RETURN(auto following, open(more_.front(), {more_.begin() + 1, more_.end()}));
  following.header_ = header_;
  *this = std::move(following);
  if (!header_.empty()) {
    LS_RETURN_IF_ERROR(next_of_file(line));
    if (line != header_)
      return refuse(fmt::format("found \"{}\"; expected the header of the first file, \"{}\"",
                                printable_excerpt(line), printable_excerpt(header_)));
  }
  return next(line);
}

Result<bool> LineReader::next_of_file(std::string_view& line) {
  ++number_;
  // Searches each byte once, whatever the number of chunks that a line spans: a 16 MiB line costs
  // linear time. A line without an end stops at the limit, before memory is exhausted.
  std::size_t searched = 0;
  std::size_t end = buffer_.find('\n', begin_);
  while (end == std::string::npos && !at_end_of_file_) {
    searched = buffer_.size() - begin_;
    if (searched > kJsonTextBytesMax) break;
    LS_RETURN_IF_ERROR(fill());
    end = buffer_.find('\n', searched);
  }
  if (end == std::string::npos && begin_ == buffer_.size()) return false;
  // A last line without a newline may be complete or cut off; the reader of its format decides.
  cut_off_ = end == std::string::npos;
  if (cut_off_) end = buffer_.size();
  line = std::string_view(buffer_).substr(begin_, end - begin_);
  begin_ = cut_off_ ? end : end + 1;
  if (line.size() > kJsonTextBytesMax)
    return refuse(fmt::format("found a line of more than {0} bytes; expected at most {0}",
                              kJsonTextBytesMax));
  // The length is checked first: \r counts towards the limit.
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line.find_first_not_of(" \t") == line.npos)
    return refuse("found an empty line; expected a record");
  return true;
}

Result<void> check_read_twice(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))
    return {};
  return fail("{}: found a pipe or a device; expected a file, which is read more than once", path);
}

Result<std::string> read_text_file(const std::string& path, std::size_t bytes_max) {
  LS_ASSIGN_OR_RETURN(auto source, ByteSource::open(path));
  std::string text;
  for (bool more = true; more && text.size() <= bytes_max;) {
    LS_ASSIGN_OR_RETURN(more, source.read_more(text));
  }
  if (text.empty()) return fail("{}: found an empty file; expected text", path);
  if (text.size() > bytes_max)
    return fail("{0}: found more than {1} bytes; expected at most {1}", path, bytes_max);
  return text;
}

}  // namespace lockstep
