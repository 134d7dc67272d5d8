// Tokens and stored rows of the reference model: how many rows a number of tokens fills, which rows
// a token completes, and what a row holds. The backend has its own arithmetic (TokenRows of
// cuda_backend/kernels/params.h) and does not include this file.
//
// Most caches store one row per token. A compressed cache stores one row per `tokens` tokens (4 or
// 128 in DeepSeek-V4), an encoder that pools may store several `rows` per token; one of the two is
// 1.
//
// Invariants
// (1) Row n covers the tokens [n * tokens, (n + 1) * tokens) from the start of a block or of a
//     request, and is written with the last of them. Token n has the rows [n * rows, (n + 1) *
//     rows).
// (2) Rows of a block never share a token with rows of another block: a block holds whole rows.
// (3) No two rows of a token have the same content.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/seeded_random.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// Prompts are stored as runs: a prompt of 100,000 tokens costs a few words, and its tokens are
// generated on demand.

// `count` consecutive tokens of one source.
// - seeded: token i is splitmix64(seed * 2^32 + first + i) mod 50000. Two runs may hold equal
//   tokens by chance; they then count as equal, because identity is by token id.
// - symbolic: the token ids of `seeded`, but identity is by (seed, first + i): the source (a trace
//   of prefix-hash ids) declares that different places are different content. A block of a symbolic
//   run is hashed in O(1).
// - repeated: the token `seed`, `count` times.
// - literal: tokens [first, first + count) of the prompt's own list; the seed is unused.
struct TokenRun {
  enum class Kind : std::uint8_t { seeded, symbolic, repeated, literal };
  Kind kind = Kind::seeded;
  std::uint64_t seed = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool operator==(const TokenRun&) const = default;
};

// Token `position` of the seeded source `seed`, in [0, 50000). A seed has 32 bits: of a longer one,
// as symbolic runs may have, only the lower half decides the token ids. Positions also have 32
// bits, so the sum never reaches the next seed.
constexpr std::int32_t seeded_token(std::uint64_t seed, std::uint32_t position) {
  return static_cast<std::int32_t>(splitmix64((seed << 32) + position) % 50000);
}

// Token `position` of the run's source. REQUIRES: the run is not literal.
constexpr std::int32_t token_of(const TokenRun& run, std::uint32_t position) {
  return run.kind == TokenRun::Kind::repeated ? static_cast<std::int32_t>(run.seed)
                                              : seeded_token(run.seed, position);
}

// The tokens of a prompt. Equal prompts may consist of different runs: == compares runs, not
// tokens.
struct Prompt {
  std::vector<TokenRun> runs;
  std::vector<std::int32_t> tokens;  // the tokens of literal runs

  std::int64_t size() const;         // tokens
  void append(const TokenRun& run);  // extends the last run where `run` continues it
  // Generates all token ids: O(size()).
  std::vector<std::int32_t> materialize() const;
  bool operator==(const Prompt&) const = default;
};

// Rows that the first num_tokens tokens complete. With 4 tokens per row, 11 tokens complete 2 rows.
constexpr std::int64_t rows_in(const TokensPerState& per_row, std::int64_t num_tokens) {
  return num_tokens * per_row.rows / per_row.tokens;
}
// Tokens that num_rows rows cover; with several rows per token the last token may be covered in
// part, and counts.
constexpr std::int64_t tokens_in(const TokensPerState& per_row, std::int64_t num_rows) {
  return (num_rows * per_row.tokens + per_row.rows - 1) / per_row.rows;
}
// True if num_tokens tokens end with a complete row.
constexpr bool fills_rows(const TokensPerState& per_row, std::int64_t num_tokens) {
  return num_tokens % per_row.tokens == 0;
}

// Rows [first, last).
struct RowRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
// The rows that token n of a block or request completes; empty: a later token completes its row.
constexpr RowRange rows_of_token(const TokensPerState& per_row, std::int64_t n) {
  return {rows_in(per_row, n), rows_in(per_row, n + 1)};
}
// The token that completes the row: its last one.
constexpr std::int64_t token_of_row(const TokensPerState& per_row, std::int64_t row) {
  return ((row + 1) * per_row.tokens - 1) / per_row.rows;
}
// The content of a row whose last token has this content. The first row of a token has the token's
// content; further rows mix in their number, so that no two are equal: invariant (3).
constexpr std::uint64_t row_content(const TokensPerState& per_row, std::uint64_t content,
                                    std::int64_t row) {
  const auto number = static_cast<std::uint64_t>(row % per_row.rows);
  return number == 0 ? content : splitmix64(content + number);
}

// The reason why the model has no rows for this kind of cache; empty: it has. Several rows per
// token exist for K/V pairs only, compressed rows for full attention to latents only.
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

// The text in messages: "4", or "1/4" for four rows per token.
inline std::string text_of(const TokensPerState& per_row) {
  return (has_several_rows(per_row) ? "1/" + std::to_string(per_row.rows)
                                    : std::to_string(per_row.tokens));
}
// The JSON value in files: a number, or the fraction as a string.
inline std::string json_of(const TokensPerState& per_row) {
  const std::string text = text_of(per_row);
  return has_several_rows(per_row) ? '"' + text + '"' : text;
}

// The accepted values, for error messages, and their limits. 2^40 tokens per row stay exact in the
// products above: num_rows * tokens fits 63 bits below 2^23 rows.
inline constexpr std::string_view kTokensPerStateExpected =
    "tokens per stored row, from 1, or \"1/n\" for n rows per token, n from 2 to 4096";
inline constexpr std::int64_t kTokensPerStateMax = std::int64_t{1} << 40;
inline constexpr std::int64_t kRowsPerTokenMax = 4096;
// Parses the JSON text of such a value. Absent: the text is not what kTokensPerStateExpected
// describes, a sign, a space or a trailing character included.
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
