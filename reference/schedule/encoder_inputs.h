// What the encoder of an encoder-decoder model computes in which step. The rows of a step and of
// the encoder cache are limited. Source of the rules: _try_schedule_encoder_inputs of
// vllm/v1/core/sched/scheduler.py and EncoderDecoderCacheManager of
// vllm/v1/core/encoder_cache_manager.py.
//
// Invariants
// (1) The step that computes a request's first token encodes all its items, and so does the first
//     step after a preemption: rows are in the request's own blocks and never shared.
// (2) Rows of the cache are counted as the engine counts them: released by every output, every
//     refusal and every end, allocated or not. After the first outputs they therefore limit nothing
//     (docs/findings.md, 39).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reference/cache/request.h"
#include "reference/types/engine_config.h"

namespace lockstep {

class EncoderInputs {
 public:
  explicit EncoderInputs(const EngineConfig& config);

  void begin_step() { budget_ = num_rows_max_; }
  // Sets `items`, by number, and request.num_encoder_rows. False: the rows of some item are more
  // than are left. REQUIRES: none of its tokens is computed, and num_tokens will be.
  bool ask(Request& request, std::int32_t num_tokens, std::vector<std::int32_t>& items) const;
  // The step computes them.
  void take(const Request& request, const std::vector<std::int32_t>& items);
  // Releases the rows of all of the request's items, allocated or not.
  void let_go(const Request& request);
  // Collects the requests whose rows the worker drops: those that the previous step computed.
  void take_dropped(std::vector<std::string>& dropped);

  std::int32_t num_free_rows() const { return num_free_rows_; }

 private:
  std::int32_t num_rows_max_;  // of a step
  std::int32_t budget_ = 0;    // what is left of them
  std::int32_t num_free_rows_;
  std::vector<std::string> computed_, to_drop_;
};

}  // namespace lockstep
