// simt.h for g++: CUDA's qualifiers, indices and launch. Include simt.h, not this file.
//
// All code is in inline namespace SIMT_VARIANT, so the fast and the checked compilation of a file
// share no inline function.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_backend/simt/cpu_types.h"
#include "cuda_backend/simt/kernel_runtime.h"

#ifdef SIMT_CHECKED
#define SIMT_IS_CHECKED 1
#else
#define SIMT_IS_CHECKED 0
#endif

// A kernel is never inlined into the thread loop: it may cache threadIdx, which the loop changes.
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define SIMT_UNROLL _Pragma("GCC unroll 8")
// For functions that touch device memory after the checker has run. The compiler may not clone
// them: g++ would move the access into the caller, which has hooks.
#if SIMT_IS_CHECKED && defined(__clang__)
#define SIMT_NO_HOOKS __attribute__((noinline, no_sanitize("thread")))
#elif SIMT_IS_CHECKED
#define SIMT_NO_HOOKS __attribute__((noipa, no_sanitize("thread")))
#else
#define SIMT_NO_HOOKS
#endif

#define SIMT_SHARED_ARRAY(T, name, N)                  \
  static ::simt::runtime::SharedSite simt_site_##name; \
  T(&name)                                             \
  [N] = *static_cast<T(*)[N]>(                         \
      ::simt::runtime::shared_array(simt_site_##name, sizeof(T) * (N), alignof(T), #name))
#define SIMT_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::simt::runtime::dynamic_shared())

// The executor defines these as mutable objects under the same assembler names. Here they are
// const: g++ hooks no read of a constant object, and caching them is right within one thread.
extern __thread const uint3 threadIdx asm("simt_thread_idx");
extern __thread const uint3 blockIdx asm("simt_block_idx");
extern __thread const uint3 blockDim asm("simt_block_dim");
extern __thread const uint3 gridDim asm("simt_grid_dim");

#if SIMT_IS_CHECKED
// With -fno-builtin-memcpy and so on every call in the source goes to the checker (tsan_hooks.cpp).
extern "C" void* memcpy(void*, const void*, std::size_t) noexcept asm("simt_checked_memcpy");
extern "C" void* memmove(void*, const void*, std::size_t) noexcept asm("simt_checked_memmove");
extern "C" void* memset(void*, int, std::size_t) noexcept asm("simt_checked_memset");
#endif

namespace simt {
inline namespace SIMT_VARIANT {

template <class... P, class... A>
inline error_t launch(const LaunchConfig& config, void (*kernel)(P...), A&&... args) {
  static_assert(sizeof...(P) == sizeof...(A), "one argument for each kernel parameter");
  static_assert((!std::is_reference_v<P> && ...), "a kernel parameter cannot be a reference");
  static_assert((std::is_trivially_copyable_v<P> && ...), "kernel parameters are copied as bytes");
  struct Call {
    void (*kernel)(P...);
    std::tuple<std::remove_cv_t<P>...> args;
  };
  const Call call{kernel,
                  std::tuple<std::remove_cv_t<P>...>(static_cast<P>(std::forward<A>(args))...)};
  return runtime::launch(
      config, SIMT_IS_CHECKED ? runtime::Variant::checked : runtime::Variant::fast,
      [](const void* raw) {
        const auto* one = static_cast<const Call*>(raw);
        std::apply(one->kernel, one->args);
      },
      &call, sizeof(call));
}

// One vector register: g++ makes one 16-byte access of it, and four of a struct of four words.
typedef std::uint32_t vec16 __attribute__((vector_size(16), may_alias));
__forceinline__ vec16 make_vec16(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                 std::uint32_t d) {
  return vec16{a, b, c, d};
}
__forceinline__ std::uint32_t word(vec16 v, int i) { return v[i]; }

// Moves that carry definedness: copying undefined bytes is legal, and the copy is undefined.
template <class T>
SIMT_NO_HOOKS void copy_value_unhooked(T* dst, const T* src) {
  *dst = *src;
}
template <class T>
SIMT_NO_HOOKS T load_unhooked(const T* src) {
  return *src;
}
// One element of 1, 2, 4, 8 or 16 bytes.
template <class T>
__forceinline__ void copy_value(T* dst, const T* src) {
  static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0);
#if SIMT_IS_CHECKED
  runtime::check_copy(dst, src, sizeof(T));
  copy_value_unhooked(dst, src);
#else
  *dst = *src;
#endif
}
__forceinline__ void copy16(void* dst, const void* src) {
  copy_value(static_cast<vec16*>(dst), static_cast<const vec16*>(src));
}
// A load of bytes that may be undefined, for fingerprints and poison checks.
template <class T>
__forceinline__ T load_any(const T* src) {
#if SIMT_IS_CHECKED
  runtime::check_load_any(src, sizeof(T));
  return load_unhooked(src);
#else
  return *src;
#endif
}

}  // namespace SIMT_VARIANT
}  // namespace simt

#include "cuda_backend/simt/cpu_intrinsics.h"
