// A file that is there whole or not at all: bytes go to PATH.partial-<pid>, are flushed to the
// disk, and take their name by rename(2); the folder is flushed after it.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace lockstep {

class AtomicFile {
 public:
  static Result<AtomicFile> create(const std::string& path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();  // without commit(): what was written is removed

  Result<void> write(std::string_view bytes);
  Result<void> commit();

 private:
  AtomicFile(std::string path, std::string partial_path, int fd);
  void abandon();

  std::string path_;
  std::string partial_path_;
  int fd_ = -1;
};

Result<void> write_file_atomically(const std::string& path, std::string_view bytes);

}  // namespace lockstep
