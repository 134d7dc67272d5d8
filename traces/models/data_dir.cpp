#include "traces/models/data_dir.h"

#include <fmt/format.h>

#include <cstdlib>
#include <system_error>

#include "base/data_root.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

std::optional<fs::path> first_folder(std::initializer_list<fs::path> candidates) {
  for (const fs::path& candidate : candidates) {
    if (is_folder(candidate)) return candidate;
  }
  return std::nullopt;
}

const char* data_variable() {
  const char* value = std::getenv("LOCKSTEP_DATA");
  return value == nullptr || *value == '\0' ? nullptr : value;
}

}  // namespace

std::optional<fs::path> find_data_dir() {
  // Where it is named, it is there or nowhere: another folder's data must not replace it.
  if (const char* named = data_variable()) return first_folder({named});
  return first_folder({fs::path(LOCKSTEP_SOURCE_DIR).parent_path() / "shared", "../shared"});
}

std::string data_dir_hint() {
  if (const char* named = data_variable()) {
    return fmt::format("no folder {} ($LOCKSTEP_DATA)", named);
  }
  return "no folder ../shared next to the project, and $LOCKSTEP_DATA is not set";
}

std::optional<fs::path> find_samples_dir() {
  return first_folder({data_root() / "traces" / "samples", "traces/samples"});
}

}  // namespace lockstep
