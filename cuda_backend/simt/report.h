// Findings of the executor about a kernel, and statistics of a launch: values that the host reads.
//
// Invariants:
//  1. A report never stops the process. A simulated thread that makes an impossible access (out of
//     bounds, wild, misaligned) is abandoned before the access. After any other report it
//     continues.
//  2. At most kReportsPerLaunch reports of a launch are kept, at most kReportsPerPlace of one kind
//     from one instruction; statistics count all of them.
//  3. Everything but `pc` is the same in every run with the same seed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/names.h"
#include "cuda_backend/simt/cpu_types.h"

namespace simt {

// "FILE:LINE" of the innermost (inlined) function that contains the call returning to pc; empty
// without debug information, or when built without libbacktrace, which comes with g++.
std::string source_place(std::uintptr_t pc);

enum class ReportKind : std::uint8_t {
  out_of_bounds,       // the address is in the arena, and in no allocation
  use_after_free,      // the address is in an allocation that was freed
  wild_access,         // not in arena, shared memory, the thread's stack, arguments or constants
  misaligned,          // the address is no multiple of the access size
  uninitialised_read,  // the bytes are unwritten, or a copy of undefined ones
  race,                // two accesses, one a write, not both atomic, and no order between them
  undeclared_access,   // outside of the launch's declared ranges
  barrier_divergence,  // some threads never reach the barrier that others wait at
  warp_divergence,     // lanes of one mask at different intrinsics, exited, or not in their mask
  runaway,             // a thread made more accesses than the option allows
  executor_limit       // the executor cannot simulate this: see detail
};
enum class AccessKind : std::uint8_t { read, write, atomic };

}  // namespace simt
template <>
inline constexpr char lockstep::kWordJoint<simt::ReportKind> = ' ';
namespace simt {

using lockstep::name_of;
inline constexpr std::size_t kReportKinds = lockstep::kWords<ReportKind>.size();

// One end of a conflict, or the author of a byte.
struct Party {
  std::uint64_t launch = 0;  // launches and host copies are numbered together, in order, from 1
  std::string kernel;        // or the host's operation: "memcpy_h2d", "memset"
  bool is_host = false;
  uint3 cta{};
  unsigned thread = 0;  // linear in the CTA; 0 for the host
  unsigned epoch = 0;   // barriers and warp barriers passed
};

struct Report {
  ReportKind kind{};
  Party by;
  uint3 thread_index{};
  AccessKind access{};
  std::size_t size_bytes = 0;
  std::string allocation;  // name of the allocation or __shared__ variable; empty when in none
  std::size_t allocation_bytes = 0;
  std::int64_t byte_offset = 0;  // from its start; may be past its end
  std::optional<Party> other;    // race: the earlier access; use of undefined copies: the copier
  bool other_reads = false;      // of a race
  std::string detail;
  std::uintptr_t pc = 0;  // 0 for reports without an instruction; source_place() says where it is
};

// "race: write of 4 bytes by kernel conv_shift (launch 3) cta 0,0,0 thread 17 ..." on one line.
std::string to_string(const Report& report);
std::string to_string(const Party& party);
// The same in the format of NVIDIA's compute-sanitizer 2026.4, for readers and searches of its
// logs: lines that start with "=========", each with its newline. An allocation starts at address
// 0x0, and a thread's number is linear. Empty for findings that its tools do not have: undeclared
// accesses, and the executor's own limits.
std::string in_sanitizer_words(const Report& report);

struct LaunchStatistics {
  std::uint64_t launch = 0;
  std::string kernel;
  std::uint64_t ctas = 0;
  std::uint64_t threads = 0;
  std::uint64_t barriers = 0;       // released
  std::uint64_t warp_meetings = 0;  // completed
  std::uint64_t switches = 0;       // from fiber to fiber
  std::uint64_t preemptions = 0;    // hunt mode
  std::uint64_t accesses = 0;       // hooked, to device and shared memory
  std::uint64_t abandoned_threads = 0;
  std::array<std::uint64_t, kReportKinds> reports{};  // by kind, kept or not
  bool definedness_known = true;  // false after an unchecked launch: undefined reads go unnoticed
  std::uint64_t reports_total() const;
  bool operator==(const LaunchStatistics&) const = default;
};

// All launches of one kernel together.
struct KernelTotals {
  std::uint64_t launches = 0;
  std::uint64_t ctas = 0;
  std::uint64_t threads = 0;
  std::uint64_t accesses = 0;
  std::uint64_t switches = 0;
  std::uint64_t barriers = 0;
  bool operator==(const KernelTotals&) const = default;
};

inline constexpr std::size_t kReportsPerLaunch = 64;
inline constexpr std::size_t kReportsPerPlace = 4;

// The reports that the host has not taken, and the limits on their number (rule 2).
//
//  1. kept_ is the sum of kept_by_place_, at most kReportsPerLaunch.
class ReportLog {
 public:
  void begin_launch(LaunchStatistics* statistics) {
    statistics_ = statistics;
    kept_ = 0;
    kept_by_place_.clear();
  }
  // Counts a report. True if it may be kept.
  bool admit(ReportKind kind, std::uintptr_t pc) {
    ++statistics_->reports[static_cast<std::size_t>(kind)];
    if (kept_ >= kReportsPerLaunch) return false;
    std::size_t& kept_here = kept_by_place_[{kind, pc}];
    if (kept_here >= kReportsPerPlace) return false;
    ++kept_here;
    ++kept_;
    return true;
  }
  void add(Report report) { reports_.push_back(std::move(report)); }
  const std::vector<Report>& reports() const { return reports_; }
  std::vector<Report> take() { return std::exchange(reports_, {}); }

 private:
  std::vector<Report> reports_;
  LaunchStatistics* statistics_ = nullptr;
  std::size_t kept_ = 0;
  std::map<std::pair<ReportKind, std::uintptr_t>, std::size_t> kept_by_place_;
};

}  // namespace simt
