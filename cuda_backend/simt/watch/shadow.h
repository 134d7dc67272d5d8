// The state of every byte of a range of memory: its last writer and the readers since.
//
// Invariants:
//  1. A granule of 16 bytes has one cell until a narrower access touches it; then it is split into
//     cells of 4, 2 or 1 bytes, as narrow as its accesses are, until one write covers it again.
//     Answers are exact to the byte.
//  2. written == 0: unwritten. A read stamp is kept only for reads after the last write.
//  3. A cell keeps the last of several concurrent readers, with a flag for the distance of the
//     others.
//  4. A copied granule also has an origin: the stamp of the first writer of its first defined byte,
//     valid as long as the granule carries the stamp of that copy.
// The order between accesses is the Viewer's. Bounds are the checker's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_backend/simt/cta_scheduler.h"
#include "cuda_backend/simt/stamp.h"

namespace simt {

// The order between accesses of one launch, as far as the program guarantees it.
//
// An access happened before the viewer's when it is of another launch (a stream is in order), of
// the same thread, of the same CTA before the last barrier, of the same warp before the viewer's
// last __syncwarp, or released to it through an atomic (ReleaseClock).
//  1. Barriers are exact.
//  2. __syncwarp with a partial mask counts for the whole warp: it may hide a race, never invent
//     one.

// Order through atomics: fence, atomic here; atomic on the same address there ("last CTA done").
//
//  1. A thread that has fenced releases, at its next atomic, what it did before the fence, and
//     what its CTA did before the last barrier in front of that fence.
//  2. An atomic acquires every release made up to the last one on its address. One clock stands
//     for all of them. It follows chains over several addresses, and may hide a race next to such a
//     chain, but never invents one.
// Kernels without __threadfence pay nothing.
struct Worker;
class CtaScheduler;

class ReleaseClock {
 public:
  void begin_launch();
  void on_fence(Worker& me, std::uint32_t base_epoch);
  void on_atomic(Worker& me, const CtaScheduler& scheduler, std::uintptr_t address);

  // Was the access released, and has the thread acquired that?
  bool covers(Stamp other, const Worker& me) const {
    return !by_tag_.empty() && covers_slow(other, me);
  }

 private:
  struct Release {
    Stamp fence;               // of the releasing thread at its fence
    std::uint32_t base_epoch;  // of its CTA at the fence
    std::uint64_t clock;
  };
  bool covers_slow(Stamp other, const Worker& me) const;

  std::unordered_map<std::uint32_t, std::vector<Release>> by_tag_;  // looked up, never iterated
  std::unordered_map<std::uintptr_t, std::uint64_t> last_release_;  // clock, by address
  std::uint64_t clock_ = 0;
};

struct Viewer {
  Stamp stamp;  // no flags
  std::uint32_t base_epoch;
  const Worker* worker;
  const CtaScheduler* scheduler;
  const ReleaseClock* releases;

  bool same_cta(Stamp other) const {
    return tag_of(other) == tag_of(stamp) || scheduler->tag_is_of_this_cta(tag_of(other));
  }
  bool passed_barrier_since(Stamp other) const {
    return same_cta(other) && (tag_of(other) != tag_of(stamp) || epoch_of(other) < base_epoch);
  }
  bool passed_warp_barrier_since(Stamp other) const {
    return same_warp(other, stamp) && epoch_of(other) < epoch_of(stamp);
  }

  // The write, or the read of a thread that read alone.
  bool follows(Stamp other) const {
    return !same_launch(other, stamp) || same_thread(other, stamp) || passed_barrier_since(other) ||
           passed_warp_barrier_since(other) || releases->covers(other, *worker);
  }
  // All the reads that a read stamp stands for.
  bool follows_readers(Stamp readers) const {
    if (!same_launch(readers, stamp)) return true;
    switch (readers & kFlagMask) {
      case kReaderAlone:
        return follows(readers);
      case kReadersInWarp:
        return passed_barrier_since(readers) || passed_warp_barrier_since(readers);
      case kReadersInCta:
        return passed_barrier_since(readers);
      default:
        return false;
    }
  }
  // The read stamp after the viewer has read, too.
  Stamp join_readers(Stamp readers) const {
    if (readers == 0 || !same_launch(readers, stamp)) return stamp;
    const Stamp flag = readers & kFlagMask;
    if (flag == kReadersInGrid || !same_cta(readers)) return stamp | kReadersInGrid;
    if (passed_barrier_since(readers)) return stamp;
    if (flag == kReaderAlone && same_thread(readers, stamp)) return stamp;
    if (flag <= kReadersInWarp && same_warp(readers, stamp))
      return epoch_of(readers) < epoch_of(stamp) ? stamp : stamp | kReadersInWarp;
    return (epoch_of(readers) > epoch_of(stamp) ? without_flags(readers) : stamp) | kReadersInCta;
  }
};

// Runs of shadow cells for granules that are split: 4 of 4 bytes, 8 of 2 or 16 of 1.
//
// A run is named by a number that fits a word; runs are recycled, and never move.
struct Cell {
  Stamp written = 0;
  Stamp read = 0;
  bool operator==(const Cell&) const = default;
};

class CellPool {
 public:
  struct Run {
    Cell* cells;
    unsigned log2_width;  // of what one cell stands for, in bytes: 0, 1 or 2
  };

  // Cells of unspecified content. The name is the address of the first, plus log2_width.
  std::uint64_t take(unsigned log2_width) {
    Width& pool = widths_[log2_width];
    if (!pool.free.empty()) {
      const std::uint64_t name = pool.free.back();
      pool.free.pop_back();
      return name;
    }
    const std::size_t cells = 16u >> log2_width;
    if (pool.unused == 0) {
      pool.chunks.push_back(std::make_unique<Cell[]>(kChunkRuns * cells));
      pool.next = pool.chunks.back().get();
      pool.unused = kChunkRuns;
    }
    --pool.unused;
    return reinterpret_cast<std::uint64_t>(std::exchange(pool.next, pool.next + cells)) |
           log2_width;
  }
  void give_back(std::uint64_t name) { widths_[name & 3].free.push_back(name); }
  static Run run(std::uint64_t name) {
    return {reinterpret_cast<Cell*>(name & ~std::uint64_t{3}), static_cast<unsigned>(name & 3)};
  }

 private:
  static_assert(alignof(Cell) >= 4);
  static constexpr std::size_t kChunkRuns = 4096;
  struct Width {
    std::vector<std::unique_ptr<Cell[]>> chunks;
    std::vector<std::uint64_t> free;
    Cell* next = nullptr;    // run of the last chunk that was never taken
    std::size_t unused = 0;  // runs from there on
  };
  std::array<Width, 3> widths_;
};

inline constexpr std::size_t kGranuleBytes = 16;

struct Origin {
  Stamp copy = 0;  // the write that this origin belongs to
  Stamp author = 0;
};

// What is wrong with an access, if anything.
struct Verdict {
  enum class Kind : std::uint8_t { fine, undefined, race } kind = Kind::fine;
  Stamp other = 0;
  bool other_reads = false;
};

class Shadow {
 public:
  Shadow() = default;
  // cells and origins: one for each granule, zeroed.
  Shadow(Cell* cells, Origin* origins) : cells_(cells), origins_(origins) {}

  // Any offset and size. Every cell is brought up to date; the first thing wrong is returned.
  Verdict read(std::size_t offset, std::size_t bytes, const Viewer& me, bool may_be_undefined);
  Verdict write(std::size_t offset, std::size_t bytes, const Viewer& me, Stamp flags);

  // The most frequent reads: of one cell that an earlier launch wrote and that no other thread of
  // this launch has read. False: nothing happens, and read() decides.
  bool read_alone(std::size_t offset, std::size_t bytes, Stamp me) {
    Cell* cell = exact_cell(offset, bytes);
    if (cell == nullptr) return false;
    if (cell->read == me) return true;
    if (is_undefined(cell->written) || same_launch(cell->written, me) ||
        same_launch(cell->read, me))
      return false;
    cell->read = me;
    return true;
  }

  // Without checks: the host, in stream order.
  void mark_written(std::size_t offset, std::size_t bytes, Stamp stamp);
  void clear(std::size_t offset, std::size_t bytes);

  // The bytes have just been written, with `stamp`, from `source`: carries definedness and origin.
  void carry(std::size_t offset, std::size_t bytes, Stamp stamp, const Shadow& source,
             std::size_t source_offset);

  std::optional<std::size_t> first_undefined(std::size_t offset, std::size_t bytes) const;
  Stamp writer(std::size_t offset) const;
  // The first writer of the byte's value; its writer if it was not copied.
  Stamp author(std::size_t offset) const;

  // Sets all stamps to `before` and forgets all reads: the launch counter restarts.
  void forget_history(std::size_t offset, std::size_t bytes, Stamp before);

 private:
  static constexpr Stamp kSplit = ~Stamp{0};  // in `written`: `read` names a run of cells

  // The one cell that stands for all of the bytes and no others; null: none does.
  Cell* exact_cell(std::size_t offset, std::size_t bytes) {
    Cell& granule = cells_[offset / kGranuleBytes];
    const std::size_t first = offset % kGranuleBytes;
    if (granule.written != kSplit) return bytes == kGranuleBytes && first == 0 ? &granule : nullptr;
    const CellPool::Run run = CellPool::run(granule.read);
    const bool is_exact = bytes == std::size_t{1} << run.log2_width && first % bytes == 0;
    return is_exact ? run.cells + (first >> run.log2_width) : nullptr;
  }
  template <class Visit>
  Verdict visit(std::size_t offset, std::size_t bytes, bool writes, Visit visit_cell);
  template <class Visit>
  Verdict visit_part(Cell& granule, std::size_t first, std::size_t last, bool writes,
                     Visit visit_cell);
  CellPool::Run split(Cell& granule, unsigned log2_width);
  const Cell& cell_of(std::size_t offset) const;
  // carry() for bytes within one granule at either end.
  void carry_piece(std::size_t offset, std::size_t bytes, Stamp stamp, const Shadow& source,
                   std::size_t source_offset);

  Cell* cells_ = nullptr;
  Origin* origins_ = nullptr;
  CellPool pool_;
};

}  // namespace simt
