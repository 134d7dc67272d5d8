#include "sim/report/timeline.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <iterator>

namespace lockstep {

// Adds what happened; states are those of the later entry.
static void merge_into(TimelineStep& into, const TimelineStep& next) {
  TimelineStep sum = next;
  sum.step = into.step;
  sum.time_ns = into.time_ns;
  sum.num_steps += into.num_steps;
  sum.scheduled_tokens += into.scheduled_tokens;
  sum.scheduled_requests += into.scheduled_requests;
  sum.preempted += into.preempted;
  sum.hit_tokens += into.hit_tokens;
  sum.evicted += into.evicted;
  sum.stored += into.stored;
  into = sum;
}

// Compares what the map shows; step and block identify a change.
static bool same_state(const BlockChange& a, const BlockChange& b) {
  return a.group == b.group && a.holders == b.holders && a.lane == b.lane && a.cached == b.cached;
}

// Every block starts free and without content.
TimelineRecorder::TimelineRecorder(const RunConfig& config, const TimelineLimits& limits)
    : config_(config), limits_(limits) {
  timeline_.num_blocks = config.backend.plan.num_blocks;
  timeline_.token_budget = config.engine.max_num_batched_tokens;
  blocks_.resize(timeline_.num_blocks);
  drawn_ = blocks_;
}

std::int32_t TimelineRecorder::lane_of(RequestId id) const {
  return index_of(id) < lanes_.size() ? lanes_[id] : -1;
}

// Request ids are reused, so the id's lane is replaced. Requests after lanes_max have none.
void TimelineRecorder::arrived(const Arrival& arrival) {
  const RequestId id = arrival.id;
  if (index_of(id) >= lanes_.size()) lanes_.resize(index_of(id) + 1, -1);
  lanes_[id] = -1;
  if (static_cast<std::int64_t>(timeline_.lanes.size()) >= limits_.lanes_max) {
    ++undrawn_lanes_;
    return;
  }
  lanes_[id] = static_cast<std::int32_t>(timeline_.lanes.size());
  Lane& lane = timeline_.lanes.emplace_back();
  lane.name = arrival.name;
  lane.prompt_tokens = arrival.num_prompt_tokens;
  lane.spans.push_back(
      {.kind = LaneSpan::Kind::waiting, .first_step = arrival.step, .last_step = arrival.step});
}

// Extends the last span to `step`. A span of another kind starts there; if both start in the same
// step, the later kind replaces the earlier one.
void TimelineRecorder::extend(std::int32_t lane, LaneSpan::Kind kind, std::int64_t step) {
  std::vector<LaneSpan>& spans = timeline_.lanes[lane].spans;
  LaneSpan& last = spans.back();
  if (last.kind == kind) {
    last.last_step = step;
    return;
  }
  if (last.first_step == step) {
    last.kind = kind;
    return;
  }
  last.last_step = step - 1;
  spans.push_back({.kind = kind, .first_step = step, .last_step = step});
}

bool TimelineRecorder::decided(const StepView& view) {
  const SchedulerOutput& decision = view.decision;
  step_ = decision.step;
  TimelineStep entry{.step = step_, .time_ns = view.now_ns};
  entry.scheduled_tokens = static_cast<std::int32_t>(decision.total_num_scheduled_tokens);
  entry.scheduled_requests = static_cast<std::int32_t>(decision.scheduled.size());
  entry.running = static_cast<std::int32_t>(view.decisions.running().size());
  const auto waiting = view.decisions.waiting();
  entry.waiting = static_cast<std::int32_t>(waiting.size());
  entry.preempted = static_cast<std::int32_t>(decision.preempted.size());
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    const std::int32_t at = lane_of(scheduled.id);
    if (scheduled.is_new) entry.hit_tokens += scheduled.computed;
    if (at < 0) continue;
    Lane& lane = timeline_.lanes[at];
    if (scheduled.is_new && !scheduled.is_resumed) lane.cached_tokens = scheduled.computed;
    const bool decodes = scheduled.computed >= lane.prompt_tokens;
    extend(at, decodes ? LaneSpan::Kind::decode : LaneSpan::Kind::prefill, step_);
  }
  for (const RequestId id : decision.preempted)
    if (lane_of(id) >= 0) extend(lane_of(id), LaneSpan::Kind::preempted, step_);
  for (const RequestId id : waiting) {
    if (lane_of(id) < 0) continue;
    LaneSpan& last = timeline_.lanes[lane_of(id)].spans.back();
    last.last_step = step_;
  }
  follow_blocks(view.decisions, entry);
  add_step(entry);
  return true;
}

// An entry is complete when it covers stride_ steps; until then the next steps are merged into it.
void TimelineRecorder::add_step(const TimelineStep& entry) {
  std::vector<TimelineStep>& steps = timeline_.steps;
  ++timeline_.num_steps;
  if (steps.empty() || steps.back().num_steps >= stride_)
    steps.push_back(entry);
  else
    merge_into(steps.back(), entry);
  if (static_cast<std::int64_t>(steps.size()) > limits_.steps_max) thin_steps();
}

// Merges pairs of entries, in place. An odd last entry is filled by later steps.
void TimelineRecorder::thin_steps() {
  std::vector<TimelineStep>& steps = timeline_.steps;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < steps.size(); i += 2) {
    steps[kept] = steps[i];
    if (i + 1 < steps.size()) merge_into(steps[kept], steps[i + 1]);
    ++kept;
  }
  steps.resize(kept);
  stride_ *= 2;
}

// Counts of the prefix cache belong to the step that is already recorded.
bool TimelineRecorder::finished(const StepView& view) {
  if (timeline_.steps.empty()) return true;
  timeline_.steps.back().evicted += static_cast<std::int32_t>(view.counters.evicted);
  timeline_.steps.back().stored += static_cast<std::int32_t>(view.counters.stored);
  for (const StoppedRequest& request : view.stopped) {
    if (lane_of(request.id) < 0) continue;
    Lane& lane = timeline_.lanes[lane_of(request.id)];
    lane.output_tokens = view.decisions.num_tokens(request.id) - lane.prompt_tokens;
  }
  return true;
}

void TimelineRecorder::left(RequestId id, FinishReason reason) {
  if (lane_of(id) < 0) return;
  timeline_.lanes[lane_of(id)].ended = name_of(reason);
}

// Records which request holds each block, from the tables of all running requests, where it
// changed. Only the model knows what is cached.
void TimelineRecorder::follow_blocks(const DecisionSource& decisions, TimelineStep& entry) {
  const Scheduler* const model = decisions.model();
  for (BlockChange& block : blocks_) block = {};
  const auto num_groups = static_cast<std::int32_t>(config_.backend.plan.groups.size());
  for (const RequestId id : decisions.running()) {
    for (std::int32_t g = 0; g < num_groups; ++g) {
      for (const BlockId held : decisions.block_table(id, g)) {
        if (held == kNullBlock || static_cast<std::size_t>(index_of(held)) >= blocks_.size())
          continue;
        BlockChange& block = blocks_[index_of(held)];
        if (block.holders++ == 0) block.lane = lane_of(id);
        block.group = g;
      }
    }
  }
  for (std::size_t b = 1; b < blocks_.size(); ++b) {
    BlockChange& block = blocks_[b];
    block.cached = model != nullptr && model->is_cached(static_cast<BlockId>(b));
    (block.holders > 0 ? entry.used_blocks
     : block.cached    ? entry.cached_blocks
                       : entry.free_blocks)++;
  }
  // Counts above are exact in every step; only the drawn changes are thinned.
  if (step_ % change_stride_ != 0) return;
  const auto followed = std::min(static_cast<std::size_t>(limits_.blocks_max), blocks_.size());
  for (std::size_t b = 1; b < followed; ++b) {
    if (same_state(blocks_[b], drawn_[b])) continue;
    drawn_[b] = blocks_[b];
    BlockChange change = blocks_[b];
    change.step = step_;
    change.block = static_cast<std::int32_t>(b);
    timeline_.block_changes.push_back(change);
  }
  if (static_cast<std::int64_t>(timeline_.block_changes.size()) > limits_.block_changes_max)
    thin_changes();
}

// Moves each change to the next recorded step, and keeps only the last one per block and step.
void TimelineRecorder::thin_changes() {
  change_stride_ *= 2;
  std::vector<BlockChange>& changes = timeline_.block_changes;
  for (BlockChange& change : changes)
    change.step = (change.step + change_stride_ - 1) / change_stride_ * change_stride_;
  const auto order = [](const BlockChange& a, const BlockChange& b) {
    return std::pair(a.step, a.block) < std::pair(b.step, b.block);
  };
  std::ranges::stable_sort(changes, order);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const bool last = i + 1 == changes.size() || order(changes[i], changes[i + 1]);
    if (last) changes[kept++] = changes[i];
  }
  changes.resize(kept);
}

Timeline TimelineRecorder::take() {
  if (stride_ > 1)
    timeline_.notes.push_back(
        fmt::format("{} steps, {} per column of the charts", timeline_.num_steps, stride_));
  if (change_stride_ > 1)
    timeline_.notes.push_back(
        fmt::format("the block map samples the pool every {} steps", change_stride_));
  if (undrawn_lanes_ > 0)
    timeline_.notes.push_back(fmt::format("{} later requests have no lane", undrawn_lanes_));
  if (timeline_.num_blocks > limits_.blocks_max)
    timeline_.notes.push_back(fmt::format("the map shows the first {} of {} blocks",
                                          limits_.blocks_max, timeline_.num_blocks));
  return std::move(timeline_);
}

namespace {

// A message in the encoding of protocol buffers: fields by number, as varints, doubles or bytes.
class Message {
 public:
  Message& number(std::uint32_t field, std::uint64_t value) {
    varint(field << 3);
    varint(value);
    return *this;
  }
  Message& bytes(std::uint32_t field, std::string_view value) {
    varint(field << 3 | 2);
    varint(value.size());
    text_ += value;
    return *this;
  }
  Message& real(std::uint32_t field, double value) {
    varint(field << 3 | 1);
    for (int shift = 0; shift < 64; shift += 8)
      text_ += static_cast<char>(std::bit_cast<std::uint64_t>(value) >> shift);
    return *this;
  }
  Message& message(std::uint32_t field, const Message& value) { return bytes(field, value.text_); }
  const std::string& text() const { return text_; }

 private:
  // Seven bits per byte, lowest first; the high bit means that another byte follows.
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(value | 0x80);
    text_ += static_cast<char>(value);
  }

  std::string text_;
};

// Field numbers of Perfetto's .proto files (protos/perfetto/trace).
namespace trace {
constexpr std::uint32_t kPacket = 1;
}
namespace packet {
constexpr std::uint32_t kTimestamp = 8, kSequenceId = 10, kTrackEvent = 11, kTrackDescriptor = 60;
}
namespace track {
constexpr std::uint32_t kUuid = 1, kName = 2, kParent = 5, kCounter = 8, kOrdering = 11, kRank = 12;
constexpr std::uint64_t kExplicit = 3;
}  // namespace track
namespace event {
constexpr std::uint32_t kAnnotation = 4, kType = 9, kTrack = 11, kName = 23, kCounterValue = 30,
                        kRealCounterValue = 44;
constexpr std::uint64_t kBegin = 1, kEnd = 2, kInstant = 3, kCounter = 4;
}  // namespace event
namespace annotation {
constexpr std::uint32_t kInt = 4, kText = 6, kName = 10;
}

// Track ids. Counters and lanes have separate ranges, so an id depends only on its position.
constexpr std::uint64_t kRoot = 1, kSteps = 2, kRequests = 3, kFirstCounter = 16, kFirstLane = 1024;

// A counter track and the value it shows. Merged steps have one value: the state after the last of
// them, or the mean per step.
struct CounterTrack {
  std::string_view name;
  std::int32_t TimelineStep::*value;
  bool is_per_step = false;
};
constexpr CounterTrack kCounters[] = {
    {"blocks used", &TimelineStep::used_blocks},
    {"blocks cached", &TimelineStep::cached_blocks},
    {"blocks free", &TimelineStep::free_blocks},
    {"requests running", &TimelineStep::running},
    {"requests waiting", &TimelineStep::waiting},
    {"tokens scheduled per step", &TimelineStep::scheduled_tokens, true},
    {"tokens hit per step", &TimelineStep::hit_tokens, true},
    {"preemptions per step", &TimelineStep::preempted, true},
    {"hashes stored per step", &TimelineStep::stored, true},
    {"hashes evicted per step", &TimelineStep::evicted, true}};

// Start times of steps, in nanoseconds of the trace.
class StepClock {
 public:
  StepClock(const RunSummary& summary, const Timeline& timeline)
      : steps_(timeline.steps), end_ns_(summary.simulated_ns) {
    for (std::size_t i = 1; i < steps_.size(); ++i)
      is_even_ |= steps_[i].time_ns <= steps_[i - 1].time_ns;
    if (!steps_.empty()) is_even_ |= end_ns_ <= steps_.back().time_ns;
  }

  // Returns true if the run's clock does not advance between some steps. Each step then takes one
  // microsecond, since Perfetto does not show slices of length 0.
  bool is_even() const { return is_even_; }
  // Returns the start of a step. Inside a merged entry, time is interpolated: an entry of 4 steps
  // from 0 to 40 ns has its third step at 20 ns.
  std::uint64_t at(std::int64_t step) const {
    if (is_even_ || steps_.empty())
      return static_cast<std::uint64_t>(std::max<std::int64_t>(step, 0)) * 1'000;
    auto entry = std::ranges::upper_bound(steps_, step, {}, &TimelineStep::step);
    if (entry != steps_.begin()) --entry;
    const std::int64_t next =
        std::next(entry) == steps_.end() ? end_ns_ : std::next(entry)->time_ns;
    const std::int64_t inside = std::clamp<std::int64_t>(step - entry->step, 0, entry->num_steps);
    return static_cast<std::uint64_t>(entry->time_ns +
                                      (next - entry->time_ns) * inside / entry->num_steps);
  }

 private:
  const std::vector<TimelineStep>& steps_;
  const std::int64_t end_ns_;
  bool is_even_ = false;
};

// Appends packets to a trace. All use sequence 1, since one writer produces them.
class TraceWriter {
 public:
  // Declares a track. `rank`: its position among the parent's tracks, if the parent `orders` them.
  void describe(std::uint64_t uuid, std::string_view name, std::uint64_t parent,
                std::uint64_t rank = 0, bool orders = false, bool is_counter = false) {
    Message descriptor;
    descriptor.number(track::kUuid, uuid).bytes(track::kName, name);
    if (parent != 0) descriptor.number(track::kParent, parent);
    if (is_counter) descriptor.message(track::kCounter, Message());
    if (orders) descriptor.number(track::kOrdering, track::kExplicit);
    descriptor.number(track::kRank, rank);
    add(Message().message(packet::kTrackDescriptor, descriptor));
  }
  // Sets a counter from `time_ns` onward to value / divisor.
  void count(std::uint64_t uuid, std::uint64_t time_ns, std::int64_t value, std::int64_t divisor) {
    Message count;
    count.number(event::kType, event::kCounter).number(event::kTrack, uuid);
    if (value % divisor == 0)
      count.number(event::kCounterValue, static_cast<std::uint64_t>(value / divisor));
    else
      count.real(event::kRealCounterValue,
                 static_cast<double>(value) / static_cast<double>(divisor));
    at(time_ns, count);
  }
  // Starts a slice; `type` may make it an instant event. `details`: annotations of the event.
  void begin(std::uint64_t uuid, std::uint64_t time_ns, std::string_view name,
             const std::vector<Message>& details = {}, std::uint64_t type = event::kBegin) {
    Message slice;
    slice.number(event::kType, type).number(event::kTrack, uuid).bytes(event::kName, name);
    for (const Message& detail : details) slice.message(event::kAnnotation, detail);
    at(time_ns, slice);
  }
  void end(std::uint64_t uuid, std::uint64_t time_ns) {
    at(time_ns, Message().number(event::kType, event::kEnd).number(event::kTrack, uuid));
  }
  std::string take() { return std::move(text_); }

 private:
  void at(std::uint64_t time_ns, const Message& track_event) {
    add(Message().number(packet::kTimestamp, time_ns).message(packet::kTrackEvent, track_event));
  }
  void add(Message one) {
    one.number(packet::kSequenceId, 1);
    text_ += Message().message(trace::kPacket, one).text();
  }

  std::string text_;
};

// Returns an annotation of an event.
Message detail(std::string_view name, std::int64_t value) {
  return Message()
      .bytes(annotation::kName, name)
      .number(annotation::kInt, static_cast<std::uint64_t>(value));
}
Message detail(std::string_view name, std::string_view value) {
  return Message().bytes(annotation::kName, name).bytes(annotation::kText, value);
}

void write_steps(const Timeline& timeline, const StepClock& clock, TraceWriter& out) {
  out.describe(kSteps, clock.is_even() ? "steps, a microsecond each" : "steps", kRoot, 1);
  for (const TimelineStep& step : timeline.steps) {
    const std::int64_t last = step.step + step.num_steps - 1;
    const std::string name = step.num_steps == 1 ? fmt::format("step {}", step.step)
                                                 : fmt::format("steps {}-{}", step.step, last);
    out.begin(kSteps, clock.at(step.step), name,
              {detail(step.num_steps == 1 ? "requests" : "request-steps",
                      std::int64_t{step.scheduled_requests}),
               detail("tokens", std::int64_t{step.scheduled_tokens})});
    out.end(kSteps, clock.at(last + 1));
  }
}

void write_counters(const Timeline& timeline, const StepClock& clock, TraceWriter& out) {
  for (std::size_t i = 0; i < std::size(kCounters); ++i) {
    const std::uint64_t uuid = kFirstCounter + i;
    out.describe(uuid, kCounters[i].name, kRoot, 2 + i, false, true);
    for (const TimelineStep& step : timeline.steps)
      out.count(uuid, clock.at(step.step), step.*kCounters[i].value,
                kCounters[i].is_per_step ? step.num_steps : 1);
  }
}

// Writes one slice per phase, and an instant event where the request ended.
void write_lane(const Lane& lane, std::uint64_t uuid, const StepClock& clock, TraceWriter& out) {
  for (const LaneSpan& span : lane.spans) {
    std::vector<Message> details;
    if (span.kind == LaneSpan::Kind::prefill)
      details = {detail("prompt tokens", lane.prompt_tokens),
                 detail("tokens hit", lane.cached_tokens)};
    out.begin(uuid, clock.at(span.first_step), name_of(span.kind), details);
    out.end(uuid, clock.at(span.last_step + 1));
  }
  if (!lane.ended.empty() && !lane.spans.empty())
    out.begin(uuid, clock.at(lane.spans.back().last_step + 1), "ended: " + lane.ended,
              {detail("output tokens", lane.output_tokens)}, event::kInstant);
}

}  // namespace

std::string perfetto_trace(const std::string& title, const RunSummary& summary,
                           const Timeline& timeline) {
  const StepClock clock(summary, timeline);
  TraceWriter out;
  out.describe(kRoot, "lockstep " + title, 0, 0, true);
  write_steps(timeline, clock, out);
  write_counters(timeline, clock, out);
  std::string requests = "requests";
  for (const std::string& note : timeline.notes) requests += "; " + note;
  out.describe(kRequests, requests, kRoot, 2 + std::size(kCounters), true);
  for (std::size_t i = 0; i < timeline.lanes.size(); ++i) {
    out.describe(kFirstLane + i, timeline.lanes[i].name, kRequests, i);
    write_lane(timeline.lanes[i], kFirstLane + i, clock, out);
  }
  if (summary.divergence)
    out.begin(kSteps, clock.at(summary.divergence->step), "divergence",
              {detail("what", std::string_view(summary.divergence->message))}, event::kInstant);
  return out.take();
}

}  // namespace lockstep
