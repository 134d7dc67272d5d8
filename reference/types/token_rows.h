// Tokens and stored rows of the reference model: how many rows tokens fill, which rows a token
// completes, and what a row holds. The backend has its own arithmetic (TokenRows of
// cuda_backend/kernels/params.h) and does not include this file.
//
// Invariants
// (1) Row n covers the tokens [n * tokens, (n + 1) * tokens), from the start of a block or of a
//     request, and is written with the last of them. Token n has the rows [n * rows,
//     (n + 1) * rows).
// (2) Rows of a block never share a token with rows of another: a block holds whole rows.
// (3) No two rows of a token have the same content.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_run.h"

namespace lockstep {

// Rows that the first num_tokens tokens complete.
constexpr std::int64_t rows_in(const TokensPerState& per_row, std::int64_t num_tokens) {
  return num_tokens * per_row.rows / per_row.tokens;
}
// Tokens that num_rows rows cover, the last one perhaps in part.
constexpr std::int64_t tokens_in(const TokensPerState& per_row, std::int64_t num_rows) {
  return (num_rows * per_row.tokens + per_row.rows - 1) / per_row.rows;
}
// True if num_tokens tokens end with a whole row.
constexpr bool fills_rows(const TokensPerState& per_row, std::int64_t num_tokens) {
  return num_tokens % per_row.tokens == 0;
}

// Rows [first, last).
struct RowRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
// The rows that the n-th token of a block or request completes; none: it shares a row.
constexpr RowRange rows_of_token(const TokensPerState& per_row, std::int64_t n) {
  return {rows_in(per_row, n), rows_in(per_row, n + 1)};
}
// The token that completes a row.
constexpr std::int64_t token_of_row(const TokensPerState& per_row, std::int64_t row) {
  return ((row + 1) * per_row.tokens - 1) / per_row.rows;
}
// The content of a row whose token has this content: the token's own, or, of further rows, one that
// their number makes.
constexpr std::uint64_t row_content(const TokensPerState& per_row, std::uint64_t content,
                                    std::int64_t row) {
  const auto number = static_cast<std::uint64_t>(row % per_row.rows);
  return number == 0 ? content : splitmix64(content + number);
}

// Why rows of this kind of cache are not modelled; empty: they are.
inline std::string why_no_rows(const KVCacheSpec& spec) {
  if (is_one_row(spec.tokens_per_state)) return {};
  if (has_several_rows(spec.tokens_per_state))
    return keeps_pairs(spec) && !is_ring(spec) && !reads_beside_tokens(spec)
               ? std::string()
               : std::to_string(spec.tokens_per_state.rows) +
                     " stored rows per token in a cache of kind " + std::string(name_of(spec.kind));
  if (!is_full_of_latents(spec.kind))
    return std::to_string(spec.tokens_per_state.tokens) +
           " tokens share one stored row in a cache of kind " + std::string(name_of(spec.kind));
  if (!fills_rows(spec.tokens_per_state, spec.block_size))
    return "a block of " + std::to_string(spec.block_size) +
           " tokens is no whole number of rows of " + std::to_string(spec.tokens_per_state.tokens) +
           " tokens";
  return {};
}

// As messages have it: "4", or "1/4" for four rows per token.
inline std::string text_of(const TokensPerState& per_row) {
  return (has_several_rows(per_row) ? "1/" + std::to_string(per_row.rows)
                                    : std::to_string(per_row.tokens));
}
// The JSON value of files: a number, or the fraction as a string.
inline std::string json_of(const TokensPerState& per_row) {
  const std::string text = text_of(per_row);
  return has_several_rows(per_row) ? '"' + text + '"' : text;
}

inline constexpr std::string_view kTokensPerStateExpected =
    "tokens per stored row, from 1, or \"1/n\" for n rows per token, n from 2 to 4096";
inline constexpr std::int64_t kTokensPerStateMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kRowsPerTokenMax = 4096;
// Nothing: it is not kTokensPerStateExpected.
inline std::optional<TokensPerState> tokens_per_state_from_json(std::string_view json) {
  constexpr std::string_view kOneOver = "\"1/";
  const auto number = [](std::string_view text, std::int64_t min,
                         std::int64_t max) -> std::optional<std::int64_t> {
    std::int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, value);
    const bool is_read = read.ec == std::errc{} && read.ptr == end;
    if (!is_read || value < min || value > max) return std::nullopt;
    return value;
  };
  if (json.starts_with(kOneOver) && json.ends_with('"')) {
    const auto rows = number(json.substr(kOneOver.size(), json.size() - kOneOver.size() - 1), 2,
                             kRowsPerTokenMax);
    if (rows) return TokensPerState{.tokens = 1, .rows = *rows};
    return std::nullopt;
  }
  const auto tokens = number(json, 1, kTokensPerStateMax);
  if (tokens) return TokensPerState{.tokens = *tokens, .rows = 1};
  return std::nullopt;
}

}  // namespace lockstep
