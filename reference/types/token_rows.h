// Tokens and stored rows of the reference model: how many rows tokens fill, which rows a token
// completes, and what a row holds. The backend has its own arithmetic (TokenRows of
// cuda_backend/kernels/params.h) and does not include this file.
//
// Invariants
// (1) Row n covers the tokens [n * tokens, (n + 1) * tokens), from the start of a block or of a
//     request, and is written with the last of them.
// (2) Rows of a block never share a token with rows of another: a block holds whole rows.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// Rows that the first num_tokens tokens complete.
constexpr std::int64_t rows_in(const TokensPerState& per_row, std::int64_t num_tokens) {
  return num_tokens / per_row.tokens;
}
// Tokens that num_rows rows cover.
constexpr std::int64_t tokens_in(const TokensPerState& per_row, std::int64_t num_rows) {
  return num_rows * per_row.tokens;
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
// The rows that the n-th token of a block or request completes; mostly one, or none.
constexpr RowRange rows_of_token(const TokensPerState& per_row, std::int64_t n) {
  return {rows_in(per_row, n), rows_in(per_row, n + 1)};
}
// The token that completes a row.
constexpr std::int64_t token_of_row(const TokensPerState& per_row, std::int64_t row) {
  return (row + 1) * per_row.tokens - 1;
}
// The content of a row whose token has this content.
constexpr std::uint64_t row_content(const TokensPerState&, std::uint64_t content,
                                    std::int64_t /*row*/) {
  return content;
}

// Why rows of this kind of cache are not modelled; empty: they are.
inline std::string why_no_rows(const KVCacheSpec& spec) {
  if (is_one_row(spec.tokens_per_state)) return {};
  if (!is_full_of_latents(spec.kind))
    return std::to_string(spec.tokens_per_state.tokens) +
           " tokens share one stored row in a cache of kind " + std::string(name_of(spec.kind));
  if (!fills_rows(spec.tokens_per_state, spec.block_size))
    return "a block of " + std::to_string(spec.block_size) +
           " tokens is no whole number of rows of " +
           std::to_string(spec.tokens_per_state.tokens) + " tokens";
  return {};
}

// As messages and files have it: "4". In a file it is this JSON value.
inline std::string text_of(const TokensPerState& per_row) { return std::to_string(per_row.tokens); }
inline std::string json_of(const TokensPerState& per_row) { return text_of(per_row); }

inline constexpr std::string_view kTokensPerStateExpected = "tokens per stored row, from 1";
inline constexpr std::int64_t kTokensPerStateMax = std::int64_t{1} << 40;
// Nothing: it is not kTokensPerStateExpected.
inline std::optional<TokensPerState> tokens_per_state_from_json(std::string_view json) {
  TokensPerState per_row;
  const char* const end = json.data() + json.size();
  const auto read = std::from_chars(json.data(), end, per_row.tokens);
  const bool is_read = read.ec == std::errc{} && read.ptr == end;
  if (!is_read || per_row.tokens < 1 || per_row.tokens > kTokensPerStateMax) return std::nullopt;
  return per_row;
}

}  // namespace lockstep
