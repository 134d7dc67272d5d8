// Declares options that name an output, in the same way for every command.
//
// (1) A path that cannot be written is refused while the options are parsed, before any work.
// (2) "-" reserves standard output for that file: everything that a person reads goes to standard
//     error.
// (3) Two options do not write the same file, and no input is overwritten: check_outputs_differ().
// (4) names_output() identifies these options: a command that repeats a run leaves them out.
#pragma once

#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lockstep {

// Declares an output file.
CLI::Option* declare_output(CLI::App& command, const std::string& flag, std::string& path,
                            const std::string& help);
// Declares an output folder, which need not exist yet.
CLI::Option* declare_output_folder(CLI::App& command, const std::string& flag, std::string& path,
                                   const std::string& help);
// True if both paths name one regular file, which need not exist yet.
bool is_same_file(const std::string& one, const std::string& other);
// True for an option that one of these functions declared.
bool names_output(const CLI::Option& option);
// Throws CLI::ValidationError if an output file of a parsed command is also another output or an
// input. Devices and FIFOs may be shared.
void check_outputs_differ(const CLI::App& command);

}  // namespace lockstep
