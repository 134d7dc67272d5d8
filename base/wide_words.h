// Computes on eight 64-bit words at a time, on CPUs with AVX-512, and on four, in builds for CPUs
// with AVX2.
//
// Functions marked LS_WIDE_WORDS are compiled for such a CPU, whatever the oldest CPU that the
// build supports. Their callers check has_wide_words() and have a scalar path. Both paths compute
// the same bits: every operation is on integers, without rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#define LS_HAVE_WIDE_WORDS 1
#define LS_WIDE_WORDS __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#else
#define LS_HAVE_WIDE_WORDS 0
#endif

namespace lockstep {

#if LS_HAVE_WIDE_WORDS
// 64 bytes: one AVX-512 register.
inline constexpr std::size_t kWideWords = 8;
typedef std::uint64_t WideWords __attribute__((vector_size(64)));

// Loads and stores 64 bytes without an alignment requirement.
LS_WIDE_WORDS inline WideWords load_wide(const void* from) {
  WideWords words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}
LS_WIDE_WORDS inline void store_wide(void* to, WideWords words) {
  std::memcpy(to, &words, sizeof(words));
}
// Returns the sum of the eight words, modulo 2^64.
LS_WIDE_WORDS inline std::uint64_t sum_of(WideWords words) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kWideWords; ++i) sum += words[i];
  return sum;
}
// Returns words i of the 16 words of low and high, for each index i in `which`: 0 to 7 are low, 8
// to 15 high.
LS_WIDE_WORDS inline WideWords pick_wide(WideWords low, WideWords which, WideWords high) {
  return (WideWords)_mm512_permutex2var_epi64((__m512i)low, (__m512i)which, (__m512i)high);
}
// Adds the low and the high 32-bit halves of each word separately, without a carry between them.
LS_WIDE_WORDS inline WideWords add_halves(WideWords a, WideWords b) {
  typedef std::uint32_t Halves __attribute__((vector_size(64)));
  return (WideWords)((Halves)a + (Halves)b);
}
// Returns the product of the low and the high 32-bit half of each word, in 64 bits.
LS_WIDE_WORDS inline WideWords product_of_halves(WideWords words) {
  return (WideWords)_mm512_maskz_mul_epu32(0xff, (__m512i)words, (__m512i)(words >> 32));
}
#endif

#if defined(__AVX2__)
#define LS_HAVE_FOUR_WORDS 1
// 32 bytes: one AVX2 register, in builds for CPUs that have it.
typedef std::uint64_t FourWords __attribute__((vector_size(32)));

inline FourWords load_four(const void* from) {
  FourWords words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}
inline std::uint64_t sum_of(FourWords words) { return words[0] + words[1] + words[2] + words[3]; }
inline FourWords add_halves(FourWords a, FourWords b) {
  return (FourWords)_mm256_add_epi32((__m256i)a, (__m256i)b);
}
inline FourWords product_of_halves(FourWords words) {
  return (FourWords)_mm256_mul_epu32((__m256i)words, (__m256i)(words >> 32));
}
#else
#define LS_HAVE_FOUR_WORDS 0
#endif

// False with LOCKSTEP_WIDE_WORDS=0 in the environment, so that tests cover the scalar paths on the
// same machine. The only condition of functions of FourWords.
inline bool wants_wide_words() {
  static const bool wants = [] {
    const char* wanted = std::getenv("LOCKSTEP_WIDE_WORDS");
    return wanted == nullptr || std::string_view(wanted) != "0";
  }();
  return wants;
}
// True if this CPU runs LS_WIDE_WORDS functions and wants_wide_words().
inline bool has_wide_words() {
#if LS_HAVE_WIDE_WORDS
  static const bool has = [] {
    return wants_wide_words() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
  }();
  return has;
#else
  return false;
#endif
}

}  // namespace lockstep
