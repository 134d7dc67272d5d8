// A text file line by line, in bounded memory: what holds for every format here is checked once.
//
// 1. A line has at most kJsonTextBytesMax bytes; its end is \n or \r\n, and the last may have none.
// 2. Refused, as a sentence with the file's name: a missing file, a folder, an empty file, a
//    byte-order mark, a line that is too long, an empty line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace lockstep {

class LineReader {
 public:
  static Result<LineReader> open(const std::string& path);
  // The same for a text in memory; `name` stands where the path would in what it refuses.
  static Result<LineReader> of_text(std::string name, std::string text);
  LineReader(LineReader&& other) noexcept;
  LineReader& operator=(LineReader&& other) noexcept;
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  ~LineReader();

  // The next line without its end, valid until the next call; false behind the last one.
  Result<bool> next(std::string_view& line);

  // Of the line that next() gave: its number from 1, and whether the file breaks off in it.
  std::int64_t number() const { return number_; }
  bool is_cut_off() const { return cut_off_; }
  const std::string& path() const { return path_; }

 private:
  LineReader(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  Result<void> fill();
  Result<void> check_start() const;
  tl::unexpected<Error> refuse(std::string_view reason) const;

  std::string path_;
  int fd_ = -1;
  std::string buffer_;  // bytes read and not yet given out start at begin_
  std::size_t begin_ = 0;
  bool at_end_of_file_ = false;
  std::int64_t number_ = 0;
  bool cut_off_ = false;
};

// A whole text file of at most `bytes_max` bytes.
Result<std::string> read_text_file(const std::string& path, std::size_t bytes_max);

}  // namespace lockstep
