// The data of a report: one record per step, the phases of requests, and which request held each
// block, step by step.
//
// Invariants
// (1) Memory is bounded: when a list is full, neighbours are merged, and an entry then covers 2, 4,
//     ... steps. `notes` lists what is merged or left out.
// (2) Counts of the summary are exact.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/cache/cache_events.h"
#include "sim/engine/step_observer.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// Sizes at which a list is thinned or cut; together they bound the size of a report.
struct TimelineLimits {
  std::int64_t steps_max = 4096;
  std::int64_t lanes_max = 512;
  std::int64_t block_changes_max = 400'000;
  std::int64_t blocks_max = 4096;  // block ids that are followed
};

// Totals of `num_steps` steps from `step` onward; queue lengths and block counts are those after
// the last of them.
struct TimelineStep {
  std::int64_t step = 0;
  std::int32_t num_steps = 1;
  std::int64_t time_ns = 0;
  std::int32_t scheduled_tokens = 0;
  std::int32_t scheduled_requests = 0;
  std::int32_t running = 0;
  std::int32_t waiting = 0;
  std::int32_t used_blocks = 0;    // held by a request
  std::int32_t cached_blocks = 0;  // free, with content a hit may find
  std::int32_t free_blocks = 0;    // free, content unknown to the prefix cache
  std::int32_t preempted = 0;
  std::int32_t hit_tokens = 0;
  std::int32_t evicted = 0;
  std::int32_t stored = 0;
};

// A phase of a request.
struct LaneSpan {
  enum class Kind : std::uint8_t { waiting, prefill, decode, preempted };
  Kind kind = Kind::waiting;
  std::int64_t first_step = 0;
  std::int64_t last_step = 0;  // inclusive
};

// One request, with its phases in order.
struct Lane {
  std::string name;
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;
  std::int64_t output_tokens = 0;
  std::string ended;  // "length", "stop", "abort"; empty: still live
  std::vector<LaneSpan> spans;
};

// From `step` onward, `holders` requests hold the block; `lane` is the first of them.
struct BlockChange {
  std::int64_t step = 0;
  std::int32_t block = 0;
  std::int32_t group = -1;
  std::int32_t holders = 0;  // 0: free
  std::int32_t lane = -1;    // -1: none, or a request without a lane
  bool cached = false;       // free, but a hit may find it
};

// The recorded run. Lists are bounded by TimelineLimits.
struct Timeline {
  std::vector<TimelineStep> steps;
  std::vector<Lane> lanes;
  std::vector<BlockChange> block_changes;
  std::int64_t num_blocks = 0;
  std::int64_t token_budget = 0;   // max_num_batched_tokens
  std::int64_t num_steps = 0;      // of the run
  std::vector<std::string> notes;  // what is not shown
};

// Records a timeline during a run. Cached blocks are only known if the model's scheduler decides.
class TimelineRecorder final : public StepObserver {
 public:
  // `config` outlives it.
  explicit TimelineRecorder(const RunConfig& config, const TimelineLimits& limits = {});

  void arrived(const Arrival& arrival) override;
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  void left(RequestId request, FinishReason reason) override;
  // Returns the timeline. REQUIRES: called once, after the run.
  Timeline take();

 private:
  // Extends a lane to `step`, with a new phase if the kind differs.
  void extend(std::int32_t lane, LaneSpan::Kind kind, std::int64_t step);
  std::int32_t lane_of(RequestId id) const;
  void add_step(const TimelineStep& step);
  // Counts blocks by state and records the changes.
  void follow_blocks(const DecisionSource& decisions, TimelineStep& entry);
  // Merge neighbours when a list is full: invariant (1). Each call halves the resolution.
  void thin_steps();
  void thin_changes();

  const RunConfig& config_;
  const TimelineLimits limits_;
  Timeline timeline_;
  IdVector<RequestId, std::int32_t> lanes_;  // -1: not shown
  std::vector<BlockChange> drawn_;           // per block: the state drawn last
  std::vector<BlockChange> blocks_;          // per block: the state now
  std::int64_t step_ = 0;
  std::int64_t stride_ = 1;         // steps per entry
  std::int64_t change_stride_ = 1;  // steps between two records of the pool
  std::int64_t undrawn_lanes_ = 0;
};

// A run as a trace for Perfetto (ui.perfetto.dev, trace_processor): one track per request with its
// phases, one for the steps, and counters of the pool, the queues and the prefix cache.
//
// Invariants
// (1) Perfetto's own format: a Trace of TracePackets (protos/perfetto/trace/trace.proto), tracks by
//     TrackDescriptor, slices and counters by TrackEvent.
// (2) Time is the run's virtual clock. Where two steps share an instant, a step takes one
//     microsecond.
//
// It shows the content of a Timeline; a track's name lists what the Timeline left out.

// The bytes of the trace. `title`: what was run.
std::string perfetto_trace(const std::string& title, const RunSummary& summary,
                           const Timeline& timeline);

// One self-contained HTML page about a run: no network, no other file. Steps on a time axis,
// requests as lanes, the pool as a map of blocks over time, hits, preemptions, evictions, budget
// use, the verdict, and a divergence with its page drawn byte by byte.

struct ReportInfo {
  std::string title;          // what was run: the trace's name
  std::string command;        // how to run it again
  std::string configuration;  // "fcfs, 256 requests, 8192 tokens per step, 2 groups, 1000 blocks",
                              // for a person
};

std::string html_report(const ReportInfo& info, const RunSummary& summary,
                        const Timeline& timeline);
Result<void> write_html_report(const std::string& path, const ReportInfo& info,
                               const RunSummary& summary, const Timeline& timeline);

// Cache events as JSON lines, for routers of requests by what engines have cached (docs/formats.md,
// "Cache events"): one line for a step that has events, newline included; empty for one without.
std::string cache_events_line(std::int64_t step, std::span<const CacheEvent> events);

// The text of report_page.html, with %DATA% where the run's JSON goes.
std::string_view report_page();

}  // namespace lockstep
