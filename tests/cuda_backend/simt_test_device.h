// A simulated device for tests: allocations that fail the test when they fail, and readable
// reports.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "cuda_backend/simt/executor/executor.h"
#include "cuda_backend/simt/report.h"

namespace lockstep {

class TestDevice {
 public:
  explicit TestDevice(simt::Mode mode, std::uint64_t seed = 1,
                      std::size_t arena_bytes = std::size_t{1} << 30, int num_threads = 1) {
    simt::ExecutorOptions options;
    options.mode = mode;
    options.seed = seed;
    options.arena_bytes = arena_bytes;
    options.num_threads = num_threads;
    options.max_accesses_per_thread = 1'000'000;
    auto created = simt::Executor::create(options);
    LS_CHECK(created.has_value(), "{}", created.error().message);
    executor_ = std::move(*created);
  }

  simt::Executor& executor() { return *executor_; }
  simt::stream_t stream() { return executor_->stream(); }

  template <class T>
  T* undefined(std::size_t count, const char* name) {
    auto data = executor_->allocate_array<T>(count, name);
    LS_CHECK(data.has_value(), "{}", data.error().message);
    return *data;
  }
  template <class T>
  T* uploaded(const std::vector<T>& host, const char* name) {
    T* data = undefined<T>(host.size(), name);
    LS_CHECK(executor_->memcpy_h2d(data, host.data(), host.size() * sizeof(T)) == simt::success);
    return data;
  }
  template <class T>
  std::vector<T> read(const T* data, std::size_t count) {
    std::vector<T> host(count);
    LS_CHECK(executor_->memcpy_d2h(host.data(), data, count * sizeof(T)) == simt::success);
    return host;
  }

  std::vector<simt::Report> take_reports() { return executor_->take_reports(); }
  // All reports are of this kind, there is at least one; the first is returned.
  simt::Report take_only(simt::ReportKind kind) {
    const std::vector<simt::Report> reports = take_reports();
    for (const simt::Report& report : reports)
      EXPECT_EQ(report.kind, kind) << simt::to_string(report);
    EXPECT_FALSE(reports.empty()) << "no report of kind " << simt::name_of(kind);
    return reports.empty() ? simt::Report{} : reports.front();
  }
  void expect_clean() {
    for (const simt::Report& report : take_reports()) ADD_FAILURE() << simt::to_string(report);
    EXPECT_EQ(executor_->last_launch().reports_total(), 0u);
  }

 private:
  std::unique_ptr<simt::Executor> executor_;
};

// The text of the source line that the report points at; empty without debug information.
inline std::string source_line(const simt::Report& report) {
  const std::string place = simt::source_place(report.pc);
  const std::size_t colon = place.rfind(':');
  if (colon == std::string::npos) return {};
  // The debug information names folders from the root of the tree or, with a compiler cache, from
  // the build: the file's name says enough.
  const std::filesystem::path kernels = LOCKSTEP_SOURCE_DIR "/tests/cuda_backend/simt_kernels";
  std::ifstream file(kernels / std::filesystem::path(place.substr(0, colon)).filename());
  std::string line;
  for (int i = std::stoi(place.substr(colon + 1)); i > 0; --i) std::getline(file, line);
  return line;
}

}  // namespace lockstep
