#include "reference/memory/row_words.h"

#include <gtest/gtest.h>

#include <vector>

#include "reference/memory/page_image.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kKey = 0x1234567890ABCDEFull;

// Lengths on both sides of the eight words that a wide CPU takes at once.
constexpr std::uint64_t kLengths[] = {0, 1, 7, 8, 9, 16, 63, 64, 130};

std::vector<std::uint64_t> words_of(std::uint64_t count) {
  std::vector<std::uint64_t> words(count);
  for (std::uint64_t i = 0; i < count; ++i) words[i] = mix(kKey + 3 * i);
  return words;
}

TEST(RowWords, ManyWordsOfARowEqualTheWordsOneByOne) {
  for (const DType dtype : {DType::bf16, DType::fp32, DType::fp8_e4m3, DType::int8}) {
    std::vector<WordShape> shapes{word_shape(dtype)};
    if (const StoredNumbers* stored = stored_numbers(Numbers::real, dtype, 1))
      shapes.push_back({.stored = stored});
    for (const WordShape& shape : shapes)
      for (const std::uint64_t count : kLengths)
        for (const std::uint64_t first : {0, 1, 8, 77}) {
          std::vector<std::uint64_t> words(count);
          fill_row_words(kKey, first, shape, words);
          for (std::uint64_t i = 0; i < count; ++i)
            ASSERT_EQ(words[i], row_word(kKey, first + i, shape)) << count << " from " << first;
        }
  }
}

TEST(RowWords, SumsOverManyWordsEqualTheSumsOfTheirTerms) {
  for (const std::uint64_t count : kLengths)
    for (const std::uint64_t first : {0, 1, 8, 77}) {
      const std::vector<std::uint64_t> words = words_of(count);
      std::vector<WordKeys> keys;
      PageSum sum;
      std::uint64_t digest = 0;
      for (std::uint64_t i = 0; i < count; ++i) {
        keys.push_back(word_keys(first + i));
        sum += page_term(words[i], keys.back());
        digest += row_digest_term(words[i], first + i);
      }
      EXPECT_EQ(sum_of_terms(words, first), sum) << count << " from " << first;
      EXPECT_EQ(sum_of_terms(words, keys), sum) << count << " from " << first;
      EXPECT_EQ(sum_of_digest_terms(words, first), digest) << count << " from " << first;
    }
}

TEST(RowWords, AStateAdvancesWordByWordAndTokenByToken) {
  for (const std::uint64_t count : kLengths)
    for (const std::uint64_t first : {0, 4096})
      for (const std::uint64_t tokens : {0, 1, 5}) {
        const std::vector<ContentId> contents = words_of(tokens);
        std::vector<std::uint64_t> words = words_of(count), expected = words;
        advance_state_words(contents, kKey, first, words);
        for (const ContentId content : contents)
          for (std::uint64_t i = 0; i < count; ++i)
            expected[i] = next_state_word(expected[i], content ^ kKey, first + i);
        EXPECT_EQ(words, expected) << count << " words from " << first << ", " << tokens;
      }
}

TEST(RowWords, APageWhoseLastWordIsCutShortHasZerosInItsPlace) {
  for (const std::size_t size : {1, 8, 63, 64, 509, 512, 515, 1030}) {
    std::vector<std::uint8_t> image(size);
    for (std::size_t i = 0; i < size; ++i) image[i] = static_cast<std::uint8_t>(mix(i));
    PageSum sum;
    for (std::size_t i = 0; 8 * i < size; ++i) sum += page_term(load_word(image, i), word_keys(i));
    EXPECT_EQ(page_sum(image), sum) << size;
  }
}

}  // namespace
}  // namespace lockstep
