#include "cuda_backend/simt/kernel_runtime.h"

#include <algorithm>

#include "cuda_backend/simt/executor_impl.h"

namespace simt::runtime {
namespace {

std::uintptr_t address_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

}  // namespace

// The instruction behind the call, for reports.
#define SIMT_CALLER reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

error_t launch(const LaunchConfig& config, Variant variant, void (*run_thread)(const void*),
               const void* args, std::size_t args_bytes) {
  if (config.stream == nullptr) return invalid_value;
  return config.stream->impl().launch(config, variant, run_thread, args, args_bytes);
}

void* shared_array(SharedSite& site, std::size_t bytes, std::size_t alignment, const char* name) {
  void* place = running->shared.place(site, bytes, alignment, name);
  if (place == nullptr) {
    running->on_divergence(ReportKind::executor_limit, running->scheduler.current(),
                           "__shared__ variables of more than 227 KiB in one CTA");
    running->scheduler.abandon();
  }
  return place;
}

void* dynamic_shared() { return running->shared.dynamic(); }

int sync_threads(BarrierKind kind, int predicate, SourcePlace place) {
  return running->scheduler.sync_threads(kind, predicate, place);
}

void sync_warp(unsigned mask) { running->scheduler.sync_warp(mask); }
unsigned ballot(unsigned mask, bool predicate) {
  return running->scheduler.ballot(mask, predicate);
}
std::uint64_t shuffle(unsigned mask, std::uint64_t bits, ShuffleKind kind, int operand, int width) {
  return running->scheduler.shuffle(mask, bits, kind, operand, width);
}
std::uint64_t combine(std::uint64_t bits, Combine combine) {
  return running->scheduler.combine(bits, combine);
}

void before_atomic(const void* address, std::size_t bytes) {
  running_checker->access(address_of(address), bytes, AccessKind::atomic, true, SIMT_CALLER);
}
void thread_fence() { running_checker->fence(); }
void check_load_any(const void* address, std::size_t bytes) {
  running_checker->load_any(address_of(address), bytes, SIMT_CALLER);
}
void check_load_readonly(const void* address, std::size_t bytes) {
  running_checker->load_readonly(address_of(address), bytes, SIMT_CALLER);
}
void check_copy(void* dst, const void* src, std::size_t bytes) {
  running_checker->copy(address_of(dst), address_of(src), bytes, true, SIMT_CALLER);
}
void check_async_copy(void* shared_dst, const void* src) {
  running_checker->async_copy(address_of(shared_dst), address_of(src), SIMT_CALLER);
}
void async_commit() { running_checker->async_commit(); }
void async_wait(int groups_in_flight) {
  running_checker->async_wait(static_cast<std::uint64_t>(groups_in_flight));
}

#undef SIMT_CALLER

}  // namespace simt::runtime
