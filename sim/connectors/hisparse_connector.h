// HiSparse's workers as a KV connector: they copy pages between the host pool and the device as
// each step requires, and report when a copy starts and completes. After vLLM's HiSparseConnector
// (vllm/distributed/kv_transfer/kv_connector/v1/hisparse/).
//
// Invariants
// (1) It has no prefixes and keeps no finished request's blocks. The scheduler itself holds what
//     must stay while a page is copied.
// (2) A page is restored in the step that names it. Any other page is copied when the next step
//     starts, after the forward pass of the step that names it.
// (3) A copy is reported as enqueued in the step that starts it, and as completed in that step or
//     up to delay_steps_max later.
// (4) There are one or two workers. Each makes every copy and reports its own completion.
// (5) Only the seed decides delays and the number of workers.
//
// Not here: the bytes, which a backend moves.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/seeded_random.h"
#include "sim/connectors/worker_connector.h"
#include "sim/engine/workload.h"

namespace lockstep {

struct HiSparseWorkerOptions {
  std::uint64_t seed = 0;
  std::int32_t delay_steps_max = 3;
};

class HiSparseConnector final : public WorkerConnector, public TransferPlanner {
 public:
  explicit HiSparseConnector(const HiSparseWorkerOptions& options);

  ExternalHit get_num_new_matched_tokens(const ExternalQuery&) override { return {}; }
  bool request_finished(RequestId, std::string_view) override { return false; }
  void start_pages(const HiSparseCommand& command) override;
  KVConnectorOutput report() override;
  bool is_busy() const override { return !started_.empty() || !next_.empty() || !moving_.empty(); }
  // What moves is in the decision.
  void plan(const DecidedStep&, StepTransfers&) override {}

 private:
  const std::int32_t delay_steps_max_;
  SeededRandom random_;
  const std::int32_t num_workers_;
  std::int64_t step_ = 0;
  std::vector<std::int64_t> next_;                            // start with the next step
  std::vector<std::int64_t> started_;                         // in this one
  std::map<std::int64_t, std::vector<std::int64_t>> moving_;  // steps in which workers are done
};

}  // namespace lockstep
