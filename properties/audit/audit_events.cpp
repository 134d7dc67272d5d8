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
  if (--found->second.num == 0) group.of_hash.erase(found);
}

void CacheIndex::store(const RecordedCacheEvent& event,
                       const std::function<void(std::string)>& refuse) {
  const auto g = static_cast<std::size_t>(event.group);
  Group& group = groups_[g];
  const auto num_hashes = std::ssize(event.block_hashes);
  const auto size = static_cast<std::int64_t>(event.block_size);
  if (size <= 0 || std::ssize(event.token_ids) % size != 0 ||
      std::ssize(event.token_ids) < num_hashes * size)
    return refuse(fmt::format("{} hashes of blocks of {} tokens are stored with {} tokens",
                              num_hashes, size, event.token_ids.size()));
  const bool is_whole = block_sizes_[g] == size && std::ssize(event.token_ids) == num_hashes * size;
  std::uint64_t content = 0;  // of the token before; 0: not known
  std::string before = event.parent.value_or("");
  const auto keys_of = [&](std::size_t i) {
    return i < event.extra_keys.size() ? std::span(event.extra_keys[i])
                                       : std::span<const RecordedExtraKey>();
  };
  const auto text_of = [&](std::size_t i) {
    std::string text;
    for (const RecordedExtraKey& key : keys_of(i))
      text += fmt::format("/{}@{}", key.value, key.place.value_or(-1));
    return text;
  };
  // A salt alone is the root of those who bring it; what else there is makes content that nobody
  // without it can have.
  const std::span<const RecordedExtraKey> first_keys = keys_of(0);
  const bool is_salted =
      !event.parent && first_keys.size() == 1 && !first_keys[0].place && event.lora_name.empty();
  if (!event.parent) {
    content = empty_prefix(is_salted ? first_keys[0].value : std::string_view{});
  } else if (const auto parent = group.of_hash.find(*event.parent); parent != group.of_hash.end()) {
    content = parent->second.content;
  } else if (block_sizes_[g] == size) {  // before a part of a block lies another, never told alone
    refuse(fmt::format("a block of group {} is stored behind {}, which is not there", g,
                       *event.parent));
  }
  for (std::size_t i = 0; i < event.block_hashes.size(); ++i) {
    const std::string& hash = event.block_hashes[i];
    std::uint64_t identity = 0;
    if (is_whole) {
      const std::string keys = text_of(i);
      identity = empty_prefix(before + "/" + keys);
      const bool is_of_root = i == 0 && is_salted;
      if (content != 0 && !keys.empty() && !is_of_root) content = content_with_item(content, keys);
      for (std::int64_t t = 0; t < size; ++t) {
        const std::int32_t token =
            event.token_ids[i * static_cast<std::size_t>(size) + static_cast<std::size_t>(t)];
        identity = content_after(identity, token);
        if (content != 0) content = content_after(content, token);
      }
    } else {
      content = 0;
    }
    Entry& entry = group.of_hash[hash];
    if (entry.num > 0 && entry.identity != identity)
      refuse(
          fmt::format("hash {} of group {} is stored with other tokens, another key or another "
                      "block before it than it stands for",
                      hash, g));
    if (entry.num++ == 0) {
      entry.content = content;
      entry.identity = identity;
    }
    if (entry.content == 0)
      ++group.num_unknown;
    else
      ++group.num_of[entry.content];
    before = hash;
  }
}

void CacheIndex::take(const RecordedCacheEvent& event,
                      const std::function<void(std::string)>& refuse) {
  if (event.kind == RecordedCacheEvent::Kind::cleared) {
    for (Group& group : groups_) group = {};
    return;
  }
  if (event.kind == RecordedCacheEvent::Kind::stored) return store(event, refuse);
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
    if (!row.request->keyed.keys.empty()) continue;  // events tell of salts alone
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
    index_.take(event, [&](std::string what) {
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
