// What libFuzzer drives, and what the ordinary tests drive over the corpus (tests/fuzz/corpus) and
// with seeded mutations when there is no clang: every reader of a file, the audit of whatever a
// recording says, and whole cases out of bytes.
//
// A target returns, or stops the process with a sentence: a reader that crashes, accepts what it
// writes differently, or refuses without saying where; a case that fails and is no known finding.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

struct FuzzTarget {
  std::string_view name;
  void (*run)(std::span<const std::uint8_t> bytes);
  std::vector<std::string> (*seeds)();  // inputs to begin with
};

std::span<const FuzzTarget> fuzz_targets();
const FuzzTarget& fuzz_target(std::string_view name);

}  // namespace lockstep
