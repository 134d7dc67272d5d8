#include "cli/fuzz_summary.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/exit_code.h"
#include "cli/terminal.h"

namespace lockstep {
namespace {

constexpr std::size_t kFailuresShown = 20;

std::string rate_text(const FuzzReport& report, double seconds) {
  const auto per_second = [&](std::int64_t count) {
    return static_cast<std::int64_t>(static_cast<double>(count) / seconds);
  };
  return fmt::format("{} cases, {} steps, {} checked a second",
                     with_commas(per_second(report.cases)), with_commas(per_second(report.steps)),
                     size_text(per_second(report.bytes_checked)));
}

// All classes, three a line.
std::string tally_text(const Tally& tally) {
  std::string text = "\nWhat was generated and reached:\n";
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    text += fmt::format("  {:<25}{:>11}", name_of(reached), with_commas(tally[reached]));
    if (i % 2 == 1 || i + 1 == kNumReached) text += "\n";
  }
  return text;
}

std::string one_line_again(const FuzzReport& report, std::uint64_t seed) {
  std::string text = fmt::format("lockstep fuzz --seed {} --backend {}", seed, report.backend);
  if (!report.engine.empty()) text += " --engine " + report.engine;
  if (!report.mutant.empty()) text += " --mutant " + report.mutant;
  return text;
}

std::string failures_text(const FuzzReport& report) {
  std::string text;
  for (std::size_t i = 0; i < std::min(report.failures.size(), kFailuresShown); ++i) {
    const FuzzFailure& failure = report.failures[i];
    text += fmt::format("\nseed {}: {}, {}", failure.seed, name_of(failure.kind), failure.check);
    if (failure.step >= 0) text += fmt::format(" in step {}", failure.step);
    if (!failure.request.empty()) text += fmt::format(", request {}", failure.request);
    text += fmt::format("\n  {}\n  {}\n", failure.what, one_line_again(report, failure.seed));
  }
  if (report.failures.size() > kFailuresShown)
    text += fmt::format("\n... and {} more; --json FILE lists them all\n",
                        report.failures.size() - kFailuresShown);
  return text;
}

}  // namespace

std::string fuzz_summary_text(const FuzzReport& report, double seconds) {
  std::string text = row_text(
      "cases", with_commas(report.cases),
      fmt::format("{} agreed, {} refused, {} of known findings, {} failed",
                  with_commas(report.agreed), report.refused,
                  report.cases - report.agreed - report.refused - std::ssize(report.failures),
                  report.failures.size()));
  text += row_text("steps", with_commas(report.steps));
  text += row_text("checked", size_text(report.bytes_checked), "of pages");
  if (seconds > 0) text += row_text("time", duration_text(seconds), rate_text(report, seconds));
  text += row_text("state hash", to_hex(report.state_hash));
  if (report.cases > 1) text += tally_text(report.tally);
  for (const auto& [finding, cases] : report.known)
    text += fmt::format("\nknown: {} (docs/findings.md): {}\n", finding, counted(cases, "case"));
  if (report.refused > 0)
    text +=
        fmt::format("\nrefused: {}, the first of seed {}: {}\n", counted(report.refused, "case"),
                    report.first_refused_seed, report.first_refusal);
  text += failures_text(report);
  const auto missing = report.missing_classes();
  if (!missing.empty())
    text += fmt::format("\nNever seen in {} cases: {}\n", with_commas(report.cases),
                        fmt::join(missing, ", "));
  return text;
}

int fuzz_exit_code(const FuzzReport& report) {
  if (!report.missing_classes().empty()) return kExitDisagreed;
  if (report.failures.empty()) return kExitAgreed;
  const bool all_stuck = std::ranges::all_of(report.failures, [](const FuzzFailure& failure) {
    return failure.kind == OutcomeKind::stuck;
  });
  return all_stuck ? kExitStuck : kExitDisagreed;
}

}  // namespace lockstep
