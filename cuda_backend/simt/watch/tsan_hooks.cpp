// What g++ and clang call before every load and store of a file compiled with -fsanitize=thread.
// The sanitizer's own runtime is never linked: the checker answers instead.
//
// Hooks fire in host code of kernel files too; without a running simulated thread they do nothing.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda_backend/simt/executor_impl.h"

namespace {

using simt::AccessKind;

inline void hook(const void* address, std::size_t bytes, AccessKind kind, bool aligned,
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
