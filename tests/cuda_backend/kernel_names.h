// Names of kernels and launches in the sources, for tests that cover all of them.
#pragma once

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace lockstep {

using Names = std::set<std::string>;

inline std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// What the first group of `pattern` matches in `text`.
inline Names matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  Names found;
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it)
    found.insert((*it)[1]);
  return found;
}

}  // namespace lockstep
