// What libFuzzer drives, and what the ordinary tests drive over the corpus (tests/fuzz/corpus) and
// with seeded mutations where clang is missing: every reader of a file, the audit of any recording,
// and whole cases from bytes.
//
// A target returns, or stops the process with a message: a reader that crashes, accepts what it
// writes differently, or refuses without a position; a failing case that is not a known finding.
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
