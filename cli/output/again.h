// Builds the command that repeats a run, for a user to paste into a shell.
//
// (1) Every option of the command line is repeated, as words that /bin/sh reads back unchanged,
//     with the environment variables that find an engine.
// (2) Options that name outputs are left out, and those that a change leaves out.
//
// Not repeated: the working folder; relative paths are relative to it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep {

// Returns the text as one word for /bin/sh. A word of plain characters stays unquoted.
std::string shell_word(std::string_view text);

// How the command to paste differs from the one that ran.
struct AgainChange {
  std::string command = {};                 // another subcommand; empty: the same
  std::vector<std::string> arguments = {};  // in place of the positional ones; empty: the same
  std::vector<std::pair<std::string, std::string>> set = {};  // options with their new values
  std::vector<std::string> without = {};                      // options to leave out
  std::vector<std::string> only = {};  // the only options to keep; empty: all
};

// Returns the command that repeats `command` with a change. REQUIRES: the options have been parsed.
std::string again_text(const CLI::App& command, const AgainChange& change = {});
// Returns `lockstep NAME PATH` for a saved case. The case holds all options, except those that name
// the deciding engine and the worker, which are repeated. `name`: "replay", "explain".
std::string again_of_case(const CLI::App& command, const std::string& name,
                          const std::string& path);

}  // namespace lockstep
