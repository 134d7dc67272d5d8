// --backend vllm[:DIR] or worker:COMMAND: an engine's own worker, for every command that has it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "sim/foreign/foreign_engine.h"
#include "sim/session/session.h"

namespace CLI {
class App;
}

namespace lockstep {

struct WorkerOptions {
  std::string runner = "v1";
  std::string states;  // vLLM's kind of layers with states; empty: the worker chooses
  std::string plant;   // a defect in the worker; empty: none
};

// --runner, --states and --plant.
void declare_worker(CLI::App& command, WorkerOptions& options);
// The processes that `backend` names, the first of them started. REQUIRES:
// is_engine_worker(backend).
Result<std::shared_ptr<ForeignEngines>> open_workers(const std::string& backend,
                                                     const WorkerOptions& options);
BackendFactory worker_factory(std::shared_ptr<ForeignEngines> workers);
// Starts them for the first case.
BackendFactory worker_factory(const std::string& backend, const WorkerOptions& options);

}  // namespace lockstep
