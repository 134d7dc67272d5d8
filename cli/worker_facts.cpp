#include "cli/worker_facts.h"

#include <utility>

namespace lockstep {

void FactsOfRun::add_to(Recording& recording, WorkedBy worker) const {
  recording.header.worker_facts = std::move(worker);
  for (RecordedStep& step : recording.steps)
    if (const auto found = steps_.find(step.step); found != steps_.end())
      step.facts = found->second;
}

Result<void> FactsOfRun::write(Recording whole, const std::string& path, WorkedBy worker) const {
  for (RecordedStep& step : whole.steps) step.facts.reset();
  add_to(whole, std::move(worker));
  LS_ASSIGN_OR_RETURN(auto file, RecordingWriter::create(path, whole.header));
  for (const RecordedStep& step : whole.steps) LS_RETURN_IF_ERROR(file.write(step));
  return file.close(whole.end);
}

}  // namespace lockstep
