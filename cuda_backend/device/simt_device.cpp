#include "cuda_backend/device/simt_device.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "cuda_backend/simt/executor/executor.h"

namespace lockstep::cuda {
namespace {

// Of CheckMode's word.
simt::Mode mode_of(CheckMode mode) { return *from_name<simt::Mode>(name_of(mode)); }

std::string thread_text(const simt::Party& party) {
  if (party.is_host) return "host";
  std::string text = fmt::format("cta {}", party.cta.x);
  if (party.cta.y != 0 || party.cta.z != 0) text += fmt::format(",{}", party.cta.y);
  if (party.cta.z != 0) text += fmt::format(",{}", party.cta.z);
  return text + fmt::format(" thread {}", party.thread);
}

// The executor numbers launches. A step owns those after `launch`.
struct StepBegin {
  std::uint64_t launch;
  std::int64_t step;
};

class SimtDevice final : public Device {
 public:
  SimtDevice(std::unique_ptr<simt::Executor> executor, CheckMode mode)
      : executor_(std::move(executor)), mode_(mode) {
    place_.stream = executor_->stream();
    place_.whole_warps = false;
    // Checked launches have a GPU's shapes, so that conflicts between threads show. The plain build
    // is for speed, in CTAs that threads share.
    place_.cta_threads = mode == CheckMode::fast ? 32 : 128;
    place_.items_per_thread = mode == CheckMode::fast ? 8 : 1;
    place_.items_per_reducer = mode == CheckMode::fast ? 1 << 20 : 32;
  }

  std::string_view name() const override { return "simt"; }
  std::string description() const override {
    return fmt::format("CPU executor, {} mode", name_of(mode_));
  }
  const KernelTable& kernels() const override {
    return mode_ == CheckMode::fast ? simt_fast::kernel_table : simt_checked::kernel_table;
  }
  const EngineKernels& engine_kernels() const override {
    return mode_ == CheckMode::fast ? simt_fast::engine_kernels : simt_checked::engine_kernels;
  }

  std::byte* allocate(std::int64_t size_bytes, std::string name) override {
    if (failed() || size_bytes == 0) return nullptr;
    auto memory = executor_->allocate(size_bytes, std::move(name));
    if (memory) return *memory;
    fail_with(memory.error().message);
    return nullptr;
  }
  void release(std::byte* memory) override {
    if (memory != nullptr) note("free", executor_->free(memory));
  }
  void upload(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    note("upload", executor_->memcpy_h2d(target, source, size_bytes));
  }
  void download(void* target, const void* source, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    note("download", executor_->memcpy_d2h(target, source, size_bytes));
  }
  void zero(void* target, std::int64_t size_bytes) override {
    if (failed() || size_bytes == 0) return;
    note("memset", executor_->memset(target, 0, size_bytes));
  }
  Result<void> finish() override {
    if (failed()) return tl::unexpected(*failure());
    return {};
  }

  void run(const Operation& operation, const Launch& launch) override {
    if (operation.touches_everything || mode_ == CheckMode::fast)
      return Device::run(operation, launch);
    simt::DeclaredRanges ranges;
    for (const MemoryRange& range : operation.reads) ranges.allow(range.begin, range.end, false);
    for (const MemoryRange& range : operation.writes) ranges.allow(range.begin, range.end, true);
    ranges.merge();
    executor_->declare(&ranges);
    Device::run(operation, launch);
    executor_->declare(nullptr);
  }
  bool watches_accesses() const override { return mode_ != CheckMode::fast; }
  const std::byte* memory_begin() const override { return executor_->arena_begin(); }
  std::vector<KernelStatistics> kernel_statistics() const override {
    std::vector<KernelStatistics> statistics;
    for (const auto& [kernel, sum] : executor_->kernel_totals())
      statistics.push_back({.kernel = kernel,
                            .launches = static_cast<std::int64_t>(sum.launches),
                            .ctas = static_cast<std::int64_t>(sum.ctas),
                            .threads = static_cast<std::int64_t>(sum.threads),
                            .accesses = static_cast<std::int64_t>(sum.accesses),
                            .switches = static_cast<std::int64_t>(sum.switches),
                            .barriers = static_cast<std::int64_t>(sum.barriers)});
    return statistics;
  }

  void begin_step(std::int64_t step) override {
    if (mode_ == CheckMode::fast) return;  // the plain build records no writers
    const std::uint64_t launch = executor_->last_launch().launch;
    if (steps_.empty() || steps_.back().launch != launch)
      steps_.push_back({launch, step});
    else
      steps_.back().step = step;
  }

  void take_reports(std::vector<DeviceReport>& reports) override {
    if (executor_->reports().empty()) return;
    for (const simt::Report& found : executor_->take_reports()) {
      DeviceReport& report = reports.emplace_back();
      report.kind = simt::name_of(found.kind);
      report.kernel = found.by.kernel;
      report.message = simt::to_string(found);
      report.sanitizer_words = [found] { return simt::in_sanitizer_words(found); };
      report.allocation = found.allocation;
      report.byte_offset = found.byte_offset;
    }
  }

  std::optional<DeviceWriter> who_wrote(const std::byte* address) override {
    const auto authorship = executor_->who_wrote(address);
    if (!authorship) return std::nullopt;
    const simt::Party& party = authorship->author ? *authorship->author : authorship->writer;
    return DeviceWriter{party.kernel, thread_text(party), step_of(party.launch)};
  }

 private:
  void note(std::string_view what, simt::error_t error) {
    if (error != simt::success) fail_with(fmt::format("{}: {}", what, simt::error_string(error)));
  }
  // The step of a launch; -1: before the first step.
  std::int64_t step_of(std::uint64_t launch) const {
    const auto after =
        std::partition_point(steps_.begin(), steps_.end(),
                             [&](const StepBegin& begin) { return begin.launch < launch; });
    return after == steps_.begin() ? -1 : std::prev(after)->step;
  }

  std::unique_ptr<simt::Executor> executor_;
  CheckMode mode_;
  std::vector<StepBegin> steps_;
};

}  // namespace

Result<std::unique_ptr<Device>> make_simt_device(CheckMode mode, std::uint64_t seed,
                                                 std::int64_t pool_size_bytes,
                                                 const std::string& shared_file, int num_threads) {
  simt::ExecutorOptions options;
  options.num_threads = num_threads;
  options.shared_file = shared_file;
  options.mode = mode_of(mode);
  options.seed = seed;
  options.arena_bytes += 2 * pool_size_bytes;
  return simt::Executor::create(options).map([&](std::unique_ptr<simt::Executor> executor) {
    return std::unique_ptr<Device>(std::make_unique<SimtDevice>(std::move(executor), mode));
  });
}

void check_count(std::string_view array, std::int64_t count) {
  LS_CHECK(count >= 0, "{}: {}", array, count);
}

}  // namespace lockstep::cuda
