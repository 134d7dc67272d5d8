// Eight 64-bit words at a time, for CPUs with AVX-512.
//
// Functions marked LS_WIDE_WORDS are compiled for such a CPU whatever the build's oldest CPU is.
// Their callers check has_wide_words() and have a path without them. Both compute the same bits.
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
inline constexpr std::size_t kWideWords = 8;
typedef std::uint64_t WideWords __attribute__((vector_size(64)));

LS_WIDE_WORDS inline WideWords load_wide(const void* from) {
  WideWords words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}
LS_WIDE_WORDS inline void store_wide(void* to, WideWords words) {
  std::memcpy(to, &words, sizeof(words));
}
LS_WIDE_WORDS inline std::uint64_t sum_of(WideWords words) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kWideWords; ++i) sum += words[i];
  return sum;
}
// Word i of the 16 words of low and high, for each i of `which`.
LS_WIDE_WORDS inline WideWords pick_wide(WideWords low, WideWords which, WideWords high) {
  return (WideWords)_mm512_permutex2var_epi64((__m512i)low, (__m512i)which, (__m512i)high);
}
// Sums of the low and of the high halves, without a carry between them.
LS_WIDE_WORDS inline WideWords add_halves(WideWords a, WideWords b) {
  typedef std::uint32_t Halves __attribute__((vector_size(64)));
  return (WideWords)((Halves)a + (Halves)b);
}
// The low half of each word times its high half.
LS_WIDE_WORDS inline WideWords product_of_halves(WideWords words) {
  return (WideWords)_mm512_maskz_mul_epu32(0xff, (__m512i)words, (__m512i)(words >> 32));
}
#endif

// True if this CPU runs LS_WIDE_WORDS functions. LOCKSTEP_WIDE_WORDS=0 in the environment: false.
inline bool has_wide_words() {
#if LS_HAVE_WIDE_WORDS
  static const bool has = [] {
    const char* wanted = std::getenv("LOCKSTEP_WIDE_WORDS");
    if (wanted != nullptr && std::string_view(wanted) == "0") return false;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  }();
  return has;
#else
  return false;
#endif
}

}  // namespace lockstep
