// Commands that a user pastes into a shell.
//
// (1) Every option of the command line is repeated, in words that /bin/sh reads as they were given,
//     with the environment that finds an engine.
// (2) Left out are options that name outputs, and those that a change leaves out.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep {

// One word for /bin/sh; a plain word stays as it is.
std::string shell_word(std::string_view text);

// How the command to paste differs from the one that ran.
struct AgainChange {
  std::string command = {};                 // another subcommand; empty: the same
  std::vector<std::string> arguments = {};  // in place of the positional ones; empty: the same
  std::vector<std::pair<std::string, std::string>> set = {};  // options with their new values
  std::vector<std::string> without = {};
  std::vector<std::string> only = {};  // empty: all
};

std::string again_text(const CLI::App& command, const AgainChange& change = {});
// `lockstep COMMAND CASE` for a saved case, which holds all options except those that name the
// deciding engine and the worker. `command`: "replay", "explain".
std::string again_of_case(const CLI::App& command, const std::string& name,
                          const std::string& path);

}  // namespace lockstep
