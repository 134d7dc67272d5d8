#include "reference/schedule/scheduler_parts.h"

#include <utility>

#include "base/check.h"

namespace lockstep {

// By priority, arrival time and name order equal priorities, so the order of calls does not matter.
void RequestQueue::add(RequestId id, const Request& request) {
  is_changed_ = true;
  if (policy_ == SchedulingPolicy::fcfs) return fifo_.push_back(id);
  ordered_.insert({&request, id});
}

// By priority this is add(): vLLM's priority queue has no front either.
void RequestQueue::prepend(RequestId id, const Request& request) {
  is_changed_ = true;
  if (policy_ == SchedulingPolicy::fcfs) return fifo_.push_front(id);
  ordered_.insert({&request, id});
}

RequestId RequestQueue::peek() const {
  LS_CHECK(!empty(), "peek at an empty queue");
  return policy_ == SchedulingPolicy::fcfs ? fifo_.front() : ordered_.begin()->id;
}

void RequestQueue::pop() {
  LS_CHECK(!empty(), "pop from an empty queue");
  is_changed_ = true;
  if (policy_ == SchedulingPolicy::fcfs) return fifo_.pop_front();
  ordered_.erase(ordered_.begin());
}

void RequestQueue::remove(RequestId id, const Request& request) {
  is_changed_ = true;
  std::erase(fifo_, id);
  ordered_.erase({&request, id});
}

std::span<const RequestId> RequestQueue::in_order() const {
  if (!std::exchange(is_changed_, false)) return order_;
  order_.assign(fifo_.begin(), fifo_.end());
  for (const Place& place : ordered_) order_.push_back(place.id);
  return order_;
}

// Rows of the item that belong to its first `num_tokens` tokens. Without `embeds` every token has a
// row.
static std::int32_t rows_before(const PromptItem& item, std::int32_t num_tokens) {
  if (item.embeds.empty()) return std::min(item.count, num_tokens);
  std::int32_t rows = 0;
  for (const TokenSpan& span : item.embeds)
    rows += std::clamp(std::min(num_tokens, item.count) - span.first, 0, span.count);
  return rows;
}

// The cache holds max_num_batched_tokens rows by default, like the step's budget.
EncoderInputs::EncoderInputs(const EngineConfig& config)
    : num_rows_max_(max_encoder_rows(config)),
      num_free_rows_(config.encoder_cache_size > 0 ? config.encoder_cache_size
                                                   : config.max_num_batched_tokens) {}

// All items or none, in the order of the prompt. `budget` shrinks per item, and the cache's limit
// adds the items up (EncoderDecoderCacheManager.can_allocate() of vLLM).
bool EncoderInputs::ask(Request& request, std::int32_t num_tokens,
                        std::vector<std::int32_t>& items) const {
  items.clear();
  std::int32_t budget = budget_, num_rows = 0;
  for (std::size_t i = 0; i < request.keys.mm.size(); ++i) {
    const PromptItem& item = request.keys.mm[i];
    const std::int32_t rows = item.num_rows();
    if (rows > budget || rows + num_rows > num_free_rows_) return false;
    // An item without rows among the first num_tokens tokens waits for a later step.
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

// Does not check that the rows were taken: the engine does not either (finding 39).
void EncoderInputs::let_go(const Request& request) {
  for (const PromptItem& item : request.keys.mm) num_free_rows_ += item.num_rows();
}

// Rows that a step computes are dropped by the next one
// (EncoderDecoderCacheManager.get_freed_mm_hashes() of vLLM).
void EncoderInputs::take_dropped(std::vector<std::string>& dropped) {
  dropped = std::exchange(to_drop_, std::exchange(computed_, {}));
}

// A threshold for long prefills bounds every chunk, so max_chunk_ includes it.
StateChunkRule::StateChunkRule(const EngineConfig& config, const EngineProfile& profile,
                               std::span<const KVCacheGroupSpec> groups, BlockSizes sizes)
    : rule_(profile.state_chunks),
      sizes_(sizes),
      block_size_(config.block_size),
      max_chunk_(config.max_num_batched_tokens),
      hit_end_(hit_end_of(config, profile)),
      // If only states are cached, hits drop no block, so the repaired rule also saves the state of
      // the last block.
      saves_one_earlier_(hit_end_.drops_last_block && !profile.state_hits_drop_a_block),
      cuts_without_parts_(profile.hits_parts_of_blocks && !profile.groups_agree_on_parts) {
  if (config.long_prefill_token_threshold > 0)
    max_chunk_ = std::min(max_chunk_, config.long_prefill_token_threshold);
  exports_states_ = std::ranges::all_of(groups, [](const KVCacheGroupSpec& group) {
    return !is_state_kind(group.spec.kind) || group.spec.num_prefill_checkpoint_blocks > 0;
  });
  // The engine uses the first state group's alignment for all groups.
  const auto first = std::ranges::find_if(
      groups, [](const KVCacheGroupSpec& group) { return is_state_kind(group.spec.kind); });
  if (first != groups.end())
    checkpoint_alignment_ = static_cast<std::int32_t>(first->spec.prefill_checkpoint_alignment);
}

// Applies the manager's rule (MambaManager::checkpoint_position()): if they differed, a chunk could
// run past a state that is then not saved.
bool StateChunkRule::exports_state(std::int32_t computed, std::int32_t end,
                                   std::int32_t prefill_end) const {
  return exports_states_ && end >= prefill_end &&
         exports_checkpoint(
             {.begin = computed,
              .end = end,
              .position = hit_end_.last_position(prefill_end, sizes_.cache_hit_alignment_tokens()),
              .hash_block_size = sizes_.hash_block_size,
              .state_block_size = block_size_,
              .alignment = checkpoint_alignment_});
}

// Decodes are not cut. The rules of releases before 0.26.0 count blocks from the chunk's start,
// later ones from the prompt's.
std::int32_t StateChunkRule::clip(const Request& request, std::int32_t num_new,
                                  std::int32_t num_hit, std::int32_t num_shared) const {
  const std::int32_t computed = request.num_computed_tokens + num_hit;
  // A resumed request replays its output, all except the last token: that is also prefill.
  if (computed >= std::max(request.num_prompt_tokens(), request.num_tokens() - 1)) return num_new;
  if (rule_ != StateChunks::whole_blocks && rule_ != StateChunks::whole_blocks_and_shared_prefixes)
    return clip_at_block_boundary(request, num_new, computed);
  num_new = clip_to_whole_blocks(request, num_new, computed);
  const bool ends_in_chunk = num_shared >= block_size_ && num_shared < num_new;
  return rule_ == StateChunks::whole_blocks_and_shared_prefixes && ends_in_chunk
             ? num_shared / block_size_ * block_size_
             : num_new;
}

std::int32_t StateChunkRule::last_whole_block(const Request& request) const {
  const std::int32_t last = request.num_tokens() / block_size_ * block_size_;
  // EAGLE drops the last block of a hit, so the state one block earlier is the one to save.
  return saves_one_earlier_ ? std::max(last - block_size_, 0) : last;
}

// Before the last state whole blocks only; across it the chunk ends there; after it anything. 0:
// fewer tokens than a block are left of the budget.
std::int32_t StateChunkRule::clip_to_whole_blocks(const Request& request, std::int32_t num_new,
                                                  std::int32_t computed) const {
  const std::int32_t last_cached = last_whole_block(request);
  const std::int32_t end = computed + num_new;
  if (end < last_cached) return num_new / block_size_ * block_size_;
  if (computed < last_cached && last_cached < end) return last_cached - computed;
  return num_new;
}

// Collects the positions at which a state must be saved, and ends at the earliest one inside the
// chunk.
std::int32_t StateChunkRule::clip_at_block_boundary(const Request& request, std::int32_t num_new,
                                                    std::int32_t computed) const {
  const auto floor = [&](std::int32_t token) { return token / block_size_ * block_size_; };
  const std::int32_t prefill_end = std::max(request.num_prompt_tokens(), request.num_tokens() - 1);
  std::int32_t end = computed + num_new;
  const bool exports = exports_state(computed, end, prefill_end);
  const bool up_to_last = rule_ == StateChunks::block_boundary_before_last_state;
  const std::int32_t last = hit_end_.last_state(request.num_tokens(), block_size_);
  // The last chunk may end anywhere: decoding fills the block up to the boundary. A block longer
  // than any chunk fills in several chunks, which end inside it and save nothing.
  if (up_to_last ? end < last
                 : end < prefill_end && (floor(end) > computed || block_size_ <= max_chunk_))
    end = floor(end);

  std::int32_t stop = end;
  const auto stop_at = [&](std::int32_t token) {
    if (computed < token && token < stop) stop = token;
  };
  if (!exports) {
    const std::int32_t next = floor(computed) + block_size_;
    if (computed % block_size_ != 0 && (!up_to_last || next <= last)) stop_at(next);
    // The last state of a whole block, and of a part, that a resend of the request can hit.
    stop_at(last);
    if ((sizes_.hits_parts_of_blocks || cuts_without_parts_) &&
        sizes_.hash_block_size < sizes_.scheduler_block_size) {
      const std::int32_t tail =
          hit_end_.last_part(request.num_prompt_tokens(), sizes_.hash_block_size);
      if (last < tail && tail < request.num_prompt_tokens()) stop_at(tail);
    }
  }
  // The end of a prefix that other requests share, rounded down to blocks from the chunk's start.
  const std::int32_t junction = request.shared_prefix_boundary;
  if (computed < junction && junction < end) stop_at(computed + floor(junction - computed));
  return std::max(stop - computed, 0);
}

}  // namespace lockstep
