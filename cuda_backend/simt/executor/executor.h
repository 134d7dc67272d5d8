// A simulated device: memory, a stream of launches, and reports of what went wrong in them.
//
// Invariants:
//  1. Launches and copies happen at once, in call order: one stream.
//  2. Results, reports and statistics depend only on the options, the seed and the calls. Launch n
//     takes its choices from (seed, n), so an unread report does not affect the next launch.
//  3. One OS thread at a time uses an executor. Several executors may exist. In the fast variant,
//     CTAs of a large launch may run in several threads; results and reports do not depend on that.
//  4. A launch of the fast variant writes nothing to the shadow. Afterwards undefined reads are not
//     reported, and the statistics of every checked launch show it (definedness_known).
//  5. A launch has at most 48 KiB of shared memory without opt-in, and 227 KiB with it.
//
// Not simulated: time, more than one stream, launches that overlap, cooperative groups, clusters,
// textures, constant memory, printf. CTAs of a launch run one after another, in mode hunt three at
// a time, in turns. A CTA that spins on one that does not run is a runaway if checked, and hangs
// the fast variant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cuda_backend/simt/cpu_types.h"
#include "cuda_backend/simt/report.h"
#include "cuda_backend/simt/watch/launch_log.h"

namespace simt {

// fast: no shadow; only the fast variant can be launched.
// check: shadow; threads change at synchronisations only.
// hunt: check, and every access may be a preemption, by a thread of the same CTA or of another one,
// so that races show their effect.
enum class Mode : std::uint8_t { fast, check, hunt };

struct ExecutorOptions {
  Mode mode = Mode::check;
  std::uint64_t seed = 1;
  std::uint32_t preempt_one_in = 4;  // hunt: probability of a preemption at an access, 1/n
  std::size_t arena_bytes = std::size_t{64} << 30;        // address space wanted
  std::size_t least_arena_bytes = std::size_t{64} << 20;  // less than this is an error
  std::string shared_file;                                // that the arena maps; empty: none
  int num_threads = 1;                                    // that run CTAs of the fast variant
  std::uint64_t max_accesses_per_thread = std::uint64_t{1}
                                          << 28;  // more is a runaway; checked only
};

// The origin of a byte's value.
struct Authorship {
  Party writer;                 // the last to write it
  std::optional<Party> author;  // first writer, if `writer` only copied it (simt::copy16)
  bool defined = true;          // false: writer copied unwritten bytes
};

class Executor {
 public:
  static lockstep::Result<std::unique_ptr<Executor>> create(const ExecutorOptions& options);
  ~Executor();
  Executor(const Executor&) = delete;

  stream_t stream() { return this; }
  std::size_t arena_bytes() const;
  const std::byte* arena_begin() const;
  std::size_t live_bytes() const;

  // Undefined memory, aligned to 256 bytes; the name appears in reports.
  lockstep::Result<std::byte*> allocate(std::size_t size_bytes, std::string name);
  template <class T>
  lockstep::Result<T*> allocate_array(std::size_t count, std::string name) {
    return allocate(count * sizeof(T), std::move(name)).map([](std::byte* p) {
      return reinterpret_cast<T*>(p);
    });
  }
  error_t free(void* address);

  // Device ranges must lie within one live allocation; otherwise invalid_value and nothing happens.
  error_t memcpy_h2d(void* dst, const void* src, std::size_t size_bytes);
  error_t memcpy_d2h(void* dst, const void* src, std::size_t size_bytes) const;
  error_t memset(void* dst, int value, std::size_t size_bytes);

  // Nothing in fast mode, and for bytes that are unwritten or in no allocation.
  std::optional<Authorship> who_wrote(const void* address) const;
  // Offset of the first byte in [address, address + size_bytes) that is undefined.
  std::optional<std::size_t> first_undefined(const void* address, std::size_t size_bytes) const;

  // Reports since the last take, oldest first.
  const std::vector<Report>& reports() const;
  std::vector<Report> take_reports();
  const LaunchStatistics& last_launch() const;
  using Totals = std::map<std::string, KernelTotals, std::less<>>;  // by kernel
  const Totals& kernel_totals() const;

  // Declares the ranges of device memory that later checked launches touch; null: no declaration.
  // REQUIRES: the object outlives the launches.
  void declare(const DeclaredRanges* ranges);

  class Impl;
  Impl& impl() { return *impl_; }

 private:
  explicit Executor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace simt
