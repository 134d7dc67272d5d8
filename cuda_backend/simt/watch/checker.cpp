#include "cuda_backend/simt/watch/checker.h"

#include <link.h>

#include <fmt/format.h>

#include <algorithm>

namespace simt {

bool Image::find(std::uintptr_t address, std::size_t bytes) const {
  return std::any_of(segments_.begin(), segments_.end(), [&](const Segment& segment) {
    return address >= segment.begin && address + bytes <= segment.end;
  });
}

bool Image::contains(std::uintptr_t address, std::size_t bytes) {
  if (find(address, bytes)) return true;
  segments_.clear();
  const auto collect = [](dl_phdr_info* object, std::size_t, void* out) {
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const auto& header = object->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      const std::uintptr_t begin = object->dlpi_addr + header.p_vaddr;
      static_cast<std::vector<Segment>*>(out)->push_back({begin, begin + header.p_memsz});
    }
    return 0;
  };
  dl_iterate_phdr(collect, &segments_);
  return find(address, bytes);
}
namespace {
constexpr std::uintptr_t kNullBytes = 1 << 20;  // an address below it is an offset from null
}

WatchedCta::WatchedCta(SharedMemory& shared_, CtaScheduler& scheduler_)
    : shared(shared_),
      scheduler(scheduler_),
      cells(VirtualRange::reserve(SharedMemory::kRangeBytes)),
      origins(VirtualRange::reserve(SharedMemory::kRangeBytes)),
      shadow(reinterpret_cast<Cell*>(cells.base()), reinterpret_cast<Origin*>(origins.base())) {
  static_assert(sizeof(Cell) == kGranuleBytes && sizeof(Origin) == kGranuleBytes);
}

Checker::Checker(Arena& arena, LaunchLog& launches, ReportLog& reports)
    : arena_(arena),
      launches_(launches),
      reports_(reports),
      device_shadow_(reinterpret_cast<Cell*>(arena.shadow().base()),
                     reinterpret_cast<Origin*>(arena.origins().base())) {}

void Checker::begin_launch(const Options& options, const void* args, std::size_t args_bytes,
                           Random* random, LaunchStatistics* statistics) {
  options_ = options;
  args_begin_ = reinterpret_cast<std::uintptr_t>(args);
  args_bytes_ = args_bytes;
  random_ = random;
  statistics_ = statistics;
  releases_.begin_launch();
  regions_ = {};
}

Viewer Checker::viewer() const {
  const Worker* me = scheduler_->current();
  return {me->stamp, scheduler_->base_epoch(), me, scheduler_, &releases_};
}

// ---------------------------------------------------------------- places

// Counts the access and may run other threads first. Never between a verdict and its access.
[[gnu::always_inline]] inline void Checker::begin_access() {
  ++statistics_->accesses;
  if (++scheduler_->current()->accesses > options_.max_accesses_per_thread) [[unlikely]]
    stop_runaway();
  if (options_.preempt_one_in != 0 && random_->below(options_.preempt_one_in) == 0)
    scheduler_->preempt();
}

void Checker::stop_runaway() {
  const Worker* me = scheduler_->current();
  if (reports_.admit(ReportKind::runaway, 0)) {
    Report report;
    report.kind = ReportKind::runaway;
    report.by = launches_.party_of(me->stamp);
    report.thread_index = me->thread_index;
    report.detail = fmt::format("after {} accesses", options_.max_accesses_per_thread);
    reports_.add(std::move(report));
  }
  scheduler_->abandon();
}

[[gnu::always_inline]] inline Checker::Place Checker::locate(const Access& access, bool aligned) {
  if (scheduler_->current()->fiber.owns(access.address)) return {};
  const bool misaligned = aligned && (access.address & (access.bytes - 1)) != 0;
  const Region& region = region_of(access);
  if (!region.holds(access) || misaligned) [[unlikely]]
    return locate_slowly(access, misaligned);
  const Place place{region.shadow, access.address - region.shadow_begin};
  begin_access();  // may run threads that replace the region
  return place;
}

Checker::Place Checker::locate_slowly(const Access& access, bool misaligned) {
  if (arena_.contains(access.address)) {
    begin_access();
    const Allocation* allocation = arena_.find(access.address);
    if (allocation == nullptr || !allocation->holds(access.address, access.bytes))
      reject(ReportKind::out_of_bounds, access);
    if (!allocation->live) reject(ReportKind::use_after_free, access);
    if (misaligned) reject(ReportKind::misaligned, access);
    Region region{allocation->begin, allocation->begin + allocation->size_bytes, &device_shadow_,
                  arena_.memory().begin()};
    if (options_.declared != nullptr) {
      const auto [begin, end] =
          options_.declared->range_of(access.address, access.kind != AccessKind::read);
      region.begin = std::max(region.begin, begin);
      region.end = std::min(region.end, end);
    }
    if (region.holds(access))
      region_of(access) = region;
    else
      add(ReportKind::undeclared_access, access, 0, {});
    return {&device_shadow_, access.address - region.shadow_begin};
  }
  if (cta_->shared.contains(access.address)) {
    begin_access();
    const SharedMemory::Variable* variable = cta_->shared.find(access.address, access.bytes);
    if (variable == nullptr) reject(ReportKind::out_of_bounds, access);
    if (misaligned) reject(ReportKind::misaligned, access);
    region_of(access) = {variable->begin, variable->begin + variable->size_bytes, &cta_->shadow,
                         cta_->shared.range().begin()};
    return {&cta_->shadow, cta_->shared.offset_of(access.address)};
  }
  return locate_elsewhere(access);
}

Checker::Place Checker::locate_elsewhere(const Access& access) {
  if (access.kind == AccessKind::read) {
    if (access.address - args_begin_ < args_bytes_) return {};
    if (is_thread_index(access.address)) return {};
    if (image_.contains(access.address, access.bytes)) return {};
  }
  reject(ReportKind::wild_access, access);
}

bool Checker::may_be_undefined(const Place& place) const {
  return !options_.definedness_known && place.shadow == &device_shadow_;
}

// ---------------------------------------------------------------- accesses

void Checker::access(std::uintptr_t address, std::size_t bytes, AccessKind kind, bool aligned,
                     std::uintptr_t pc) {
  const Access access{address, bytes, kind, pc};
  const Place place = locate(access, aligned);
  if (place.shadow == nullptr) return;
  if (kind == AccessKind::read &&
      place.shadow->read_alone(place.offset, bytes, scheduler_->current()->stamp))
    return;
  const Viewer me = viewer();
  if (kind == AccessKind::atomic) {
    const Stamp before = place.shadow->writer(place.offset);
    if (!may_be_undefined(place) && is_undefined(before))
      judge({Verdict::Kind::undefined, before}, access);
    // Its own release or acquire comes first, because it may order the read.
    releases_.on_atomic(*scheduler_->current(), *scheduler_, address);
  }
  const Verdict verdict =
      kind == AccessKind::read
          ? place.shadow->read(place.offset, bytes, me, may_be_undefined(place))
          : place.shadow->write(place.offset, bytes, me, kind == AccessKind::atomic ? kAtomic : 0);
  if (verdict.kind != Verdict::Kind::fine) [[unlikely]]
    judge(verdict, access);
}

void Checker::load_any(std::uintptr_t address, std::size_t bytes, std::uintptr_t pc) {
  const Access access{address, bytes, AccessKind::read, pc};
  const Place place = locate(access, true);
  if (place.shadow == nullptr) return;
  if (place.shadow->read_alone(place.offset, bytes, scheduler_->current()->stamp)) return;
  judge(place.shadow->read(place.offset, bytes, viewer(), true), access);
}

void Checker::misaligned(std::uintptr_t address, std::size_t alignment, AccessKind kind,
                         std::string detail, std::uintptr_t pc) {
  add(ReportKind::misaligned, {address, alignment, kind, pc}, 0, std::move(detail));
  scheduler_->abandon();
}

void Checker::fence() { releases_.on_fence(*scheduler_->current(), scheduler_->base_epoch()); }

// ---------------------------------------------------------------- copies

void Checker::copy(std::uintptr_t dst, std::uintptr_t src, std::size_t bytes, bool aligned,
                   std::uintptr_t pc) {
  const Access read{src, bytes, AccessKind::read, pc};
  const Access write{dst, bytes, AccessKind::write, pc};
  const Place from = locate(read, aligned);
  const Place to = locate(write, aligned);
  const Viewer me = viewer();
  if (from.shadow != nullptr)  // into a local it is a load
    judge(from.shadow->read(from.offset, bytes, me, to.shadow != nullptr || may_be_undefined(from)),
          read);
  if (to.shadow != nullptr) judge(to.shadow->write(to.offset, bytes, me, 0), write);
  if (from.shadow != nullptr && to.shadow != nullptr)
    to.shadow->carry(to.offset, bytes, me.stamp, *from.shadow, from.offset);
}

// ---------------------------------------------------------------- reports

void Checker::judge(const Verdict& verdict, const Access& access) {
  switch (verdict.kind) {
    case Verdict::Kind::fine:
      return;
    case Verdict::Kind::undefined:
      add(ReportKind::uninitialised_read, access, verdict.other,
          verdict.other == 0 ? "never written" : "only undefined bytes were copied there");
      return;
    case Verdict::Kind::race:
      add(ReportKind::race, access, verdict.other,
          verdict.other_reads ? "the other access reads" : "the other access writes",
          verdict.other_reads);
      return;
  }
}

void Checker::reject(ReportKind kind, const Access& access) {
  add(kind, access, 0, {});
  scheduler_->abandon();
}

void Checker::add(ReportKind kind, const Access& access, Stamp other, std::string detail,
                  bool other_reads) {
  const Worker* me = scheduler_->current();
  if (!reports_.admit(kind, access.pc)) return;
  Report report;
  report.kind = kind;
  report.by = launches_.party_of(me->stamp);
  report.thread_index = me->thread_index;
  report.access = access.kind;
  report.size_bytes = access.bytes;
  report.pc = access.pc;
  report.detail = std::move(detail);
  report.other_reads = other_reads;
  if (other != 0) report.other = launches_.party_of(without_flags(other));
  name_place(report, access.address);
  reports_.add(std::move(report));
}

void Checker::name_place(Report& report, std::uintptr_t address) const {
  if (arena_.contains(address)) {
    const Allocation* allocation = arena_.nearest(address);
    if (allocation == nullptr) return;
    report.allocation = allocation->name;
    report.allocation_bytes = allocation->size_bytes;
    report.byte_offset = static_cast<std::int64_t>(address - allocation->begin);
    report.detail +=
        fmt::format("{}of {} bytes", report.detail.empty() ? "" : "; ", allocation->size_bytes);
  } else if (cta_->shared.contains(address)) {
    const SharedMemory::Variable* variable = cta_->shared.nearest(address);
    if (variable == nullptr) return;
    report.allocation = fmt::format("__shared__ {}", variable->name);
    report.allocation_bytes = variable->size_bytes;
    report.byte_offset = static_cast<std::int64_t>(address - variable->begin);
  } else if (address < kNullBytes) {
    report.detail = fmt::format("null pointer + {}", address);
  }
}

}  // namespace simt
