// Marks: what a case reached, as a set of numbers that a guided search compares. A case with a new
// mark reached something that no earlier case did.
//
// A mark is the hash of one of these: a class of coverage with the magnitude of its count; a
// configuration class with a configuration or event class; two event classes in one step, or in
// consecutive steps; two consecutive states of one request, with a kind of cache; how the case
// failed.
//
// Invariants
// (1) The marks of a case depend only on the case and on what it is judged with.
// (2) A run without a guided search computes none of this.
// (3) Two marks may share a number. That loses a little guidance and never correctness.
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

inline constexpr std::size_t kNumMarks = std::size_t{1} << 20;  // marks are in [0, kNumMarks)
using Mark = std::uint32_t;

// Collects the marks of one engine's run.
class MarkCollector {
 public:
  explicit MarkCollector(const SavedCase& saved) : block_size_(saved.engine.block_size) {}

  // Adds the marks of one step. `before` and `after` are the case's counts around the step: a class
  // whose count changed occurred in it. Must be called for every step, in order.
  void step(const RecordedStep& step, const Tally& before, const Tally& after);
  // Adds the marks of the whole case and returns all marks, ascending and unique. `failure`
  // identifies how the case failed; empty: it did not. Ends the collection.
  std::vector<Mark> finish(const Tally& tally, std::string_view failure);

 private:
  struct Request {
    std::int64_t num_prompt_tokens = 0;
    // 0: not seen before
    std::uint32_t state = 0;
  };
  // Moves a request to a state and records the transition. Staying in a state is not a transition.
  void enter(const std::string& name, std::uint32_t state);
  void follow_requests(const RecordedStep& step);
  std::uint32_t state_of(const RecordedStep& step, const RecordedScheduled& scheduled,
                         const Request& request) const;

  const std::int64_t block_size_;
  std::vector<std::uint8_t> last_classes_;  // event classes of the previous step
  std::map<std::string, Request> requests_;
  std::vector<std::uint64_t> edges_;  // transitions: previous state << 16 | state
  std::vector<Mark> marks_;
};

}  // namespace lockstep
