// What the audit says of a recording in memory.
#pragma once

#include <vector>

#include "properties/audit/audit.h"

namespace lockstep {

inline std::vector<AuditFinding> audit(const Recording& recording,
                                       AuditScope scope = AuditScope::running_engine) {
  Auditor auditor(recording.header, scope);
  for (const RecordedStep& step : recording.steps) auditor.step(step);
  auditor.end(recording.end);
  return auditor.take_findings();
}

}  // namespace lockstep
