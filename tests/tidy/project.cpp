#include "tests/tidy/project.h"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace lockstep::tidy {
namespace {

namespace fs = std::filesystem;

bool is_text(const fs::path& path) {
  const std::string end = path.extension().string();
  return is_code(path.string()) || end == ".md" || end == ".cmake" || end == ".txt" ||
         end == ".py" || end == ".sh" || path.filename() == "run" ||
         path.filename() == "CMakePresets.json";
}

SourceFile read(const fs::path& path) {
  return {fs::relative(path, root()).generic_string(), text_of(path)};
}

}  // namespace

fs::path root() { return LOCKSTEP_SOURCE_DIR; }

const std::set<std::string>& top_folders() {
  static const std::set<std::string> folders = {"base",         "reference",  "traces", "sim",
                                                "cuda_backend", "properties", "cli",    "python",
                                                "tests",        "cmake",      "docs"};
  return folders;
}

const std::set<std::string>& top_files() {
  static const std::set<std::string> files = {
      "CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json", "CONTRIBUTING.md",
      "LICENSE",      "pyproject.toml", "README.md",         "run"};
  return files;
}

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string text_of(const Findings& findings) {
  std::string text;
  for (const Finding& finding : findings)
    text += fmt::format("{}:{}: {}\n", finding.path, finding.line, finding.what);
  return text;
}

const std::vector<SourceFile>& project() {
  static const std::vector<SourceFile> files = [] {
    std::vector<fs::path> paths = {root() / ".ci/run"};
    for (const std::string& file : top_files()) paths.push_back(root() / file);
    for (const std::string& folder : top_folders()) {
      for (const auto& entry : fs::recursive_directory_iterator(root() / folder)) {
        if (entry.is_regular_file() && is_text(entry.path())) paths.push_back(entry.path());
      }
    }
    std::sort(paths.begin(), paths.end());
    std::vector<SourceFile> read_files;
    for (const fs::path& path : paths) read_files.push_back(read(path));
    return read_files;
  }();
  return files;
}

bool is_product(const SourceFile& file) {
  const std::string folder = file.path.substr(0, file.path.find('/'));
  return is_code(file.path) && folder != "tests" && folder != "docs" && folder != "cmake";
}

std::vector<std::string> includes_of(const SourceFile& file) {
  constexpr std::string_view kInclude = "#include \"";
  std::vector<std::string> names;
  std::istringstream lines(file.text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(kInclude))
      names.push_back(line.substr(kInclude.size(), line.rfind('"') - kInclude.size()));
  return names;
}

}  // namespace lockstep::tidy
