#include "properties/audit/prompt_content.h"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {
namespace {

std::uint64_t text_after(std::uint64_t content, std::string_view text) {
  for (const char c : text) content = content_after(content, static_cast<unsigned char>(c));
  return content;
}

// Who covers a position; null: nobody.
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

std::string_view or_none(std::string_view text) { return text.empty() ? "none" : text; }

}  // namespace

std::uint64_t empty_prefix(std::string_view cache_salt) {
  return text_after(0x61756469740000ull, cache_salt);
}

std::uint64_t empty_prefix(const KeyedRequest& request) {
  std::uint64_t content = empty_prefix(request.cache_salt);
  if (request.keys.lora.empty()) return content;
  content = text_after(content_after(content, -2), request.keys.lora);
  return text_after(content_after(content, -3), request.keys.lora_path);
}

std::vector<std::uint64_t> contents_of(const KeyedRequest& request,
                                       const std::vector<std::int32_t>& tokens) {
  std::vector<std::uint64_t> contents;
  contents.reserve(tokens.size());
  std::uint64_t content = empty_prefix(request);
  std::int32_t position = 0;
  for (const std::int32_t token : tokens) {
    content = content_after(content, token);
    std::int32_t kind = -4;
    for (const auto* items : {&request.keys.multimodal, &request.keys.prompt_embeds}) {
      if (const PromptItem* item = item_at(*items, position))
        content = content_after(text_after(content_after(content, kind), item->identifier),
                                position - item->first);
      --kind;
    }
    contents.push_back(content);
    ++position;
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
  compare("under another adapter", there.keys.lora, here.keys.lora);
  if (there.keys.lora == here.keys.lora)
    compare("under an adapter from another place", there.keys.lora_path, here.keys.lora_path);
  const auto compare_items = [&](std::string_view what, const std::vector<PromptItem>& theirs,
                                 const std::vector<PromptItem>& mine) {
    const std::int32_t p = first_unlike(mine, theirs, position);
    if (p < 0) return;
    const auto text = [&](const std::vector<PromptItem>& items) {
      const PromptItem* item = item_at(items, p);
      return item == nullptr ? std::string("none")
                             : fmt::format("{} from token {} on", item->identifier, item->first);
    };
    unlike.push_back(
        fmt::format(" with {} at token {} ({} there, {} here)", what, p, text(theirs), text(mine)));
  };
  compare_items("another image", there.keys.multimodal, here.keys.multimodal);
  compare_items("other prompt embeddings", there.keys.prompt_embeds, here.keys.prompt_embeds);
  return fmt::format("{}", fmt::join(unlike, " and"));
}

}  // namespace lockstep
