// Many words of a row at once: the same bits as row_word(), page_term() and row_digest_term() of
// content.h give word by word, several times as fast on a CPU with AVX-512. A test compares both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/memory/content.h"

namespace lockstep {

inline constexpr std::size_t kWordsAtOnce = 64;  // of a caller's buffer

// Writes words [first, first + out.size()) of a row. REQUIRES: shape is shape_of_row(key, ...).
void fill_row_words(std::uint64_t key, std::uint64_t first, const WordShape& shape,
                    std::span<std::uint64_t> out);

// Sums the page terms of words with the keys keys[0], keys[1], ... REQUIRES: one key per word.
PageSum sum_of_terms(std::span<const std::uint64_t> words, std::span<const WordKeys> keys);
// Sums the page terms of words number first, first + 1, ... and computes their keys.
PageSum sum_of_terms(std::span<const std::uint64_t> words, std::uint64_t first);

// Sums the digest terms of a row's words number first, first + 1, ...
std::uint64_t sum_of_digest_terms(std::span<const std::uint64_t> words, std::uint64_t first);

// Advances consecutive words of a state tensor, from word `first` on, by the tokens, in order.
// `coord` is the tensor's coordinate.
void advance_state_words(std::span<const ContentId> contents, std::uint64_t coord,
                         std::uint64_t first, std::span<std::uint64_t> words);

}  // namespace lockstep
