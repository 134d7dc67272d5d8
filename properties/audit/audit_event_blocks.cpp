// Which blocks of the pool an event describes. An event names no block: a block of the group that a
// live request fills must have the event's tokens and keys, after the block that the event names.
#include <fmt/format.h>

#include <algorithm>

#include "properties/audit/audit_impl.h"

namespace lockstep {
namespace {

// Keys of the request that the hash of tokens [first, end) covers. The digest of an embedding is
// the engine's own: only its presence is compared, as an empty value.
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

std::string text_of(std::span<const RecordedExtraKey> keys) {
  std::string text;
  for (const RecordedExtraKey& key : keys) {
    text += text.empty() ? "" : ", ";
    text += key.value.empty() ? "the digest of an embedding" : key.value;
    if (key.place) text += fmt::format(" from token {} of the block", *key.place);
  }
  return text.empty() ? "no key" : text;
}

// The tokens that show a difference: eight at most.
std::string from_difference(std::span<const std::int32_t> tokens,
                            std::span<const std::int32_t> other) {
  constexpr std::size_t kShown = 8;
  const auto [at, there] = std::ranges::mismatch(tokens, other);
  const auto first = static_cast<std::size_t>(at - tokens.begin());
  const auto shown = tokens.subspan(first < kShown ? 0 : first);
  return fmt::format("{}{}", fmt::join(shown.first(std::min(kShown, shown.size())), " "),
                     shown.size() > kShown ? " ..." : "");
}

// Tokens that the event and the request have in common, at most one position apart.
std::int64_t likeness(std::span<const std::int32_t> said, std::span<const std::int32_t> tokens,
                      std::int32_t first) {
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

}  // namespace

// In what the event differs from the request's blocks that begin with token `first`; empty: in
// nothing. `cause` is what an engine does wrong, `token` where.
std::string Auditor::Impl::why_not_described(const RecordedCacheEvent& event,
                                             const AuditedRequest& request, std::int32_t first,
                                             std::string& cause, std::int32_t& token) const {
  const auto g = static_cast<std::size_t>(event.group);
  const std::int32_t size = event.block_size;
  const std::span<const std::int32_t> said(event.token_ids);
  const auto num = static_cast<std::int32_t>(std::ssize(said) / size);
  const bool is_whole = num == std::ssize(event.block_hashes);
  const std::string& name = request.name;
  const auto block_at = [&](std::int32_t position) {
    const auto entry = static_cast<std::size_t>(position / block_size(g));
    const std::vector<BlockId>& table = request.tables[g];
    return entry < table.size() ? table[entry] : kNullBlock;
  };
  const auto of_block = [&](std::int32_t position) {
    const BlockId block = block_at(position);
    return block == kNullBlock ? fmt::format("the block at token {}", position)
                               : fmt::format("block {}", index_of(block));
  };
  const std::span<const std::int32_t> own(request.tokens);
  for (std::int32_t i = 0; i < num; ++i) {
    token = first + i * size;
    const std::span<const std::int32_t> theirs = said.subspan(i * size, size);
    const auto begin = std::min<std::size_t>(static_cast<std::size_t>(token), own.size());
    const auto mine = own.subspan(begin, std::min<std::size_t>(size, own.size() - begin));
    if (!std::ranges::equal(theirs, mine)) {
      cause = "tokens";
      return fmt::format("the event says tokens {} of {}, {} has {} there",
                         from_difference(theirs, mine), of_block(token), name,
                         from_difference(mine, theirs));
    }
    const auto at = static_cast<std::size_t>(i);
    if (!is_whole) continue;
    const auto keys = keys_of_block(request.keyed, token, token + size);
    const auto told = at < event.extra_keys.size()
                          ? std::span<const RecordedExtraKey>(event.extra_keys[at])
                          : std::span<const RecordedExtraKey>();
    const bool tells =
        !told.empty() || (!event.extra_keys.empty() && tells_keys_) || request.keyed.keys.empty();
    if (tells && !event.extra_keys.empty() && !are_same_keys(told, keys)) {
      cause = "keys";
      return fmt::format("the event says {} of {}, {} has {} there", text_of(told), of_block(token),
                         name, text_of(keys));
    }
    if (!keeps_all_tokens(groups_[g].spec) || !request.running || size != block_size(g)) continue;
    cause = "group";
    if (block_at(token) == kNullBlock)
      return fmt::format("the event says that group {} has tokens [{}, {}), {} has no block there",
                         g, token, token + size, name);
    if (!has_connector_ && index_.is_stored(g, block_at(token)))
      return fmt::format("the event says that {} of group {} is stored, and it was stored before",
                         of_block(token), g);
  }
  if (first > 0 && event.parent) {
    const auto parent = index_.prefix_of(*event.parent);
    if (parent && parent->content != 0 &&
        parent->content != request.contents[static_cast<std::size_t>(first) - 1]) {
      cause = "parent";
      token = first;
      return fmt::format(
          "the event says that tokens [{}, {}) of {} follow the block of {}, which "
          "has another prefix",
          first, first + std::ssize(said), name, *event.parent);
    }
  }
  return {};
}

// The blocks that the event describes. Where it describes none, the request that is most like it is
// named, and the index takes what that request has: one cause.
CacheIndex::StoredBlocks Auditor::Impl::blocks_of_event(const RecordedCacheEvent& event,
                                                        const RecordedStep& step) {
  if (event.kind != RecordedCacheEvent::Kind::stored) return {};
  const std::int32_t size = event.block_size;
  const auto num_hashes = std::ssize(event.block_hashes);
  const auto num_tokens = static_cast<std::int32_t>(event.token_ids.size());
  const auto report_event = [&](const AuditedRequest* request, std::int32_t token, std::string what,
                                std::string_view cause) {
    AuditFinding finding{.rule = AuditRule::cache_events,
                         .step = step_,
                         .request = request == nullptr ? std::string() : request->name,
                         .group = event.group,
                         .token = token,
                         .what = std::move(what)};
    const auto g = static_cast<std::size_t>(event.group);
    if (request != nullptr && token >= 0) {
      finding.entry = token / block_size(g);
      finding.block = index_of(block_of(*request, g, token));
    }
    tell(std::move(finding), fmt::format("cache_events {}", cause));
  };
  if (size <= 0 || num_tokens % size != 0 || num_tokens < num_hashes * size) {
    report_event(nullptr, -1,
                 fmt::format("{} hashes of blocks of {} tokens are stored with {} tokens",
                             num_hashes, size, num_tokens),
                 fmt::format("step {}", step_));
    return {.is_wrong = true};
  }
  for (const auto& keys : event.extra_keys)
    for (const RecordedExtraKey& key : keys)
      tells_keys_ |= key.place || key.value == event.lora_name;
  const auto parent = event.parent ? index_.prefix_of(*event.parent) : std::nullopt;
  const AuditedRequest* best = nullptr;
  std::int32_t best_first = 0;
  std::int64_t best_likeness = -1;
  const auto take = [&](const AuditedRequest& request, std::int32_t first, bool is_wrong = true) {
    CacheIndex::StoredBlocks stored;
    stored.is_wrong = is_wrong;
    stored.end = first + num_tokens;
    for (std::int32_t end = first + size; end <= stored.end; end += size) {
      const bool is_known = std::cmp_less_equal(end, request.contents.size());
      stored.contents.push_back(is_known ? request.contents[static_cast<std::size_t>(end) - 1] : 0);
      stored.blocks.push_back(block_of(request, static_cast<std::size_t>(event.group), end - size));
    }
    return stored;
  };
  std::string cause;
  std::int32_t token = -1;
  const auto describes = [&](const AuditedRequest& request, std::int32_t first) {
    return first + num_tokens <= std::ssize(request.tokens) &&
           std::equal(event.token_ids.begin(), event.token_ids.end(),
                      request.tokens.begin() + first) &&
           why_not_described(event, request, first, cause, token).empty();
  };
  const auto firsts_of = [&](const AuditedRequest& request) {
    std::vector<std::int32_t> firsts;
    if (!event.parent) return std::vector<std::int32_t>{0};
    if (parent && parent->end >= 0) return std::vector<std::int32_t>{parent->end};
    for (std::int32_t first = 0; first + num_tokens <= std::ssize(request.tokens); first += size)
      firsts.push_back(first);
    return firsts;
  };
  const auto consider = [&](const AuditedRequest& request) {
    for (const std::int32_t first : firsts_of(request)) {
      // Of two requests with the same tokens, the one whose block is not stored yet.
      const auto group = static_cast<std::size_t>(event.group);
      const bool is_new = !index_.is_stored(group, block_of(request, group, first));
      const std::int64_t like =
          2 * likeness(event.token_ids, request.tokens, first) + (is_new ? 1 : 0);
      if (like <= best_likeness) continue;
      best = &request;
      best_first = first;
      best_likeness = like;
    }
  };
  const auto has_blocks = [&](const AuditedRequest& request) {
    return request.keeps_blocks() || request.preempted_in == step_;
  };
  for (const auto& [name, request] : requests_)
    for (const std::int32_t first : firsts_of(request))
      if (has_blocks(request) && describes(request, first)) return take(request, first, false);
  if (event.parent && (!parent || parent->end < 0)) return {};
  // Samples after a lost block or a wrong row are not known.
  for (const auto& [name, request] : requests_)
    if (request.is_past_telling || request.is_adrift() || request.void_step >= 0) return {};
  for (const RecordedScheduled& scheduled : step.scheduled)
    if (const auto found = requests_.find(scheduled.id); found != requests_.end())
      consider(found->second);
  if (best == nullptr) {
    report_event(nullptr, -1,
                 fmt::format("the event says tokens {}, and no scheduled request has a block there",
                             fmt::join(event.token_ids, " ")),
                 "tokens");
    return {.is_wrong = true};
  }
  // The same tokens elsewhere in the request: the block before is another one.
  const std::span<const std::int32_t> all(best->tokens);
  const bool is_same = best_first + num_tokens <= std::ssize(all) &&
                       std::ranges::equal(all.subspan(best_first, num_tokens), event.token_ids);
  for (std::int32_t first = 0; first + num_tokens <= std::ssize(all); first += size)
    if (!is_same && first != best_first &&
        std::ranges::equal(all.subspan(first, num_tokens), event.token_ids)) {
      report_event(best, first,
                   fmt::format("the event says that tokens [{}, {}) of {} follow {}", first,
                               first + num_tokens, best->name,
                               event.parent ? fmt::format("the block of {}", *event.parent)
                                            : std::string("no block")),
                   "parent");
      return take(*best, first);
    }
  std::string what = why_not_described(event, *best, best_first, cause, token);
  report_event(best, token, std::move(what), cause);
  return take(*best, best_first);
}

}  // namespace lockstep
