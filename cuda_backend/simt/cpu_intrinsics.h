// CUDA's barriers, warp intrinsics, atomics and fences for g++. Include simt.h, not this file.
//
// A warp operation is a rendezvous of the lanes in its mask, one switch per lane. simt::warp_sum,
// simt::warp_max and their forms for several values are one rendezvous instead of five shuffles for
// each value, with bit-identical results.
//
// In the checked variant one simulated thread runs at a time, so a plain read-modify-write is
// atomic; the checker runs first, and the update itself is not instrumented. In the fast variant
// other CTAs may run in other OS threads.
#pragma once

#include <atomic>
#include <bit>

inline namespace SIMT_VARIANT {

template <class T, class Update>
__forceinline__ T simt_atomic_update(T* address, Update update) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
#if SIMT_IS_CHECKED
  ::simt::runtime::before_atomic(address, sizeof(T));
  const T old = ::simt::load_unhooked(address);
  const T value = update(old);
  ::simt::copy_value_unhooked(address, &value);
  return old;
#else
  const std::atomic_ref<T> shared(*address);
  T old = shared.load(std::memory_order_relaxed);
  while (!shared.compare_exchange_weak(old, update(old))) {
  }
  return old;
#endif
}

#define SIMT_DEFINE_ATOMIC(name, T, expression)                                                  \
  inline T name(T* address, T operand) {                                                         \
    return simt_atomic_update(address, [operand](T old) { return static_cast<T>(expression); }); \
  }
#define SIMT_DEFINE_INTEGER_ATOMICS(T)                                                         \
  SIMT_DEFINE_ATOMIC(atomicAdd, T, old + operand)                                              \
  SIMT_DEFINE_ATOMIC(atomicMax, T, old < operand ? operand : old)                              \
  SIMT_DEFINE_ATOMIC(atomicMin, T, operand < old ? operand : old)                              \
  SIMT_DEFINE_ATOMIC(atomicOr, T, old | operand)                                               \
  SIMT_DEFINE_ATOMIC(atomicXor, T, old ^ operand)                                              \
  inline T atomicCAS(T* address, T compare, T desired) {                                       \
    return simt_atomic_update(address, [=](T old) { return old == compare ? desired : old; }); \
  }

// The types that CUDA has. A signed sum wraps, as the hardware's does.
SIMT_DEFINE_INTEGER_ATOMICS(unsigned)
SIMT_DEFINE_INTEGER_ATOMICS(unsigned long long)
SIMT_DEFINE_ATOMIC(atomicAdd, float, old + operand)
SIMT_DEFINE_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(operand))
#undef SIMT_DEFINE_INTEGER_ATOMICS
#undef SIMT_DEFINE_ATOMIC

// An access followed by a fence and an atomic is ordered before what follows an atomic on the same
// address elsewhere (ReleaseClock): the "last CTA done" pattern is no race.
__forceinline__ void __threadfence() {
#if SIMT_IS_CHECKED
  ::simt::runtime::thread_fence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

__forceinline__ int __popc(unsigned v) { return std::popcount(v); }
__forceinline__ unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
__forceinline__ float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }

__forceinline__ void __syncthreads(const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
  ::simt::runtime::sync_threads({file, line});
}

__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { ::simt::runtime::sync_warp(mask); }

// A value of up to 8 bytes as the executor carries it between lanes.
template <class T>
__forceinline__ std::uint64_t simt_to_bits(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4)
    return __builtin_bit_cast(std::uint32_t, value);
  else
    return __builtin_bit_cast(std::uint64_t, value);
}
template <class T>
__forceinline__ T simt_from_bits(std::uint64_t bits) {
  if constexpr (sizeof(T) == 4)
    return __builtin_bit_cast(T, static_cast<std::uint32_t>(bits));
  else
    return __builtin_bit_cast(T, bits);
}

template <class T>
__forceinline__ T simt_shuffle(unsigned mask, T value, ::simt::runtime::ShuffleKind kind,
                               int operand, int width) {
  return simt_from_bits<T>(
      ::simt::runtime::shuffle(mask, simt_to_bits(value), kind, operand, width));
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return simt_shuffle(mask, value, ::simt::runtime::ShuffleKind::index, source, width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return simt_shuffle(mask, value, ::simt::runtime::ShuffleKind::exclusive_or, lane_mask, width);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return simt_shuffle(mask, value, ::simt::runtime::ShuffleKind::up, static_cast<int>(delta),
                      width);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return simt_shuffle(mask, value, ::simt::runtime::ShuffleKind::down, static_cast<int>(delta),
                      width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::simt::runtime::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

}  // namespace SIMT_VARIANT

namespace simt {
inline namespace SIMT_VARIANT {

// The butterfly lane ^ kLanes / 2, .., 2, 1 over all lanes at once.
template <class T, class Operation, int kLanes = 32>
SIMT_NO_HOOKS void combine_butterfly(std::uint64_t (&lanes)[32]) {
  T values[32];
  for (int i = 0; i < 32; ++i) values[i] = simt_from_bits<T>(lanes[i]);
  for (int offset = kLanes / 2; offset > 0; offset >>= 1) {
    T next[32];
    for (int i = 0; i < 32; ++i) next[i] = Operation::apply(values[i], values[i ^ offset]);
    for (int i = 0; i < 32; ++i) values[i] = next[i];
  }
  for (int i = 0; i < 32; ++i) lanes[i] = simt_to_bits(values[i]);
}
struct Sum {
  template <class T>
  __forceinline__ static T apply(T a, T b) {
    return a + b;
  }
};
struct Max {
  template <class T>
  __forceinline__ static T apply(T a, T b) {
    return a < b ? b : a;
  }
};
// Several values of each lane in one rendezvous: lanes bring the addresses of theirs.
template <class T, class Operation, int kCount>
SIMT_NO_HOOKS void combine_arrays(std::uint64_t (&lanes)[32]) {
  for (int k = 0; k < kCount; ++k) {
    std::uint64_t values[32];
    for (int i = 0; i < 32; ++i) values[i] = simt_to_bits(reinterpret_cast<T*>(lanes[i])[k]);
    combine_butterfly<T, Operation>(values);
    for (int i = 0; i < 32; ++i) reinterpret_cast<T*>(lanes[i])[k] = simt_from_bits<T>(values[i]);
  }
}
template <class T>
inline T warp_sum(T value) {
  return simt_from_bits<T>(runtime::combine(simt_to_bits(value), combine_butterfly<T, Sum>));
}
template <class T, int kCount>
inline void warp_sum_each(T (&values)[kCount]) {
  runtime::combine(reinterpret_cast<std::uint64_t>(&values[0]), combine_arrays<T, Sum, kCount>);
}
template <class T, int kCount>
inline void warp_max_each(T (&values)[kCount]) {
  runtime::combine(reinterpret_cast<std::uint64_t>(&values[0]), combine_arrays<T, Max, kCount>);
}

// A kernel of one warp per CTA may let a thread run several lanes: it keeps kLanesPerThread values
// where a lane has one, and runs its lanes one after the other between warp operations. In the fast
// variant one thread is the whole warp, and nothing switches.
#if SIMT_IS_CHECKED
inline constexpr int kLanesPerThread = 1;
__forceinline__ void sync_lanes() { __syncwarp(); }
#else
inline constexpr int kLanesPerThread = 32;
__forceinline__ void sync_lanes() {}
#endif
template <class Operation, class T, int kCount>
inline void combine_each(T (&lanes)[kLanesPerThread][kCount]) {
  if constexpr (kLanesPerThread == 1) {
    runtime::combine(reinterpret_cast<std::uint64_t>(&lanes[0][0]),
                     combine_arrays<T, Operation, kCount>);
  } else {
    std::uint64_t addresses[32];
    for (int i = 0; i < 32; ++i) addresses[i] = reinterpret_cast<std::uint64_t>(&lanes[i][0]);
    combine_arrays<T, Operation, kCount>(addresses);
  }
}
template <class T, int kCount>
inline void warp_sum_each(T (&lanes)[kLanesPerThread][kCount]) {
  combine_each<Sum>(lanes);
}
template <class T, int kCount>
inline void warp_max_each(T (&lanes)[kLanesPerThread][kCount]) {
  combine_each<Max>(lanes);
}
template <class T, int kCount>
struct FromLane {
  T values[kCount];
  std::int32_t lane;
};
template <class T, int kCount>
SIMT_NO_HOOKS void copy_from_lane(std::uint64_t (&lanes)[32]) {
  using Values = FromLane<T, kCount>;
  const std::int32_t lane = reinterpret_cast<Values*>(lanes[0])->lane;
  const Values source = *reinterpret_cast<Values*>(lanes[lane]);
  for (const std::uint64_t one : lanes) *reinterpret_cast<Values*>(one) = source;
}
template <class T, int kCount>
inline void warp_copy_each(T (&values)[kCount], std::int32_t lane) {
  FromLane<T, kCount> own{{}, lane};
  for (int i = 0; i < kCount; ++i) own.values[i] = values[i];
  runtime::combine(reinterpret_cast<std::uint64_t>(&own), copy_from_lane<T, kCount>);
  for (int i = 0; i < kCount; ++i) values[i] = own.values[i];
}
template <class T, int kLanes = 32>
inline T warp_max(T value) {
  if (kLanes == 1) return value;
  return simt_from_bits<T>(
      runtime::combine(simt_to_bits(value), combine_butterfly<T, Max, kLanes>));
}

}  // namespace SIMT_VARIANT
}  // namespace simt
