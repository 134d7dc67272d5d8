// Starts an engine's own worker for --backend vllm[:DIR] or worker:COMMAND, and derives from its
// `hello` what a generated case may contain (docs/real_worker.md).
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
  std::string runner;  // model runner, "v1" or "v2"; empty: that of a saved case, else v1
  std::string
      states;  // vLLM's kind of layers with states; empty: that of a saved case, else the worker's
  std::string plant;  // a defect in the worker; empty: that of a saved case, else none
};

// Declares --runner, --states, --plant and --engine-python.
void declare_worker(CLI::App& command, WorkerOptions& options);
// Returns the options with everything that the command line leaves open as it was when the case
// failed.
WorkerOptions with_case(WorkerOptions options, const std::optional<WorkedBy>& worked_by);
// Refuses --runner, --states and --plant for a backend that would ignore them: all except an
// engine's own worker. `given`: the options of the command line.
Result<void> check_worker_options(const std::string& backend, const WorkerOptions& given);
// Returns the worker processes that `backend` names, with the first one started. Errors: options
// that only vLLM's worker has, a worker that does not start. REQUIRES: is_engine_worker(backend).
Result<std::shared_ptr<ForeignEngines>> open_workers(const std::string& backend,
                                                     const WorkerOptions& options);
// Returns the factory of backends on these processes. `facts`: receives what the worker does in
// each step; absent: not recorded.
BackendFactory worker_factory(std::shared_ptr<ForeignEngines> workers, FactsSink facts = {});
// The same, but the processes start with the first case.
BackendFactory worker_factory(const std::string& backend, const WorkerOptions& options);

// Returns the worker as a saved case names it.
WorkedBy worker_of(const ForeignEngines& workers, const WorkerOptions& options);
// Returns a line that names the worker with which a saved case failed, if a different one runs now;
// else empty. `now`: absent: `backend` is not a worker.
std::string worker_text(const std::optional<WorkedBy>& worked_by, const std::string& backend,
                        const std::optional<WorkedBy>& now);
// Restricts generated cases to what the worker claims to support (docs/protocols.md).
void fit_generator(const EngineHello& hello, GeneratorOptions& generator);

}  // namespace lockstep
