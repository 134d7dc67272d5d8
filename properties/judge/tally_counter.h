// Counts what a case is made of, from the case, and what each of its engines reaches, from its
// steps as a recorder writes them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "properties/judge/tally.h"
#include "traces/formats/recording.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// What it is made of.
void count_case(const SavedCase& saved, Tally& tally);

// What an engine reaches.
class TallyCounter {
 public:
  // Both must outlive the counter.
  TallyCounter(const SavedCase& saved, Tally& tally) : saved_(saved), tally_(tally) {}

  void step(const RecordedStep& step);

 private:
  enum class Place : std::uint8_t { waiting, loading, running, preempted };
  struct Request {
    Place place = Place::waiting;
    std::int64_t num_prompt_tokens = 0;
    std::int64_t num_computed_tokens = 0;  // after the last step in which it was scheduled
    std::int64_t num_steps = 0;            // scheduled since it was let in
    std::int64_t first_computed = 0;       // before that step
    std::int64_t num_loaded_tokens = 0;    // that a longer load is to bring it up to
  };

  void count_events(const RecordedStep& step);
  void count_abort(const std::string& name);
  void count_abort_of_running(const Request& request);
  void count_scheduled(const RecordedStep& step);
  void count_hit(const RecordedStep& step, const RecordedScheduled& scheduled);
  void count_preempted(const RecordedStep& step);
  void count_outcome(const RecordedStep& step);
  void count_answers(const RecordedStep& step);
  void count_transfers(const RecordedStep& step);
  bool is_computed_again(const RecordedScheduled& scheduled, const Request& request) const;

  const SavedCase& saved_;
  Tally& tally_;
  std::map<std::string, Request> requests_;  // live ones
  std::int64_t steps_in_flight_ = 0;
};

}  // namespace lockstep
