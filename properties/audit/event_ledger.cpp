#include "properties/audit/event_ledger.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

using Tokens = std::span<const std::int32_t>;

// Keys that the hash of tokens [first, end) covers. An empty value stands for the digest of an
// embedding.
std::vector<RecordedExtraKey> keys_of_block(const KeyedRequest& request, std::int32_t first,
                                            std::int32_t end) {
  std::vector<RecordedExtraKey> keys;
  if (!request.keys.lora.name.empty()) keys.push_back({request.keys.lora.name});
  for (const PromptItem& item : request.keys.mm)
    if (item.first < end && first < item.first + item.count)
      keys.push_back({item.identifier, item.first - first});
  if (first == 0 && !request.cache_salt.empty()) keys.push_back({request.cache_salt});
  if (!request.keys.embeds.empty()) keys.push_back({});
  return keys;
}

bool are_same_keys(std::span<const RecordedExtraKey> said,
                   std::span<const RecordedExtraKey> expected) {
  return std::ranges::equal(
      said, expected, [](const RecordedExtraKey& a, const RecordedExtraKey& b) {
        return a.place == b.place && (a.value == b.value || (b.value.empty() && !b.place));
      });
}

std::string keys_text(std::span<const RecordedExtraKey> keys) {
  std::string text;
  for (const RecordedExtraKey& key : keys) {
    text += text.empty() ? "" : ", ";
    text += key.value.empty() ? "the digest of an embedding" : key.value;
    if (key.place) text += fmt::format(" from token {} of the block", *key.place);
  }
  return text.empty() ? "no key" : text;
}

// At most eight tokens that show the difference.
std::string tokens_text(Tokens tokens, Tokens other) {
  constexpr std::size_t kShown = 8;
  const auto at = std::ranges::mismatch(tokens, other).in1;
  const auto first = static_cast<std::size_t>(at - tokens.begin());
  const auto shown = tokens.subspan(first < kShown ? 0 : first);
  return fmt::format("{}{}", fmt::join(shown.first(std::min(kShown, shown.size())), " "),
                     shown.size() > kShown ? " ..." : "");
}

// Tokens that the event has where the request has them from `first` onward, at most one position
// apart.
std::int64_t likeness(Tokens said, Tokens tokens, std::int32_t first) {
  std::int64_t most = 0;
  for (const std::int32_t shift : {-1, 0, 1}) {
    std::int64_t num = 0;
    for (std::int64_t i = 0; i < std::ssize(said); ++i) {
      const std::int64_t at = first + i + shift;
      num += at >= 0 && at < std::ssize(tokens) &&
             tokens[static_cast<std::size_t>(at)] == said[static_cast<std::size_t>(i)];
    }
    most = std::max(most, num);
  }
  return most;
}

// Of block `i` of the event, after the block of hash `before`.
std::uint64_t identity_of(const RecordedCacheEvent& event, std::size_t i,
                          const std::string& before) {
  std::string text = before + "/";
  if (i < event.extra_keys.size())
    for (const RecordedExtraKey& key : event.extra_keys[i])
      text += fmt::format("/{}@{}", key.value, key.place.value_or(-1));
  std::uint64_t identity = empty_prefix(text);
  const auto size = static_cast<std::size_t>(event.block_size);
  for (std::size_t t = i * size; t < (i + 1) * size; ++t)
    identity = content_after(identity, event.token_ids[t]);
  return identity;
}

std::vector<std::int32_t> sizes_of_full_groups(const AuditSetup& setup) {
  std::vector<std::int32_t> sizes = setup.block_sizes;
  for (std::size_t g = 0; g < sizes.size(); ++g)
    if (!keeps_all_tokens(setup.groups[g].spec)) sizes[g] = 0;
  return sizes;
}

}  // namespace

void CacheIndex::store(const RecordedCacheEvent& event, const DescribedBlocks& described,
                       const Refuse& refuse) {
  const auto g = static_cast<std::size_t>(event.group);
  LS_CHECK(g < groups_.size() && event.block_size > 0, "group {} of {}, blocks of {} tokens", g,
           groups_.size(), event.block_size);
  Group& group = groups_[g];
  const std::int32_t size = event.block_size;
  const auto num = event.block_hashes.size();
  const bool is_full = block_sizes_[g] == size;
  const bool is_whole = is_full && event.token_ids.size() == num * static_cast<std::size_t>(size);
  if (is_full && event.parent && !described.is_wrong && !group.of_hash.contains(*event.parent))
    refuse(fmt::format("a block of group {} is stored after {}, which is not there", g,
                       *event.parent));
  std::string before = event.parent.value_or("");
  for (std::size_t i = 0; i < num; ++i) {
    const std::string& hash = event.block_hashes[i];
    const std::uint64_t identity = is_whole ? identity_of(event, i, before) : 0;
    Entry& entry = group.of_hash[hash];
    if (entry.num > 0 && entry.identity != identity && !described.is_wrong)
      refuse(
          fmt::format("hash {} of group {} is stored with other tokens, another key or another "
                      "block before it than it stands for",
                      hash, g));
    if (entry.num++ == 0) {
      entry.identity = identity;
      if (is_whole && i < described.contents.size()) entry.content = described.contents[i];
      if (is_whole && described.end >= 0)
        entry.end = described.end - static_cast<std::int32_t>(num - 1 - i) * size;
    }
    if (is_whole && i < described.blocks.size() && described.blocks[i] != kNullBlock) {
      entry.blocks.push_back(described.blocks[i]);
      group.blocks.insert(described.blocks[i]);
    }
    if (entry.content == 0)
      ++group.num_unknown;
    else
      ++group.num_of[entry.content];
    before = hash;
  }
}

void CacheIndex::remove(const RecordedCacheEvent& event, const Refuse& refuse) {
  LS_CHECK(std::cmp_less(event.group, groups_.size()), "group {} of {}", event.group,
           groups_.size());
  Group& group = groups_[static_cast<std::size_t>(event.group)];
  for (const std::string& hash : event.block_hashes) {
    const auto found = group.of_hash.find(hash);
    if (found == group.of_hash.end()) {
      refuse(fmt::format("hash {} is removed from group {}, where nothing of it is stored", hash,
                         event.group));
      continue;
    }
    if (found->second.content == 0) {
      --group.num_unknown;
    } else if (const auto content = group.num_of.find(found->second.content);
               --content->second == 0) {
      group.num_of.erase(content);
    }
    // The event does not say which of several blocks is removed.
    for (const BlockId block : found->second.blocks) group.blocks.erase(block);
    found->second.blocks.clear();
    if (--found->second.num == 0) group.of_hash.erase(found);
  }
}

void CacheIndex::clear() {
  for (Group& group : groups_) group = {};
}

std::optional<CacheIndex::Prefix> CacheIndex::prefix_of(const std::string& hash) const {
  std::optional<Prefix> prefix;
  for (const Group& group : groups_)
    if (const auto found = group.of_hash.find(hash);
        found != group.of_hash.end() && (!prefix || prefix->end < 0))
      prefix = {found->second.content, found->second.end};
  return prefix;
}

EventLedger::EventLedger(AuditCore& core)
    : Ledger(core), index_(sizes_of_full_groups(core.setup)) {}

// With a connector, blocks are hit that the index does not have.
void EventLedger::step(const RecordedStep& step, std::span<const AuditRow> rows) {
  const std::vector<UntoldHit> before =
      setup_.has_connector ? std::vector<UntoldHit>{} : untold_hits(rows);
  const auto refuse = [&](std::string what) {
    report(AuditRule::cache_events, {}, std::move(what), fmt::format("step {}", step_number()));
  };
  std::int64_t num_stored = 0;
  std::int64_t num_removed = 0;
  bool is_cleared = false;
  for (const RecordedCacheEvent& event : step.events) {
    LS_CHECK(std::cmp_less(event.group, num_groups()), "group {} of {}", event.group, num_groups());
    if (event.kind == RecordedCacheEvent::Kind::stored) {
      num_stored += std::ssize(event.block_hashes);
      const std::int64_t window = spec_of(static_cast<std::size_t>(event.group)).sliding_window;
      if (event.kv_cache_spec_sliding_window && *event.kv_cache_spec_sliding_window != window)
        report_event(event, nullptr,
                     {fmt::format("the event says that group {} has a window of {} tokens, and it "
                                  "has {}",
                                  event.group, *event.kv_cache_spec_sliding_window,
                                  window > 0 ? std::to_string(window) : "none"),
                      "window"});
      const auto size = static_cast<std::int64_t>(event.block_size);
      if (size <= 0 || std::ssize(event.token_ids) % size != 0 ||
          std::ssize(event.token_ids) < std::ssize(event.block_hashes) * size)
        report_event(event, nullptr,
                     {fmt::format("{} hashes of blocks of {} tokens are stored with {} tokens",
                                  event.block_hashes.size(), size, event.token_ids.size()),
                      "size"});
      else
        index_.store(event, describe(event, step), refuse);
    } else if (event.kind == RecordedCacheEvent::Kind::removed) {
      num_removed += std::ssize(event.block_hashes);
      index_.remove(event, refuse);
    } else {
      is_cleared = true;
      index_.clear();
    }
  }
  check_counts(step, num_stored, num_removed, is_cleared);
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

void EventLedger::check_counts(const RecordedStep& step, std::int64_t num_stored,
                               std::int64_t num_removed, bool is_cleared) const {
  if (num_stored == step.stored && num_removed == step.evicted && is_cleared == step.cleared)
    return;
  report(AuditRule::cache_events, {},
         fmt::format(
             "events report {} hashes stored and {} removed{}; the prefix cache had {} and {}{}",
             num_stored, num_removed, is_cleared ? ", and a reset" : "", step.stored, step.evicted,
             step.cleared ? ", and was reset" : ""),
         "counts");
}

std::vector<EventLedger::UntoldHit> EventLedger::untold_hits(std::span<const AuditRow> rows) const {
  std::vector<UntoldHit> untold;
  for (const AuditRow& row : rows)
    for (std::size_t g = 0; g < num_groups(); ++g) {
      if (!index_.is_complete(g)) continue;
      const std::int32_t size = block_size(g);
      for (std::int32_t end = size; end <= row.num_hit; end += size)
        if (!index_.has(g, row.request->contents[static_cast<std::size_t>(end) - 1])) {
          untold.push_back({row.request, g, end - size});
          break;
        }
    }
  return untold;
}

// Finds the blocks that a stored event describes. If it describes none, reports how it differs from
// the most similar request.
DescribedBlocks EventLedger::describe(const RecordedCacheEvent& event, const RecordedStep& step) {
  for (const auto& keys : event.extra_keys)
    for (const RecordedExtraKey& key : keys)
      tells_keys_ |= key.place || key.value == event.lora_name;
  bool is_certain = true;
  std::optional<Candidate> behind;  // has these tokens, and has not computed them
  for (const auto& [name, request] : requests_) {
    // A waiting request has no block; one that this step preempts had some.
    if (!request.keeps_blocks() && request.preempted_in != step_number()) continue;
    for (const std::int32_t first : firsts_of(event, request))
      if (const Candidate of{&request, first};
          has_tokens_at(event, of) && difference(event, of).what.empty()) {
        if (first + std::ssize(event.token_ids) <= std::max(request.computed, request.scheduled_to))
          return blocks_of(event, of, false);
        if (!behind) behind = of;
      }
    is_certain &= !request.is_unpredictable && !request.is_adrift && request.void_step < 0;
  }
  if (behind) return blocks_of(event, *behind, false);
  // The index reports a parent that it does not have.
  const auto parent = event.parent ? index_.prefix_of(*event.parent) : std::nullopt;
  if (!is_certain || (event.parent && (!parent || parent->end < 0))) return {};
  Candidate best = most_like(event, step);
  if (best.request == nullptr) {
    report_event(
        event, nullptr,
        {fmt::format("the event says tokens {}, and no scheduled request has a block there",
                     tokens_text(event.token_ids, {})),
         "tokens"});
    return {.is_wrong = true};
  }
  // The same tokens elsewhere in the request: the parent is another block.
  const bool has_tokens = has_tokens_at(event, best);
  for (std::int32_t first = 0; first < std::ssize(best.request->tokens); first += event.block_size)
    if (!has_tokens && has_tokens_at(event, {best.request, first})) {
      best.first = first;
      report_event(event, best.request,
                   {fmt::format("the event says that tokens [{}, {}) of {} follow {}", first,
                                first + std::ssize(event.token_ids), best.request->name,
                                event.parent ? "the block of " + *event.parent : "no block"),
                    "parent", first});
      return blocks_of(event, best, true);
    }
  report_event(event, best.request, difference(event, best));
  return blocks_of(event, best, true);
}

// Where the blocks of the event can start: after its parent.
std::vector<std::int32_t> EventLedger::firsts_of(const RecordedCacheEvent& event,
                                                 const AuditRequest& request) const {
  if (!event.parent) return {0};
  const auto parent = index_.prefix_of(*event.parent);
  if (parent && parent->end >= 0) return {parent->end};
  std::vector<std::int32_t> firsts;
  for (std::int32_t first = 0; first < std::ssize(request.tokens); first += event.block_size)
    firsts.push_back(first);
  return firsts;
}

bool EventLedger::has_tokens_at(const RecordedCacheEvent& event, const Candidate& of) const {
  return of.first + std::ssize(event.token_ids) <= std::ssize(of.request->tokens) &&
         std::equal(event.token_ids.begin(), event.token_ids.end(),
                    of.request->tokens.begin() + of.first);
}

EventLedger::Candidate EventLedger::most_like(const RecordedCacheEvent& event,
                                              const RecordedStep& step) const {
  Candidate best;
  std::int64_t most = -1;
  for (const RecordedScheduled& scheduled : step.scheduled) {
    const AuditRequest* request = requests_.find(scheduled.id);
    if (request == nullptr) continue;
    for (const std::int32_t first : firsts_of(event, *request)) {
      // Of two requests with the same tokens, the one whose block is not stored yet.
      const auto g = static_cast<std::size_t>(event.group);
      const bool is_new = !index_.is_stored(g, block_of(*request, g, first));
      const std::int64_t like =
          2 * likeness(event.token_ids, request->tokens, first) + (is_new ? 1 : 0);
      if (like <= most) continue;
      best = {request, first};
      most = like;
    }
  }
  return best;
}

EventLedger::Difference EventLedger::difference(const RecordedCacheEvent& event,
                                                const Candidate& of) const {
  const Adapter& adapter = of.request->keyed.keys.lora;
  const std::string& name = event.lora_name.empty() ? adapter.name : event.lora_name;
  const std::int64_t id = event.lora_id.value_or(adapter.id);
  if (name != adapter.name || id != adapter.id)
    return {fmt::format("the event says adapter {} with id {}, {} has {} with id {}", name, id,
                        of.request->name, adapter.name.empty() ? "none" : adapter.name, adapter.id),
            "adapter", of.first};
  const std::int32_t size = event.block_size;
  const auto num = static_cast<std::size_t>(std::ssize(event.token_ids) / size);
  for (std::size_t i = 0; i < num; ++i)
    if (Difference found =
            difference_in_block(event, *of.request, i, of.first + static_cast<int>(i) * size);
        !found.what.empty())
      return found;
  if (of.first == 0 || !event.parent) return {};
  const auto parent = index_.prefix_of(*event.parent);
  if (!parent || parent->content == 0 ||
      parent->content == of.request->contents[static_cast<std::size_t>(of.first) - 1])
    return {};
  return {fmt::format("the event says that tokens [{}, {}) of {} follow the block of {}, which has "
                      "another prefix",
                      of.first, of.first + std::ssize(event.token_ids), of.request->name,
                      *event.parent),
          "parent", of.first};
}

// Compares block `i` of the event with the request's block from `token` onward.
EventLedger::Difference EventLedger::difference_in_block(const RecordedCacheEvent& event,
                                                         const AuditRequest& request, std::size_t i,
                                                         std::int32_t token) const {
  const auto g = static_cast<std::size_t>(event.group);
  const auto size = static_cast<std::size_t>(event.block_size);
  const Tokens theirs = Tokens(event.token_ids).subspan(i * size, size);
  const Tokens all(request.tokens);
  const std::size_t begin = std::min(static_cast<std::size_t>(token), all.size());
  const Tokens mine = all.subspan(begin, std::min(size, all.size() - begin));
  if (!std::ranges::equal(theirs, mine))
    return {
        fmt::format("the event says tokens {} of {}, {} has {} there", tokens_text(theirs, mine),
                    block_text(request, g, token), request.name, tokens_text(mine, theirs)),
        "tokens", token};
  // In groups that leave blocks out, the event does not say which hash is the block's.
  if (event.token_ids.size() != event.block_hashes.size() * size) return {};
  const auto keys = keys_of_block(request.keyed, token, token + event.block_size);
  const auto said = i < event.extra_keys.size()
                        ? std::span<const RecordedExtraKey>(event.extra_keys[i])
                        : std::span<const RecordedExtraKey>();
  // A recording may have salts only, and events of parts of blocks have no keys.
  const bool tells =
      !event.extra_keys.empty() && (!said.empty() || tells_keys_ || request.keyed.keys.empty());
  if (tells && !are_same_keys(said, keys))
    return {fmt::format("the event says {} of {}, {} has {} there", keys_text(said),
                        block_text(request, g, token), request.name, keys_text(keys)),
            "keys", token};
  if (!keeps_all_tokens(spec_of(g)) || !request.running || event.block_size != block_size(g))
    return {};
  const BlockId block = block_of(request, g, token);
  if (block == kNullBlock)
    return {fmt::format("the event says that group {} has tokens [{}, {}), {} has no block there",
                        g, token, token + event.block_size, request.name),
            "group", token};
  // Where hashes look ahead, an event does not tell blocks of equal tokens apart.
  if (!setup_.has_connector && setup_.hash_lookahead == 0 && index_.is_stored(g, block))
    return {fmt::format("the event says that {} of group {} is stored, and it was stored before",
                        block_text(request, g, token), g),
            "group", token};
  return {};
}

DescribedBlocks EventLedger::blocks_of(const RecordedCacheEvent& event, const Candidate& of,
                                       bool is_wrong) const {
  DescribedBlocks described{.end = of.first + static_cast<std::int32_t>(event.token_ids.size()),
                            .is_wrong = is_wrong};
  for (std::int32_t end = of.first + event.block_size; end <= described.end;
       end += event.block_size) {
    const auto at = static_cast<std::size_t>(end);
    described.contents.push_back(at <= of.request->contents.size() ? of.request->contents[at - 1]
                                                                   : 0);
    described.blocks.push_back(
        block_of(*of.request, static_cast<std::size_t>(event.group), end - event.block_size));
  }
  return described;
}

std::string EventLedger::block_text(const AuditRequest& request, std::size_t group,
                                    std::int32_t token) const {
  const BlockId block = block_of(request, group, token);
  return block == kNullBlock ? fmt::format("the block at token {}", token)
                             : fmt::format("block {}", index_of(block));
}

// Every wrong event of a kind has one cause.
void EventLedger::report_event(const RecordedCacheEvent& event, const AuditRequest* request,
                               Difference difference) const {
  AuditFinding finding{.rule = AuditRule::cache_events,
                       .step = step_number(),
                       .request = request == nullptr ? std::string() : request->name,
                       .group = event.group,
                       .token = difference.token,
                       .what = std::move(difference.what)};
  const auto g = static_cast<std::size_t>(event.group);
  if (request != nullptr && difference.token >= 0) {
    finding.entry = difference.token / block_size(g);
    finding.block = index_of(block_of(*request, g, difference.token));
  }
  findings_.add(std::move(finding), fmt::format("cache_events {}", difference.cause));
}

}  // namespace lockstep
