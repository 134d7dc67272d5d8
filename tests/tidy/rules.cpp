#include "tests/tidy/rules.h"

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <map>
#include <utility>

namespace lockstep::tidy {
namespace {

using Words = std::initializer_list<std::string_view>;

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::size_t characters(std::string_view utf8) {
  return static_cast<std::size_t>(
      std::count_if(utf8.begin(), utf8.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

bool is_word_character(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

// The line contains `word`, and not as a part of a longer word.
bool contains_word(std::string_view line, std::string_view word) {
  for (std::size_t at = line.find(word); at != line.npos; at = line.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    const bool starts = at == 0 || !is_word_character(line[at - 1]) || !is_word_character(word[0]);
    const bool ends =
        end == line.size() || !is_word_character(line[end]) || !is_word_character(word.back());
    if (starts && ends) return true;
  }
  return false;
}

// What the compiler sees of a line: no comment, and no name of an included project file.
std::string_view code_of(std::string_view line) {
  return line.starts_with("#include \"") ? "" : line.substr(0, line.find("//"));
}

std::string_view folder_of(std::string_view path) { return path.substr(0, path.find('/')); }

bool in_folders(std::string_view path, Words folders) {
  return std::find(folders.begin(), folders.end(), folder_of(path)) != folders.end();
}

bool in_a_library(std::string_view path) {
  return in_folders(path, {"base", "reference", "traces", "sim", "cuda_backend", "properties"});
}

bool is_header(std::string_view path) { return path.ends_with(".h") || path.ends_with(".cuh"); }

// "vllm-" and a digit in a string.
bool names_a_release(std::string_view code) {
  constexpr std::string_view kName = "\"vllm-";
  const std::size_t at = code.find(kName);
  return at != code.npos && at + kName.size() < code.size() &&
         std::isdigit(static_cast<unsigned char>(code[at + kName.size()])) != 0;
}

// The name of the type that a line at a namespace's scope begins to define; empty: none.
std::string_view defined_type(std::string_view line) {
  for (const std::string_view word : {"struct ", "class ", "enum class ", "union "}) {
    if (!line.starts_with(word) || (line.find(';') != line.npos && line.find('{') == line.npos))
      continue;
    line.remove_prefix(word.size());
    if (line.starts_with("alignas(")) line.remove_prefix(line.find(' ') + 1);
    return line.substr(0, line.find_first_of(" {"));
  }
  return {};
}

Findings banned_words(const SourceFile& file, Words words, std::string_view why,
                      bool comments_too = false) {
  Findings findings;
  int number = 0;
  for (std::string_view line : lines_of(file.text)) {
    ++number;
    const std::string_view looked_at = comments_too ? line : code_of(line);
    for (std::string_view word : words) {
      if (contains_word(looked_at, word)) {
        findings.push_back({file.path, number, std::string(word) + ": " + std::string(why)});
      }
    }
  }
  return findings;
}

void append(Findings& findings, Findings more) {
  std::move(more.begin(), more.end(), std::back_inserter(findings));
}

}  // namespace

bool is_code(std::string_view path) {
  for (std::string_view end : {".cpp", ".h", ".cu", ".cuh"}) {
    if (path.ends_with(end)) return true;
  }
  return false;
}

Findings check_lines(const SourceFile& file) {
  Findings findings;
  bool in_block = false;  // of a document: output as it was printed
  int number = 0;
  for (std::string_view line : lines_of(file.text)) {
    ++number;
    if (line.starts_with("```")) in_block = !in_block;
    const bool is_prose = file.path.ends_with(".md") && !in_block && line.find("://") == line.npos;
    if ((is_code(file.path) || is_prose) && characters(line) > 100) {
      findings.push_back({file.path, number, "longer than 100 characters"});
    }
    if (line.find('\t') != line.npos) findings.push_back({file.path, number, "a tab"});
    if (!line.empty() && (line.back() == ' ' || line.back() == '\r')) {
      findings.push_back({file.path, number, "white space at the end of the line"});
    }
  }
  if (!file.text.empty() && file.text.back() != '\n') {
    findings.push_back({file.path, number, "no newline at the end of the file"});
  }
  return findings;
}

Findings check_shape(const SourceFile& file) {
  if (!is_code(file.path)) return {};
  Findings findings;
  const auto lines = lines_of(file.text);
  if (lines.size() > 600) findings.push_back({file.path, 0, "more than 600 lines"});
  if (is_header(file.path)) {
    if (std::find(lines.begin(), lines.end(), "#pragma once") == lines.end()) {
      findings.push_back({file.path, 0, "a header without #pragma once"});
    }
    if (lines.empty() || !lines[0].starts_with("//")) {
      findings.push_back({file.path, 1, "a header that does not open with what it is"});
    }
  }
  return findings;
}

Findings check_words(const SourceFile& file) {
  // Written in two halves, so that this file does not find itself.
  Findings findings = banned_words(file,
                                   {"/wo"
                                    "rk/",
                                    "/ro"
                                    "ot/",
                                    "/ho"
                                    "me/",
                                    "/tm"
                                    "p/"},
                                   "a path of one machine", true);
  append(findings, banned_words(file,
                                {"TO"
                                 "DO",
                                 "FIX"
                                 "ME",
                                 "XX"
                                 "X",
                                 "HA"
                                 "CK",
                                 "not imple"
                                 "mented",
                                 "unimple"
                                 "mented"},
                                "unfinished by its own words", true));
  return findings;
}

Findings check_determinism(const SourceFile& file) {
  if (!is_code(file.path) || !in_a_library(file.path)) {
    return {};
  }
  return banned_words(file,
                      {"random_device", "uniform_int_distribution", "uniform_real_distribution",
                       "normal_distribution", "bernoulli_distribution", "discrete_distribution",
                       "poisson_distribution", "exponential_distribution", "std::shuffle",
                       "std::sample", "std::hash", "rand(", "srand(", "system_clock",
                       "high_resolution_clock", "time(nullptr)", "time(NULL)", "atomicAdd_float"},
                      "differs from run to run or from library to library");
}

Findings check_library_manners(const SourceFile& file) {
  if (!is_code(file.path) || !in_a_library(file.path)) {
    return {};
  }
  Findings findings;
  if (file.path != "base/check.cpp") {
    findings = banned_words(file,
                            {"std::cout", "std::cerr", "printf(", "fprintf(", "fmt::print", "puts(",
                             "exit(", "abort(", "std::terminate", "assert("},
                            "a library neither prints nor ends the process");
  }
  if (folder_of(file.path) == "reference" && file.path != "base/check.cpp") {
    append(findings,
           banned_words(file,
                        {"<chrono>", "<thread>", "<mutex>", "<atomic>", "<random>", "<fstream>",
                         "<iostream>", "<cstdio>", "<filesystem>", "<ctime>", "getenv"},
                        "the model has no clock, randomness, files or threads"));
  }
  return findings;
}

Findings check_includes(const SourceFile& file) {
  if (!is_code(file.path)) return {};
  Findings findings;
  int number = 0;
  for (std::string_view line : lines_of(file.text)) {
    ++number;
    constexpr std::string_view kInclude = "#include \"";
    if (line.starts_with(kInclude) && line.find('/') == line.npos)
      findings.push_back({file.path, number, "an include without its folder"});
  }
  return findings;
}

Findings check_terms(const SourceFile& file) {
  if (!is_code(file.path) || folder_of(file.path) == "tests") return {};
  Findings findings = banned_words(file, {"page_size"}, "say bytes or tokens: page_size_bytes");
  if (!file.path.starts_with("cuda_backend/kernels/") &&
      !file.path.starts_with("cuda_backend/defects/kernels/") &&
      !file.path.starts_with("cuda_backend/simt/")) {
    append(findings, banned_words(file, {"__global__"}, "kernels live in cuda_backend/kernels"));
  }
  if (file.path.starts_with("cuda_backend/kernels/"))
    append(findings, banned_words(file, {"__restrict__", "memcpy", "memmove", "memset"},
                                  "nothing checks it; simt::copy16 and copy_value are checked"));
  return findings;
}

Findings check_release_names(const SourceFile& file) {
  if (!is_code(file.path) || (!in_a_library(file.path) && folder_of(file.path) != "cli") ||
      file.path.starts_with("reference/profiles/") ||
      file.path == "reference/plan/model_spec.cpp" ||  // since when what is the default
      file.path == "reference/types/engine_config.h")        // the default
    return {};
  Findings findings;
  int number = 0;
  for (std::string_view line : lines_of(file.text)) {
    ++number;
    if (const std::string_view code = code_of(line); names_a_release(code))
      findings.push_back({file.path, number, "a release's name: ask its profile for a field"});
  }
  return findings;
}

Findings check_seams(const SourceFile& file) {
  constexpr std::string_view kClean[] = {
      "cuda_backend/kernels/", "cuda_backend/launch/", "cuda_backend/device/",
      "cuda_backend/pool/",    "cuda_backend/step/",   "cuda_backend/streams/",
      "cuda_backend/views/",   "reference/cache/",     "reference/memory/",
      "reference/plan/",       "reference/placement/", "reference/profiles/",
      "reference/schedule/",   "reference/types/"};
  if (std::none_of(std::begin(kClean), std::end(kClean),
                   [&](std::string_view folder) { return file.path.starts_with(folder); }))
    return {};
  Findings findings;
  int number = 0;
  for (std::string_view line : lines_of(file.text)) {
    ++number;
    // Kernels and their launchers have no defect in any form: no parameter, no template argument.
    const bool in_full = file.path.starts_with("cuda_backend/kernels/") ||
                         file.path.starts_with("cuda_backend/launch/");
    if (!in_full && !line.starts_with("#include")) continue;
    for (const std::string_view word : {"defect", "Defect", "mutant", "Mutant"})
      if (line.find(word) != line.npos)
        findings.push_back({file.path, number, "planted defects belong in cuda_backend/defects"});
  }
  return findings;
}

Findings check_folder_sizes(const std::vector<SourceFile>& files) {
  constexpr int kMost = 40;
  std::map<std::string, int> counts;
  for (const SourceFile& file : files)
    if (!file.path.starts_with("docs/findings/"))  // a page per finding, by number
      ++counts[file.path.substr(0, file.path.rfind('/') + 1)];
  Findings findings;
  for (const auto& [folder, count] : counts)
    if (count > kMost) findings.push_back({folder, 0, std::to_string(count) + " files"});
  return findings;
}

Findings check_definitions(const std::vector<SourceFile>& files) {
  Findings findings;
  std::map<std::string, std::string> headers;  // by the name of a type
  for (const SourceFile& file : files) {
    // What nvcc reads in place of the executor's headers says some of it again.
    if (!is_header(file.path) || file.path == "cuda_backend/simt/simt_gpu.h") continue;
    std::string scope;
    int number = 0;
    for (std::string_view line : lines_of(file.text)) {
      ++number;
      if (line.starts_with("namespace ")) scope = line.substr(0, line.find(" {"));
      const std::string_view type = defined_type(line);
      if (type.empty()) continue;
      const auto [at, is_first] = headers.emplace(scope + " " + std::string(type), file.path);
      if (!is_first)
        findings.push_back(
            {file.path, number, std::string(type) + " is a type of " + at->second + " already"});
    }
  }
  return findings;
}

}  // namespace lockstep::tidy
