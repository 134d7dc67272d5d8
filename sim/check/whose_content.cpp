#include "sim/check/diagnosis.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/check.h"
#include "reference/memory/page_image.h"

namespace lockstep {
namespace {

// A row's position in the cache: block id, and offset of its token's slot in the block.
struct RowPlace {
  std::int32_t block = 0;
  std::int64_t slot_offset = 0;
  const SlotContent* slot = nullptr;
};

// A candidate row and its agreement with the bytes. words == 0: no match.
struct Match {
  std::size_t words = 0;   // number of equal words
  std::int64_t shift = 0;  // words of the row before the first one compared
  const ModelLayer* layer = nullptr;
  // index in ModelLayer::coords: part * num_kv_heads + head
  std::size_t coord = 0;
  RowPlace place;
};

// The words to explain; empty where a word is the expected one.
using WrongWords = std::vector<std::optional<std::uint64_t>>;

// Counts the words that equal those of the row, compared from the row's word `shift`.
std::size_t count_matches(const WrongWords& words, std::span<const std::uint64_t> row,
                          std::size_t shift) {
  std::size_t matches = 0;
  for (std::size_t i = 0; i < words.size() && i + shift < row.size(); ++i)
    matches += words[i] == row[i + shift];
  return matches;
}

// Returns the row with the most words in common with `words`. Except for its exponents, a word of a
// row is 64 bits of hash with at least 32 random bits: a single equal word is not an accident.
// `shifted` also tries the row from each of its later words, for rows written at a wrong offset.
// Costs (live rows) * (words per row), squared in the words if shifted.
Match best_row(const MemoryModel& model, const WrongWords& words, bool shifted) {
  Match best;
  for (const ModelLayer& layer : model.layers()) {
    if (layer.num_kv == 0) continue;
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(layer.row_size_bytes));
    std::vector<std::uint64_t> row(static_cast<std::size_t>(num_words(layer.row_size_bytes)));
    for (std::int32_t b = 0; b < model.num_blocks(); ++b) {
      const BlockContent& block = model.block(static_cast<BlockId>(b));
      // Groups overlay each other in one buffer; only the owning group's content is in the block.
      if (block.group != layer.group) continue;
      for (std::int64_t offset = 0; offset < model.block_size(layer.group); ++offset) {
        const SlotContent* slot =
            model.slot_content(layer.group, static_cast<BlockId>(b), offset, layer.lane);
        if (slot == nullptr) continue;
        for (std::size_t c = 0; c < layer.coords.size(); ++c) {
          draw_row(layer, slot->content, c, bytes);
          for (std::size_t i = 0; i < row.size(); ++i) row[i] = load_word(bytes, i);
          for (std::size_t shift = 0; shift < (shifted ? row.size() : 1); ++shift) {
            const std::size_t count = count_matches(words, row, shift);
            if (count > best.words)
              best = {count, static_cast<std::int64_t>(shift), &layer, c, {b, offset, slot}};
          }
        }
      }
    }
  }
  return best;
}

std::string describe(const MemoryModel& model, const Match& match) {
  const ModelLayer& layer = *match.layer;
  const std::int64_t heads = layer.num_kv_heads;
  const auto coord = static_cast<std::int64_t>(match.coord);
  std::string text =
      fmt::format("{} of head {} of layer {} of {}'s token {} in slot {} of block {}",
                  part_name(layer, coord / heads), coord % heads, layer.index,
                  model.writer_name(match.place.slot->writer), match.place.slot->position,
                  match.place.slot_offset, match.place.block);
  if (match.shift != 0) text += fmt::format(", from byte {} of the row", 8 * match.shift);
  return text;
}

// Returns the name of the poison pattern that the word is, empty if it is none. Poison word i of a
// page is key ^ i, so word ^ key must be a small index within the page.
std::string poison_name(const MemoryModel& model, std::uint64_t word) {
  constexpr std::string_view kinds[] = {"never allocated", "allocated and not written since",
                                        "padding", "allocated to be zeroed, but not zeroed"};
  for (int kind = 0; kind < std::ssize(kinds); ++kind)
    for (std::int32_t t = 0; t < model.num_tensors(); ++t)
      for (std::int32_t p = 0; p < model.num_blocks(); ++p) {
        const std::uint64_t i = word ^ poison_key(static_cast<Unwritten>(kind), t, p);
        if (static_cast<std::int64_t>(i) < num_words(model.page_size_bytes(t)) && (i >> 32) == 0)
          return fmt::format("the poison of page {} of tensor {}, byte {} ({})", p, t, 8 * i,
                             kinds[kind]);
      }
  return {};
}

// Returns the name of the state that contains the word, empty if there is none. Only states of
// known words can match; unsettled real numbers have none.
std::string state_name(const MemoryModel& model, std::uint64_t word) {
  for (std::int32_t b = 0; b < model.num_blocks(); ++b) {
    const BlockContent& block = model.block(static_cast<BlockId>(b));
    if (block.state.writer == kNobody || block.state.words == nullptr) continue;
    const std::vector<std::uint64_t>& words = *block.state.words;
    const auto at = std::ranges::find(words, word);
    if (at == words.end()) continue;
    return fmt::format("the state of {} after {} tokens in block {}",
                       model.writer_name(block.state.writer), block.state.num_tokens, b);
  }
  return {};
}

}  // namespace

std::string part_name(const ModelLayer& layer, std::int64_t part) {
  if (part >= kPartState) return fmt::format("state {}", part - kPartState);
  if (is_hidden_state(layer.kind)) return "hidden state";
  if (layer.num_kv == 1) return "latent row";
  return part == kPartK ? "K" : "V";
}

std::string whose_content(const MemoryModel& model, const ByteOwner& owner, std::int64_t first_byte,
                          std::span<const std::uint8_t> found,
                          std::span<const std::uint8_t> expected) {
  LS_CHECK(found.size() == expected.size(), "{} bytes and {}", found.size(), expected.size());
  std::int64_t wrong = 0, zeros = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    wrong += found[i] != expected[i];
    zeros += found[i] != expected[i] && found[i] == 0;
  }
  // Zeros are the content of a zeroed block. Report them before the search, in which no row matches
  // them. A row has them whole.
  const bool are_zeros = owner.what == ByteOwner::What::row
                             ? std::ranges::count(found, 0) == std::ssize(found)
                             : zeros == wrong;
  if (are_zeros) return "zeros";
  WrongWords words(found.size() / 8);
  for (std::size_t i = 0; i < words.size(); ++i)
    if (const std::uint64_t word = load_word(found, i); word != load_word(expected, i))
      words[i] = word;
  // Likeliest first: another row in the same place, then poison, then states, then a row at a wrong
  // offset, which is also the most expensive search.
  if (owner.what == ByteOwner::What::row)
    if (const Match match = best_row(model, words, false); match.words > 0)
      return describe(model, match);
  // Poison words are aligned to the page; an unaligned read has none of them whole.
  if (first_byte % 8 == 0)
    for (const auto& word : words)
      if (std::string poison = word ? poison_name(model, *word) : ""; !poison.empty())
        return poison;
  for (const auto& word : words)
    if (std::string state = word ? state_name(model, *word) : ""; !state.empty()) return state;
  if (const Match match = best_row(model, words, true); match.words > 0)
    return describe(model, match);
  if (owner.what != ByteOwner::What::row ||
      std::ranges::all_of(words, [](const auto& word) { return word.has_value(); }))
    return {};
  return fmt::format("the right row, {} of its {} bytes differ", wrong, found.size());
}

}  // namespace lockstep
