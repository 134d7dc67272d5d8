// A text file, plain or gzip, or several as one, line by line in bounded memory: checks what every
// format here requires.
//
// 1. A line has at most kJsonTextBytesMax bytes; its end is \n or \r\n, and the last may have none.
// 2. Refused, with an error message that names the file: a missing file, a folder, an empty file, a
//    byte-order mark, a line that is too long, an empty line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

struct gzFile_s;

namespace lockstep {

// The bytes of a file, plain or gzip, in chunks.
//
// Invariants
// (1) An open source owns one descriptor: fd_ or, of a gzip file, the one in gzip_. A moved-from
//     source owns none.
// (2) A regular file that starts with gzip's two bytes is unpacked, all of its members. A pipe is
//     read unchanged, and its bytes are returned as soon as they arrive.
//
// Refused, with an error message that names the file: a missing file, a folder, damaged gzip data.

class ByteSource {
 public:
  ByteSource() = default;
  static Result<ByteSource> open(const std::string& path);
  ByteSource(ByteSource&& other) noexcept;
  ByteSource& operator=(ByteSource&& other) noexcept;
  ~ByteSource();

  // Appends up to one chunk; false at the end of the file.
  Result<bool> read_more(std::string& buffer);

 private:
  std::string path_;
  int fd_ = -1;               // -1: none, or owned by gzip_
  gzFile_s* gzip_ = nullptr;  // null: a plain file
};

class LineReader {
 public:
  // `more`: files that follow, as if their lines were in the first one.
  static Result<LineReader> open(const std::string& path, std::vector<std::string> more = {});
  // The same for a text in memory; `name` replaces the path in messages.
  static Result<LineReader> of_text(std::string name, std::string text);
  LineReader(LineReader&& other) noexcept;
  LineReader& operator=(LineReader&& other) noexcept;
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // Each file that follows starts with this line, which next() skips.
  void expect_header(std::string_view line) { header_ = line; }
  // The next line without its end, valid until the next call; false behind the last one.
  Result<bool> next(std::string_view& line);

  // Of the line that next() gave: its number from 1, whether the file breaks off in it, its file.
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
  std::string header_;             // of each; empty: none
};

// A whole text file of at most `bytes_max` bytes.
Result<std::string> read_text_file(const std::string& path, std::size_t bytes_max);

}  // namespace lockstep
