#include "base/data_root.h"

#include <system_error>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

}  // namespace

// /proc/self/exe, not argv[0]: a program that a shell found through PATH has a name without a
// folder.
fs::path folder_of_program() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  return error ? fs::path() : program.parent_path();
}

// Prefers the installed layout, so that an installed program never reads a source tree that happens
// to exist where it was built.
fs::path data_root() {
  std::error_code error;
  const fs::path installed = folder_of_program().parent_path() / "share" / "lockstep";
  return fs::is_directory(installed, error) ? installed : fs::path(LOCKSTEP_SOURCE_DIR);
}

}  // namespace lockstep
