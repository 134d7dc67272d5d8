// What the encoder of an encoder-decoder model computes, and when: rows of a step and of the
// encoder's cache are limited. Source of the rules: _try_schedule_encoder_inputs of
// vllm/v1/core/sched/scheduler.py and EncoderDecoderCacheManager of
// vllm/v1/core/encoder_cache_manager.py.
//
// (1) A request has all its items encoded in the step that computes its first token, and again
//     after a preemption: rows lie in its own blocks, and nobody else finds them.
// (2) Rows of the cache are counted as the engine counts them: given back with every output, every
//     refusal and every end, whether or not they were taken. So after the first outputs they limit
//     nothing (docs/findings.md, 39).
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
  // All of the request's items: their rows are not needed any more, or have not been taken.
  void let_go(const Request& request);
  // Whose rows the worker drops: those that the step before computed.
  void take_dropped(std::vector<std::string>& dropped);

  std::int32_t num_free_rows() const { return num_free_rows_; }

 private:
  std::int32_t num_rows_max_;  // of a step
  std::int32_t budget_ = 0;    // what is left of them
  std::int32_t num_free_rows_;
  std::vector<std::string> computed_, to_drop_;
};

}  // namespace lockstep
