#include "cuda_backend/simt/watch/shadow.h"

#include <algorithm>
#include <bit>

namespace simt {

void ReleaseClock::begin_launch() {
  by_tag_.clear();
  last_release_.clear();
  clock_ = 0;
}

void ReleaseClock::on_fence(Worker& me, std::uint32_t base_epoch) {
  me.fence_stamp = me.stamp;
  me.fence_base_epoch = base_epoch;
}

void ReleaseClock::on_atomic(Worker& me, const CtaScheduler& scheduler, std::uintptr_t address) {
  const auto last = last_release_.find(address);
  if (last != last_release_.end()) me.acquired = std::max(me.acquired, last->second);
  if (me.fence_stamp == 0) return;
  last_release_[address] = ++clock_;
  by_tag_[tag_of(me.fence_stamp)].push_back({me.fence_stamp, me.fence_base_epoch, clock_});
  // What the CTA did under earlier tags lies before a barrier (cta_scheduler.h).
  for (const std::uint32_t earlier : scheduler.tags_before(tag_of(me.fence_stamp)))
    by_tag_[earlier].push_back({me.fence_stamp, kMaxEpoch + 1, clock_});
}

bool ReleaseClock::covers_slow(Stamp other, const Worker& me) const {
  const auto releases = by_tag_.find(tag_of(other));
  if (releases == by_tag_.end()) return false;
  return std::any_of(releases->second.begin(), releases->second.end(), [&](const Release& release) {
    return release.clock <= me.acquired &&
           (epoch_of(other) < release.base_epoch ||
            (same_thread(other, release.fence) && epoch_of(other) <= epoch_of(release.fence)));
  });
}

namespace {

Verdict read_cell(Cell& cell, const Viewer& me, bool may_be_undefined) {
  if (cell.read == me.stamp) return {};  // read by the same thread, and nothing was written since
  if (!may_be_undefined && is_undefined(cell.written))
    return {Verdict::Kind::undefined, cell.written};
  const Stamp written = cell.written;
  cell.read = me.join_readers(cell.read);
  if (!me.follows(written)) return {Verdict::Kind::race, written};
  return {};
}

Verdict write_cell(Cell& cell, const Viewer& me, Stamp flags) {
  const Cell before = cell;
  cell = {me.stamp | flags, 0};
  const bool both_atomic = (before.written & flags & kAtomic) != 0;
  if (!both_atomic && !me.follows(before.written)) return {Verdict::Kind::race, before.written};
  if (before.read != 0 && !me.follows_readers(before.read))
    return {Verdict::Kind::race, before.read, true};
  return {};
}

void keep_first(Verdict& kept, const Verdict& next) {
  if (kept.kind == Verdict::Kind::fine) kept = next;
}

}  // namespace

// The granule as cells of that width or narrower.
CellPool::Run Shadow::split(Cell& granule, unsigned log2_width) {
  if (granule.written == kSplit) {
    const CellPool::Run wide = pool_.run(granule.read);
    if (wide.log2_width <= log2_width) return wide;
    const std::uint64_t name = pool_.take(log2_width);
    const CellPool::Run narrow = pool_.run(name);
    const unsigned log2_ratio = wide.log2_width - log2_width;
    for (unsigned i = 0; i < (16u >> log2_width); ++i)
      narrow.cells[i] = wide.cells[i >> log2_ratio];
    pool_.give_back(granule.read);
    granule.read = name;
    return narrow;
  }
  const std::uint64_t name = pool_.take(log2_width);
  const CellPool::Run run = pool_.run(name);
  std::fill_n(run.cells, 16u >> log2_width, granule);
  granule = {kSplit, name};
  return run;
}

// Bytes [first, last) of a granule, which becomes split. Neighbours mostly carry equal cells: the
// first is visited and its outcome copied as long as they do.
template <class Visit>
Verdict Shadow::visit_part(Cell& granule, std::size_t first, std::size_t last, bool writes,
                           Visit visit_cell) {
  const unsigned log2_width = std::min(2u, static_cast<unsigned>(std::countr_zero(first | last)));
  const CellPool::Run run = split(granule, log2_width);
  Cell* cell = run.cells + (first >> run.log2_width);
  Cell* const end = run.cells + (last >> run.log2_width);
  Verdict verdict;
  while (cell < end) {
    const Cell before = *cell;
    keep_first(verdict, visit_cell(*cell));
    const Cell after = *cell;
    for (++cell; cell < end && *cell == before; ++cell) *cell = after;
  }
  if (writes && last - first == kGranuleBytes) {
    const Cell all = *run.cells;
    pool_.give_back(granule.read);
    granule = all;
  }
  return verdict;
}

template <class Visit>
Verdict Shadow::visit(std::size_t offset, std::size_t bytes, bool writes, Visit visit_cell) {
  Verdict verdict;
  const std::size_t end = offset + bytes;
  while (offset < end) {
    Cell& granule = cells_[offset / kGranuleBytes];
    const std::size_t first = offset % kGranuleBytes;
    const std::size_t last = std::min(kGranuleBytes, first + (end - offset));
    if (last - first == kGranuleBytes && granule.written != kSplit)
      keep_first(verdict, visit_cell(granule));
    else
      keep_first(verdict, visit_part(granule, first, last, writes, visit_cell));
    offset += last - first;
  }
  return verdict;
}

Verdict Shadow::read(std::size_t offset, std::size_t bytes, const Viewer& me,
                     bool may_be_undefined) {
  if (Cell* cell = exact_cell(offset, bytes)) return read_cell(*cell, me, may_be_undefined);
  // Read by the same thread, whole, and nothing was written since.
  if (offset % kGranuleBytes + bytes <= kGranuleBytes &&
      cells_[offset / kGranuleBytes].written != kSplit &&
      cells_[offset / kGranuleBytes].read == me.stamp)
    return {};
  return visit(offset, bytes, false,
               [&](Cell& cell) { return read_cell(cell, me, may_be_undefined); });
}

Verdict Shadow::write(std::size_t offset, std::size_t bytes, const Viewer& me, Stamp flags) {
  if (Cell* cell = exact_cell(offset, bytes)) return write_cell(*cell, me, flags);
  return visit(offset, bytes, true, [&](Cell& cell) { return write_cell(cell, me, flags); });
}

void Shadow::mark_written(std::size_t offset, std::size_t bytes, Stamp stamp) {
  visit(offset, bytes, true, [stamp](Cell& cell) {
    cell = {stamp, 0};
    return Verdict{};
  });
}

void Shadow::clear(std::size_t offset, std::size_t bytes) {
  for (std::size_t g = offset / kGranuleBytes; g * kGranuleBytes < offset + bytes; ++g) {
    if (cells_[g].written == kSplit) pool_.give_back(cells_[g].read);
    cells_[g] = {};
  }
}

void Shadow::carry(std::size_t offset, std::size_t bytes, Stamp stamp, const Shadow& source,
                   std::size_t source_offset) {
  while (bytes != 0) {
    const std::size_t piece = std::min({bytes, kGranuleBytes - offset % kGranuleBytes,
                                        kGranuleBytes - source_offset % kGranuleBytes});
    carry_piece(offset, piece, stamp, source, source_offset);
    offset += piece;
    source_offset += piece;
    bytes -= piece;
  }
}

void Shadow::carry_piece(std::size_t offset, std::size_t bytes, Stamp stamp, const Shadow& source,
                         std::size_t source_offset) {
  const auto source_is_undefined = [&](std::size_t i) {
    return is_undefined(source.writer(source_offset + i));
  };
  Cell& to = cells_[offset / kGranuleBytes];
  std::size_t first_defined = bytes;
  std::size_t undefined_count = 0;
  for (std::size_t i = 0; i < bytes; ++i) {
    if (source_is_undefined(i))
      ++undefined_count;
    else
      first_defined = std::min(first_defined, i);
  }
  if (undefined_count == bytes && to.written != kSplit) {
    to.written |= kUndefined;
  } else if (undefined_count != 0) {
    const CellPool::Run run = split(to, 0);
    for (std::size_t i = 0; i < bytes; ++i)
      if (source_is_undefined(i)) run.cells[offset % kGranuleBytes + i].written |= kUndefined;
  }
  if (first_defined < bytes)
    origins_[offset / kGranuleBytes] = {without_flags(stamp),
                                        source.author(source_offset + first_defined)};
}

std::optional<std::size_t> Shadow::first_undefined(std::size_t offset, std::size_t bytes) const {
  for (std::size_t i = 0; i < bytes; ++i)
    if (is_undefined(writer(offset + i))) return i;
  return std::nullopt;
}

const Cell& Shadow::cell_of(std::size_t offset) const {
  const Cell& granule = cells_[offset / kGranuleBytes];
  if (granule.written != kSplit) return granule;
  const CellPool::Run run = pool_.run(granule.read);
  return run.cells[offset % kGranuleBytes >> run.log2_width];
}

Stamp Shadow::writer(std::size_t offset) const { return cell_of(offset).written; }

Stamp Shadow::author(std::size_t offset) const {
  const Stamp stamp = writer(offset);
  const Origin& origin = origins_[offset / kGranuleBytes];
  return stamp != 0 && origin.copy == without_flags(stamp) ? origin.author : stamp;
}

void Shadow::forget_history(std::size_t offset, std::size_t bytes, Stamp before) {
  const auto forget = [before](Cell& cell) {
    if (cell.written != 0) cell.written = before | (cell.written & kUndefined);
    cell.read = 0;
  };
  for (std::size_t g = offset / kGranuleBytes; g * kGranuleBytes < offset + bytes; ++g) {
    if (cells_[g].written == 0) continue;  // reading a page never touched costs no memory
    if (cells_[g].written == kSplit) {
      const CellPool::Run run = pool_.run(cells_[g].read);
      std::for_each_n(run.cells, 16u >> run.log2_width, forget);
    } else {
      forget(cells_[g]);
    }
  }
}

}  // namespace simt
