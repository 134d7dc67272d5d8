#include "cuda_backend/simt/report.h"

#include <fmt/format.h>
#include <cstdlib>
#include <numeric>
#include <string_view>

#if SIMT_HAVE_LIBBACKTRACE
#include <backtrace.h>
#endif

namespace simt {

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

namespace {

constexpr std::string_view kMargin = "=========     ";

std::string place_of(const Report& report) {
  const std::string source = source_place(report.pc);
  return report.by.kernel + "()" +
         (source.empty() ? "" : " in " + source.substr(source.rfind('/') + 1));
}

std::string cta_of(const Party& party) {
  return fmt::format("({},{},{})", party.cta.x, party.cta.y, party.cta.z);
}

// "at ..." and "by thread ...", the lines after every finding except a hazard.
std::string who_and_where(const Report& report) {
  return fmt::format("{0}at {1}\n{0}by thread ({2},{3},{4}) in block {5}\n", kMargin,
                     place_of(report), report.thread_index.x, report.thread_index.y,
                     report.thread_index.z, cta_of(report.by));
}

// "Address ... is out of bounds", and where that is, seen from the allocation nearest to it.
std::string address_of(const Report& report, std::string_view is) {
  if (report.allocation.empty()) return fmt::format("{}Address of no allocation{}\n", kMargin, is);
  std::string text =
      fmt::format("{}Address {}0x{:x}{}\n", kMargin, report.byte_offset < 0 ? "-" : "",
                  std::abs(report.byte_offset), is);
  if (is.empty()) return text;
  const auto size = static_cast<std::int64_t>(report.allocation_bytes);
  std::string side = "inside";
  if (report.byte_offset < 0) side = fmt::format("{} bytes before", -report.byte_offset);
  if (report.byte_offset >= size)
    side = fmt::format("{} bytes after", report.byte_offset - size + 1);
  return text + fmt::format("{}and is {} the nearest allocation at 0x0 of size {} bytes ({}{})\n",
                            kMargin, side, size, report.allocation,
                            report.kind == ReportKind::use_after_free ? ", freed" : "");
}

std::string hazard(const Report& report, std::string_view space) {
  const bool reads = report.access == AccessKind::read;
  const auto side = [&](bool is_read, const Party& party, std::string_view place) {
    return fmt::format("{}{} Thread ({},0,0) in block {} at {}\n", kMargin,
                       is_read ? "Read" : "Write", party.thread, cta_of(party), place);
  };
  std::string text =
      fmt::format("========= Error: Potential {} hazard detected at {} 0x{:x} in block {} :\n",
                  reads ? "RAW" : (report.other_reads ? "WAR" : "WAW"), space, report.byte_offset,
                  cta_of(report.by));
  if (report.other) text += side(report.other_reads, *report.other, report.other->kernel + "()");
  return text + side(reads, report.by, place_of(report));
}

}  // namespace

std::string in_sanitizer_words(const Report& report) {
  const std::string_view space =
      report.allocation.starts_with("__shared__") ? "__shared__" : "__global__";
  const auto access = [&](std::string_view is) {
    return fmt::format("========= Invalid {} {} of size {} bytes\n{}{}", space,
                       name_of(report.access), report.size_bytes, who_and_where(report),
                       address_of(report, is));
  };
  switch (report.kind) {
    case ReportKind::out_of_bounds:
    case ReportKind::use_after_free:
    case ReportKind::wild_access:
      return access(" is out of bounds");
    case ReportKind::misaligned:
      return access(" is misaligned");
    case ReportKind::uninitialised_read:
      return fmt::format("========= Uninitialized {} memory read of size {} bytes\n{}{}", space,
                         report.size_bytes, who_and_where(report), address_of(report, ""));
    case ReportKind::race:
      return hazard(report, space);
    case ReportKind::barrier_divergence:
      return "========= Barrier error detected. Divergent thread(s) in block\n" +
             who_and_where(report);
    case ReportKind::warp_divergence:
      return "========= Barrier error detected. Divergent thread(s) in warp\n" +
             who_and_where(report);
    case ReportKind::undeclared_access:
    case ReportKind::runaway:
    case ReportKind::executor_limit:
      break;
  }
  return {};
}

std::uint64_t LaunchStatistics::reports_total() const {
  return std::accumulate(reports.begin(), reports.end(), std::uint64_t{0});
}

#if SIMT_HAVE_LIBBACKTRACE

static void ignore_error(void*, const char*, int) {}

static int keep_first(void* out, std::uintptr_t, const char* file, int line, const char*) {
  auto& place = *static_cast<std::string*>(out);
  if (file == nullptr) return 0;
  place = fmt::format("{}:{}", file, line);
  return 1;  // the innermost frame comes first
}

std::string source_place(std::uintptr_t pc) {
  // Reading the debug information is expensive; libbacktrace needs one state per process.
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
