// --backend vllm[:DIR] or worker:COMMAND: an engine's own worker, for every command that has it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "properties/generate/generator.h"
#include "sim/foreign/foreign_engine.h"
#include "sim/session/session.h"
#include "sim/worker/worker_backend.h"
#include "traces/formats/saved_case.h"

namespace CLI {
class App;
}

namespace lockstep {

struct WorkerOptions {
  std::string runner;  // empty: that of a saved case, else v1
  std::string
      states;  // vLLM's kind of layers with states; empty: that of a saved case, else the worker's
  std::string plant;  // a defect in the worker; empty: that of a saved case, else none
};

// --runner, --states and --plant.
void declare_worker(CLI::App& command, WorkerOptions& options);
// What the command line leaves open, as it was when the case failed.
WorkerOptions with_case(WorkerOptions options, const std::optional<WorkedBy>& worked_by);
// The processes that `backend` names, the first of them started. REQUIRES:
// is_engine_worker(backend).
Result<std::shared_ptr<ForeignEngines>> open_workers(const std::string& backend,
                                                     const WorkerOptions& options);
// `facts` receives what they do; absent: not recorded.
BackendFactory worker_factory(std::shared_ptr<ForeignEngines> workers, FactsSink facts = {});
// Starts them for the first case.
BackendFactory worker_factory(const std::string& backend, const WorkerOptions& options);

// The worker, as a saved case names it.
WorkedBy worker_of(const ForeignEngines& workers, const WorkerOptions& options);
// Names the worker when a saved case failed, if a different one works now; else empty. `now`:
// absent: `backend` does.
std::string worker_text(const std::optional<WorkedBy>& worked_by, const std::string& backend,
                        const std::optional<WorkedBy>& now);
// Narrows generated cases to what the worker says it takes (docs/protocols.md).
void fit_generator(const EngineHello& hello, GeneratorOptions& generator);

}  // namespace lockstep
