#include "properties/generate/choices.h"

#include "reference/types/token_run.h"

namespace lockstep {

std::int64_t SeededChoices::draw(std::int64_t n) {
  state_ += 0x9E3779B97F4A7C15ull;
  return static_cast<std::int64_t>(splitmix64(state_) % static_cast<std::uint64_t>(n));
}

std::int64_t WordChoices::draw(std::int64_t n) {
  if (words_.empty()) return 0;
  const std::uint64_t word = words_.front();
  words_ = words_.subspan(1);
  return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(n));
}

std::int64_t ByteChoices::draw(std::int64_t n) {
  std::uint64_t word = 0;
  for (std::uint64_t range = 1; range < static_cast<std::uint64_t>(n); range <<= 8) {
    const std::uint64_t byte = bytes_.empty() ? 0 : bytes_.front();
    if (!bytes_.empty()) bytes_ = bytes_.subspan(1);
    word = word << 8 | byte;
  }
  return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(n));
}

}  // namespace lockstep
