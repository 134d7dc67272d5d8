// What the CUDA vocabulary of simt_cpu.h calls in the executor. Kernel files never call it
// themselves.
//
// All of it but launch() acts for the simulated thread that runs; none of it is instrumented.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_backend/simt/cpu_types.h"

namespace simt::runtime {

// Which of the two compilations of a kernel file asks.
enum class Variant : std::uint8_t { fast, checked };

// One launch: run_thread(args) is called once for every simulated thread. args is readable by the
// kernel for the time of the launch.
error_t launch(const LaunchConfig& config, Variant variant, void (*run_thread)(const void*),
               const void* args, std::size_t args_bytes);

// A __shared__ variable in the source. Its place differs from launch to launch, its id does not.
struct SharedSite {
  std::uint32_t id = 0;  // 0: not seen yet
};
void* shared_array(SharedSite& site, std::size_t bytes, std::size_t alignment, const char* name);
void* dynamic_shared();

// Where in the source a barrier stands. Lines survive what the optimiser does to code, addresses do
// not.
struct SourcePlace {
  const char* file;
  int line;
};

void sync_threads(SourcePlace place);

enum class WarpOperation : std::uint8_t { sync, shuffle, ballot, combine };
void sync_warp(unsigned mask);
unsigned ballot(unsigned mask, bool predicate);
// Every lane of the mask deposits 8 bytes; each gets what its source lane deposited, or its own
// when the source lies outside of its segment of `width` lanes.
enum class ShuffleKind : std::uint8_t { index, exclusive_or, up, down };
std::uint64_t shuffle(unsigned mask, std::uint64_t bits, ShuffleKind kind, int operand, int width);
// Every lane of a full warp deposits 8 bytes, the last one applies combine to all 32, every lane
// gets its own result.
using Combine = void (*)(std::uint64_t (&lanes)[32]);
std::uint64_t combine(std::uint64_t bits, Combine combine);

// Checked variant only. An access that must not happen does not return: its thread is abandoned.
void before_atomic(const void* address, std::size_t bytes);
void thread_fence();
void check_load_any(const void* address, std::size_t bytes);
// Before the copy; carries the shadow.
void check_copy(void* dst, const void* src, std::size_t bytes);

}  // namespace simt::runtime
