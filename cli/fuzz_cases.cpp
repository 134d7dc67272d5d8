#include "cli/fuzz_cases.h"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <utility>

#include "cli/failing_case.h"
#include "cli/terminal.h"
#include "properties/shrink/case_size.h"

namespace lockstep {
namespace {

constexpr int kShrunkPerCheck = 3;

std::string line_of(const std::string& path, const SavedCase& saved, std::string_view more) {
  const CaseSize size = size_of(saved);
  return fmt::format("  {}  {}, {}, {}{}\n", path, counted(size.requests, "request"),
                     counted(size.tokens, "token"), counted(size.blocks, "block"), more);
}

}  // namespace

Result<void> FuzzCases::keep(const SavedCase& found, const Outcome& outcome) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) return fail(fmt::format("{}: {}", folder_, error.message()));
  SavedCase saved = found;
  const bool has_phase = outcome.kind == OutcomeKind::divergence;
  saved.expected = ExpectedVerdict{.kind = has_phase ? outcome.check : "agreed", .step = {}};
  if (has_phase) saved.expected->step = outcome.step;
  if (outcome.kind == OutcomeKind::stuck) saved.expected->kind = "liveness";
  const std::string path = (std::filesystem::path(folder_) / (saved.name + ".case.jsonl")).string();
  if (auto written = write_saved_case(path, saved); !written) return written;
  lines_ += line_of(path, saved, {});
  kept_.push_back({path, std::move(saved), outcome.check});
  return {};
}

Result<void> FuzzCases::shrink(double seconds_per_case) {
  lines_.clear();
  FailingCaseOptions judging;
  judging.shrink_seconds = seconds_per_case;
  std::map<std::string, int> shrunk_of_check;
  for (const Kept& kept : kept_) {
    lines_ += line_of(kept.path, kept.saved, {});
    if (shrunk_of_check[kept.check]++ >= kShrunkPerCheck) continue;
    const Result<Failure> failure = failure_of(kept.saved, judging);
    if (!failure) return tl::unexpected(failure.error());
    if (!failure->failed())
      return fail(fmt::format("{}: failed once ({}) and not a second time", kept.path, kept.check));
    const Result<ShrunkCase> shrunk = shrink_case(kept.saved, *failure, judging);
    if (!shrunk) return tl::unexpected(shrunk.error());
    const std::string path = path_of_smallest(kept.path);
    const SavedCase& smallest = shrunk->result.smallest;
    if (auto written = write_saved_case(path, smallest); !written) return written;
    lines_ += line_of(path, smallest,
                      shrunk->result.is_minimal ? "" : "; the time ran out, it may go further");
  }
  return {};
}

}  // namespace lockstep
