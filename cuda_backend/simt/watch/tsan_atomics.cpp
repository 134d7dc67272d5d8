// Compiler built-ins for atomics in files compiled with -fsanitize=thread: std::atomic_ref in a
// kernel, and the guards of static variables in host code. Every memory order counts as
// sequentially consistent.
//
// A read-modify-write is judged as CUDA's atomics are; so is an atomic load, which thereby never
// races with another atomic and, like a write, does race with a plain read.
#include <cstddef>
#include <cstdint>

#include "cuda_backend/simt/executor_impl.h"

namespace {

inline void judge(const volatile void* address, std::size_t bytes, const void* pc) {
  simt::Checker* checker = simt::runtime::running_checker;
  if (checker == nullptr) return;
  checker->access(reinterpret_cast<std::uintptr_t>(address), bytes, simt::AccessKind::atomic, true,
                  reinterpret_cast<std::uintptr_t>(pc));
}

}  // namespace

#define SIMT_JUDGE(p) judge(p, sizeof(*(p)), __builtin_return_address(0))
#define SIMT_DEFINE_FETCH(bits, name)                                                     \
  std::uint##bits##_t __tsan_atomic##bits##_fetch_##name(volatile std::uint##bits##_t* p, \
                                                         std::uint##bits##_t v, int) {    \
    SIMT_JUDGE(p);                                                                        \
    return __atomic_fetch_##name(p, v, __ATOMIC_SEQ_CST);                                 \
  }
#define SIMT_DEFINE_COMPARE_EXCHANGE(bits, strength)                                               \
  int __tsan_atomic##bits##_compare_exchange_##strength(volatile std::uint##bits##_t* p,           \
                                                        std::uint##bits##_t* expected,             \
                                                        std::uint##bits##_t v, int, int) {         \
    SIMT_JUDGE(p);                                                                                 \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
#define SIMT_DEFINE_ATOMICS(bits)                                                                 \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* p, int) {    \
    SIMT_JUDGE(p);                                                                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                               \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* p, std::uint##bits##_t v, int) { \
    SIMT_JUDGE(p);                                                                                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                               \
  std::uint##bits##_t __tsan_atomic##bits##_exchange(volatile std::uint##bits##_t* p,             \
                                                     std::uint##bits##_t v, int) {                \
    SIMT_JUDGE(p);                                                                                \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                           \
  }                                                                                               \
  SIMT_DEFINE_FETCH(bits, add)                                                                    \
  SIMT_DEFINE_FETCH(bits, sub)                                                                    \
  SIMT_DEFINE_FETCH(bits, and)                                                                    \
  SIMT_DEFINE_FETCH(bits, or)                                                                     \
  SIMT_DEFINE_FETCH(bits, xor)                                                                    \
  SIMT_DEFINE_FETCH(bits, nand)                                                                   \
  SIMT_DEFINE_COMPARE_EXCHANGE(bits, strong)                                                      \
  SIMT_DEFINE_COMPARE_EXCHANGE(bits, weak)                                                        \
  std::uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(                                 \
      volatile std::uint##bits##_t* p, std::uint##bits##_t expected, std::uint##bits##_t v, int,  \
      int) {                                                                                      \
    SIMT_JUDGE(p);                                                                                \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
    return expected;                                                                              \
  }

extern "C" {

SIMT_DEFINE_ATOMICS(8)
SIMT_DEFINE_ATOMICS(16)
SIMT_DEFINE_ATOMICS(32)
SIMT_DEFINE_ATOMICS(64)

void __tsan_atomic_thread_fence(int) {
  if (simt::runtime::running_checker != nullptr) simt::runtime::running_checker->fence();
}
void __tsan_atomic_signal_fence(int) {}

}  // extern "C"
