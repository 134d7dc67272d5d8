#include "reference/schedule/state_chunks.h"

#include <algorithm>

namespace lockstep {

StateChunkRule::StateChunkRule(const EngineConfig& config, const EngineProfile& profile)
    : rule_(profile.state_chunks),
      block_size_(config.block_size),
      max_chunk_(config.max_num_batched_tokens) {
  const bool looks_ahead = hash_lookahead_of(config, profile) > 0;
  // Where states alone are cached nobody drops a block: the repaired rule saves its state as well.
  drops_last_block_ =
      config.spec_method == SpecMethod::eagle && !looks_ahead && !profile.state_hits_drop_a_block;
  num_unhashed_ =
      drops_last_block_ ? 0 : 1;  // a lookahead hash proves one token, as logits need one
  if (config.long_prefill_token_threshold > 0)
    max_chunk_ = std::min(max_chunk_, config.long_prefill_token_threshold);
}

std::int32_t StateChunkRule::clip(const Request& request, std::int32_t num_new,
                                  std::int32_t num_hit) const {
  const std::int32_t computed = request.num_computed_tokens + num_hit;
  // A resumed request replays its output, all but the last token of it.
  if (computed >= std::max(request.num_prompt_tokens(), request.num_tokens() - 1)) return num_new;
  return rule_ == StateChunks::whole_blocks ? clip_to_whole_blocks(request, num_new, computed)
                                            : clip_at_block_boundary(request, num_new, computed);
}

std::int32_t StateChunkRule::clip_to_whole_blocks(const Request& request, std::int32_t num_new,
                                                  std::int32_t computed) const {
  std::int32_t last_cached = request.num_tokens() / block_size_ * block_size_;
  // EAGLE drops the last block of a hit, so the state one block earlier is the one to save.
  if (drops_last_block_) last_cached = std::max(last_cached - block_size_, 0);
  const std::int32_t end = computed + num_new;
  if (end < last_cached) return num_new / block_size_ * block_size_;
  if (computed < last_cached && last_cached < end) return last_cached - computed;
  return num_new;
}

std::int32_t StateChunkRule::clip_at_block_boundary(const Request& request, std::int32_t num_new,
                                                    std::int32_t computed) const {
  const auto floor = [&](std::int32_t token) { return token / block_size_ * block_size_; };
  const std::int32_t prefill_end = std::max(request.num_prompt_tokens(), request.num_tokens() - 1);
  std::int32_t end = computed + num_new;
  // The last chunk may end anywhere: decoding goes on to the boundary. A block longer than any
  // chunk is filled bit by bit.
  if (end < prefill_end && (floor(end) > computed || block_size_ <= max_chunk_)) end = floor(end);

  std::int32_t stop = end;
  const auto stop_at = [&](std::int32_t token) {
    if (computed < token && token < stop) stop = token;
  };
  if (computed % block_size_ != 0) stop_at(floor(computed) + block_size_);
  // The last state that a resend of the request can hit.
  stop_at(std::max(
      floor(request.num_tokens() - num_unhashed_) - (drops_last_block_ ? block_size_ : 0), 0));
  const std::int32_t junction = request.shared_prefix_boundary;
  if (computed < junction && junction < end) stop_at(computed + floor(junction - computed));
  return std::max(stop - computed, 0);
}

}  // namespace lockstep
