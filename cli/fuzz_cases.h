// The failing cases of a fuzz run, in a folder: each as it was found, NAME.case.jsonl, and made
// small beside it, NAME.min.case.jsonl.
//
// Made small are the first few failures of each check; the others would say the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "properties/judge/judge.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

class FuzzCases {
 public:
  explicit FuzzCases(std::string folder) : folder_(std::move(folder)) {}

  // Writes the case at once: what follows may take long, or end early.
  Result<void> keep(const SavedCase& saved, const Outcome& outcome);
  // REQUIRES: no thread of the run is left, since every try is a child process.
  Result<void> shrink(double seconds_per_case);
  // A line for each file with its size; empty: nothing was kept.
  std::string text() const { return lines_; }

 private:
  struct Kept {
    std::string path;
    SavedCase saved;
    std::string check;
  };

  std::string folder_;
  std::vector<Kept> kept_;
  std::string lines_;
};

}  // namespace lockstep
