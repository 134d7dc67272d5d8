// Options that name an output, the same way for every command.
//
// (1) A path that cannot be written is refused while the options are read, before any work.
// (2) "-" keeps standard output for that file: what a person reads goes to standard error.
#pragma once

#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lockstep {

CLI::Option* declare_output(CLI::App& command, const std::string& flag, std::string& path,
                            const std::string& help);
// A folder, which the command makes where it does not exist.
CLI::Option* declare_output_folder(CLI::App& command, const std::string& flag, std::string& path,
                                   const std::string& help);
// True for options that one of these declared.
bool names_output(const CLI::Option& option);

}  // namespace lockstep
