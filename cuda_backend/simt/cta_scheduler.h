// Runs the threads of one CTA on fibers, with barriers, warp operations and preemption.
//
// Invariants:
//  1. One worker fiber runs thread after thread on one stack. Another worker starts only when a
//     thread has to wait. A CTA without synchronisation costs two switches.
//  2. The seeded generator makes every choice (which thread starts, which waiting thread continues)
//     if shuffling is on. Otherwise the order is fixed.
//  3. A barrier does not wait for threads that have exited. If no thread can run and some are left,
//     the scheduler abandons the CTA with a barrier_divergence report and forgets its stacks.
//  4. Epochs order accesses within a CTA. Everything before epoch base_epoch() happened before what
//     runs now; within a warp, so did everything of an epoch smaller than one's own.
//  5. Every worker is in exactly one place: current_, paused_, idle_, ready_, or a waiting list.
//  6. Schedulers of CTAs that share the executor take turns: resume() returns when its CTA has
//     ended or makes room for another. Nothing of a CTA changes while it is paused.
// Memory is not part of this class. Shuffles exchange values and order nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_backend/simt/fiber.h"
#include "cuda_backend/simt/kernel_runtime.h"
#include "cuda_backend/simt/random.h"
#include "cuda_backend/simt/report.h"
#include "cuda_backend/simt/stamp.h"

// threadIdx, blockIdx, blockDim and gridDim of the simulated thread that runs. Kernel files see the
// same objects as constants (simt_cpu.h).
extern __thread uint3 simt_current_thread_idx asm("simt_thread_idx");
extern __thread uint3 simt_current_block_idx asm("simt_block_idx");
extern __thread uint3 simt_current_block_dim asm("simt_block_dim");
extern __thread uint3 simt_current_grid_dim asm("simt_grid_dim");

namespace simt {

// g++ hooks no reads of them, clang does.
inline bool is_thread_index(std::uintptr_t address) {
  for (const uint3* index : {&simt_current_thread_idx, &simt_current_block_idx,
                             &simt_current_block_dim, &simt_current_grid_dim})
    if (address - reinterpret_cast<std::uintptr_t>(index) < sizeof(uint3)) return true;
  return false;
}

// A simulated thread while a worker runs it.
struct Worker {
  Fiber fiber;
  bool restart = true;  // true if the stack has nothing to continue
  unsigned thread = 0;
  uint3 thread_index{};
  std::uint32_t epoch = 0;
  Stamp stamp = 0;
  std::uint64_t accesses = 0;
  std::uint64_t acquired = 0;  // ReleaseClock
  Stamp fence_stamp = 0;       // at the last __threadfence; 0: none
  std::uint32_t fence_base_epoch = 0;
};

// Events of the scheduler.
class SchedulerListener {
 public:
  // by: the thread that caused it; null: the whole CTA.
  virtual void on_divergence(ReportKind kind, const Worker* by, std::string detail) = 0;
  // A further tag for the CTA (stamp.h, rule 2).
  virtual std::uint32_t open_tag(std::uint32_t cta_linear) = 0;

 protected:
  ~SchedulerListener() = default;
};

class CtaScheduler {
 public:
  struct Launch {
    void (*run_thread)(const void*) = nullptr;
    const void* args = nullptr;
    uint3 block_dim{};
    std::uint32_t number = 0;  // for stamps
    bool stamps = false;       // keep epochs and stamps: accesses are checked
    bool shuffle = false;      // seeded order instead of the fixed one
    bool hunt = false;         // run other threads when one ends
    bool takes_turns = false;  // a preemption may make room for another CTA
  };

  explicit CtaScheduler(SchedulerListener& listener) : listener_(listener) {}

  void begin_launch(const Launch& launch, Random* random, LaunchStatistics* statistics);
  void begin_cta(std::uint32_t linear);
  // Runs the CTA until it ends (true) or makes room for another one.
  bool resume();

  Worker* current() { return current_; }
  std::uint32_t cta_linear() const { return cta_linear_; }
  std::uint32_t base_epoch() const { return base_epoch_; }
  bool tag_is_of_this_cta(std::uint32_t tag) const {
    return tag == cta_linear_ || std::ranges::find(further_tags_, tag) != further_tags_.end();
  }
  // The tags that this CTA had before the given one of its tags.
  std::vector<std::uint32_t> tags_before(std::uint32_t tag) const;

  // For the running thread.
  void sync_threads(runtime::SourcePlace place);
  void sync_warp(unsigned mask);
  unsigned ballot(unsigned mask, bool predicate);
  std::uint64_t shuffle(unsigned mask, std::uint64_t bits, runtime::ShuffleKind kind, int operand,
                        int width);
  std::uint64_t combine(std::uint64_t bits, runtime::Combine reduce);
  void preempt();
  [[noreturn]] void abandon();

 private:
  // The result of a rendezvous of lanes.
  struct Result {
    std::uint64_t slots[32] = {};
    unsigned attended = 0;  // lanes
    std::uint32_t epoch = 0;
  };
  // A rendezvous of the lanes in a mask. Two results alternate: a lane may enter the next
  // rendezvous before another lane has read the last result.
  struct Rendezvous {
    unsigned mask = 0;   // as the kernel wrote it
    unsigned lanes = 0;  // those that exist
    unsigned arrived = 0;
    runtime::WarpOperation operation{};
    runtime::Combine reduce = nullptr;
    unsigned turn = 0;
    Result results[2];
    std::vector<Worker*> waiting;
  };
  struct Warp {
    std::vector<std::unique_ptr<Rendezvous>> rendezvous;
    unsigned exited = 0;  // lanes
  };
  struct Barrier {
    std::vector<Worker*> waiting;
    unsigned arrived = 0;
    runtime::SourcePlace place{};
    std::uint64_t acquired = 0;
    std::uint64_t result_acquired = 0;  // of the last release
  };

  static void worker_entry();
  void work();  // the loop of a worker
  void begin_thread(Worker& worker, unsigned thread);
  void finish_thread(unsigned thread);
  void restamp(Worker& worker);
  Worker* next_worker();
  Worker* idle_worker();
  void continue_with(Worker* from, Worker* to);
  void wait();  // runs another thread. REQUIRES: the running one is in a waiting list
  void give_up();
  void forget_stacks();
  void release_barrier();
  void release_rendezvous(Rendezvous& rendezvous);
  std::uint32_t next_epoch();
  void open_tag();
  Rendezvous& rendezvous_of(Warp& warp, unsigned mask);
  void check_rendezvous(const Warp& warp, const Rendezvous& rendezvous,
                        runtime::WarpOperation operation, runtime::Combine reduce);
  // Deposits bits and waits for the others. The result is valid until the lane's next rendezvous.
  const Result& meet(unsigned mask, std::uint64_t bits, runtime::WarpOperation operation,
                     runtime::Combine reduce);
  std::string census() const;

  SchedulerListener& listener_;
  Launch launch_;
  Random* random_ = nullptr;
  LaunchStatistics* statistics_ = nullptr;

  const void* os_thread_ = nullptr;  // that the workers were started on
  Fiber host_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> idle_;
  std::vector<Worker*> ready_;
  Worker* current_ = nullptr;
  Worker* paused_ = nullptr;  // that ran when the CTA made room for another

  std::uint32_t cta_linear_ = 0;
  std::uint32_t tag_ = 0;
  std::vector<std::uint32_t> further_tags_;  // of this CTA, in the order of its epochs
  std::uint32_t base_epoch_ = 0;
  std::uint32_t max_epoch_ = 0;
  unsigned thread_count_ = 0;
  unsigned started_ = 0;
  unsigned finished_ = 0;
  bool given_up_ = false;
  std::vector<unsigned> order_;
  std::vector<Warp> warps_;
  Barrier barrier_;
};

}  // namespace simt
