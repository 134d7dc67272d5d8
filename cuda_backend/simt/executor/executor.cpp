#include "cuda_backend/simt/executor/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "base/check.h"
#include "cuda_backend/simt/executor/executor_impl.h"

__thread uint3 simt_current_block_idx;
__thread uint3 simt_current_block_dim;
__thread uint3 simt_current_grid_dim;

namespace simt {
namespace runtime {
__thread CtaRunner* running = nullptr;
__thread Checker* running_checker = nullptr;
}  // namespace runtime

namespace {

constexpr unsigned kMaxThreadsPerCta = 1024;
// Half of the tags are left for CTAs that synchronise more than a thousand times (Stamp).
constexpr std::uint64_t kMaxCheckedCtas = (kMaxTag + 1) / 2;
constexpr std::uint64_t kMaxCtas = 0xffffffffu;
// CTAs of a launch that a team shares, and parts that each member takes of them.
constexpr std::uint32_t kLeastSharedCtas = 32;
constexpr std::int64_t kPartsPerMember = 8;
// CTAs that take turns in mode hunt. A CTA that waits for one beyond them waits forever, as on a
// GPU that has no room for both.
constexpr std::uint32_t kResidentCtas = 3;

// Marks what runs on this OS thread, for the time of a launch.
class Running {
 public:
  Running(CtaRunner* runner, Checker* checker) {
    LS_CHECK(runtime::running == nullptr, "a kernel cannot launch a kernel");
    runtime::running = runner;
    runtime::running_checker = checker;
  }
  ~Running() {
    runtime::running = nullptr;
    runtime::running_checker = nullptr;
  }
};

std::size_t capacity_of(const LaunchConfig& config) {
  return config.large_shared ? SharedMemory::kLargeCapacityBytes : SharedMemory::kCapacityBytes;
}

bool resume_cta(CtaRunner& runner, const LaunchConfig& config) {
  const std::uint32_t cta = runner.scheduler.cta_linear();
  simt_current_block_idx = {cta % config.grid.x, cta / config.grid.x % config.grid.y,
                            cta / config.grid.x / config.grid.y};
  return runner.scheduler.resume();
}

}  // namespace

Executor::Impl::Impl(const ExecutorOptions& options_, Arena arena_)
    : options(options_),
      arena(std::move(arena_)),
      random(options_.seed),
      main(*this),
      checker(options_.mode == Mode::fast ? nullptr
                                          : std::make_unique<Checker>(arena, launches, reports)) {}

CtaRunner::CtaRunner(Executor::Impl& impl)
    : scheduler(*this),
      watched(impl.options.mode == Mode::fast ? nullptr
                                              : std::make_unique<WatchedCta>(shared, scheduler)),
      impl_(impl) {}

// ---------------------------------------------------------------- launches

error_t Executor::Impl::launch(const LaunchConfig& config, runtime::Variant variant,
                               void (*run_thread)(const void*), const void* args,
                               std::size_t args_bytes) {
  const bool checked = variant == runtime::Variant::checked;
  const std::uint64_t threads = std::uint64_t{config.block.x} * config.block.y * config.block.z;
  const std::uint64_t ctas = std::uint64_t{config.grid.x} * config.grid.y * config.grid.z;
  if (threads == 0 || threads > kMaxThreadsPerCta || ctas == 0) return invalid_configuration;
  if (config.grid.y > 65535 || config.grid.z > 65535 || config.block.z > 64)
    return invalid_configuration;  // as on a GPU
  if (ctas > (checked ? kMaxCheckedCtas : kMaxCtas)) return invalid_configuration;
  if (config.smem > capacity_of(config)) return invalid_configuration;
  if (checked && checker == nullptr) return invalid_configuration;

  LS_CHECK(main.found.empty(), "{} reports of an earlier launch", main.found.size());
  make_room_in_log();
  const std::uint32_t number =
      launches.begin_launch(config.name, {config.grid.x, config.grid.y, config.grid.z});
  launch_number = number;
  statistics = {};
  statistics.launch = launches.absolute(number);
  statistics.kernel = config.name;
  statistics.ctas = ctas;
  statistics.threads = ctas * threads;
  if (!checked) definedness_known = false;
  statistics.definedness_known = definedness_known;
  random = Random(options.seed * 0x9e3779b97f4a7c15ull + statistics.launch);

  reports.begin_launch(&statistics);
  const bool hunt = checked && options.mode == Mode::hunt;
  const auto cta_count = static_cast<std::uint32_t>(ctas);
  next_tag = cta_count;
  const CtaScheduler::Launch described{
      .run_thread = run_thread,
      .args = args,
      .block_dim = {config.block.x, config.block.y, config.block.z},
      .number = number,
      .stamps = checked,
      .shuffle = checked,
      .hunt = hunt,
      .takes_turns = hunt && cta_count > 1};
  begin(main, config, described, &statistics);
  if (checked)
    checker->begin_launch({hunt ? options.preempt_one_in : 0, options.max_accesses_per_thread,
                           definedness_known, declared},
                          args, args_bytes, &random, &statistics);
  if (checked)
    run_checked(config, described, cta_count);
  else
    run_ctas(config, described, cta_count);
  add_found(main);
  add_to_totals();
  return success;
}

void Executor::Impl::add_to_totals() {
  KernelTotals& sum = totals[statistics.kernel];
  ++sum.launches;
  sum.ctas += statistics.ctas;
  sum.threads += statistics.threads;
  sum.accesses += statistics.accesses;
  sum.switches += statistics.switches;
  sum.barriers += statistics.barriers;
}

void Executor::Impl::begin(CtaRunner& runner, const LaunchConfig& config,
                           const CtaScheduler::Launch& launch, LaunchStatistics* counts) {
  simt_current_block_dim = launch.block_dim;
  simt_current_grid_dim = {config.grid.x, config.grid.y, config.grid.z};
  runner.shared.begin_launch(config.smem, capacity_of(config));
  runner.scheduler.begin_launch(launch, &random, counts);
}

std::vector<CtaRunner*> Executor::Impl::runners(std::size_t count) {
  while (others.size() + 1 < count) others.push_back(std::make_unique<CtaRunner>(*this));
  std::vector<CtaRunner*> all = {&main};
  for (std::size_t i = 0; all.size() < count && others[i]->usable(); ++i)
    all.push_back(others[i].get());
  return all;
}

void Executor::Impl::run_ctas(const LaunchConfig& config, const CtaScheduler::Launch& launch,
                              std::uint32_t cta_count) {
  const auto run = [&](CtaRunner& runner, std::int64_t first, std::int64_t last) {
    const Running mark(&runner, nullptr);
    for (std::int64_t cta = first; cta < last; ++cta) {
      runner.scheduler.begin_cta(static_cast<std::uint32_t>(cta));
      resume_cta(runner, config);
    }
  };
  if (options.num_threads == 1 || cta_count < kLeastSharedCtas) return run(main, 0, cta_count);
  if (team == nullptr) team = std::make_unique<lockstep::ThreadTeam>(options.num_threads);
  const std::vector<CtaRunner*> members = runners(static_cast<std::size_t>(team->size()));
  const std::int64_t parts = team->size() * kPartsPerMember;
  const std::int64_t part = (cta_count + parts - 1) / parts;
  std::atomic<std::int64_t> next = 0;
  team->run([&](int member) {
    if (member >= std::ssize(members)) return;
    CtaRunner& runner = *members[static_cast<std::size_t>(member)];
    if (member > 0) begin(runner, config, launch, &runner.counts);
    for (std::int64_t first = next.fetch_add(part); first < cta_count; first = next.fetch_add(part))
      run(runner, first, std::min<std::int64_t>(first + part, cta_count));
  });
  for (const auto& other : others) {
    const LaunchStatistics counts = std::exchange(other->counts, {});
    statistics.barriers += counts.barriers;
    statistics.warp_meetings += counts.warp_meetings;
    statistics.switches += counts.switches;
    statistics.abandoned_threads += counts.abandoned_threads;
    std::ranges::move(std::exchange(other->found, {}), std::back_inserter(main.found));
  }
}

// A seeded walk i -> i * step + start through all CTAs, step and count without a common factor.
void Executor::Impl::run_checked(const LaunchConfig& config, const CtaScheduler::Launch& launch,
                                 std::uint32_t cta_count) {
  std::uint64_t step = 1, linear = 0;
  if (cta_count > 1) {
    linear = random.below(cta_count);
    step = 1 + random.below(cta_count - 1);
    while (std::gcd(step, std::uint64_t{cta_count}) != 1) ++step;
  }
  std::vector<CtaRunner*> idle =
      runners(launch.takes_turns ? std::min(cta_count, kResidentCtas) : 1);
  for (CtaRunner* runner : std::span(idle).subspan(1)) begin(*runner, config, launch, &statistics);
  std::vector<CtaRunner*> resident;
  for (std::uint32_t begun = 0; begun < cta_count || !resident.empty();) {
    for (; begun < cta_count && !idle.empty(); ++begun, linear = (linear + step) % cta_count) {
      idle.back()->watched->begin();
      idle.back()->scheduler.begin_cta(static_cast<std::uint32_t>(linear));
      resident.push_back(idle.back());
      idle.pop_back();
    }
    const auto count = static_cast<std::uint32_t>(resident.size());
    const auto chosen = resident.begin() + (count == 1 ? 0 : random.below(count));
    checker->enter(*(*chosen)->watched);
    const Running mark(*chosen, checker.get());
    if (!resume_cta(**chosen, config)) continue;
    idle.push_back(*chosen);
    resident.erase(chosen);
  }
}

void CtaRunner::on_divergence(ReportKind kind, const Worker* by, std::string detail) {
  Report report;
  report.kind = kind;
  report.detail = std::move(detail);
  report.by = impl_.launches.party_of(impl_.launch_number, scheduler.cta_linear(),
                                      by == nullptr ? 0 : by->thread,
                                      by == nullptr ? scheduler.base_epoch() : by->epoch);
  if (by != nullptr) report.thread_index = by->thread_index;
  found.emplace_back(scheduler.cta_linear(), std::move(report));
  if (runtime::running_checker != nullptr) impl_.add_found(*this);
}

std::uint32_t CtaRunner::open_tag(std::uint32_t cta_linear) {
  LS_CHECK(impl_.next_tag <= kMaxTag, "a launch with more than {} synchronisations",
           std::uint64_t{kMaxTag} << kEpochBits);
  impl_.launches.keep_tag(impl_.launch_number, impl_.next_tag, cta_linear);
  return impl_.next_tag++;
}

void Executor::Impl::add_found(CtaRunner& runner) {
  std::ranges::stable_sort(runner.found, {}, &std::pair<std::uint32_t, Report>::first);
  for (auto& [cta, report] : std::exchange(runner.found, {}))
    if (reports.admit(report.kind, 0)) reports.add(std::move(report));
}

// ---------------------------------------------------------------- host copies

const Allocation* Executor::Impl::live_range(const void* address, std::size_t size_bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (!arena.contains(begin)) return nullptr;
  const Allocation* allocation = arena.find(begin);
  const bool usable =
      allocation != nullptr && allocation->live && allocation->holds(begin, size_bytes);
  return usable ? allocation : nullptr;
}

void Executor::Impl::make_room_in_log() {
  if (!launches.full()) return;
  const Stamp before = launches.begin_again();
  if (checker == nullptr) return;
  for (const Allocation& allocation : arena.allocations())
    if (allocation.live)
      checker->device_shadow().forget_history(allocation.begin - arena.memory().begin(),
                                              allocation.size_bytes, before);
}

Stamp Executor::Impl::host_stamp(const char* operation) {
  make_room_in_log();
  return make_stamp(launches.begin_host(operation), 0, 0, 0);
}

error_t Executor::memcpy_h2d(void* dst, const void* src, std::size_t size_bytes) {
  if (size_bytes == 0) return success;
  if (impl_->live_range(dst, size_bytes) == nullptr || src == nullptr) return invalid_value;
  std::memcpy(dst, src, size_bytes);
  const Stamp stamp = impl_->host_stamp("memcpy_h2d");
  if (impl_->checker)
    impl_->checker->device_shadow().mark_written(impl_->offset_of(dst), size_bytes, stamp);
  return success;
}

error_t Executor::memcpy_d2h(void* dst, const void* src, std::size_t size_bytes) const {
  if (size_bytes == 0) return success;
  if (impl_->live_range(src, size_bytes) == nullptr || dst == nullptr) return invalid_value;
  std::memcpy(dst, src, size_bytes);
  return success;
}

error_t Executor::memset(void* dst, int value, std::size_t size_bytes) {
  if (size_bytes == 0) return success;
  if (impl_->live_range(dst, size_bytes) == nullptr) return invalid_value;
  std::memset(dst, value, size_bytes);
  const Stamp stamp = impl_->host_stamp("memset");
  if (impl_->checker)
    impl_->checker->device_shadow().mark_written(impl_->offset_of(dst), size_bytes, stamp);
  return success;
}

// ---------------------------------------------------------------- the rest of the surface

lockstep::Result<std::unique_ptr<Executor>> Executor::create(const ExecutorOptions& options) {
  LS_ASSIGN_OR_RETURN(auto arena, Arena::reserve(options.arena_bytes, options.least_arena_bytes,
                                                 options.mode != Mode::fast, options.shared_file));
  auto impl = std::make_unique<Impl>(options, std::move(arena));
  if (!impl->main.usable())
    return lockstep::fail("simulated device: no address space for shared memory");
  return std::unique_ptr<Executor>(new Executor(std::move(impl)));
}

Executor::Executor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Executor::~Executor() = default;

std::size_t Executor::arena_bytes() const { return impl_->arena.size_bytes(); }
const std::byte* Executor::arena_begin() const { return impl_->arena.memory().base(); }
std::size_t Executor::live_bytes() const { return impl_->arena.live_bytes(); }

void Executor::declare(const DeclaredRanges* ranges) { impl_->declared = ranges; }
const Executor::Totals& Executor::kernel_totals() const { return impl_->totals; }

lockstep::Result<std::byte*> Executor::allocate(std::size_t size_bytes, std::string name) {
  return impl_->arena.allocate(size_bytes, std::move(name));
}

error_t Executor::free(void* address) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const Allocation* allocation = impl_->live_range(address, 0);
  if (allocation == nullptr || allocation->begin != begin) return invalid_value;
  if (impl_->checker) {
    // Gives runs of cells back. A page of the shadow that was never touched holds none.
    const auto clear = [this](std::size_t offset, std::size_t bytes) {
      impl_->checker->device_shadow().clear(offset, bytes);
    };
    impl_->arena.shadow().for_each_resident(impl_->offset_of(address), allocation->size_bytes,
                                            clear);
  }
  return impl_->arena.release(address) ? success : invalid_value;
}

std::optional<Authorship> Executor::who_wrote(const void* address) const {
  if (!impl_->checker || impl_->live_range(address, 1) == nullptr) return std::nullopt;
  const Shadow& shadow = impl_->checker->device_shadow();
  const Stamp writer = shadow.writer(impl_->offset_of(address));
  if (writer == 0) return std::nullopt;
  Authorship authorship;
  authorship.writer = impl_->launches.party_of(writer);
  authorship.defined = (writer & kUndefined) == 0;
  const Stamp author = shadow.author(impl_->offset_of(address));
  if (authorship.defined && author != writer) authorship.author = impl_->launches.party_of(author);
  return authorship;
}

std::optional<std::size_t> Executor::first_undefined(const void* address,
                                                     std::size_t size_bytes) const {
  if (!impl_->checker || impl_->live_range(address, size_bytes) == nullptr) return std::nullopt;
  return impl_->checker->device_shadow().first_undefined(impl_->offset_of(address), size_bytes);
}

const std::vector<Report>& Executor::reports() const { return impl_->reports.reports(); }
std::vector<Report> Executor::take_reports() { return impl_->reports.take(); }
const LaunchStatistics& Executor::last_launch() const { return impl_->statistics; }

}  // namespace simt

// What kernels call: kernel_runtime.h.
namespace simt::runtime {

static std::uintptr_t address_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// The instruction behind the call, for reports.
#define SIMT_CALLER reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

error_t launch(const LaunchConfig& config, Variant variant, void (*run_thread)(const void*),
               const void* args, std::size_t args_bytes) {
  if (config.stream == nullptr) return invalid_value;
  return config.stream->impl().launch(config, variant, run_thread, args, args_bytes);
}

void* shared_array(SharedSite& site, std::size_t bytes, std::size_t alignment, const char* name) {
  void* place = running->shared.place(site, bytes, alignment, name);
  if (place == nullptr) {
    running->on_divergence(ReportKind::executor_limit, running->scheduler.current(),
                           fmt::format("more than {} KiB of shared memory in one CTA",
                                       running->shared.capacity_bytes() / 1024));
    running->scheduler.abandon();
  }
  return place;
}

void* dynamic_shared() { return running->shared.dynamic(); }

void sync_threads(SourcePlace place) { running->scheduler.sync_threads(place); }

void sync_warp(unsigned mask) { running->scheduler.sync_warp(mask); }
unsigned ballot(unsigned mask, bool predicate) {
  return running->scheduler.ballot(mask, predicate);
}
std::uint64_t shuffle(unsigned mask, std::uint64_t bits, ShuffleKind kind, int operand, int width) {
  return running->scheduler.shuffle(mask, bits, kind, operand, width);
}
std::uint64_t combine(std::uint64_t bits, Combine combine) {
  return running->scheduler.combine(bits, combine);
}

void before_atomic(const void* address, std::size_t bytes) {
  running_checker->access(address_of(address), bytes, AccessKind::atomic, true, SIMT_CALLER);
}
void thread_fence() { running_checker->fence(); }
void check_load_any(const void* address, std::size_t bytes) {
  running_checker->load_any(address_of(address), bytes, SIMT_CALLER);
}
void check_copy(void* dst, const void* src, std::size_t bytes) {
  running_checker->copy(address_of(dst), address_of(src), bytes, true, SIMT_CALLER);
}

#undef SIMT_CALLER

}  // namespace simt::runtime
