// The parts of an executor and what they share. Only the sources of this folder include it.
//
// Invariants
// 1. A runner belongs to one OS thread: `main` to the one that launches, others[i] to member i + 1
//    of the team.
// 2. A launch with a checker runs on `main` alone.
// 3. Between launches no runner holds a report.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "cuda_backend/simt/arena.h"
#include "cuda_backend/simt/cta_scheduler.h"
#include "cuda_backend/simt/executor/executor.h"
#include "cuda_backend/simt/kernel_runtime.h"
#include "cuda_backend/simt/report.h"
#include "cuda_backend/simt/shared_memory.h"
#include "cuda_backend/simt/watch/checker.h"
#include "cuda_backend/simt/watch/launch_log.h"

namespace simt {

// What one OS thread needs to run CTAs.
class CtaRunner final : public SchedulerListener {
 public:
  explicit CtaRunner(Executor::Impl& impl) : scheduler(*this), impl_(impl) {}

  void on_divergence(ReportKind kind, const Worker* by, std::string detail) override;
  void on_tag(std::uint32_t tag, std::uint32_t cta_linear) override;

  SharedMemory shared;
  CtaScheduler scheduler;
  LaunchStatistics counts;  // of this runner alone
  // Of launches without a checker, each with its CTA: several runners meet them in any order.
  std::vector<std::pair<std::uint32_t, Report>> found;

 private:
  Executor::Impl& impl_;
};

class Executor::Impl {
 public:
  Impl(const ExecutorOptions& options, Arena arena);

  error_t launch(const LaunchConfig& config, runtime::Variant variant,
                 void (*run_thread)(const void*), const void* args, std::size_t args_bytes);
  // Before the first CTA, on the runner's own thread.
  void begin(CtaRunner& runner, const LaunchConfig& config, const CtaScheduler::Launch& launch,
             LaunchStatistics* counts);
  // Every CTA: in one thread, or in the team's where the launch is large ...
  void run_ctas(const LaunchConfig& config, const CtaScheduler::Launch& launch);
  // ... or watched by the checker, in seeded order.
  void run_checked(const LaunchConfig& config, std::uint32_t cta_count);
  void add_found();
  void add_to_totals();

  // The allocation that holds all of the range, live; or null.
  const Allocation* live_range(const void* address, std::size_t size_bytes) const;
  std::size_t offset_of(const void* address) const {
    return reinterpret_cast<std::uintptr_t>(address) - arena.memory().begin();
  }
  // Stamp of the next host copy. Begins the numbers again when they run out.
  Stamp host_stamp(const char* operation);
  void make_room_in_log();

  ExecutorOptions options;
  Arena arena;
  LaunchLog launches;
  ReportLog reports;
  Random random;
  LaunchStatistics statistics;
  std::map<std::string, KernelTotals, std::less<>> totals;  // by kernel
  const DeclaredRanges* declared = nullptr;
  CtaRunner main;
  std::vector<std::unique_ptr<CtaRunner>> others;  // of the team's members from 1 on
  std::unique_ptr<lockstep::ThreadTeam> team;      // null until a launch is large enough
  std::unique_ptr<Checker> checker;                // null in fast mode
  bool definedness_known = true;
  std::uint32_t launch_number = 0;  // of the launch that runs, in stamps
};

namespace runtime {
// What runs on this OS thread now: null outside of launches; the checker also in fast launches.
extern __thread CtaRunner* running;
extern __thread Checker* running_checker;
}  // namespace runtime

}  // namespace simt
