// Reads a text file line by line in bounded memory: plain or gzip, or several files as one. Checks
// what all formats of this project require.
//
// 1. A line has at most kJsonTextBytesMax bytes. It ends in \n or \r\n; the last line may have no
//    end.
// 2. Refused, with an error message that names the file: a missing file, a folder, an empty file, a
//    byte-order mark, a line that is too long, an empty line.
//
// Not checked: that the text is UTF-8 or JSON.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace lockstep {

// The bytes of a file, plain or gzip, in chunks of 1 MiB.
//
// Invariants
// (1) An open source owns one descriptor, fd_. A moved-from source owns none.
// (2) A regular file that starts with gzip's two magic bytes is decompressed, with all its members.
//     A pipe is read unchanged, because its first bytes cannot be read twice; its bytes are
//     returned as soon as they arrive.
//
// Refused, with an error message that names the file: a missing file, a folder, damaged or
// truncated gzip data, and bytes after it that are not zeros.

class ByteSource {
 public:
  ByteSource() = default;
  static Result<ByteSource> open(const std::string& path);
  ByteSource(ByteSource&& other) noexcept;
  ByteSource& operator=(ByteSource&& other) noexcept;
  ~ByteSource();

  // Appends up to one chunk to `buffer`; false at the end of the file. A stop signal
  // (base/stop_signal.h) ends a wait for a pipe with an error.
  Result<bool> read_more(std::string& buffer);

 private:
  struct Gzip;
  Result<std::size_t> unpack(char* to) const;

  std::string path_;
  int fd_ = -1;           // -1: none
  Gzip* gzip_ = nullptr;  // null: a plain file
};

// The lines of one file, or of several as if they were one.
//
// Invariants
// (1) buffer_[begin_..] holds the bytes that are read and not yet returned.
// (2) After an error the reader returns nothing useful: the caller stops.
class LineReader {
 public:
  // Opens `path`. `more`: files whose lines follow. They are opened when the previous one has
  // ended, so a missing file among them is an error of next().
  static Result<LineReader> open(const std::string& path, std::vector<std::string> more = {});
  // Reads a text in memory; `name` replaces the path in error messages.
  static Result<LineReader> of_text(std::string name, std::string text);
  LineReader(LineReader&& other) noexcept;
  LineReader& operator=(LineReader&& other) noexcept;
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // Requires each file of `more` to start with this line, and skips it: the shards of a CSV file
  // repeat its header.
  void expect_header(std::string_view line) { header_ = line; }
  // Reads the next line without its end. The view is valid until the next call. False: no line is
  // left.
  Result<bool> next(std::string_view& line);

  // Describe the line that next() has returned: its number in its file from 1, whether the file
  // ends without a newline after it, and the path of its file.
  std::int64_t number() const { return number_; }
  bool is_cut_off() const { return cut_off_; }
  const std::string& path() const { return path_; }

 private:
  explicit LineReader(std::string path) : path_(std::move(path)) {}
  Result<bool> next_of_file(std::string_view& line);
  Result<void> fill();
  Result<void> check_start() const;
  tl::unexpected<Error> refuse(std::string_view reason) const;

  std::string path_;
  ByteSource source_;
  std::string buffer_;  // bytes read and not yet returned start at begin_
  std::size_t begin_ = 0;
  bool at_end_of_file_ = false;
  std::int64_t number_ = 0;
  bool cut_off_ = false;
  std::vector<std::string> more_;  // files that follow
  std::string header_;             // first line of each; empty: none
};

// Refuses a pipe, socket or device: it gives its bytes once, and the caller opens the file again
// after it has detected its format.
Result<void> check_read_twice(const std::string& path);

// Reads a whole text file. Refuses an empty file and one of more than `bytes_max` bytes, after
// decompression.
Result<std::string> read_text_file(const std::string& path, std::size_t bytes_max);

}  // namespace lockstep
