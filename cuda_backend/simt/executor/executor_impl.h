// The parts of an executor and what they share. Only the sources of this folder include it.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "cuda_backend/simt/arena.h"
#include "cuda_backend/simt/cta_scheduler.h"
#include "cuda_backend/simt/executor/executor.h"
#include "cuda_backend/simt/kernel_runtime.h"
#include "cuda_backend/simt/report.h"
#include "cuda_backend/simt/shared_memory.h"
#include "cuda_backend/simt/watch/checker.h"
#include "cuda_backend/simt/watch/launch_log.h"

namespace simt {

class Executor::Impl final : public SchedulerListener {
 public:
  Impl(const ExecutorOptions& options, Arena arena);

  error_t launch(const LaunchConfig& config, runtime::Variant variant,
                 void (*run_thread)(const void*), const void* args, std::size_t args_bytes);
  // Every CTA in seeded order; the checked variant also poisons and clears shared memory for each.
  void run_ctas(const LaunchConfig& config, std::uint32_t cta_count, bool checked);
  void on_divergence(ReportKind kind, const Worker* by, std::string detail) override;
  void on_tag(std::uint32_t tag, std::uint32_t cta_linear) override;

  // The allocation that holds all of the range, live; or null.
  const Allocation* live_range(const void* address, std::size_t size_bytes) const;
  std::size_t offset_of(const void* address) const {
    return reinterpret_cast<std::uintptr_t>(address) - arena.memory().begin();
  }
  // Stamp of the next host copy. Begins the numbers again when they run out.
  Stamp host_stamp(const char* operation);
  void make_room_in_log();
  void add_to_totals();

  ExecutorOptions options;
  Arena arena;
  SharedMemory shared;
  LaunchLog launches;
  ReportLog reports;
  Random random;
  LaunchStatistics statistics;
  std::map<std::string, KernelTotals, std::less<>> totals;  // by kernel
  const DeclaredRanges* declared = nullptr;
  CtaScheduler scheduler;
  std::unique_ptr<Checker> checker;  // null in fast mode
  bool definedness_known = true;
  std::uint32_t launch_number = 0;  // of the launch that runs, in stamps
};

namespace runtime {
// What runs on this OS thread now: null outside of launches; the checker also in fast launches.
extern __thread Executor::Impl* running;
extern __thread Checker* running_checker;
}  // namespace runtime

}  // namespace simt
