// Marks: what a case reached, as a set of numbers that a guided search compares.
//
// A mark is the hash of one of these: a class of coverage with the magnitude of its count; a class
// of events together with one of configurations; two classes in one step, or in consecutive
// steps; two consecutive states of one request, with a kind of cache; how the case failed.
//
// Invariants
// (1) The marks of a case depend on the case alone.
// (2) Nothing of a run without a guided search computes them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "properties/judge/tally.h"
#include "traces/formats/recording.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

inline constexpr std::size_t kNumMarks = std::size_t{1} << 20;  // their range
using Mark = std::uint32_t;

// Collects the marks of one engine's run.
class MarkCollector {
 public:
  explicit MarkCollector(const SavedCase& saved) : block_size_(saved.engine.block_size) {}

  // Of a step, with the counts of the case before it and after it.
  void step(const RecordedStep& step, const Tally& before, const Tally& after);
  // Of the case; `failure` names how it failed (empty: it did not). Ascending.
  std::vector<Mark> finish(const Tally& tally, std::string_view failure);

 private:
  struct Request {
    std::int64_t num_prompt_tokens = 0;
    std::uint32_t state = 0;
  };
  void enter(const std::string& name, std::uint32_t state);
  void follow_requests(const RecordedStep& step);
  std::uint32_t state_of(const RecordedStep& step, const RecordedScheduled& scheduled,
                         const Request& request) const;

  const std::int64_t block_size_;
  std::vector<std::uint8_t> last_classes_;  // of the previous step
  std::map<std::string, Request> requests_;
  std::vector<std::uint64_t> edges_;  // of states of requests
  std::vector<Mark> marks_;
};

}  // namespace lockstep
