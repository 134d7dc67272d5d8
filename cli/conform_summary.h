// What a comparison with recordings came to, for a person and as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sim/conform/conform.h"
#include "sim/conform/conform_layouts.h"

namespace lockstep {

struct ConformTotals {
  ConformSummary schedules;
  std::vector<LayoutConformance> layouts;
  std::vector<RefusedFile> refused;        // of all kinds
  std::vector<std::string> not_looked_at;  // one sentence each

  std::int64_t files() const;  // that were judged
  std::int64_t plans() const;
  std::int64_t agreed() const;  // recordings of schedules, and plans
  std::vector<ConformMismatch> mismatches() const;
};

std::string summary_text(const ConformTotals& totals);
// files (that were judged), plans, agreed, steps, stuck, not_looked_at,
// mismatches: [{file, step, what, recorded, model}], refused (how many), refusals: [{file, reason}]
std::string summary_json(const ConformTotals& totals);

}  // namespace lockstep
