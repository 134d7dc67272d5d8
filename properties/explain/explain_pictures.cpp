#include "properties/story/story_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <sstream>

#include "base/number_text.h"

namespace lockstep {
namespace {

constexpr char kNoBreak = '\x1f';  // a space at which no line ends
constexpr std::size_t kCellsShown = 12;
constexpr std::size_t kBlocksNamed = 64;
constexpr std::size_t kBytesShown = 12;
constexpr std::size_t kRowsShown = 16;

std::string range(std::int64_t first, std::int64_t last) {
  return first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
}

std::string cell(BlockId block, std::int64_t index, const KVCacheSpec& spec, std::int64_t tokens,
                 bool is_new) {
  const std::string name = block == kNullBlock ? "-" : fmt::format("{}", index_of(block));
  const std::string mark = is_new ? "*" : "";
  const std::int64_t first = index * spec.block_size;
  if (spec.kind == CacheKind::mamba && spec.mamba_cache_mode != MambaCacheMode::all)
    return fmt::format("[{}{}]", name, mark);
  if (first >= tokens) return fmt::format("[{}{}:{}empty]", name, mark, kNoBreak);
  const std::int64_t last = std::min(tokens, first + spec.block_size) - 1;
  return fmt::format("[{}{}:{}{}]", name, mark, kNoBreak, range(first, last));
}

std::string hex_of(const std::vector<std::uint8_t>& page, std::size_t first, std::size_t size) {
  const std::string text = hex_bytes(std::span(page).subspan(first, std::min(size, kBytesShown)));
  return size > kBytesShown ? text + " ..." : text;
}

// One run of a page, and where in it the first wrong byte is.
struct PageRow {
  std::string text;
  bool wrong = false;
};

PageRow page_row(const Divergence& found, const PageSpan& span) {
  const auto first = static_cast<std::size_t>(span.first_byte);
  const auto size = static_cast<std::size_t>(span.size_bytes);
  std::size_t at = first;
  while (at < first + size && found.expected_page[at] == found.found_page[at]) ++at;
  PageRow row{
      .text = fmt::format("    {:>11}  {:<48}",
                          range(span.first_byte, span.first_byte + span.size_bytes - 1), span.what),
      .wrong = at < first + size};
  if (!row.wrong) {
    row.text += "  right\n";
    return row;
  }
  row.text += fmt::format("  WRONG from byte {}\n", at);
  const std::size_t left = first + size - at;
  row.text +=
      fmt::format("                 should be  {}\n                 is         {}\n",
                  hex_of(found.expected_page, at, left), hex_of(found.found_page, at, left));
  return row;
}

}  // namespace

std::string wrapped(const std::string& label, const std::string& text) {
  std::string out;
  std::string line = label;
  std::istringstream words(text);
  bool first = true;
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > kStoryColumns) {
      out += line + "\n";
      line = std::string(label.size(), ' ') + word;
    } else {
      line += (first ? "" : " ") + word;
    }
  }
  out += line + "\n";
  std::ranges::replace(out, kNoBreak, ' ');
  return out;
}

std::string table_picture(const std::vector<BlockId>& table, const KVCacheSpec& spec,
                          std::int64_t tokens, const std::vector<BlockId>& handed_out) {
  std::vector<std::string> cells;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const bool is_new =
        table[i] != kNullBlock && std::ranges::find(handed_out, table[i]) != handed_out.end();
    cells.push_back(cell(table[i], static_cast<std::int64_t>(i), spec, tokens, is_new));
  }
  if (cells.size() > kCellsShown) {
    const auto middle = static_cast<std::ptrdiff_t>(kCellsShown / 2);
    const std::size_t left_out = cells.size() - kCellsShown;
    cells.erase(cells.begin() + middle, cells.end() - middle);
    cells.insert(cells.begin() + middle, fmt::format("({}{}more)", left_out, kNoBreak));
  }
  return cells.empty() ? "no blocks" : fmt::format("{}", fmt::join(cells, " "));
}

std::string pool_picture(const std::vector<BlockState>& pool) {
  std::string text;
  std::int64_t held = 0;
  std::int64_t cached = 0;
  std::int64_t free = 0;
  for (std::size_t i = 1; i < pool.size();) {
    std::size_t end = i + 1;
    while (end < pool.size() && pool[end] == pool[i]) ++end;
    const auto count = static_cast<std::int64_t>(end - i);
    std::string what = "free";
    if (pool[i].kind == BlockState::Kind::held) {
      what = fmt::format("{}", fmt::join(pool[i].holders, " and "));
      held += count;
    } else if (pool[i].kind == BlockState::Kind::cached) {
      what = "free but cached";
      cached += count;
    } else {
      free += count;
    }
    std::ranges::replace(what, ' ', kNoBreak);
    text += fmt::format("{}{}:{}{}", i == 1 ? "" : ", ",
                        range(static_cast<std::int64_t>(i), static_cast<std::int64_t>(end) - 1),
                        kNoBreak, what);
    i = end;
  }
  if (pool.size() <= kBlocksNamed) return text;
  return fmt::format("{} held, {} free but cached, {} free", held, cached, free);
}

std::string page_picture(const Divergence& found) {
  if (found.found_page.empty() || found.found_page.size() != found.expected_page.size()) return {};
  std::string out;
  std::size_t shown = 0;
  std::size_t right = 0;
  const auto flush_right = [&] {
    if (right > 0)
      out += fmt::format("    {:>11}  ({} more that {} right)\n", "...", right,
                         right == 1 ? "is" : "are");
    right = 0;
  };
  const std::size_t wrong_rows = static_cast<std::size_t>(std::ranges::count_if(
      found.spans, [&](const PageSpan& span) { return page_row(found, span).wrong; }));
  const bool all = found.spans.size() <= kRowsShown;
  for (const PageSpan& span : found.spans) {
    const PageRow row = page_row(found, span);
    if (!all && (!row.wrong || shown >= kRowsShown)) {
      right += row.wrong ? 0 : 1;
      continue;
    }
    flush_right();
    out += row.text;
    ++shown;
  }
  flush_right();
  if (wrong_rows > kRowsShown && !all)
    out += fmt::format("    {:>11}  ({} more that are wrong)\n", "...", wrong_rows - shown);
  return out;
}

}  // namespace lockstep
