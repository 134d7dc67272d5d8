#include "reference/memory/row_words.h"

#include "base/check.h"
#include "base/wide_words.h"

namespace lockstep {
namespace {

// True if each word is one mix() and two masks, so that lanes are independent of each other.
bool is_plain(const WordShape& shape) {
  return !shape.is_int4 && shape.by_group == nullptr && shape.stored == nullptr;
}

#if LS_HAVE_WIDE_WORDS
using Wide = WideWords;

// Lanes first, first + 1, ..., first + 7.
LS_WIDE_WORDS inline Wide count_from(std::uint64_t first) {
  return first + Wide{0, 1, 2, 3, 4, 5, 6, 7};
}
// splitmix64 in every lane.
LS_WIDE_WORDS inline Wide mix(Wide x) {
  x += kWordStep;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

struct WideSum {
  Wide a{}, b{};
};
// page_term() in every lane; sums of lanes are added at the end, which any order allows.
LS_WIDE_WORDS inline void add_terms(WideSum& sum, Wide words, Wide k, Wide m) {
  sum.a += product_of_halves(add_halves(words, k)) + words;
  sum.b += product_of_halves(add_halves(words, m)) + (words << 32 | words >> 32);
}

// The wide functions process whole vectors and return the number of words that they did; the
// callers below finish the rest word by word.
LS_WIDE_WORDS std::size_t fill_wide(std::uint64_t key, std::uint64_t first, const WordShape& shape,
                                    std::span<std::uint64_t> out) {
  // row_word(): word i is mix(key + (i + 1) * kWordStep).
  Wide at = key + count_from(first + 1) * kWordStep;
  std::size_t i = 0;
  for (; i + kWideWords <= out.size(); i += kWideWords, at += kWideWords * kWordStep)
    store_wide(out.data() + i, (mix(at) & shape.keep) | shape.set);
  return i;
}

// Keys are stored as pairs (k, m): two loads, then even and odd lanes apart.
LS_WIDE_WORDS std::size_t sum_wide(std::span<const std::uint64_t> words,
                                   std::span<const WordKeys> keys, PageSum& out) {
  static_assert(sizeof(WordKeys) == 2 * sizeof(std::uint64_t));
  constexpr Wide kEven{0, 2, 4, 6, 8, 10, 12, 14}, kOdd{1, 3, 5, 7, 9, 11, 13, 15};
  WideSum sum;
  std::size_t i = 0;
  for (; i + kWideWords <= words.size(); i += kWideWords) {
    const WordKeys* next = keys.data() + i;
    const Wide low = load_wide(next), high = load_wide(next + kWideWords / 2);
    add_terms(sum, load_wide(words.data() + i), pick_wide(low, kEven, high),
              pick_wide(low, kOdd, high));
  }
  out = {sum_of(sum.a), sum_of(sum.b)};
  return i;
}

LS_WIDE_WORDS std::size_t sum_wide(std::span<const std::uint64_t> words, std::uint64_t first,
                                   PageSum& out) {
  WideSum sum;
  std::size_t i = 0;
  for (; i + kWideWords <= words.size(); i += kWideWords) {
    // word_keys(): mix(2 i) and mix(2 i + 1).
    const Wide twice = 2 * count_from(first + i);
    add_terms(sum, load_wide(words.data() + i), mix(twice), mix(twice + 1));
  }
  out = {sum_of(sum.a), sum_of(sum.b)};
  return i;
}

LS_WIDE_WORDS std::size_t digest_wide(std::span<const std::uint64_t> words, std::uint64_t first,
                                      std::uint64_t& out) {
  Wide sum{};
  // row_digest_term(): mix(word ^ (i + 1) * kWordStep).
  Wide at = count_from(first + 1) * kWordStep;
  std::size_t i = 0;
  for (; i + kWideWords <= words.size(); i += kWideWords, at += kWideWords * kWordStep)
    sum += mix(load_wide(words.data() + i) ^ at);
  out = sum_of(sum);
  return i;
}

// Words in the outer loop: they stay in registers for all tokens. Four vectors overlap, since each
// multiplication of a vector needs its previous one: 32 words take 2.2 times as long as eight.
LS_WIDE_WORDS std::size_t advance_wide(std::span<const ContentId> contents, std::uint64_t coord,
                                       std::uint64_t first, std::span<std::uint64_t> words) {
  constexpr std::size_t kVectors = 4, kWords = kVectors * kWideWords;
  std::size_t i = 0;
  for (; i + kWords <= words.size(); i += kWords) {
    Wide word[kVectors], place[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) {
      word[v] = load_wide(words.data() + i + v * kWideWords);
      // next_state_word(): the step's key is content ^ coord ^ i.
      place[v] = count_from(first + i + v * kWideWords) ^ coord;
    }
    for (const ContentId content : contents)
      for (std::size_t v = 0; v < kVectors; ++v)
        word[v] = word[v] * kStateStep + mix(place[v] ^ content);
    for (std::size_t v = 0; v < kVectors; ++v)
      store_wide(words.data() + i + v * kWideWords, word[v]);
  }
  return i;
}
#endif

}  // namespace

// Shapes with scales go word by word: their words depend on tables.
void fill_row_words(std::uint64_t key, std::uint64_t first, const WordShape& shape,
                    std::span<std::uint64_t> out) {
  std::size_t i = 0;
  if (is_plain(shape)) {
#if LS_HAVE_WIDE_WORDS
    if (has_wide_words()) i = fill_wide(key, first, shape, out);
#endif
    for (; i < out.size(); ++i) out[i] = shape(mix(key + (first + i + 1) * kWordStep));
    return;
  }
  for (; i < out.size(); ++i) out[i] = row_word(key, first + i, shape);
}

PageSum sum_of_terms(std::span<const std::uint64_t> words, std::span<const WordKeys> keys) {
  LS_CHECK(keys.size() >= words.size(), "{} keys of {} words", keys.size(), words.size());
  PageSum sum;
  std::size_t i = 0;
#if LS_HAVE_WIDE_WORDS
  if (has_wide_words()) i = sum_wide(words, keys, sum);
#endif
  for (; i < words.size(); ++i) sum += page_term(words[i], keys[i]);
  return sum;
}

PageSum sum_of_terms(std::span<const std::uint64_t> words, std::uint64_t first) {
  PageSum sum;
  std::size_t i = 0;
#if LS_HAVE_WIDE_WORDS
  if (has_wide_words()) i = sum_wide(words, first, sum);
#endif
  for (; i < words.size(); ++i) sum += page_term(words[i], word_keys(first + i));
  return sum;
}

std::uint64_t sum_of_digest_terms(std::span<const std::uint64_t> words, std::uint64_t first) {
  std::uint64_t sum = 0;
  std::size_t i = 0;
#if LS_HAVE_WIDE_WORDS
  if (has_wide_words()) i = digest_wide(words, first, sum);
#endif
  for (; i < words.size(); ++i) sum += row_digest_term(words[i], first + i);
  return sum;
}

void advance_state_words(std::span<const ContentId> contents, std::uint64_t coord,
                         std::uint64_t first, std::span<std::uint64_t> words) {
  std::size_t done = 0;
#if LS_HAVE_WIDE_WORDS
  if (has_wide_words()) done = advance_wide(contents, coord, first, words);
#endif
  for (const ContentId content : contents)
    for (std::size_t i = done; i < words.size(); ++i)
      words[i] = next_state_word(words[i], content ^ coord, first + i);
}

}  // namespace lockstep
