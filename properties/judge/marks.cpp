#include "properties/judge/marks.h"

#include <algorithm>

#include "base/seeded_random.h"

namespace lockstep {
namespace {

// Values enter the hash, so reordering changes every mark of a stored comparison.
enum class MarkKind : std::uint64_t { count, configured, same_step, next_step, request, failure };

// Hashes up to three numbers. REQUIRES: a and b below 2^20, c below 2^20, so that the parts do not
// overlap.
Mark mark_of(MarkKind kind, std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0) {
  const std::uint64_t low = a + (b << 20) + (c << 40);
  return static_cast<Mark>(splitmix64(low ^ (static_cast<std::uint64_t>(kind) << 60)) % kNumMarks);
}

// Classes before it describe configurations, classes from it on describe events.
constexpr auto kFirstEvent = static_cast<std::size_t>(Reached::step);

// Sorts and removes duplicates.
void sort_out(auto& values) {
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

// States of a request. Values with kScheduled also carry what state_of() packs above bit 4.
enum State : std::uint32_t {
  kAdded = 1,
  kAborted,
  kPreempted,
  kLoading,
  kHeld,
  kStopped,
  kScheduled = 1u << 4,
};

}  // namespace

void MarkCollector::enter(const std::string& name, std::uint32_t state) {
  Request& request = requests_[name];
  if (request.state == state) return;
  edges_.push_back(std::uint64_t{request.state} << 16 | state);
  request.state = state;
}

// Packs the state of a scheduled request: bits 5 to 6 new or resumed, 7 with a hit, 8 to 9 in or
// past its prompt, 10 to 11 the position in its block (at its end, one past it, one before it,
// elsewhere), 12 to 14 the fate of its drafts (none, in flight, all rejected, some or all
// accepted).
std::uint32_t MarkCollector::state_of(const RecordedStep& step, const RecordedScheduled& scheduled,
                                      const Request& request) const {
  const std::int64_t end = scheduled.computed + scheduled.tokens;
  const std::int64_t in_block = end % block_size_;
  const std::uint32_t entry = !scheduled.is_new ? 0 : scheduled.resumed ? 2 : 1;
  const std::uint32_t hit = scheduled.is_new && scheduled.computed > 0 ? 1 : 0;
  // 0: still inside its prompt; 1: completes the prompt in this step; 2: decodes.
  const std::uint32_t phase = end < request.num_prompt_tokens                  ? 0
                              : scheduled.computed < request.num_prompt_tokens ? 1
                                                                               : 2;
  const std::uint32_t place = in_block == 0                 ? 0
                              : in_block == 1               ? 1
                              : in_block == block_size_ - 1 ? 2
                                                            : 3;
  const auto sampled = std::ranges::find(step.sampled, scheduled.id, &RecordedTokens::id);
  const std::int64_t num_drafts = std::ssize(scheduled.spec);
  // -1: no output of this step yet, or none at all for a prompt chunk.
  const std::int64_t accepted =
      sampled == step.sampled.end() ? -1 : std::ssize(sampled->tokens) - 1;
  const std::uint32_t drafts = num_drafts == 0         ? 0
                               : accepted < 0          ? 1
                               : accepted == 0         ? 2
                               : accepted < num_drafts ? 3
                                                       : 4;
  return kScheduled | entry << 5 | hit << 7 | phase << 8 | place << 10 | drafts << 12;
}

// Follows the requests through one step, in the order in which an engine acts: events, preemptions,
// schedule, loads, sends, ends, events while the step ran.
void MarkCollector::follow_requests(const RecordedStep& step) {
  const auto follow_events = [&](const std::vector<RecordedEvent>& events) {
    for (const RecordedEvent& event : events) {
      if (event.kind == RecordedEvent::Kind::add) {
        enter(event.request.name, kAdded);
        requests_[event.request.name].num_prompt_tokens = event.request.prompt.size();
      } else if (event.kind == RecordedEvent::Kind::abort) {
        enter(event.name, kAborted);
      }
    }
  };
  follow_events(step.before);
  for (const std::string& name : step.preempted) enter(name, kPreempted);
  for (const RecordedScheduled& scheduled : step.scheduled)
    enter(scheduled.id, state_of(step, scheduled, requests_[scheduled.id]));
  if (step.loading)
    for (const RecordedTable& table : *step.loading) enter(table.id, kLoading);
  for (const std::string& name : step.held) enter(name, kHeld);
  for (const RecordedStopped& stopped : step.stopped) enter(stopped.id, kStopped);
  follow_events(step.during);
}

// Pairs of classes in a step grow with the square of their number, but few classes occur in one
// step.
void MarkCollector::step(const RecordedStep& step, const Tally& before, const Tally& after) {
  std::vector<std::uint8_t> classes;
  for (std::size_t i = kFirstEvent + 1; i < kNumReached; ++i)  // every step has the first
    if (before[static_cast<Reached>(i)] != after[static_cast<Reached>(i)])
      classes.push_back(static_cast<std::uint8_t>(i));
  for (const std::uint8_t a : classes) {
    for (const std::uint8_t b : classes)
      if (a < b) marks_.push_back(mark_of(MarkKind::same_step, a, b));
    for (const std::uint8_t b : last_classes_) marks_.push_back(mark_of(MarkKind::next_step, b, a));
  }
  last_classes_ = std::move(classes);
  follow_requests(step);
}

std::vector<Mark> MarkCollector::finish(const Tally& tally, std::string_view failure) {
  std::vector<std::uint8_t> configured, events;
  // A class contributes one mark per magnitude up to its count: a count of 5 gives those of 1, 2
  // and 4. A case with more occurrences has all marks of a case with fewer.
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const std::int64_t count = tally[static_cast<Reached>(i)];
    if (count == 0) continue;
    (i < kFirstEvent ? configured : events).push_back(static_cast<std::uint8_t>(i));
    const std::uint64_t size = static_cast<std::uint64_t>(count);
    for (std::uint64_t m = 1; size >> (m - 1) > 0; ++m)
      marks_.push_back(mark_of(MarkKind::count, i, m));
  }
  for (const std::uint8_t a : configured) {
    for (const std::uint8_t b : configured)
      if (a < b) marks_.push_back(mark_of(MarkKind::configured, a, b));
    for (const std::uint8_t b : events) marks_.push_back(mark_of(MarkKind::configured, a, b));
  }
  // A transition is marked once per kind of cache in the case: the same transition exercises
  // different managers.
  sort_out(edges_);
  for (const std::uint64_t edge : edges_)
    for (auto kind = static_cast<std::size_t>(Reached::full_attention);
         kind <= static_cast<std::size_t>(Reached::reference_window); ++kind)
      if (tally[static_cast<Reached>(kind)] > 0)
        marks_.push_back(mark_of(MarkKind::request, edge & 0xffff, edge >> 16, kind));
  // Names of failures are long, so they are hashed first; 40 bits of the hash are used.
  if (!failure.empty()) {
    std::uint64_t hash = 0;
    for (const char c : failure) hash = splitmix64(hash ^ static_cast<unsigned char>(c));
    marks_.push_back(mark_of(MarkKind::failure, hash & 0xfffff, hash >> 20 & 0xfffff));
  }
  sort_out(marks_);
  return std::move(marks_);
}

}  // namespace lockstep
