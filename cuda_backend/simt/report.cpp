#include "cuda_backend/simt/report.h"

#include <fmt/format.h>
#include <array>
#include <numeric>

namespace simt {

const char* name_of(ReportKind kind) {
  constexpr std::array<const char*, kReportKinds> kNames = {"out of bounds",
                                                            "use after free",
                                                            "wild access",
                                                            "misaligned",
                                                            "uninitialised read",
                                                            "race",
                                                            "undeclared access",
                                                            "read-only data written",
                                                            "barrier divergence",
                                                            "warp divergence",
                                                            "runaway",
                                                            "executor limit"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* name_of(AccessKind kind) {
  constexpr std::array kNames = {"read", "write", "atomic"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* error_string(error_t error) {
  constexpr std::array kTexts = {"success", "invalid value", "invalid launch configuration",
                                 "out of memory"};
  const auto index = static_cast<std::size_t>(error);
  return index < kTexts.size() ? kTexts[index] : "?";
}

std::string to_string(const Party& party) {
  if (party.is_host) return fmt::format("the host's {} ({})", party.kernel, party.launch);
  return fmt::format("{} (launch {}) cta {},{},{} thread {} epoch {}", party.kernel, party.launch,
                     party.cta.x, party.cta.y, party.cta.z, party.thread, party.epoch);
}

std::string to_string(const Report& report) {
  std::string text = fmt::format("{}: {}", name_of(report.kind), to_string(report.by));
  if (report.size_bytes != 0)
    text += fmt::format(", {} of {} bytes", name_of(report.access), report.size_bytes);
  if (!report.allocation.empty())
    text += fmt::format(" at '{}' + {}", report.allocation, report.byte_offset);
  if (report.other) text += fmt::format(", against {}", to_string(*report.other));
  if (!report.detail.empty()) text += fmt::format(": {}", report.detail);
  return text;
}

std::uint64_t LaunchStatistics::reports_total() const {
  return std::accumulate(reports.begin(), reports.end(), std::uint64_t{0});
}

}  // namespace simt

#if SIMT_HAVE_LIBBACKTRACE
#include <backtrace.h>
#endif

namespace simt {

#if SIMT_HAVE_LIBBACKTRACE

namespace {

void ignore_error(void*, const char*, int) {}

int keep_first(void* out, std::uintptr_t, const char* file, int line, const char*) {
  auto& place = *static_cast<std::string*>(out);
  if (file == nullptr) return 0;
  place = fmt::format("{}:{}", file, line);
  return 1;  // the innermost frame comes first
}

}  // namespace

std::string source_place(std::uintptr_t pc) {
  // Reading the debug information is dear; libbacktrace wants one state for the whole process.
  static backtrace_state* const state =
      backtrace_create_state(nullptr, /*threaded=*/1, ignore_error, nullptr);
  std::string place;
  if (state != nullptr && pc != 0)
    backtrace_pcinfo(state, pc - 1, keep_first, ignore_error, &place);
  return place;
}

#else

std::string source_place(std::uintptr_t) { return {}; }

#endif

}  // namespace simt
