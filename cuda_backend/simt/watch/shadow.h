// What is known about every byte of a range of memory: who wrote it last, who has read it since.
//
//  1. A granule of 16 bytes has one cell until a narrower access touches it; then it is split into
//     cells of 4, 2 or 1 bytes, as narrow as its accesses are, until one write covers it again.
//     Answers are exact to the byte.
//  2. written == 0: nobody wrote it. A read stamp is kept only for reads after the last write.
//  3. Of several concurrent readers the last one is kept, with a flag that says how far the
//     others are.
//  4. A copied granule also has an origin: the stamp of whoever wrote the bytes first, valid as
//     long as the granule carries the stamp of that copy. It is that of the first defined byte.
// The order between accesses is the viewer's (happens_before.h). Bounds are the checker's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda_backend/simt/watch/cell_pool.h"
#include "cuda_backend/simt/watch/happens_before.h"
#include "cuda_backend/simt/watch/stamp.h"

namespace simt {

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

  // Without checks: the host, in stream order.
  void mark_written(std::size_t offset, std::size_t bytes, Stamp stamp);
  void clear(std::size_t offset, std::size_t bytes);

  // The bytes have just been written, with `stamp`, from `source`: carries definedness and origin.
  void carry(std::size_t offset, std::size_t bytes, Stamp stamp, const Shadow& source,
             std::size_t source_offset);

  std::optional<std::size_t> first_undefined(std::size_t offset, std::size_t bytes) const;
  Stamp writer(std::size_t offset) const;
  // Who wrote first what the byte holds; its writer when it was not copied.
  Stamp author(std::size_t offset) const;

  // All stamps become `before`, all reads are forgotten: the launch counter begins again.
  void forget_history(std::size_t offset, std::size_t bytes, Stamp before);

 private:
  static constexpr Stamp kSplit = ~Stamp{0};  // in `written`: `read` names a run of cells

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
