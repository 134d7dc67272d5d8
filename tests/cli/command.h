// Runs the built `lockstep` as a user would: arguments in; exit status and what it printed out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace lockstep::tests {

struct Outcome {
  int status = -1;  // of exit(); 128 + the signal's number when one ended it
  std::string out;
  std::string err;
};

Outcome run_lockstep(const std::vector<std::string>& arguments);
// Another program; with an environment of its own when `environment` ("NAME=value") is not empty.
Outcome run_program(const std::string& program, const std::vector<std::string>& arguments,
                    std::vector<std::string> environment = {});

std::string sample_path(std::string_view name);  // in traces/samples
inline const std::string kSample = sample_path("shared_prefixes.jsonl");
std::string read_text(const std::string& path);
// The text with the first `found` replaced. Fails the test if there is none.
std::string replaced(std::string text, const std::string& found, const std::string& better);
void write_text(const std::string& path, std::string_view text);
// A request trace of these lines, with its header and its end.
std::string trace_of(const std::vector<std::string>& records);

}  // namespace lockstep::tests
