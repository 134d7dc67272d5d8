// The source of a generator's choices: a seed, a list of words (rapidcheck), or a byte string
// (libFuzzer). The same choices give the same case, whatever their source.
//
// Invariants
// (1) An exhausted source answers 0 forever. Every generator makes 0 the plainest choice, so a
//     short input is a small case, and shrinking the input shrinks the case.
// (2) A generator enters a part of the case before it makes choices for that part. Sources with one
//     stream ignore that; a source with a stream per part changes one part and keeps the others
//     (genes.h).
// (3) The sequence of calls depends only on earlier choices and the options, never on time or
//     addresses.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep {

// Parts of a case with their own stream of choices. The index tells repeated parts apart. Values
// are stored in files of genes: new parts go to the end.
enum class CasePart : std::uint8_t {
  head,
  features,  // one stream for all features, in the order of the table
  engine,    // index: the attempt; likewise for groups and pool
  groups,
  pool,
  traffic,
  request,  // index: of the request in the trace
  faults,
  fault,  // index: of the fault in the plan
  ranks,
  connector,
  caches,
};
inline constexpr std::int64_t kNumCaseParts = static_cast<std::int64_t>(CasePart::caches) + 1;

class ChoiceSource {
 public:
  virtual ~ChoiceSource() = default;

  // Directs the next choices to this part, after the choices that the part already made.
  // Re-entering a part continues its stream.
  virtual void enter(CasePart, std::int64_t /*index*/ = 0) {}

  // Returns a number in [0, n). REQUIRES: n >= 1. A choice of one value consumes nothing.
  std::int64_t below(std::int64_t n) {
    LS_CHECK(n >= 1, "a choice of {}", n);
    return n == 1 ? 0 : draw(n);
  }
  // Returns a number in [low, high]. REQUIRES: low <= high.
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  // Returns true in `percent` of all cases. The high values are true: 0, the plainest choice, is
  // false unless `percent` is 100.
  bool chance(std::int64_t percent) { return below(100) >= 100 - percent; }
  // Returns one of the values; the first is the plainest. Repeat a value to make it likelier.
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

 protected:
  // Returns a number in [0, n). Called for n >= 2 only.
  virtual std::int64_t draw(std::int64_t n) = 0;
};

// Choices from a seed: a counter through splitmix64, the same on every platform. The modulo favours
// small values by less than n / 2^64.
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

// Choices from rapidcheck: one word per choice, reduced modulo its range. Removing a word shifts
// all later choices.
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

// Choices from libFuzzer: as many bytes per choice as its range needs, most significant first. A
// range of 256 takes one byte, 257 takes two. An input that ends inside a choice is padded with
// zeros.
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
