#include "cli/options/output_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "base/output_file.h"

namespace lockstep {
namespace {

// Type names in the help, and the mark by which names_output() finds these options.
const std::string kFile = "FILE|-";
const std::string kFolder = "FOLDER";

// CLI11's validators return an error message, or an empty text.
std::string sentence_of(const Result<void>& checked) {
  return checked ? std::string() : checked.error().message;
}

// True for a value that may be an input: a positional argument, or the value of an option that
// looks like a path and not like a word ("mooncake" of --as).
bool may_be_input(const CLI::Option& option, const std::string& value) {
  return option.get_positional() || value.find_first_of("./") != value.npos;
}

// True if `path` is a recording that a command finds in the input folder `value`.
bool is_found_in(const std::string& value, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(value, error) || !fs::exists(path, error)) return false;
  const fs::path within = fs::relative(path, value, error);
  return !error && *within.begin() != ".." && within.extension() == ".jsonl";
}

// Returns the name of the option that shares `path` with the output `given`; empty: none. Of two
// outputs only the later one is compared with the earlier one.
std::string sharer_of(const CLI::App& command, const CLI::Option& given, const std::string& path) {
  bool is_later = false;
  for (const CLI::Option* option : command.get_options()) {
    const bool is_output = option->get_type_name() == kFile;
    if (option == &given) is_later = true;
    if (option == &given || option->get_type_name() == kFolder || (is_output && is_later)) continue;
    for (const std::string& value : option->results()) {
      if (is_output && value == "-" && path == "-") return option->get_name();
      if ((is_output || may_be_input(*option, value)) &&
          (is_same_file(value, path) || is_found_in(value, path)))
        return option->get_name();
    }
  }
  return {};
}

}  // namespace

bool is_same_file(const std::string& one, const std::string& other) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(one, error) || fs::exists(other, error))
    return fs::is_regular_file(one, error) && fs::equivalent(one, other, error);
  return fs::weakly_canonical(one, error) == fs::weakly_canonical(other, error);
}

CLI::Option* declare_output(CLI::App& command, const std::string& flag, std::string& path,
                            const std::string& help) {
  const auto check = [](std::string& given) {
    if (given == "-") keep_standard_output_for_files();
    return sentence_of(check_output(given));
  };
  return command.add_option(flag, path, help)->type_name(kFile)->check(CLI::Validator(check, ""));
}

CLI::Option* declare_output_folder(CLI::App& command, const std::string& flag, std::string& path,
                                   const std::string& help) {
  const auto check = [](std::string& given) { return sentence_of(check_output_folder(given)); };
  return command.add_option(flag, path, help)->type_name(kFolder)->check(CLI::Validator(check, ""));
}

void check_outputs_differ(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_type_name() != kFile) continue;
    for (const std::string& path : option->results())
      if (const std::string other = sharer_of(command, *option, path); !other.empty())
        throw CLI::ValidationError(
            option->get_name(),
            fmt::format("{} is also given as {}; use another file", path, other));
  }
}

bool names_output(const CLI::Option& option) {
  return option.get_type_name() == kFile || option.get_type_name() == kFolder;
}

}  // namespace lockstep
