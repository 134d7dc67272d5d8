#include "properties/audit/audit_requests.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

std::uint64_t text_after(std::uint64_t content, std::string_view text) {
  for (const char c : text) content = content_after(content, static_cast<unsigned char>(c));
  return content;
}

// The item at a position; null: none.
const PromptItem* item_at(const std::vector<PromptItem>& items, std::int32_t position) {
  const auto item = std::ranges::partition_point(
      items, [&](const PromptItem& before) { return before.first + before.count <= position; });
  return item != items.end() && item->first <= position ? &*item : nullptr;
}

// The first position at which items differ, as far as `position`; -1: none.
std::int32_t first_unlike(const std::vector<PromptItem>& here, const std::vector<PromptItem>& there,
                          std::int32_t position) {
  for (std::int32_t p = 0; p <= position; ++p) {
    const PromptItem* mine = item_at(here, p);
    const PromptItem* theirs = item_at(there, p);
    if ((mine == nullptr) != (theirs == nullptr)) return p;
    if (mine != nullptr && (mine->identifier != theirs->identifier || mine->first != theirs->first))
      return p;
  }
  return -1;
}

// Names the embedding at a position; empty: none. A digest is named where its tokens begin.
std::string row_text(const PromptEmbeds& embeds, std::int32_t position) {
  if (embeds.empty()) return {};
  if (!embeds.digests.empty()) {
    const auto at = static_cast<std::size_t>(position / embeds.digest_tokens);
    const bool begins = position % embeds.digest_tokens == 0 && at < embeds.digests.size();
    return begins ? embeds.digests[at] : std::string();
  }
  std::int64_t row = embeds.row_at(position);
  if (row < 0) return {};
  for (const TokenRun& run : embeds.rows) {
    if (row < run.count)
      return fmt::format("row {} of seed {} with {} columns", run.first + row, run.seed,
                         embeds.width);
    row -= run.count;
  }
  return {};
}

std::uint64_t prefix_of_adapter(std::uint64_t content, std::string_view name,
                                std::string_view path) {
  content = text_after(content_after(content, -2), name);
  return text_after(content_after(content, -3), path);
}

std::string_view or_none(std::string_view text) { return text.empty() ? "none" : text; }

}  // namespace

std::uint64_t empty_prefix(std::string_view cache_salt) {
  return text_after(0x61756469740000ull, cache_salt);
}

std::uint64_t empty_prefix(const KeyedRequest& request) {
  const std::uint64_t content = empty_prefix(request.cache_salt);
  const Adapter& lora = request.keys.lora;
  return lora.name.empty() ? content : prefix_of_adapter(content, lora.name, lora.path);
}

std::uint64_t content_with_item(std::uint64_t content, std::string_view identifier) {
  return text_after(content_after(content, -4), identifier);
}

std::uint64_t content_of_encoder_row(const PromptItem& item, std::int32_t row) {
  return content_after(text_after(content_after(0, -6), item.identifier), row);
}

std::uint64_t content_at_position(const KeyedRequest& request, std::uint64_t before,
                                  std::int32_t token, std::int32_t position) {
  std::uint64_t content = content_after(before, token);
  if (request.keys.empty()) return content;
  // The content of an item's first token names the item; later tokens include it.
  if (const PromptItem* item = item_at(request.keys.mm, position);
      item != nullptr && item->first == position)
    content = content_with_item(content, item->identifier);
  const std::string row = row_text(request.keys.embeds, position);
  return row.empty() ? content : text_after(content_after(content, -5), row);
}

std::vector<std::uint64_t> contents_of(const KeyedRequest& request,
                                       const std::vector<std::int32_t>& tokens) {
  std::vector<std::uint64_t> contents;
  contents.reserve(tokens.size());
  std::uint64_t content = empty_prefix(request);
  for (const std::int32_t token : tokens) {
    content =
        content_at_position(request, content, token, static_cast<std::int32_t>(contents.size()));
    contents.push_back(content);
  }
  return contents;
}

std::string key_difference(const KeyedRequest& here, const KeyedRequest& there,
                           std::int32_t position) {
  std::vector<std::string> unlike;
  const auto compare = [&](std::string_view what, std::string_view theirs, std::string_view mine) {
    if (theirs != mine)
      unlike.push_back(
          fmt::format(" {} ({} there, {} here)", what, or_none(theirs), or_none(mine)));
  };
  compare("under another cache salt", there.cache_salt, here.cache_salt);
  const Adapter& theirs = there.keys.lora;
  const Adapter& mine = here.keys.lora;
  compare("under another adapter", theirs.name, mine.name);
  if (theirs.name == mine.name)
    compare("under an adapter from another place", theirs.path, mine.path);
  if (const std::int32_t p = first_unlike(here.keys.mm, there.keys.mm, position); p >= 0) {
    const auto text = [&](const std::vector<PromptItem>& items) {
      const PromptItem* item = item_at(items, p);
      return item == nullptr ? std::string("none")
                             : fmt::format("{} from token {} on", item->identifier, item->first);
    };
    unlike.push_back(fmt::format(" with another image at token {} ({} there, {} here)", p,
                                 text(there.keys.mm), text(here.keys.mm)));
  }
  for (std::int32_t p = 0; p <= position; ++p) {
    const std::string of_theirs = row_text(there.keys.embeds, p);
    const std::string of_mine = row_text(here.keys.embeds, p);
    if (of_theirs == of_mine) continue;
    unlike.push_back(fmt::format(" with other prompt embeddings at token {} ({} there, {} here)", p,
                                 or_none(of_theirs), or_none(of_mine)));
    break;
  }
  return fmt::format("{}", fmt::join(unlike, " and"));
}

AuditRequest& AuditRequests::add(
    const RequestSpec& spec, std::size_t num_groups,
    const std::function<void(const std::function<void(std::int32_t)>&)>& in_use) {
  erase(spec.name);
  AuditRequest request;
  request.name = spec.name;
  request.index = num_requests_++;
  request.tokens = spec.prompt.materialize();
  request.num_prompt = static_cast<std::int32_t>(request.tokens.size());
  request.keyed = {spec.name, spec.cache_salt, spec.keys};
  request.root = empty_prefix(request.keyed);
  request.contents = contents_of(request.keyed, request.tokens);
  request.tables.resize(num_groups);
  request.slot = free_slots_.empty() ? num_slots_++ : free_slots_.back();
  if (!free_slots_.empty()) free_slots_.pop_back();
  set_keys(request);
  AuditRequest& added = by_name_.emplace(spec.name, std::move(request)).first->second;
  if (keys_.size() >= num_keys_max_) {
    std::set<std::int32_t> kept;
    in_use([&](std::int32_t index) { kept.insert(index); });
    for (const auto& [name, live] : by_name_) kept.insert(live.index);
    std::erase_if(keys_, [&](const auto& of) { return !kept.contains(of.first); });
    num_keys_max_ = std::max(num_keys_max_, 2 * keys_.size());
  }
  LS_CHECK(added.contents.size() == added.tokens.size(), "{} contents of {} tokens",
           added.contents.size(), added.tokens.size());
  return added;
}

void AuditRequests::erase(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  found_.fill(nullptr);
  LS_CHECK(found->second.slot < num_slots_, "slot {} of {}", found->second.slot, num_slots_);
  free_slots_.push_back(found->second.slot);
  by_name_.erase(found);
}

const std::string& AuditRequests::name_at(std::int32_t index) const {
  static const std::string kForgotten = "?";
  const KeyedRequest* keys = keys_at(index);
  return keys == nullptr ? kForgotten : keys->name;
}

const KeyedRequest* AuditRequests::keys_at(std::int32_t index) const {
  const auto found = keys_.find(index);
  return found == keys_.end() ? nullptr : &found->second;
}

}  // namespace lockstep
