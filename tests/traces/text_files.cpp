#include "tests/traces/text_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/temporary_folder.h"

namespace lockstep::testing_files {

std::string temporary_path(std::string_view name) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string file = fmt::format("{}.{}.{}", test->test_suite_name(), test->name(), name);
  std::replace(file.begin(), file.end(), '/', '_');
  const std::string path = tests::temporary_path(file);
  std::filesystem::remove_all(path);
  return path;
}

std::string write_temporary(std::string_view text, std::string_view name) {
  const std::string path = temporary_path(name);
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string changed(std::string text, std::string_view from, std::string_view to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from << " is not in " << text;
  if (at != std::string::npos) text.replace(at, from.size(), to);
  return text;
}

SavedCase smallest_case() {
  SavedCase saved;
  saved.cache.num_blocks = 1;
  saved.cache.groups = {
      {.layer_names = {"l"}, .spec = {}, .layer_specs = {}, .layers_per_page = 1}};
  saved.cache.tensors = {{.size_bytes = 1 << 20, .shared_by = {"l"}}};
  saved.kernel_block_sizes = {16};
  saved.trace.header.source = {.kind = "hand", .name = "", .seed = {}};
  return saved;
}

}  // namespace lockstep::testing_files
