// Many words of a row at once: the same bits as row_word(), page_term() and row_digest_term() of
// content.h word by word, several times as fast on a CPU with AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/memory/content.h"

namespace lockstep {

inline constexpr std::size_t kWordsAtOnce = 64;  // of a caller's buffer

// Writes words [first, first + out.size()) of a row. REQUIRES: a shape_of_row(key, ...).
void fill_row_words(std::uint64_t key, std::uint64_t first, const WordShape& shape,
                    std::span<std::uint64_t> out);

// Sums the page terms of words that have the keys keys[0], keys[1], ...
PageSum sum_of_terms(std::span<const std::uint64_t> words, const WordKeys* keys);
// Sums the page terms of consecutive words, the first of them number `first`.
PageSum sum_of_terms(std::span<const std::uint64_t> words, std::uint64_t first);

// Sums the digest terms of words [first, first + words.size()) of a row.
std::uint64_t sum_of_digest_terms(std::span<const std::uint64_t> words, std::uint64_t first);

// Advances the words of a state tensor by tokens, in order; `coord` as in next_state_word().
void advance_state_words(std::span<const ContentId> contents, std::uint64_t coord,
                         std::span<std::uint64_t> words);

}  // namespace lockstep
