// What the documents point at is there: the files of their links, and the tests that they name as
// the ones that would notice.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "tests/tidy/project.h"

namespace lockstep::tidy {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_under(const fs::path& folder, std::string_view extension) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().extension() == extension)
      files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<fs::path> documents() {
  std::vector<fs::path> files = files_under(root() / "docs", ".md");
  files.push_back(root() / "README.md");
  return files;
}

// The groups of every match, joined by full stops.
std::vector<std::string> matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it)
    found.push_back((*it)[1].str() + (it->size() > 2 ? "." + (*it)[2].str() : ""));
  return found;
}

// "Suite.Name" of all tests.
std::vector<std::string> tests() {
  std::vector<std::string> names;
  for (const fs::path& file : files_under(root() / "tests", ".cpp"))
    for (std::string& name : matches(text_of(file), R"(\nTEST(?:_P|_F)?\((\w+),\s*(\w+)\))"))
      names.push_back(std::move(name));
  return names;
}

// The names of Catch2's cases, "subject: what holds".
std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const fs::path& file : files_under(root() / "tests", ".cpp"))
    for (std::string& name :
         matches(text_of(file), R"re(\nTEST_CASE(?:_METHOD)?\((?:\s*\w+,)?\s*"([^"]+)")re"))
      names.push_back(std::move(name));
  return names;
}

// How many tests the documents name by `pattern`; each must be the beginning of one of `all`.
int names_of_tests(const std::string& pattern, const std::vector<std::string>& all) {
  int named = 0;
  for (const fs::path& document : documents())
    for (const std::string& begin : matches(text_of(document), pattern)) {
      const auto starts = [&](const std::string& test) { return test.starts_with(begin); };
      EXPECT_TRUE(std::any_of(all.begin(), all.end(), starts))
          << document.filename() << ": no test is called " << begin;
      ++named;
    }
  return named;
}

TEST(Documents, NameTestsThatAreThere) {
  EXPECT_GE(names_of_tests(R"(`([A-Z]\w+)\.([A-Z]\w+)(?:\.\.\.)?`)", tests()), 10);
  EXPECT_GE(names_of_tests(
                R"(`((?:attention|cache write|convolution|recurrence|split attention): [^`.]+))",
                cases()),
            5);
}

TEST(Documents, LinkToFilesThatAreThere) {
  int links = 0;
  for (const fs::path& document : documents())
    for (const std::string& link : matches(text_of(document), R"(\]\(([^)#\s]+)(?:#[^)]*)?\))")) {
      if (link.find("://") != link.npos) continue;
      EXPECT_TRUE(fs::exists(document.parent_path() / link))
          << document.filename() << " links to " << link;
      ++links;
    }
  EXPECT_GE(links, 40);
}

}  // namespace
}  // namespace lockstep::tidy
