// What an engine sends to its worker in addition to a step's program: for backends that are a real
// engine's worker and derive the program's content themselves.
//
// Invariants
// (1) begin() is called first and once. A request is added before a decision names it.
// (2) decided() precedes the execute() of its step; what the step sampled follows it.
#pragma once

#include <cstdint>
#include <span>

#include "base/ids.h"
#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

class EngineWorker {
 public:
  virtual ~EngineWorker() = default;
  // Errors: options that the engine's worker does not take.
  virtual Result<void> begin(const EngineConfig& engine) = 0;
  // False: its memory is not laid out as the plan says, and no page of it can be looked at. The
  // next execute() reports where.
  virtual bool views_hold() const = 0;
  virtual void add_request(RequestId id, const RequestSpec& spec) = 0;
  // Valid during the step.
  virtual void decided(const SchedulerOutput& decision) = 0;
  virtual void sampled(RequestId id, std::span<const std::int32_t> tokens) = 0;
  // Lockstep's own code in the worker's process raised, and execute() returned its error; else
  // null.
  virtual const EngineFailure* harness_failure() const = 0;
  // The engine has dropped what was sampled behind the request's first `num_tokens` tokens.
  virtual void dropped(RequestId id, std::int64_t num_tokens) = 0;
};

}  // namespace lockstep
