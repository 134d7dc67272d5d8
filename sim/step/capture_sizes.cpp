#include "sim/step/capture_sizes.h"

#include "base/check.h"

namespace lockstep {
namespace {

std::int64_t on_the_grid(std::int64_t num_tokens) {
  if (num_tokens <= 2) return num_tokens;
  if (num_tokens <= 4) return 4;
  const std::int64_t step = num_tokens <= 256 ? 8 : 16;
  return (num_tokens + step - 1) / step * step;
}

}  // namespace

std::int64_t captured_batch(std::int64_t num_tokens, std::int64_t max_capture_size,
                            std::int64_t max_tokens_per_step) {
  LS_CHECK(num_tokens >= 0, "{} tokens", num_tokens);
  const bool takes_the_largest_step = max_tokens_per_step <= max_capture_size;
  const std::int64_t limit = takes_the_largest_step ? max_tokens_per_step : max_capture_size;
  const std::int64_t size = on_the_grid(num_tokens);
  if (size <= limit) return size;
  return takes_the_largest_step && num_tokens <= limit ? limit : 0;
}

}  // namespace lockstep
