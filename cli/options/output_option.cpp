#include "cli/options/output_option.h"

#include <CLI/CLI.hpp>

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

}  // namespace

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

bool names_output(const CLI::Option& option) {
  return option.get_type_name() == kFile || option.get_type_name() == kFolder;
}

}  // namespace lockstep
