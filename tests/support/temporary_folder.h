// Where tests write: a folder of their own in the system's temporary folder, gone when they are.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace lockstep::tests {

// Made empty; removed with all that is in it. A forked child that ends leaves it to its parent.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    folder_ = (std::filesystem::temp_directory_path() / "lockstep_tests.XXXXXX").string();
    if (mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("cannot make " + folder_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (getpid() == owner_) std::filesystem::remove_all(folder_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string path(std::string_view name) const { return folder_ + "/" + std::string(name); }

 private:
  std::string folder_;
  pid_t owner_ = getpid();
};

// Of this process, until it ends. ctest runs each test in a process of its own.
inline std::string temporary_path(std::string_view name) {
  static const TemporaryFolder folder;
  return folder.path(name);
}

// The same, with nothing left there by an earlier test of the process.
inline std::string fresh_path(std::string_view name) {
  const std::string path = temporary_path(name);
  std::filesystem::remove_all(path);
  return path;
}

}  // namespace lockstep::tests
