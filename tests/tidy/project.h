// The text files of the project, for every rule that looks at all of them.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/tidy/rules.h"

namespace lockstep::tidy {

std::filesystem::path root();
const std::set<std::string>& top_folders();
const std::set<std::string>& top_files();

std::string text_of(const std::filesystem::path& path);
// "path:line: what", one line each.
std::string text_of(const Findings& findings);

// Every text file that people write, in the order of their names.
const std::vector<SourceFile>& project();
// C++ and CUDA of what is built, without tests and examples.
bool is_product(const SourceFile& file);
// Names in the #include "..." lines of a file.
std::vector<std::string> includes_of(const SourceFile& file);

}  // namespace lockstep::tidy
