// One self-contained HTML page about a run: no network, no other file. Steps on a time axis,
// requests as lanes, the pool as a map of blocks over time, hits, preemptions, evictions, budget
// use, the verdict, and a divergence with its page drawn byte by byte.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/cache/cache_events.h"
#include "sim/report/timeline.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

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
