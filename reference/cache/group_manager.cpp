#include "reference/cache/group_manager.h"

#include <utility>

#include "base/check.h"
#include "reference/cache/group_managers.h"
#include "reference/plan/rank_plan.h"

namespace lockstep {

GroupManager::GroupManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                           BlockSizes sizes, BlockPool& pool)
    : profile_(engine_profile(config.engine)),
      spec_(spec),
      group_(group),
      block_size_(static_cast<std::int32_t>(spec.block_size) * num_context_ranks(config, spec)),
      sizes_(sizes),
      hit_end_(hit_end_of(config, profile_)),
      alignment_(sizes.cache_hit_alignment_tokens()),
      mask_alignment_(profile_.masks_at_hit_alignment ? alignment_ : sizes.scheduler_block_size),
      retention_interval_(config.prefix_cache_retention_interval),
      pool_(pool),
      drops_last_block_(hit_end_.drops_last_block) {
  LS_CHECK(block_size_ > 0, "group {} has blocks of {} tokens", group, block_size_);
}

std::unique_ptr<GroupManager> GroupManager::create(const KVCacheSpec& spec, std::int32_t group,
                                                   const EngineConfig& config, BlockSizes sizes,
                                                   BlockPool& pool) {
  return with_manager_of(spec.kind, [&]<class Manager>() -> std::unique_ptr<GroupManager> {
    return std::make_unique<Manager>(spec, group, config, sizes, pool);
  });
}

std::int64_t GroupManager::num_evictable(std::span<const BlockId> blocks) const {
  return std::ranges::count_if(blocks, [&](BlockId block) { return pool_.is_evictable(block); });
}

std::int64_t GroupManager::num_blocks_to_allocate(const Request& request,
                                                  std::span<const BlockId> new_computed_blocks,
                                                  const SlotDemand& demand) const {
  const GroupBlocks& held = of(request);
  std::int64_t required = ceil_div(demand.num_tokens, block_size_);
  // The whole prompt is never held at once by a window group. Without the cap, a prompt longer than
  // the pool would never be admitted; vLLM caps it the same way, so that startup and admission
  // agree (get_num_blocks_to_allocate()).
  const bool capped = demand.apply_admission_cap && admission_cap_;
  const std::int64_t num_skipped =
      std::max(num_skipped_tokens(demand.total_computed_tokens), 0) / block_size_;
  // Part of finding 8 (docs/findings.md): the cap counts from the table's head, so a load after a
  // window seems to need no blocks.
  const std::int64_t first_held = profile_.caps_windows_where_they_begin ? num_skipped : 0;
  if (capped) required = std::min(required, first_held + *admission_cap_);
  const auto num_held = static_cast<std::int64_t>(held.blocks.size());
  if (held.num_cached_blocks >= 0) {
    // A running request. Drafts of its last step may have been rejected, so it may hold more blocks
    // than it requires.
    LS_CHECK(new_computed_blocks.empty(), "a running request cannot have a prefix hit");
    return std::max<std::int64_t>(required - num_held, 0);
  }
  const std::int64_t num_local = static_cast<std::int64_t>(new_computed_blocks.size()) + num_held;
  const std::int64_t num_new =
      std::max<std::int64_t>(required - std::max(num_skipped, num_local), 0);
  // A hit that is in the free queue leaves it when the request takes it, so it costs a free block.
  // Hits before the window are not taken.
  const std::int64_t num_skipped_hits =
      std::clamp<std::int64_t>(num_skipped - num_held, 0, std::ssize(new_computed_blocks));
  // The copy of a block that the hit shares in part.
  const std::int64_t num_copies =
      hits_part(new_computed_blocks, demand.num_local_computed_tokens) ? 1 : 0;
  return num_new + num_evictable(new_computed_blocks.subspan(num_skipped_hits)) + num_copies;
}

// Skipped entries are null blocks, so that an entry's index still gives its tokens. All entries
// count as published: they were found in the prefix cache.
void GroupManager::take_computed_blocks(Request& request,
                                        std::span<const BlockId> new_computed_blocks,
                                        std::int32_t num_computed_tokens) {
  GroupBlocks& held = of(request);
  if (held.num_cached_blocks >= 0) {
    LS_CHECK(new_computed_blocks.empty(), "a running request cannot have a prefix hit");
    return;
  }
  LS_CHECK(held.blocks.empty(), "request {} holds blocks before its hit", request.name);
  const auto num_skipped =
      static_cast<std::size_t>(std::max(num_skipped_tokens(num_computed_tokens), 0) / block_size_);
  new_computed_blocks =
      new_computed_blocks.subspan(std::min(num_skipped, new_computed_blocks.size()));
  pool_.touch(new_computed_blocks);
  held.blocks.assign(num_skipped, kNullBlock);
  held.blocks.insert(held.blocks.end(), new_computed_blocks.begin(), new_computed_blocks.end());
  held.num_cached_blocks = static_cast<std::int32_t>(held.blocks.size());
}

// part_idx is the entry in which the hit ends: with block_size 64, a hit of 80 tokens ends in entry
// 1.
void GroupManager::share_part(Request& request, std::int32_t num_local_computed_tokens) {
  GroupBlocks& held = of(request);
  held.part_idx = num_local_computed_tokens / block_size_;
  LS_CHECK(held.part_idx == std::ssize(held.blocks) - 1 && held.blocks.back() != kNullBlock,
           "a hit of {} tokens in {} blocks", num_local_computed_tokens, held.blocks.size());
  held.part_block = held.blocks.back();
  held.num_cached_blocks = held.part_idx;  // the copy is published once it is full
}

void GroupManager::replace_part(GroupBlocks& held, BlockId copy) {
  LS_CHECK(held.blocks[held.part_idx] == held.part_block, "entry {} is block {}, shared {}",
           held.part_idx, index_of(held.blocks[held.part_idx]), index_of(held.part_block));
  // The hit's reference to the shared block lasts until the copy is made, and so does one more on
  // the copy: a request that ends in this step frees neither.
  copies_.push_back({held.part_block, copy});
  pool_.touch({&copy, 1});
  held.blocks[held.part_idx] = copy;
  held.part_block = kNullBlock;
}

void GroupManager::take_copies(std::vector<KVCacheBlockCopy>& out) {
  out.insert(out.end(), copies_.begin(), copies_.end());
  copies_.clear();
}

// Looks for null entries between the window's first block and the last full block.
bool GroupManager::lacks_window(const Request& request, std::int32_t num_computed_tokens) const {
  const std::vector<BlockId>& blocks = of(request).blocks;
  const auto begin = std::max(num_skipped_tokens(num_computed_tokens), 0) / block_size_;
  const auto end = std::min<std::ptrdiff_t>(num_computed_tokens / block_size_, std::ssize(blocks));
  return begin < end && std::find(blocks.begin() + begin, blocks.begin() + end, kNullBlock) !=
                            blocks.begin() + end;
}

void GroupManager::allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                                          bool zeroes) {
  grow(of(request).blocks, static_cast<std::size_t>(ceil_div(num_computed_tokens, block_size_)),
       zeroes);
}

// Appends the ids to those of new blocks: the worker zeroes them before the step, in this order.
void GroupManager::record_again(const Request& request, std::int32_t first_token) {
  if (!records_new_blocks_) return;
  const std::vector<BlockId>& blocks = of(request).blocks;
  const auto first = std::min<std::ptrdiff_t>(first_token / block_size_, std::ssize(blocks));
  new_block_ids_.insert(new_block_ids_.end(), blocks.begin() + first, blocks.end());
}

// The one place where a table gets new blocks at its end, except states in mode align.
void GroupManager::grow(std::vector<BlockId>& table, std::size_t num_blocks, bool zeroes) {
  const std::size_t first_new = table.size();
  if (num_blocks <= first_new) return;
  pool_.get_new_blocks(static_cast<std::int64_t>(num_blocks - first_new), table);
  if (records_new_blocks_ && zeroes)
    new_block_ids_.insert(new_block_ids_.end(),
                          table.begin() + static_cast<std::ptrdiff_t>(first_new), table.end());
}

std::size_t GroupManager::allocate_new_blocks(Request& request, const SlotDemand& demand) {
  GroupBlocks& held = of(request);
  if (held.part_block != kNullBlock) {
    pool_.get_new_blocks(1, new_block_ids_);  // zeroed first, whatever the kind
    replace_part(held, new_block_ids_.back());
  }
  std::vector<BlockId>& blocks = held.blocks;
  const std::size_t first_new = blocks.size();
  grow(blocks, static_cast<std::size_t>(ceil_div(demand.num_tokens, block_size_)));
  return first_new;
}

void GroupManager::remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) {
  const std::int32_t num_tokens = num_skipped_tokens(num_computed_tokens);
  if (num_tokens <= 0) return;
  GroupBlocks& held = of(request);
  free_head(held, std::min<std::int64_t>(num_tokens / block_size_, std::ssize(held.blocks)));
}

// Stops at the first null entry from the right: an earlier call freed it and all entries before it.
// Costs O(freed blocks), not O(table).
void GroupManager::free_range(GroupBlocks& held, std::int64_t begin, std::int64_t end) {
  LS_CHECK(begin >= 0 && end <= std::ssize(held.blocks), "entries [{}, {}) of {} are freed", begin,
           end, held.blocks.size());
  freed_.clear();
  for (std::int64_t i = end - 1; i >= begin; --i) {
    BlockId& entry = held.blocks[i];
    if (entry == kNullBlock) break;
    freed_.push_back(std::exchange(entry, kNullBlock));
  }
  if (!freed_.empty()) pool_.free_blocks(freed_, true);  // most steps retire nothing
}

void GroupManager::cache_blocks(Request& request, std::int32_t num_tokens) {
  if (!is_prefix_cacheable(spec_)) return;
  const std::int32_t scale = block_size_ / sizes_.hash_block_size;
  // A block whose hash covers lookahead tokens is published once those tokens are known.
  const std::int32_t num_full =
      std::min(num_tokens / block_size_, static_cast<std::int32_t>(request.hashes.size()) / scale);
  if (std::max(of(request).num_cached_blocks, 0) < num_full) cache_full_blocks(request, num_full);
  if (caches_prompt_tails_ && scale > 1) cache_prompt_tail(request, num_tokens);
}

// A block that is_published() rejects still counts as offered: it is not offered again.
void GroupManager::cache_full_blocks(Request& request, std::int32_t num_full) {
  GroupBlocks& held = of(request);
  const std::int32_t first = std::max(held.num_cached_blocks, 0);
  const std::int32_t scale = block_size_ / sizes_.hash_block_size;
  const auto key_at = [&](std::int32_t i) -> const BlockKey& {
    return request.hashes[(i + 1) * scale - 1];
  };
  constexpr std::int32_t kAhead =
      4;  // a prompt adds hundreds of keys to a table larger than the caches
  LS_CHECK(num_full <= std::ssize(held.blocks), "{} of {} entries are published", num_full,
           held.blocks.size());
  for (std::int32_t i = first; i < num_full; ++i) {
    if (i + kAhead < num_full) pool_.cache().prefetch(key_at(i + kAhead), group_);
    if (!is_published(request, i)) continue;
    pool_.cache_block(held.blocks[i], key_at(i), group_, (i + 1) * block_size_);
  }
  held.num_cached_blocks = num_full;
  if (pool_.events() != nullptr) announce_stored(request, first, num_full);
}

bool GroupManager::is_published(const Request& request, std::int32_t i) const {
  return of(request).blocks[i] != kNullBlock && (!publishes_sparsely_ || is_reachable(request, i));
}

// Reports blocks [first, num_full) to the event log as one BlockStored event, as
// cache_full_blocks() of vLLM does: the tokens of the whole range, the hashes of published blocks
// only. A block that is left out may still be published as a part.
void GroupManager::announce_stored(const Request& request, std::int32_t first,
                                   std::int32_t num_full) {
  const std::vector<ExternalBlockHash>& hashes = request.hashes.external();
  const std::int32_t scale = block_size_ / sizes_.hash_block_size;
  const auto hash_of = [&](std::int32_t i) {
    ExternalBlockHash hash;
    const std::int32_t begin =
        profile_.joins_hashes_of_long_blocks ? i * scale : (i + 1) * scale - 1;
    for (std::int32_t part = begin; part < (i + 1) * scale; ++part)
      hash.insert(hash.end(), hashes[part].begin(), hashes[part].end());
    return hash;
  };
  CacheEvent event{.group = group_, .block_size = block_size_};
  if (first > 0) event.parent = hash_of(first - 1);
  event.token_ids.resize((num_full - first) * block_size_);
  request.tokens.copy(std::int64_t{first} * block_size_, std::ssize(event.token_ids),
                      event.token_ids.data());
  for (std::int32_t i = first; i < num_full; ++i) {
    if (!is_published(request, i)) continue;
    event.block_hashes.push_back(hash_of(i));
    const bool salted = i == 0 && !request.cache_salt.empty();
    event.extra_keys.push_back(salted ? std::optional(request.cache_salt) : std::nullopt);
    pool_.events()->names(of(request).blocks[i], group_, event.block_hashes.back());
  }
  pool_.events()->stored(std::move(event));
}

// Publishes the last hash boundary of the prompt if it is inside a block: hits may end there
// although the block is not full. Intermediate boundaries are not published (vLLM 0.33.0,
// FullAttentionManager._cache_partial_tail_block()).
void GroupManager::cache_prompt_tail(const Request& request, std::int32_t num_tokens) {
  const std::int32_t hash_block_size = sizes_.hash_block_size;
  // A resend hits at most all tokens except the last. EAGLE that drops a hash of each hit reads
  // that token too, before it drops.
  const bool leaves_one =
      hit_end_.prompt_ends == PromptEnds::before_last_token && !drops_last_block_;
  const std::int32_t num_hashes =
      std::min((request.num_prompt_tokens() - (leaves_one ? 1 : 0)) / hash_block_size,
               static_cast<std::int32_t>(request.hashes.size()));
  const std::int32_t boundary = num_hashes * hash_block_size;
  if (boundary == 0 || boundary > num_tokens || boundary % block_size_ == 0) return;
  const std::vector<BlockId>& blocks = of(request).blocks;
  const auto i = static_cast<std::size_t>(boundary / block_size_);
  if (i >= blocks.size()) return;
  cache_part(request, blocks[i], boundary, false);
}

// The event describes one hash block, not the group's block: consumers identify parts by hash.
bool GroupManager::cache_part(const Request& request, BlockId block, std::int32_t num_tokens,
                              bool replaces) {
  const std::int32_t hash_block_size = sizes_.hash_block_size;
  LS_CHECK(num_tokens >= hash_block_size && num_tokens % hash_block_size == 0,
           "a part ends at token {}; hashes cover {}", num_tokens, hash_block_size);
  const auto last = static_cast<std::size_t>(num_tokens / hash_block_size - 1);
  if (!pool_.cache_part_of_block(block, request.hashes[last], group_, num_tokens, replaces))
    return false;
  if (pool_.events() == nullptr) return true;
  const std::vector<ExternalBlockHash>& hashes = request.hashes.external();
  CacheEvent event{.group = group_, .block_size = hash_block_size};
  event.block_hashes.push_back(hashes[last]);
  if (last > 0) event.parent = hashes[last - 1];
  event.token_ids.resize(hash_block_size);
  request.tokens.copy(num_tokens - hash_block_size, hash_block_size, event.token_ids.data());
  event.extra_keys.push_back(
      last == 0 && !request.cache_salt.empty() ? std::optional(request.cache_salt) : std::nullopt);
  pool_.events()->names(block, group_, hashes[last]);
  pool_.events()->stored(std::move(event));
  return true;
}

// Example: scheduler blocks of 16, a prompt of 48 tokens. Without EAGLE both resend and
// continuation are 47, aligned to 32. With EAGLE that drops a block, a resend resumes at 16 (32
// less a block) and a continuation at 32.
std::array<std::int32_t, 4> GroupManager::replay_boundaries(const Request& request) const {
  const auto aligned = [&](std::int32_t token) {
    return token / mask_alignment_ * mask_alignment_;
  };
  std::int32_t resend = request.num_prompt_tokens() - 1;
  std::int32_t continuation = resend;
  if (hit_end_.drops_last_block && profile_.retains_for_eagle) {
    const std::int32_t unit = sizes_.scheduler_block_size;
    resend = std::max(resend / unit * unit - unit, 0);
    continuation = std::max(request.num_prompt_tokens() / unit * unit - unit, 0);
  }
  const std::int32_t junction =
      request.shared_prefix_boundary > 0 ? request.shared_prefix_boundary : resend;
  // A request that diverges right after the junction cannot use the block after it as EAGLE's
  // proof, so its hit ends one block earlier.
  const bool keeps_one_before =
      profile_.retains_before_junctions && drops_last_block_ && request.shared_prefix_boundary > 0;
  const std::int32_t before = keeps_one_before ? std::max(junction - block_size_, 0) : junction;
  return {aligned(resend), aligned(continuation), aligned(junction), aligned(before)};
}

// publishes_at is the end of the next unpublished block.
void GroupManager::narrow(const Request& request, std::int32_t num_left_behind,
                          TableRest& rest) const {
  const GroupBlocks& held = of(request);
  const auto num_held = static_cast<std::int32_t>(held.blocks.size());
  rest.num_tokens = std::min(rest.num_tokens, num_held * block_size_);
  rest.retires_at = std::min(rest.retires_at, retires_at(num_left_behind));
  // A prompt's tail may be published in any step, and again, so such a request is never at rest.
  const bool has_tail = caches_prompt_tails_ && block_size_ > sizes_.hash_block_size;
  const std::int32_t next = (std::max(held.num_cached_blocks, 0) + 1) * block_size_;
  if (is_prefix_cacheable(spec_))
    rest.publishes_at = std::min(rest.publishes_at, has_tail ? 0 : next);
}

void GroupManager::free(Request& request) {
  GroupBlocks& held = of(request);
  // The tail first: it is evicted before the prefix that more requests can share.
  pool_.free_blocks_reversed(held.blocks, is_sliding_window(spec_.kind));
  held.clear();
}

// The caller frees the blocks later, with their references intact.
std::vector<BlockId> GroupManager::pop(Request& request) {
  GroupBlocks& held = of(request);
  std::vector<BlockId> blocks = std::move(held.blocks);
  held.clear();
  return blocks;
}

bool GroupManager::find_key(const BlockKey& key, std::span<const std::int32_t> groups,
                            std::vector<BlockId>& found) const {
  found.clear();
  for (const std::int32_t group : groups) {
    const BlockId block = pool_.cache().find(key, group);
    if (block == kNullBlock) return false;
    found.push_back(block);
  }
  return true;
}

void GroupManager::take_new_block_ids(std::vector<BlockId>& out) {
  out.insert(out.end(), new_block_ids_.begin(), new_block_ids_.end());
  new_block_ids_.clear();
}

}  // namespace lockstep
