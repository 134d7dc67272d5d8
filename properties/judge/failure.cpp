#include "properties/judge/failure.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <utility>

namespace lockstep {
namespace {

using Json = nlohmann::json;

// Formats the parts of an outcome that a Failure has, for the pipe from the child. Bytes that are
// not UTF-8 are replaced: an engine's message may contain any.
std::string to_line(const Outcome& outcome) {
  const Json json = {{"kind", name_of(outcome.kind)}, {"check", outcome.check},
                     {"step", outcome.step},          {"steps", outcome.steps},
                     {"request", outcome.request},    {"what", outcome.what},
                     {"finding", outcome.finding}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Reads what to_line() wrote. Only the own child writes it, so malformed text is a bug and may
// throw.
Failure from_line(const std::string& line) {
  const Json json = Json::parse(line);
  return {.kind = json["kind"],
          .check = json["check"],
          .step = json["step"],
          .steps = json["steps"],
          .request = json["request"],
          .what = json["what"],
          .finding = json["finding"]};
}

// Returns "FILE:LINE" before the last ": check failed", with the file's folder only, so that a name
// does not depend on where the project was built. Empty: no check failed.
std::string failed_check(const std::string& words) {
  const std::size_t end = words.rfind(": check failed");
  if (end == std::string::npos) return {};
  std::size_t begin = words.rfind('\n', end);
  begin = begin == std::string::npos ? 0 : begin + 1;
  const std::string place = words.substr(begin, end - begin);
  const std::size_t file = place.rfind('/');
  const std::size_t folder = file == std::string::npos ? file : place.rfind('/', file - 1);
  return folder == std::string::npos ? place : place.substr(folder + 1);
}

// A child that ended without a signal and without an answer called exit() itself.
Failure crash_of(const ChildAnswer& answer) {
  Failure failure{
      .kind = "crash", .check = failed_check(answer.last_words), .request = {}, .what = {}};
  if (failure.check.empty())
    failure.check = answer.signal.empty() ? "exit without an answer" : answer.signal;
  failure.what = answer.last_words.substr(0, answer.last_words.find_last_not_of('\n') + 1);
  return failure;
}

}  // namespace

Result<Failure> judge_in_child(const SavedCase& saved, const Judging& judging,
                               std::chrono::milliseconds time_limit) {
  FollowingChild child(time_limit);
  return judge_in_child(saved, judging, child);
}

Result<Failure> judge_in_child(const SavedCase& saved, const Judging& judging,
                               FollowingChild& child) {
  LS_ASSIGN_OR_RETURN(const auto answer, child.run([&] { return to_line(judging(saved)); }));
  if (answer.end == ChildAnswer::End::answered) return from_line(answer.text);
  if (answer.end == ChildAnswer::End::crashed) return crash_of(answer);
  return Failure{.kind = "hang",
                 .check = "time limit",
                 .request = {},
                 .what = fmt::format("no end after {} ms", child.time_limit().count())};
}

Failure failure_of(const Outcome& outcome) {
  return {.kind = std::string(name_of(outcome.kind)),
          .check = outcome.check,
          .step = outcome.step,
          .steps = outcome.steps,
          .request = outcome.request,
          .what = outcome.what,
          .finding = outcome.finding};
}

namespace {

// Replaces words that equal `name`, apart from punctuation after them, by "R". Only whole words:
// request r1 must not change r10.
std::string with_request_as_r(const std::string& text, std::string_view name) {
  std::string words;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    end = std::min(text.find(' ', begin), text.size() - 1) + 1;
    const std::string_view word = std::string_view(text).substr(begin, end - begin);
    const std::size_t letters = word.find_last_not_of(" :,.)") + 1;
    words += word.substr(0, letters) == name ? "R" : word.substr(0, letters);
    words += word.substr(letters);
  }
  return words;
}

}  // namespace

// Steps: keep the first clause; drop remarks in parentheses and the data parallel rank; replace
// request and numbers; join lists of numbers. Static: a regex is expensive to compile.
std::string bucket_of(std::string_view check, std::string_view request, std::string_view what) {
  static const std::regex kRemark(R"( ?\([^)]*\)|^data parallel rank \d+: )");
  static const std::regex kNumber(R"(\w*\d\w*)"), kNumbers(R"(N(,? N)+)");
  std::string clause(what.substr(0, what.find_first_of(";\n")));
  if (check.find('.') ==
      std::string_view::npos)  // a divergence: keep which rows differ, not what is stored there
    clause.resize(std::min(clause.find(" of layer"), clause.size()));
  if (!request.empty()) clause = with_request_as_r(clause, request);
  clause = std::regex_replace(std::regex_replace(clause, kRemark, ""), kNumber, "N");
  return fmt::format("{}: {}", check, std::regex_replace(clause, kNumbers, "N"));
}

// Equal checks of an engine's own failures ("engine.exception") have different causes.
static std::string cause_of(const Failure& failure) {
  return failure.check.starts_with("engine.")
             ? bucket_of(failure.check, failure.request, failure.what)
             : std::string();
}

bool Failure::same_as(const Failure& other) const {
  return kind == other.kind && check == other.check && finding == other.finding &&
         cause_of(*this) == cause_of(other);
}

nlohmann::ordered_json json_of(const Failure& failure) {
  return {{"kind", failure.kind},       {"check", failure.check}, {"step", failure.step},
          {"request", failure.request}, {"what", failure.what},   {"finding", failure.finding}};
}

// The kind of a run's verdict replaces that of the judge where both exist. "crash" and "hang" have
// none.
ExpectedVerdict expected_of(const Failure& failure) {
  ExpectedVerdict expected{.kind = failure.kind,
                           .step = {},
                           .check = failure.check,
                           .request = failure.request,
                           .cause = cause_of(failure)};
  if (failure.step >= 0) expected.step = failure.step;
  const auto begins = [&](std::string_view prefix) { return failure.check.starts_with(prefix); };
  if (failure.kind == "divergence")
    expected.kind = failure.check;
  else if (failure.kind == "stuck")
    expected.kind = name_of(Verdict::liveness);
  else if (failure.kind == "violation" && begins("engine."))
    expected.kind = name_of(Verdict::engine_failure);
  else if (failure.kind == "violation" && begins("conform."))
    expected.kind = name_of(Verdict::mismatch);
  else if (failure.kind == "violation" && begins("audit."))
    expected.kind = name_of(Verdict::audit);
  return expected;
}

Failure judge_here(const SavedCase& saved, const Judging& judging) {
  return failure_of(judging(saved));
}

StillFails fails_like(const Failure& first, JudgeCase judge_case) {
  return [first, judge_case = std::move(judge_case)](const SavedCase& saved,
                                                     std::int64_t) -> std::optional<std::int64_t> {
    const auto failure = judge_case(saved);
    if (!failure || !failure->same_as(first)) return std::nullopt;
    // With recorded decisions the schedule cannot change: the same request must fail with the same
    // message. Otherwise removing records would keep any failure of the same check.
    if (saved.decide == Decides::recording &&
        (failure->request != first.request ||
         bucket_of(failure->check, failure->request, failure->what) !=
             bucket_of(first.check, first.request, first.what)))
      return std::nullopt;
    return failure->steps;
  };
}

}  // namespace lockstep
