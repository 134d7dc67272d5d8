// The workload of data parallel ranks as one of them sees it.
//
// (1) It is given what is dealt out to it, and answers for its own requests. An abort is for
//     whoever knows the request: until the step after the one in which it left.
// (2) Of its requests that have left, the workload of all hears when all ranks are through with the
//     step; so it does of how long the step has taken.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/engine/workload.h"

namespace lockstep {

class DealtWorkload final : public Workload {
 public:
  // `all` must outlive it.
  explicit DealtWorkload(Workload& all) : all_(all) {}

  // For the next turn.
  void deal(WorkloadEvent event);
  std::int64_t num_dealt_requests() const;
  bool knows(std::string_view request) const { return names_.find(request) != names_.end(); }
  // All ranks are through with the step: tells `all` what it was told.
  void pass_on();

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    return all_.sample(step, rows, output);
  }
  void step_done(std::int64_t) override {}
  void request_left(std::string_view name, std::uint64_t ticket) override;
  std::int64_t now_ns() const override { return all_.now_ns(); }
  void advance_to(std::int64_t now_ns) override;
  std::int64_t records_consumed() const override { return all_.records_consumed(); }

 private:
  Workload& all_;
  std::vector<WorkloadEvent> dealt_;
  std::set<std::string, std::less<>> names_;
  std::vector<std::pair<std::string, std::uint64_t>> left_;  // in the step at hand
  std::vector<std::string> left_before_;                     // in the step before
  std::int64_t until_ns_ = 0;                                // the step lasts at least
};

}  // namespace lockstep
