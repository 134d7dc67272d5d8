#include <algorithm>

#include "properties/shrink/case_parts.h"
#include "properties/shrink/shrink_passes.h"

namespace lockstep {
namespace {

// The time that a record has of its own; null: it waits for others.
std::int64_t* time_of(TraceRecord& record) {
  if (auto* control = std::get_if<TraceControl>(&record)) return &control->t_ns;
  auto& request = std::get<TraceRequest>(record);
  return request.after.empty() ? &request.spec.arrival_ns : nullptr;
}

// Record `index` and all behind it come `by` earlier, but none before the record in front of it.
void move_up(SavedCase& saved, std::size_t index, std::int64_t by) {
  std::int64_t at_least = 0;
  for (std::size_t i = 0; i < saved.trace.records.size(); ++i) {
    TraceRecord& record = saved.trace.records[i];
    if (std::int64_t* t_ns = time_of(record)) {
      if (i >= index) *t_ns = std::max(at_least, *t_ns - by);
      at_least = *t_ns;
    }
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr || !request->abort || !request->abort->t_ns || i < index) continue;
    *request->abort->t_ns = std::max(at_least, *request->abort->t_ns - by);
  }
}

// Time between record `index` and the one before that has a time.
std::int64_t gap_before(SavedCase& saved, std::size_t index) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < index; ++i)
    if (const std::int64_t* t_ns = time_of(saved.trace.records[i])) before = *t_ns;
  const std::int64_t* t_ns = time_of(saved.trace.records[index]);
  return t_ns == nullptr ? 0 : *t_ns - before;
}

// Waits for nobody any more and comes with the record in front of it.
void stop_waiting(SavedCase& saved, std::size_t index) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < index; ++i)
    if (const std::int64_t* t_ns = time_of(saved.trace.records[i])) before = *t_ns;
  auto* request = std::get_if<TraceRequest>(&saved.trace.records[index]);
  if (request == nullptr || request->after.empty()) return;
  request->after.clear();
  request->delay_ns = 0;
  request->spec.arrival_ns = before;
}

}  // namespace

void shrink_arrivals(ShrinkTrial& trial) {
  if (trial.best().recording) return;
  trial.attempt_with([](SavedCase& saved) { move_up(saved, 0, std::int64_t{1} << 62); });
  for (std::size_t i = trial.best().trace.records.size(); i-- > 0;) {
    trial.attempt_with([i](SavedCase& saved) { stop_waiting(saved, i); });
    trial.lower_with(
        0, [i](SavedCase& saved) { return gap_before(saved, i); },
        [i](SavedCase& saved, std::int64_t gap) { move_up(saved, i, gap_before(saved, i) - gap); });
    auto& records = trial.best().trace.records;
    const auto* request = std::get_if<TraceRequest>(&records[i]);
    if (request == nullptr) continue;
    const auto at = [i](SavedCase& saved) -> TraceRequest& {
      return std::get<TraceRequest>(saved.trace.records[i]);
    };
    if (!request->after.empty())
      trial.lower(0, [&](SavedCase& saved) { return &at(saved).delay_ns; });
    if (request->abort && request->abort->t_ns)
      trial.lower(request->spec.arrival_ns,
                  [&](SavedCase& saved) { return &*at(saved).abort->t_ns; });
    if (request->abort && request->abort->after_tokens)
      trial.lower(1, [&](SavedCase& saved) { return &*at(saved).abort->after_tokens; });
  }
}

}  // namespace lockstep
