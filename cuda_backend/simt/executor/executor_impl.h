// The parts of an executor and what they share. Only the sources of this folder include it.
//
// Invariants
// 1. In a launch without a checker a runner belongs to one OS thread: `main` to the one that
//    launches, others[i] to member i + 1 of the team.
// 2. In a launch with a checker every runner belongs to the thread that launches. Each has at most
//    one CTA, which runs or is paused.
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

// What a CTA needs to run.
class CtaRunner final : public SchedulerListener {
 public:
  explicit CtaRunner(Executor::Impl& impl);

  void on_divergence(ReportKind kind, const Worker* by, std::string detail) override;
  std::uint32_t open_tag(std::uint32_t cta_linear) override;
  bool usable() const { return shared.usable() && (watched == nullptr || watched->usable()); }

  SharedMemory shared;
  CtaScheduler scheduler;
  std::unique_ptr<WatchedCta> watched;  // null in fast mode
  LaunchStatistics counts;              // of this runner alone
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
  void run_ctas(const LaunchConfig& config, const CtaScheduler::Launch& launch,
                std::uint32_t cta_count);
  // ... or watched by the checker, in seeded order: one after another, or several that take turns.
  void run_checked(const LaunchConfig& config, const CtaScheduler::Launch& launch,
                   std::uint32_t cta_count);
  // Runners for `count` CTAs at once, `main` first; fewer where the system gives no memory.
  std::vector<CtaRunner*> runners(std::size_t count);
  void add_found(CtaRunner& runner);
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
  Totals totals;
  const DeclaredRanges* declared = nullptr;
  CtaRunner main;
  std::vector<std::unique_ptr<CtaRunner>> others;  // made when a launch first needs them
  std::unique_ptr<lockstep::ThreadTeam> team;      // null until a launch is large enough
  std::unique_ptr<Checker> checker;                // null in fast mode
  bool definedness_known = true;
  std::uint32_t launch_number = 0;  // of the launch that runs, in stamps
  std::uint32_t next_tag = 0;       // of the launch that runs: below are its CTAs' linear indices
};

namespace runtime {
// What runs on this OS thread now: null outside of launches; the checker also in fast launches.
extern __thread CtaRunner* running;
extern __thread Checker* running_checker;
}  // namespace runtime

}  // namespace simt
