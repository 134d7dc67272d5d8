// One self-contained HTML page about a run: no network, no other file. Steps on a time axis,
// requests as lanes, the pool as a map of blocks over time, hits, preemptions, evictions, budget
// use, the verdict, and a divergence with its page drawn byte by byte.
#pragma once

#include <string>

#include "base/result.h"
#include "sim/engine/lockstep.h"

namespace lockstep {

struct ReportInfo {
  std::string title;          // what was run: the trace's name
  std::string command;        // how to run it again
  std::string configuration;  // "fcfs, 256 requests, 8192 tokens a step, 2 groups, 1000 blocks",
                              // for a person
};

std::string html_report(const ReportInfo& info, const RunReport& run);
Result<void> write_html_report(const std::string& path, const ReportInfo& info,
                               const RunReport& run);

}  // namespace lockstep
