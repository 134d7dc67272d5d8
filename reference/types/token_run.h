// Prompts as runs: a prompt of 100,000 tokens costs a few words, and its tokens are made when
// needed.
#pragma once

#include <cstdint>
#include <vector>

#include "base/seeded_random.h"

namespace lockstep {

// `count` consecutive tokens of one source.
//   seeded:   token i is splitmix64(seed * 2^32 + first + i) mod 50000. Two runs may hold equal
//   tokens by
//             chance, and then they are equal: identity is by token id.
//   symbolic: as seeded for the token ids, but identity is by (seed, first + i): the source (a
//   trace of
//             prefix-hash ids) says that different places are different content. A block of a
//             symbolic run is hashed in O(1).
//   repeated: the token `seed`, `count` times.
//   literal:  tokens[first .. first + count) of the prompt's own list; the seed is unused.
struct TokenRun {
  enum class Kind : std::uint8_t { seeded, symbolic, repeated, literal };
  Kind kind = Kind::seeded;
  std::uint64_t seed = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool operator==(const TokenRun&) const = default;
};

constexpr std::int32_t seeded_token(std::uint64_t seed, std::uint32_t position) {
  return static_cast<std::int32_t>(splitmix64((seed << 32) + position) % 50000);
}

// Token `position` of a run that is not literal.
constexpr std::int32_t token_of(const TokenRun& run, std::uint32_t position) {
  return run.kind == TokenRun::Kind::repeated ? static_cast<std::int32_t>(run.seed)
                                              : seeded_token(run.seed, position);
}

struct Prompt {
  std::vector<TokenRun> runs;
  std::vector<std::int32_t> tokens;  // what literal runs point into

  std::int64_t size() const;         // tokens
  void append(const TokenRun& run);  // merges with the last run where it continues it
  std::vector<std::int32_t> materialize() const;
  bool operator==(const Prompt&) const = default;
};

}  // namespace lockstep
