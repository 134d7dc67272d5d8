// Catch2, of either generation: 2 is one header (Debian 12), 3 a library (Ubuntu 24.04).
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#define CATCH_CONFIG_ENABLE_BENCHMARKING
#define CATCH_CONFIG_FAST_COMPILE
#include <catch2/catch.hpp>
#endif

#include <algorithm>
#include <cmath>
#include <sstream>

namespace lockstep {

// Ends the test if `found` is no number within `bound` of `exact`; `where` is written down then
// only, since there are thousands of numbers to a shape.
template <class... Where>
void require_near(double found, double exact, double bound, const Where&... where) {
  if (std::fabs(found - exact) <= bound) return;
  std::ostringstream text;
  (text << ... << where);
  FAIL(text.str() << ": " << found << " is further than " << bound << " from " << exact);
}

// Ends the test at the first byte that differs.
template <class Bytes>
void require_same(const Bytes& found, const Bytes& expected) {
  REQUIRE(found.size() == expected.size());
  const auto [a, b] = std::mismatch(expected.begin(), expected.end(), found.begin());
  if (a != expected.end())
    FAIL("byte " << a - expected.begin() << ": " << int{*b} << " and not " << int{*a});
}

}  // namespace lockstep
