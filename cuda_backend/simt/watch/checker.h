// Checks every access of the checked variant before it happens.
//
// Invariants:
//  1. An access that cannot be made (wild, out of bounds, freed, misaligned) is reported and its
//     thread abandoned: the call does not return. After an undefined read or a race the thread
//     continues.
//  2. A thread may read its own stack, its launch's arguments and the program's constants. It may
//     not write the program's globals.
//  3. Copies carry definedness and origin. They do not require definedness.
//  4. Every access to the arena or to shared memory counts in the statistics, once.
// Not checked: accesses of host code, when no simulated thread runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_backend/simt/arena.h"
#include "cuda_backend/simt/cta_scheduler.h"
#include "cuda_backend/simt/report.h"
#include "cuda_backend/simt/shared_memory.h"
#include "cuda_backend/simt/watch/launch_log.h"
#include "cuda_backend/simt/watch/shadow.h"

namespace simt {

// The constants and globals of the program, which kernels may read: tables, literals, kernel
// arguments that the compiler made static.
class Image {
 public:
  // True in a loaded segment of the program or of a shared library, also one loaded since the last
  // call.
  bool contains(std::uintptr_t address, std::size_t bytes);

 private:
  struct Segment {
    std::uintptr_t begin;
    std::uintptr_t end;
  };
  bool find(std::uintptr_t address, std::size_t bytes) const;
  std::vector<Segment> segments_;
};

// A CTA that the executor runs: its threads, its shared memory, and the state of that memory.
struct WatchedCta {
  WatchedCta(SharedMemory& shared_, CtaScheduler& scheduler_);
  bool usable() const { return cells && origins; }
  // Before a CTA begins: shared memory is undefined again.
  void begin() {
    shared.poison();
    shadow.clear(0, shared.used_extent_bytes());
  }

  SharedMemory& shared;
  CtaScheduler& scheduler;
  VirtualRange cells;
  VirtualRange origins;
  Shadow shadow;
};

class Checker {
 public:
  struct Options {
    std::uint32_t preempt_one_in = 0;  // 0: never
    std::uint64_t max_accesses_per_thread = 0;
    bool definedness_known = true;  // false: undefined device memory is read without a report
    const DeclaredRanges* declared = nullptr;  // null: any device memory may be touched
  };

  Checker(Arena& arena, LaunchLog& launches, ReportLog& reports);

  void begin_launch(const Options& options, const void* args, std::size_t args_bytes,
                    Random* random, LaunchStatistics* statistics);
  // The accesses from here on are this CTA's.
  void enter(WatchedCta& cta) {
    cta_ = &cta;
    scheduler_ = &cta.scheduler;
  }

  // bytes is what the instruction moves; aligned: it must lie at a multiple of that.
  void access(std::uintptr_t address, std::size_t bytes, AccessKind kind, bool aligned,
              std::uintptr_t pc);
  // Found by the compiler's own test.
  [[noreturn]] void misaligned(std::uintptr_t address, std::size_t alignment, AccessKind kind,
                               std::string detail, std::uintptr_t pc);
  void load_any(std::uintptr_t address, std::size_t bytes, std::uintptr_t pc);
  void fence();
  // Judges both ends of a copy and carries the shadow; the caller then moves the bytes.
  void copy(std::uintptr_t dst, std::uintptr_t src, std::size_t bytes, bool aligned,
            std::uintptr_t pc);

  Shadow& device_shadow() { return device_shadow_; }
  const Shadow& device_shadow() const { return device_shadow_; }

 private:
  // Where an address lies, once it is known to be usable.
  struct Place {
    Shadow* shadow = nullptr;  // null: memory of this thread alone
    std::size_t offset = 0;
  };
  struct Access {
    std::uintptr_t address;
    std::size_t bytes;
    AccessKind kind;
    std::uintptr_t pc;
  };
  // The device memory or shared variable that an instruction used last in this launch, as far as
  // it may use it.
  struct Region {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    Shadow* shadow = nullptr;
    std::uintptr_t shadow_begin = 0;  // address of the shadow's first granule
    bool holds(const Access& access) const {
      return access.address >= begin && access.address <= end &&
             access.bytes <= end - access.address;
    }
  };

  Region& region_of(const Access& access) {
    return regions_[access.kind == AccessKind::read][access.pc / 4 % kRegions];
  }
  Place locate(const Access& access, bool aligned);
  Place locate_slowly(const Access& access, bool misaligned);
  Place locate_elsewhere(const Access& access);
  void begin_access();
  [[noreturn]] void stop_runaway();
  bool may_be_undefined(const Place& place) const;
  void judge(const Verdict& verdict, const Access& access);
  Viewer viewer() const;
  [[noreturn]] void reject(ReportKind kind, const Access& access);
  void add(ReportKind kind, const Access& access, Stamp other, std::string detail,
           bool other_reads = false);
  void name_place(Report& report, std::uintptr_t address) const;

  Arena& arena_;
  WatchedCta* cta_ = nullptr;
  CtaScheduler* scheduler_ = nullptr;  // cta_'s: every access asks it
  LaunchLog& launches_;
  ReportLog& reports_;
  Image image_;
  ReleaseClock releases_;
  Shadow device_shadow_;

  static constexpr std::size_t kRegions = 64;
  std::array<std::array<Region, kRegions>, 2> regions_;  // by kind and instruction

  Options options_;
  Random* random_ = nullptr;
  LaunchStatistics* statistics_ = nullptr;
  std::uintptr_t args_begin_ = 0;
  std::size_t args_bytes_ = 0;
};

}  // namespace simt
