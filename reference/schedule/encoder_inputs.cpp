#include "reference/schedule/encoder_inputs.h"

#include <algorithm>

namespace lockstep {
namespace {

// Rows of the item that stand for its first `num_tokens` tokens.
std::int32_t rows_before(const PromptItem& item, std::int32_t num_tokens) {
  if (item.embeds.empty()) return std::min(item.count, num_tokens);
  std::int32_t rows = 0;
  for (const TokenSpan& span : item.embeds)
    rows += std::clamp(std::min(num_tokens, item.count) - span.first, 0, span.count);
  return rows;
}

}  // namespace

EncoderInputs::EncoderInputs(const EngineConfig& config)
    : num_rows_max_(max_encoder_rows(config)),
      num_free_rows_(config.encoder_cache_size > 0 ? config.encoder_cache_size
                                                   : config.max_num_batched_tokens) {}

bool EncoderInputs::ask(Request& request, std::int32_t num_tokens,
                        std::vector<std::int32_t>& items) const {
  items.clear();
  std::int32_t budget = budget_, num_rows = 0;
  for (std::size_t i = 0; i < request.keys.mm.size(); ++i) {
    const PromptItem& item = request.keys.mm[i];
    const std::int32_t rows = item.num_rows();
    if (rows > budget || rows + num_rows > num_free_rows_) return false;
    // Skips an item while none of its rows is at the head of the request.
    if (rows_before(item, num_tokens) == 0) continue;
    num_rows += rows;
    budget -= rows;
    items.push_back(static_cast<std::int32_t>(i));
  }
  request.num_encoder_rows = num_rows;
  return true;
}

void EncoderInputs::take(const Request& request, const std::vector<std::int32_t>& items) {
  for (const std::int32_t i : items) {
    const PromptItem& item = request.keys.mm[i];
    budget_ -= item.num_rows();
    num_free_rows_ -= item.num_rows();
    computed_.push_back(item.identifier);
  }
}

void EncoderInputs::let_go(const Request& request) {
  for (const PromptItem& item : request.keys.mm) num_free_rows_ += item.num_rows();
}

void EncoderInputs::take_dropped(std::vector<std::string>& dropped) {
  dropped = std::exchange(to_drop_, std::exchange(computed_, {}));
}

}  // namespace lockstep
