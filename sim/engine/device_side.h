// Everything of a run that has to do with memory: the worker's view of the requests, the program of
// each step, the memory model, the backend and their comparison.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/result.h"
#include "reference/types/scheduler_types.h"
#include "sim/connectors/transfer_planner.h"
#include "sim/engine/lockstep.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/verdict/divergence.h"
#include "sim/verdict/state_hash.h"

namespace lockstep {

class DeviceSide {
 public:
  // One backend for each of num_ranks(config.device), in their order.
  // Refused: what the memory model or the program builder cannot follow, and degrees that the plan
  // cannot be cut into.
  static Result<std::unique_ptr<DeviceSide>> create(const LockstepConfig& config,
                                                    std::span<Backend* const> ranks,
                                                    RunSummary& summary);
  virtual ~DeviceSide() = default;

  virtual void add_request(RequestId id, const RequestSpec& spec) = 0;
  // Program, model, backend, comparison; slot mappings are padded to what was agreed on, at least.
  // A divergence is a value.
  virtual Result<std::optional<Divergence>> run_step(const SchedulerOutput& decision,
                                                     const StepTransfers& transfers,
                                                     const AgreedBatch& agreed,
                                                     StateHashChain& chain) = 0;
  virtual void append_sampled(RequestId id, std::span<const std::int32_t> tokens) = 0;
  // The engine has dropped what was sampled behind the request's first `num_tokens` tokens.
  virtual void drop_sampled(RequestId id, std::int64_t num_tokens) = 0;
  // After the step's output: who has finished and still keeps its blocks.
  virtual void release(std::span<const HeldRequest> held) = 0;
  // Reads the hidden states of requests that the step's output has ended, whole, before their
  // blocks can be given to others; and what a trainer has seen of those read before, up to now_ns.
  virtual Result<std::optional<Divergence>> extract(std::span<const StoppedRequest> stopped,
                                                    std::int64_t now_ns) = 0;
  // By the last call. Nothing where several ranks hold a part each.
  virtual std::span<const HiddenStates> extracted() const = 0;
  // After the last step: every page; then the sentences on what was not checked.
  virtual Result<std::optional<Divergence>> finish(bool agreed) = 0;
};

}  // namespace lockstep
