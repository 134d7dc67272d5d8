// CUDA's atomics and fences for g++: relaxed read-modify-writes. Include simt.h, not this file.
//
// One simulated thread runs at a time, so a plain read-modify-write is atomic. In the checked
// variant the checker hears of it first and the update itself is not instrumented.
#pragma once

#include <bit>

inline namespace SIMT_VARIANT {

template <class T, class Update>
__forceinline__ T simt_atomic_update(T* address, Update update) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
#if SIMT_IS_CHECKED
  ::simt::runtime::before_atomic(address, sizeof(T));
#endif
  const T old = ::simt::load_unhooked(address);
  const T value = update(old);
  ::simt::copy_value_unhooked(address, &value);
  return old;
}

#define SIMT_DEFINE_ATOMIC(name, T, expression)                                                  \
  inline T name(T* address, T operand) {                                                         \
    return simt_atomic_update(address, [operand](T old) { return static_cast<T>(expression); }); \
  }
#define SIMT_DEFINE_INTEGER_ATOMICS(T)                                                         \
  SIMT_DEFINE_ATOMIC(atomicAdd, T, old + operand)                                              \
  SIMT_DEFINE_ATOMIC(atomicMax, T, old < operand ? operand : old)                              \
  SIMT_DEFINE_ATOMIC(atomicMin, T, operand < old ? operand : old)                              \
  SIMT_DEFINE_ATOMIC(atomicAnd, T, old& operand)                                               \
  SIMT_DEFINE_ATOMIC(atomicOr, T, old | operand)                                               \
  SIMT_DEFINE_ATOMIC(atomicXor, T, old ^ operand)                                              \
  SIMT_DEFINE_ATOMIC(atomicExch, T, ((void)old, operand))                                      \
  inline T atomicCAS(T* address, T compare, T desired) {                                       \
    return simt_atomic_update(address, [=](T old) { return old == compare ? desired : old; }); \
  }

// The types that CUDA has. A signed sum wraps, as the hardware's does.
SIMT_DEFINE_INTEGER_ATOMICS(unsigned)
SIMT_DEFINE_INTEGER_ATOMICS(unsigned long long)
SIMT_DEFINE_ATOMIC(atomicAdd, float, old + operand)
SIMT_DEFINE_ATOMIC(atomicAdd, double, old + operand)
SIMT_DEFINE_ATOMIC(atomicExch, float, ((void)old, operand))
SIMT_DEFINE_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(operand))
SIMT_DEFINE_ATOMIC(atomicMax, int, old < operand ? operand : old)
SIMT_DEFINE_ATOMIC(atomicMin, int, operand < old ? operand : old)
SIMT_DEFINE_ATOMIC(atomicExch, int, ((void)old, operand))
SIMT_DEFINE_ATOMIC(atomicOr, int, old | operand)
SIMT_DEFINE_ATOMIC(atomicAnd, int, old& operand)
SIMT_DEFINE_ATOMIC(atomicMax, long long, old < operand ? operand : old)
SIMT_DEFINE_ATOMIC(atomicMin, long long, operand < old ? operand : old)
inline int atomicCAS(int* address, int compare, int desired) {
  return simt_atomic_update(address, [=](int old) { return old == compare ? desired : old; });
}
#undef SIMT_DEFINE_INTEGER_ATOMICS
#undef SIMT_DEFINE_ATOMIC

// An access followed by a fence and an atomic is ordered before what follows an atomic on the same
// address elsewhere (ReleaseClock): the "last CTA done" pattern is no race.
__forceinline__ void __threadfence() {
#if SIMT_IS_CHECKED
  ::simt::runtime::thread_fence();
#endif
}
__forceinline__ void __threadfence_block() {}

template <class T>
__forceinline__ T __ldg(const T* address) {
  return *address;
}
__forceinline__ int __popc(unsigned v) { return std::popcount(v); }
__forceinline__ int __popcll(unsigned long long v) { return std::popcount(v); }
__forceinline__ int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
__forceinline__ int __ffs(int v) {
  return v == 0 ? 0 : 1 + std::countr_zero(static_cast<unsigned>(v));
}
__forceinline__ unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
__forceinline__ float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }

}  // namespace SIMT_VARIANT
