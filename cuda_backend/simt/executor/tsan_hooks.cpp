// What g++ and clang call before every load and store of a file compiled with -fsanitize=thread.
// The sanitizer's own runtime is never linked: the checker answers instead.
//
// A build under TSan itself (preset threads) links that runtime and leaves the checked files
// without hooks: its modes check and hunt see no access.
//
// Hooks fire in host code of kernel files too; without a running simulated thread they do nothing.
#include <dlfcn.h>
#include <fmt/format.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda_backend/simt/executor/executor_impl.h"

namespace {

using simt::AccessKind;

inline void hook(const volatile void* address, std::size_t bytes, AccessKind kind, bool aligned,
                 const void* pc) {
  simt::Checker* checker = simt::runtime::running_checker;
  if (checker == nullptr) return;
  checker->access(reinterpret_cast<std::uintptr_t>(address), bytes, kind, aligned,
                  reinterpret_cast<std::uintptr_t>(pc));
}

}  // namespace

#define SIMT_CALLER __builtin_return_address(0)
#define SIMT_DEFINE_HOOKS(n)                                                                     \
  void __tsan_read##n(void* p) { hook(p, n, AccessKind::read, true, SIMT_CALLER); }              \
  void __tsan_write##n(void* p) { hook(p, n, AccessKind::write, true, SIMT_CALLER); }            \
  void __tsan_unaligned_read##n(void* p) { hook(p, n, AccessKind::read, false, SIMT_CALLER); }   \
  void __tsan_unaligned_write##n(void* p) { hook(p, n, AccessKind::write, false, SIMT_CALLER); } \
  void __tsan_volatile_read##n(void* p) { hook(p, n, AccessKind::read, true, SIMT_CALLER); }     \
  void __tsan_volatile_write##n(void* p) { hook(p, n, AccessKind::write, true, SIMT_CALLER); }

extern "C" {

#if !defined(__SANITIZE_THREAD__)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

SIMT_DEFINE_HOOKS(1)
SIMT_DEFINE_HOOKS(2)
SIMT_DEFINE_HOOKS(4)
SIMT_DEFINE_HOOKS(8)
SIMT_DEFINE_HOOKS(16)

void __tsan_read_range(void* p, std::size_t n) {
  if (n != 0) hook(p, n, AccessKind::read, false, SIMT_CALLER);
}
void __tsan_write_range(void* p, std::size_t n) {
  if (n != 0) hook(p, n, AccessKind::write, false, SIMT_CALLER);
}
#endif

// Calls of memcpy and so on in a checked file arrive here (simt_cpu.h). Between device ranges
// memcpy copies definedness; memmove is for overlapping registers and reads what it moves.
void* simt_checked_memcpy(void* dst, const void* src, std::size_t n) {
  if (simt::Checker* checker = simt::runtime::running_checker; checker != nullptr && n != 0)
    checker->copy(reinterpret_cast<std::uintptr_t>(dst), reinterpret_cast<std::uintptr_t>(src), n,
                  false, reinterpret_cast<std::uintptr_t>(SIMT_CALLER));
  return std::memcpy(dst, src, n);
}
void* simt_checked_memmove(void* dst, const void* src, std::size_t n) {
  if (n != 0) {
    hook(src, n, AccessKind::read, false, SIMT_CALLER);
    hook(dst, n, AccessKind::write, false, SIMT_CALLER);
  }
  return std::memmove(dst, src, n);
}
void* simt_checked_memset(void* dst, int value, std::size_t n) {
  if (n != 0) hook(dst, n, AccessKind::write, false, SIMT_CALLER);
  return std::memset(dst, value, n);
}

}  // extern "C"

#if !defined(__SANITIZE_THREAD__)
// Compiler built-ins for atomics in files compiled with -fsanitize=thread: std::atomic_ref in a
// kernel, and the guards of static variables in host code. Every memory order counts as
// sequentially consistent.
//
// A read-modify-write is judged as CUDA's atomics are; so is an atomic load, which thereby never
// races with another atomic and, like a write, does race with a plain read.

#define SIMT_JUDGE(p) hook(p, sizeof(*(p)), AccessKind::atomic, true, SIMT_CALLER)
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
#endif

// What a file compiled with -fsanitize=alignment calls before it uses a misaligned pointer. Checked
// kernel files are: of a struct that is stored member by member, the other hooks see members only.
//
// The sanitizer's own runtime, where the program is linked with it, still gets the calls of host
// code.

namespace {

// The layout that compilers emit.
struct TypeDescriptor {
  std::uint16_t kind;
  std::uint16_t info;
  char name[1];  // "'float2'", as long as it is
};
struct TypeMismatch {
  const char* file;
  std::uint32_t line;
  std::uint32_t column;
  const TypeDescriptor* type;
  std::uint8_t log2_alignment;
  std::uint8_t use;  // 0: a load, 1: a store, and others
};

using Handler = void (*)(TypeMismatch*, std::uintptr_t);

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, std::uintptr_t address) {
  if (simt::runtime::running_checker == nullptr) {
    static const auto next =
        reinterpret_cast<Handler>(dlsym(RTLD_NEXT, "__ubsan_handle_type_mismatch_v1"));
    if (next != nullptr) next(data, address);
    return;
  }
  const std::size_t alignment = std::size_t{1} << data->log2_alignment;
  simt::runtime::running_checker->misaligned(
      address, alignment, data->use == 1 ? simt::AccessKind::write : simt::AccessKind::read,
      fmt::format("a {} wants a multiple of {}, at {}:{}", data->type->name, alignment, data->file,
                  data->line),
      reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)));
}

#undef SIMT_CALLER
