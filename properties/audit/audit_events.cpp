// What an engine tells of its prefix cache, held against what it does with it.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "properties/audit/audit_impl.h"
#include "properties/audit/cache_index.h"

namespace lockstep {

void CacheIndex::remove(Group& group, const std::string& hash) {
  const auto found = group.of_hash.find(hash);
  if (found->second.content == 0) {
    --group.num_unknown;
  } else if (const auto content = group.num_of.find(found->second.content);
             --content->second == 0) {
    group.num_of.erase(content);
  }
  // Of several blocks with one hash, the event does not say which one is removed.
  for (const BlockId block : found->second.blocks) group.blocks.erase(block);
  found->second.blocks.clear();
  if (--found->second.num == 0) group.of_hash.erase(found);
}

std::optional<CacheIndex::Prefix> CacheIndex::prefix_of(const std::string& hash) const {
  for (const Group& group : groups_)
    if (const auto found = group.of_hash.find(hash); found != group.of_hash.end())
      return Prefix{found->second.content, found->second.end};
  return {};
}

void CacheIndex::store(const RecordedCacheEvent& event, const StoredBlocks& stored,
                       const std::function<void(std::string)>& refuse) {
  const auto g = static_cast<std::size_t>(event.group);
  Group& group = groups_[g];
  const auto size = static_cast<std::int64_t>(event.block_size);
  const auto num = event.block_hashes.size();
  const bool is_whole =
      size > 0 && block_sizes_[g] == size && std::cmp_equal(event.token_ids.size(), num * size);
  if (event.parent && block_sizes_[g] == size && !stored.is_wrong &&
      !group.of_hash.contains(*event.parent))
    refuse(fmt::format("a block of group {} is stored behind {}, which is not there", g,
                       *event.parent));
  std::string before = event.parent.value_or("");
  for (std::size_t i = 0; i < num; ++i) {
    const std::string& hash = event.block_hashes[i];
    std::uint64_t identity = 0;
    if (is_whole) {
      std::string text = before + "/";
      if (i < event.extra_keys.size())
        for (const RecordedExtraKey& key : event.extra_keys[i])
          text += fmt::format("/{}@{}", key.value, key.place.value_or(-1));
      identity = empty_prefix(text);
      for (std::int64_t t = 0; t < size; ++t)
        identity = content_after(
            identity,
            event.token_ids[static_cast<std::size_t>(static_cast<std::int64_t>(i) * size + t)]);
    }
    Entry& entry = group.of_hash[hash];
    if (entry.num > 0 && entry.identity != identity && !stored.is_wrong)
      refuse(
          fmt::format("hash {} of group {} is stored with other tokens, another key or another "
                      "block before it than it stands for",
                      hash, g));
    if (entry.num++ == 0) {
      entry.content = is_whole && i < stored.contents.size() ? stored.contents[i] : 0;
      entry.identity = identity;
      if (is_whole && stored.end >= 0)
        entry.end = stored.end - static_cast<std::int32_t>((num - 1 - i) * size);
    }
    if (is_whole && i < stored.blocks.size() && stored.blocks[i] != kNullBlock) {
      entry.blocks.push_back(stored.blocks[i]);
      group.blocks.insert(stored.blocks[i]);
    }
    if (entry.content == 0)
      ++group.num_unknown;
    else
      ++group.num_of[entry.content];
    before = hash;
  }
}

void CacheIndex::take(const RecordedCacheEvent& event, const StoredBlocks& stored,
                      const std::function<void(std::string)>& refuse) {
  if (event.kind == RecordedCacheEvent::Kind::cleared) {
    for (Group& group : groups_) group = {};
    return;
  }
  if (event.kind == RecordedCacheEvent::Kind::stored) return store(event, stored, refuse);
  Group& group = groups_[static_cast<std::size_t>(event.group)];
  for (const std::string& hash : event.block_hashes) {
    if (group.of_hash.contains(hash))
      remove(group, hash);
    else
      refuse(fmt::format("hash {} is removed from group {}, where nothing of it is stored", hash,
                         event.group));
  }
}

CacheIndex index_of_events(const RecordingHeader& header,
                           const std::vector<std::int32_t>& block_sizes) {
  std::vector<std::int32_t> whole = block_sizes;
  for (std::size_t g = 0; g < whole.size(); ++g)
    if (!keeps_all_tokens(header.groups[g].spec)) whole[g] = 0;
  return CacheIndex(std::move(whole));
}

// Blocks that requests of the step have hit and consumers know nothing of.
std::vector<Auditor::Impl::UntoldHit> Auditor::Impl::untold_hits(
    const std::vector<AuditRow>& rows) const {
  std::vector<UntoldHit> untold;
  for (const AuditRow& row : rows) {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!index_.knows(g)) continue;
      const std::int32_t size = block_size(g);
      for (std::int32_t end = size; end <= row.num_hit; end += size)
        if (!index_.has(g, row.request->contents[static_cast<std::size_t>(end) - 1])) {
          untold.push_back({row.request, g, end - size});
          break;
        }
    }
  }
  return untold;
}

// A block that is hit is held: it was there before the step or is stored in it, and is not removed.
void Auditor::Impl::check_events(const RecordedStep& step, const std::vector<AuditRow>& rows) {
  if (!has_events_) return;
  const std::vector<UntoldHit> before =
      has_connector_ ? std::vector<UntoldHit>{} : untold_hits(rows);
  std::int64_t num_stored = 0;
  std::int64_t num_removed = 0;
  bool is_cleared = false;
  for (const RecordedCacheEvent& event : step.events) {
    num_stored +=
        event.kind == RecordedCacheEvent::Kind::stored ? std::ssize(event.block_hashes) : 0;
    num_removed +=
        event.kind == RecordedCacheEvent::Kind::removed ? std::ssize(event.block_hashes) : 0;
    is_cleared |= event.kind == RecordedCacheEvent::Kind::cleared;
    index_.take(event, blocks_of_event(event, step), [&](std::string what) {
      report(AuditRule::cache_events, {}, std::move(what), fmt::format("step {}", step_));
    });
  }
  if (num_stored != step.stored || num_removed != step.evicted || is_cleared != step.cleared)
    report(AuditRule::cache_events, {},
           fmt::format("events tell of {} hashes stored and {} removed{}; the prefix cache had {} "
                       "and {}{}",
                       num_stored, num_removed, is_cleared ? ", and of a reset" : "", step.stored,
                       step.evicted, step.cleared ? ", and was reset" : ""),
           "counts");
  if (is_cleared) return;
  for (const UntoldHit& hit : before) {
    const std::int32_t last = hit.token + block_size(hit.group) - 1;
    if (index_.has(hit.group, hit.request->contents[static_cast<std::size_t>(last)])) continue;
    report(AuditRule::cache_events, *hit.request, hit.group, hit.token,
           block_of(*hit.request, hit.group, hit.token),
           fmt::format("a hit has tokens [{}, {}), and by its events the prefix cache has no such "
                       "block: it was never stored, or removed",
                       hit.token, last + 1));
  }
}

}  // namespace lockstep
