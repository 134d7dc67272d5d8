// The bytes of a file, plain or gzip, in chunks.
//
// Invariants
// (1) An open source owns one descriptor: fd_ or, of a gzip file, the one in gzip_. A moved-from
//     source owns none.
// (2) A regular file that starts with gzip's two bytes is unpacked, all of its members. A pipe is
//     read unchanged, and its bytes are returned as soon as they arrive.
//
// Refused, with an error message that names the file: a missing file, a folder, damaged gzip data.
#pragma once

#include <string>

#include "base/result.h"

struct gzFile_s;

namespace lockstep {

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

}  // namespace lockstep
