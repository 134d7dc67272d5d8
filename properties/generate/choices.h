// The source of a generator's choices: a seed, a list of words (rapidcheck's), or a byte string
// (libFuzzer's). The same choices give the same case, whatever their source.
//
// Invariants
// (1) An exhausted source answers 0 forever: every generator makes 0 the plainest choice, so that a
//     short input is a small case.
// (2) A generator enters a part of the case before it draws for it. Sources with one stream ignore
//     that; a source with a stream per part changes one part and keeps the others (genes.h).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep {

enum class CasePart : std::uint8_t {
  head,
  features,  // position: the feature
  engine,    // index: the attempt, here and in the next two
  groups,
  pool,
  traffic,
  request,  // index: of the trace
  faults,
  fault,  // index: of the plan
  ranks,
  connector,
  caches,
};
inline constexpr std::int64_t kNumCaseParts = static_cast<std::int64_t>(CasePart::caches) + 1;

class ChoiceSource {
 public:
  virtual ~ChoiceSource() = default;

  // The choices that follow are of this part, after the earlier ones of that part.
  virtual void enter(CasePart, std::int64_t /*index*/ = 0) {}

  // A number of [0, n). REQUIRES: n >= 1.
  std::int64_t below(std::int64_t n) {
    LS_CHECK(n >= 1, "a choice of {}", n);
    return n == 1 ? 0 : draw(n);
  }
  // A number of [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  // True in `percent` of all cases; 0, the plainest choice, is false.
  bool chance(std::int64_t percent) { return below(100) >= 100 - percent; }
  // One of the values, the first being the plainest. Repeat one to make it likelier.
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

 protected:
  virtual std::int64_t draw(std::int64_t n) = 0;
};

class SeededChoices final : public ChoiceSource {
 public:
  explicit SeededChoices(std::uint64_t seed) : state_(seed) {}

 private:
  std::int64_t draw(std::int64_t n) override {
    state_ += 0x9E3779B97F4A7C15ull;
    return static_cast<std::int64_t>(splitmix64(state_) % static_cast<std::uint64_t>(n));
  }
  std::uint64_t state_;
};

class WordChoices final : public ChoiceSource {
 public:
  explicit WordChoices(std::span<const std::uint64_t> words) : words_(words) {}

 private:
  std::int64_t draw(std::int64_t n) override {
    if (words_.empty()) return 0;
    const std::uint64_t word = words_.front();
    words_ = words_.subspan(1);
    return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(n));
  }
  std::span<const std::uint64_t> words_;
};

// As many bytes a choice as its range needs.
class ByteChoices final : public ChoiceSource {
 public:
  explicit ByteChoices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

 private:
  std::int64_t draw(std::int64_t n) override {
    std::uint64_t word = 0;
    for (std::uint64_t range = 1; range < static_cast<std::uint64_t>(n); range <<= 8) {
      const std::uint64_t byte = bytes_.empty() ? 0 : bytes_.front();
      if (!bytes_.empty()) bytes_ = bytes_.subspan(1);
      word = word << 8 | byte;
    }
    return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(n));
  }
  std::span<const std::uint8_t> bytes_;
};

}  // namespace lockstep
