// lockstep bisect CASE vllm-A..vllm-B: which release changes the verdict of a case, as the model
// decides?
// lockstep bisect CASE ENGINE GOOD..BAD: which commit changes it, as the engine itself decides?
//
// Between releases the model runs under each profile, and the policies that differ are switched one
// by one to name the cause. Between commits each candidate's source is exported and its scheduler
// runs.
//
// A binary search, so it assumes that the verdict changes once. If it changes several times, one of
// the changes is found, and a third verdict at the end of the range is reported.
//
// Not compared: anything after the first failing check of a case.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/child_process.h"
#include "base/result.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/failing_case.h"
#include "cli/options/decisions_option.h"
#include "cli/output/again.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "traces/importers/open_trace.h"

namespace lockstep {
namespace {

struct Commit {
  std::string hash;  // all digits
  std::string abbreviation;
  std::string subject;
};

namespace fs = std::filesystem;

constexpr std::int64_t kFirstSecond = 1'000'000'000;  // Unix time, in 2001
// Time limit for one line of git's output: a partial clone fetches objects on demand.
constexpr auto kGitLimit = std::chrono::minutes(10);

// Runs a shell command and returns the lines that it prints. Git's variables are unset: a hook that
// runs this program sets them to its own repository. Errors: an exit status other than 0, with the
// last line of standard error.
Result<std::vector<std::string>> lines_of(const std::string& command) {
  LS_ASSIGN_OR_RETURN(auto process,
                      LineProcess::start("unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE; " + command));
  process->end_input();
  std::vector<std::string> lines;
  LineProcess::End end;
  for (std::string_view line;
       (end = process->receive(line, kGitLimit)) == LineProcess::End::answered;)
    lines.emplace_back(line);
  if (end == LineProcess::End::timed_out) return fail("`{}` hangs", command);
  const std::string how = process->how_it_ended();
  if (how == "exit status 0") return lines;
  const std::string words = last_line(process->last_words());
  return fail(words.empty() ? fmt::format("`{}`: {}", command, how) : words);
}

std::string git(const std::string& repository, const std::string& words) {
  return fmt::format("git -C {} {}", shell_word(repository), words);
}

// Lists commits by `git log` with `words` as further arguments. The user's configuration (color,
// decoration, signatures, encoding) does not change the format.
Result<std::vector<Commit>> log_of(const std::string& repository, const std::string& words) {
  LS_ASSIGN_OR_RETURN(const auto lines,
                      lines_of(git(repository,
                                   "--no-pager log --no-color --no-decorate --no-show-signature "
                                   "--encoding=UTF-8 --format='%H %h %s' " +
                                       words)));
  std::vector<Commit> commits;
  for (const std::string& line : lines) {
    const std::size_t first = line.find(' ');
    const std::size_t second = line.find(' ', first + 1);
    if (second == std::string::npos) return fail("git log printed {}", line);
    commits.push_back({.hash = line.substr(0, first),
                       .abbreviation = line.substr(first + 1, second - first - 1),
                       .subject = line.substr(second + 1)});
  }
  return commits;
}

// Returns GOOD and every first-parent commit after it up to BAD, oldest first: a merged branch
// counts as its merge. Errors: git's, and a GOOD that is not an ancestor of BAD.
Result<std::vector<Commit>> commits_between(const std::string& repository, const std::string& good,
                                            const std::string& bad) {
  // ^{commit}: a tag stands for its commit, and a name of another object is refused here by its
  // name.
  for (const std::string& end : {good, bad}) {
    const std::string commit = shell_word(end + "^{commit}");
    if (auto known = lines_of(git(repository, "rev-parse --verify --end-of-options " + commit));
        !known)
      return fail("{}: {} is not a commit: {}", repository, end, known.error().message);
  }
  const std::string from = shell_word(good + "^{commit}");
  const std::string to = shell_word(bad + "^{commit}");
  if (!lines_of(git(repository,
                    fmt::format("merge-base --is-ancestor --end-of-options {} {}", from, to))))
    return fail("{}: {} is not an ancestor of {}", repository, good, bad);
  LS_ASSIGN_OR_RETURN(auto commits, log_of(repository, "-1 --end-of-options " + from));
  LS_ASSIGN_OR_RETURN(
      auto later,
      log_of(repository, fmt::format("--first-parent --reverse --end-of-options {}",
                                     shell_word(good + "^{commit}.." + bad + "^{commit}"))));
  if (later.empty()) return fail("{}: {} and {} are the same commit", repository, good, bad);
  commits.insert(commits.end(), later.begin(), later.end());
  return commits;
}

// Commits of a git repository, each exported into a temporary folder.
//
// Invariants
// (1) The repository is only read: its index, its work tree and its list of work trees do not
//     change.
// (2) The temporary folder is removed when the process ends, even by SIGKILL. A process in its own
//     session waits for that end and removes it.
// (3) One folder holds one commit at a time, so the engine's path is the same for all of them.
//
// Not exported: submodules.
class TemporaryExports {
 public:
  static Result<std::unique_ptr<TemporaryExports>> create() {
    std::unique_ptr<TemporaryExports> exports(new TemporaryExports);
    std::error_code error;
    std::string folder = (fs::temp_directory_path(error) / "lockstep-bisect.XXXXXX").string();
    if (error || ::mkdtemp(folder.data()) == nullptr)
      return fail("{}: cannot create a temporary folder; set TMPDIR", folder);
    exports->folder_ = std::move(folder);
    // An engine may still write while it ends, so the folder is removed a second time after a
    // second.
    const std::string remove = "rm -rf -- " + shell_word(exports->folder_);
    const std::string wait =
        fmt::format("cat >/dev/null; {} 2>/dev/null; sleep 1; {}", remove, remove);
    LS_ASSIGN_OR_RETURN(exports->remover_,
                        LineProcess::start("exec setsid sh -c " + shell_word(wait)));
    return exports;
  }

  TemporaryExports(const TemporaryExports&) = delete;
  ~TemporaryExports() {
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
  }

  // Replaces the files of the previous commit by those of this one, and returns their folder. Files
  // that do not differ keep their time stamps, so that what was compiled from them stays valid.
  Result<std::string> put(const std::string& repository, const Commit& commit) {
    const std::string folder = path("commit");
    const std::string in_folder = fmt::format(
        "of=$({2}) && mkdir -p {0} && cd {0} && export GIT_INDEX_FILE={1} && here() {{ git "
        "--git-dir=\"$of\" --work-tree=. \"$@\"; }} && ",
        shell_word(folder), shell_word(path("index")),
        git(repository, "rev-parse --absolute-git-dir"));
    // Python treats a compiled module as current if the size and modification second of its source
    // are unchanged. Two commits exported within a second could share a stale module, so the files
    // of each commit that differ get a second of their own.
    const std::string changed =
        exported_.empty() ? fmt::format("ls-tree -r -z --name-only {}", commit.hash)
                          : fmt::format("diff-tree -r -z --name-only --diff-filter=d {} {}",
                                        exported_, commit.hash);
    // read-tree writes the files that differ, clean removes the rest, touch sets the time stamps,
    // and update-index makes the index accept them.
    LS_RETURN_IF_ERROR(lines_of(
        in_folder +
        fmt::format("here read-tree --reset -u {} && here clean -ffdxq && here {} | xargs -0 -r "
                    "touch -chd @{} -- && {{ here update-index -q --refresh || true; }}",
                    commit.hash, changed, kFirstSecond + ++num_exported_)));
    exported_ = commit.hash;
    return folder;
  }

  std::string path(std::string_view name) const { return folder_ + "/" + std::string(name); }

 private:
  TemporaryExports() = default;

  std::string folder_;
  std::string exported_;                  // the previous commit; empty: none
  std::int64_t num_exported_ = 0;         // commits so far; makes their time stamps differ
  std::unique_ptr<LineProcess> remover_;  // removes the folder when its input ends
};

// Placeholder in an engine's command for the folder of a commit.
constexpr std::string_view kFolder = "{dir}";

struct BisectOptions {
  std::string file;
  std::vector<std::string> where;  // RANGE, or ENGINE and GOOD..BAD
  std::string repository;          // --repo
  ReportOptions reports;
  FailingCaseOptions judging;
};

// A release or a commit, and the case's verdict there.
struct Candidate {
  std::string name;
  std::string subject = {};             // first line of the commit message; empty for a release
  std::optional<Failure> failure = {};  // absent: not judged yet, or skipped
  std::string skipped = {};             // why the case cannot be judged here
};

// The state of the search. `good` and `bad` are indices of `candidates`, oldest first: the last
// known candidate with the verdict of the first, and the first known candidate with another
// verdict. Skipped candidates may remain between them.
//
// If the case fails only at one end, the compared verdict is whether it fails: one cause may have
// different symptoms in different releases. Otherwise the compared verdict is the failing check.
struct Bisection {
  std::vector<Candidate> candidates;
  std::size_t good = 0, bad = 0;
  std::int64_t judged = 0;

  bool changes() const { return !is_same(*candidates.back().failure); }
  // REQUIRES: both ends are judged.
  bool is_same(const Failure& failure) const {
    LS_CHECK(candidates.front().failure && candidates.back().failure, "an end has no verdict");
    const Failure& first = *candidates.front().failure;
    if (first.failed() != candidates.back().failure->failed())
      return first.failed() == failure.failed();
    return first.same_as(failure);
  }
};

// Judges the case at a candidate. An error means that the candidate cannot run it.
using JudgeAt = std::function<Result<Failure>(std::size_t)>;

// Judges one candidate and stores its verdict, or why it is skipped. An error in Lockstep's own
// code inside the engine's process is not a verdict on the engine, so it is a reason to skip.
// REQUIRES: the candidate has not been judged.
void judge_at(Bisection& found, std::size_t index, const JudgeAt& judge, Progress& progress) {
  Candidate& candidate = found.candidates[index];
  LS_CHECK(!candidate.failure && candidate.skipped.empty(), "{} has a verdict already",
           candidate.name);
  progress.at(++found.judged, candidate.name);
  Result<Failure> failure = judge(index);
  if (!failure)
    candidate.skipped = last_line(failure.error().message);
  else if (failure->kind == "harness")
    candidate.skipped = failure->what;
  else
    candidate.failure = std::move(*failure);
}

// Returns the candidate nearest to the middle of the open interval (good, bad) that is not skipped.
// Absent: none is left. A wrapped `middle - far` is above `bad` and fails the comparison.
std::optional<std::size_t> next_of(const Bisection& found) {
  const std::size_t middle = found.good + (found.bad - found.good) / 2;
  for (std::size_t far = 0; far < found.bad - found.good; ++far)
    for (const std::size_t at : {middle - far, middle + far})
      if (at > found.good && at < found.bad && found.candidates[at].skipped.empty()) return at;
  return std::nullopt;
}

// Narrows the interval to neighbours, except for skipped candidates between them. Both ends are
// judged first: if their verdicts are equal, no search follows. A stop signal leaves a valid, wider
// interval. Errors: an end of the range cannot be judged.
Result<void> search(Bisection& found, const JudgeAt& judge) {
  LS_CHECK(found.candidates.size() >= 2, "a range of {}", found.candidates.size());
  Progress progress("judging", 0);
  found.good = 0;
  found.bad = found.candidates.size() - 1;
  for (const std::size_t end : {found.good, found.bad}) {
    judge_at(found, end, judge, progress);
    const Candidate& candidate = found.candidates[end];
    if (!candidate.failure)
      return fail("{} cannot be checked: {}; choose a different end of the range", candidate.name,
                  candidate.skipped);
  }
  if (!found.changes()) return {};
  for (auto next = next_of(found); next && !stop_requested(); next = next_of(found)) {
    judge_at(found, *next, judge, progress);
    const Candidate& candidate = found.candidates[*next];
    if (!candidate.failure) continue;
    (found.is_same(*candidate.failure) ? found.good : found.bad) = *next;
  }
  return {};
}

std::string verdict_text(const Failure& failure) {
  if (!failure.failed()) return "agreed";
  std::string text = stable_line(failure.check, failure.step, failure.request, failure.what);
  if (failure.finding != 0) text += fmt::format(" (finding {})", failure.finding);
  return text;
}

// "1a2b3c4 Subject of the commit", or a release's name.
std::string name_text(const Candidate& candidate) {
  return candidate.subject.empty() ? candidate.name : candidate.name + " " + candidate.subject;
}

void print_found(const Bisection& found) {
  const Candidate& good = found.candidates[found.good];
  const Candidate& bad = found.candidates[found.bad];
  if (!found.changes()) {
    fmt::print("{} and {} agree: {}\n", good.name, bad.name, verdict_text(*bad.failure));
    return;
  }
  fmt::print("{}: {}\n  {}: {}\n  {}: {}\n",
             stop_requested() ? "Interrupted; the verdict changes here or earlier"
                              : "First with a different verdict",
             name_text(bad), good.name, verdict_text(*good.failure), bad.name,
             verdict_text(*bad.failure));
  const Candidate& last = found.candidates.back();
  if (!bad.failure->same_as(*last.failure))
    fmt::print("  {} has a third verdict: {}\n", last.name, verdict_text(*last.failure));
}

void print_skipped(const Bisection& found) {
  bool is_open = false;
  for (std::size_t i = 0; i < found.candidates.size(); ++i) {
    const Candidate& candidate = found.candidates[i];
    if (candidate.skipped.empty()) continue;
    fmt::print("Skipped: {}: {}\n", name_text(candidate), candidate.skipped);
    is_open |= i > found.good && i < found.bad;
  }
  // The verdict may have changed in a skipped candidate already.
  if (is_open && found.changes())
    fmt::print("The first may be a skipped one between {} and {}.\n",
               found.candidates[found.good].name, found.candidates[found.bad].name);
}

nlohmann::ordered_json json_of(const Candidate& candidate) {
  nlohmann::ordered_json json = {{"name", candidate.name}};
  if (!candidate.subject.empty()) json["subject"] = candidate.subject;
  if (candidate.failure) json["verdict"] = json_of(*candidate.failure);
  if (!candidate.skipped.empty()) json["skipped"] = candidate.skipped;
  return json;
}

nlohmann::ordered_json json_of(const Bisection& found) {
  nlohmann::ordered_json json = {{"candidates", found.candidates.size()},
                                 {"judged", found.judged},
                                 {"changes", found.changes()},
                                 {"before", json_of(found.candidates[found.good])},
                                 {"first", json_of(found.candidates[found.bad])},
                                 {"skipped", nlohmann::ordered_json::array()}};
  for (const Candidate& candidate : found.candidates)
    if (!candidate.skipped.empty()) json["skipped"].push_back(json_of(candidate));
  return json;
}

// Adds the result as one item, failed if the verdict changes, and returns the exit status.
int report_found(const BisectOptions& options, const Bisection& found, nlohmann::ordered_json json,
                 CommandReport& report) {
  ReportedItem item{.name = fmt::format("{}", fmt::join(options.where, " ")), .file = options.file};
  const Candidate& bad = found.candidates[found.bad];
  if (found.changes()) {
    item.kind = ItemKind::failed;
    item.check = "bisect";
    item.line = fmt::format("bisect: the verdict changes in {}: {}", name_text(bad),
                            verdict_text(*bad.failure));
    // A verdict that changes is the result; it is a failed item so that CI pages show it.
    item.again = report.again();
  }
  report.add(std::move(item));
  if (report.wants_json()) report.set_json(json_text(json));
  return found.changes() ? kExitDisagreed : kExitAgreed;
}

// A policy that changes the verdict by itself, and the verdict with it.
struct PolicyVerdict {
  const Policy* policy = nullptr;
  std::int64_t value = 0;
  std::string engine;
  Failure failure;
};

using JudgeEngine = std::function<Result<Failure>(const std::string& engine)>;

// Returns the policies that change the verdict of `from` when each is set, by itself, to its value
// in `to`. From good to bad it finds sufficient causes, from bad to good necessary ones. REQUIRES:
// `verdict` is that of `from`, one of the two neighbours that the search found.
std::vector<PolicyVerdict> policies_that_change(const Bisection& searched, const std::string& from,
                                                const std::string& to, const Failure& verdict,
                                                const JudgeEngine& judge) {
  std::vector<PolicyVerdict> found;
  const EngineProfile& base = engine_profile(from);
  const EngineProfile& other = engine_profile(to);
  for (const Policy* policy : differences(base, other)) {
    if (stop_requested()) break;
    const std::int64_t value = policy->get(other);
    const std::string& engine = with_policy(base, *policy, value).name;
    auto failure = judge(engine);
    if (failure && searched.is_same(*failure) != searched.is_same(verdict))
      found.push_back({policy, value, engine, std::move(*failure)});
  }
  return found;
}

nlohmann::ordered_json json_of(const std::vector<PolicyVerdict>& policies) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const PolicyVerdict& one : policies)
    json.push_back({{"policy", one.policy->name},
                    {"value", one.policy->word(one.value)},
                    {"engine", one.engine},
                    {"verdict", json_of(one.failure)}});
  return json;
}

void print_policies(const std::vector<PolicyVerdict>& policies, std::string_view how) {
  for (const PolicyVerdict& one : policies)
    fmt::print("  {} = {} {}: {}\n    {}\n    --engine {}\n", one.policy->name,
               one.policy->word(one.value), how, verdict_text(one.failure), one.policy->effect,
               one.engine);
}

// Searches a range of releases. The model decides in each of them; pages follow the case's own
// plan.
Result<int> bisect_releases(BisectOptions& options, const SavedCase& saved, CommandReport& report) {
  LS_ASSIGN_OR_RETURN(const auto releases, releases_in(options.where.front()));
  if (releases.size() < 2)
    return fail("{}: a range needs at least two releases", options.where.front());
  const JudgeEngine judge_engine = [&](const std::string& engine) {
    SavedCase of_engine = saved;
    of_engine.engine.engine = engine;
    // A saved case stores the value of the release that it was found in.
    of_engine.engine.num_hash_lookahead_tokens = kEngineHashLookahead;  // the release's own
    return failure_of(of_engine, options.judging);
  };
  Bisection found;
  for (const Release& release : releases) found.candidates.push_back({std::string(release.name)});
  LS_RETURN_IF_ERROR(
      search(found, [&](std::size_t at) { return judge_engine(found.candidates[at].name); }));
  print_found(found);
  nlohmann::ordered_json json = json_of(found);
  if (found.changes()) {
    const Candidate& good = found.candidates[found.good];
    const Candidate& bad = found.candidates[found.bad];
    const auto alone =
        policies_that_change(found, good.name, bad.name, *good.failure, judge_engine);
    json["policies"] = json_of(alone);
    print_policies(alone, "alone");
    if (alone.empty()) {
      fmt::print(
          "  No single policy explains it. Restoring any one of these changes the verdict of {}:\n",
          bad.name);
      const auto needed =
          policies_that_change(found, bad.name, good.name, *bad.failure, judge_engine);
      json["policies_needed"] = json_of(needed);
      print_policies(needed, "restored");
    }
  }
  print_skipped(found);
  return report_found(options, found, std::move(json), report);
}

struct GitRange {
  std::string engine;  // with {dir} for the folder of a commit
  std::string repository;
  std::string good, bad;
};

// Splits ENGINE and GOOD..BAD. ENGINE is "vllm:REPO", "sglang:REPO", or a command with {dir} and
// --repo. A revision must not start with a dot, since "GOOD...BAD" is git's symmetric difference.
Result<GitRange> git_range_of(const BisectOptions& options) {
  GitRange range;
  range.engine = options.where[0];
  range.repository = options.repository;
  const std::string& revisions = options.where[1];
  const std::size_t dots = revisions.find("..");
  if (dots != std::string::npos) {
    range.good = revisions.substr(0, dots);
    range.bad = revisions.substr(dots + 2);
  }
  if (range.good.empty() || range.bad.empty() || range.bad.starts_with('.'))
    return fail("{}: expected GOOD..BAD, two commits", revisions);
  for (const std::string_view adapter : {"vllm", "sglang"}) {
    if (range.engine != adapter && !range.engine.starts_with(std::string(adapter) + ":")) continue;
    const std::string folder = range.engine.substr(adapter.size());
    if (folder.size() > 1) range.repository = folder.substr(1);
    range.engine = fmt::format("{}:{}", adapter, kFolder);
  }
  if (range.engine.find(kFolder) == std::string::npos)
    return fail("{}: expected vllm:REPO, sglang:REPO, or a command with {} for a commit's folder",
                range.engine, kFolder);
  if (range.repository.empty())
    return fail("{}: name its git repository with --repo", range.engine);
  return range;
}

// Puts a folder in place of every {dir}, quoted if ENGINE is a command.
std::string engine_in(const GitRange& range, const std::string& folder) {
  std::string engine = range.engine;
  const bool is_command = !engine.starts_with("vllm:") && !engine.starts_with("sglang:");
  const std::string word = is_command ? shell_word(folder) : folder;
  for (std::size_t at = 0; (at = engine.find(kFolder, at)) != std::string::npos; at += word.size())
    engine.replace(at, kFolder.size(), word);
  return engine;
}

// Searches the commits of an engine. Each candidate runs as a new process from its exported source.
Result<int> bisect_history(BisectOptions& options, const SavedCase& saved, CommandReport& report) {
  LS_ASSIGN_OR_RETURN(const GitRange range, git_range_of(options));
  LS_ASSIGN_OR_RETURN(const auto commits, commits_between(range.repository, range.good, range.bad));
  LS_ASSIGN_OR_RETURN(const auto exports, TemporaryExports::create());
  // Python's compiled modules go to the temporary folder too, and are removed with it. All commits
  // share those of torch, which take longer to compile than the engine's.
  ::setenv("PYTHONPYCACHEPREFIX", exports->path("compiled").c_str(), 1);
  ::unsetenv("PYTHONDONTWRITEBYTECODE");
  // One process imports what all commits need except the engine itself, and forks for each of them.
  ::setenv("LOCKSTEP_WARM_ENGINES", exports->path("warm").c_str(), 0);
  Bisection found;
  for (const Commit& commit : commits)
    found.candidates.push_back({.name = commit.abbreviation, .subject = commit.subject});
  FailingCaseOptions judging = options.judging;
  const JudgeAt judge = [&](std::size_t at) -> Result<Failure> {
    LS_ASSIGN_OR_RETURN(const auto folder, exports->put(range.repository, commits[at]));
    judging.decisions.decisions = engine_in(range, folder);
    LS_RETURN_IF_ERROR(start_engines(judging));
    auto failure = failure_of(saved, judging);
    judging.engines = nullptr;  // ends the process, before its files go
    return failure;
  };
  LS_RETURN_IF_ERROR(search(found, judge));
  print_found(found);
  print_skipped(found);
  fmt::print("{} of {} tried.\n", counted(found.judged, "commit"), with_commas(commits.size()));
  nlohmann::ordered_json json = json_of(found);
  if (found.changes()) json["commit"] = commits[found.bad].hash;
  return report_found(options, found, std::move(json), report);
}

Result<int> bisect(BisectOptions& options, CommandReport& report) {
  watch_stop_signals();
  LS_ASSIGN_OR_RETURN(const auto format, detect_format(options.file));
  if (format == FileFormat::recording) options.judging.decide = "model";
  LS_ASSIGN_OR_RETURN(auto saved, load_case(options.file, options.judging));
  saved.decide = Decides::model;  // or an engine, but never recorded decisions
  LS_RETURN_IF_ERROR(start_workers(saved, options.judging));
  if (options.where.size() == 2) return bisect_history(options, saved, report);
  if (!options.repository.empty())
    return fail("--repo needs an ENGINE before GOOD..BAD: vllm, sglang, or a command with {dir}");
  return bisect_releases(options, saved, report);
}

}  // namespace

void add_bisect_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BisectOptions>();
  CLI::App* command = app.add_subcommand(
      "bisect", "Find the first release or commit of an engine that changes a case's verdict");
  command->add_option("CASE", options->file, "a saved case, or a recording")->required();
  command
      ->add_option("RANGE", options->where,
                   "vllm-A..vllm-B: releases, simulated by the model. Or ENGINE GOOD..BAD: commits "
                   "of vllm:REPO, sglang:REPO, or a command with {dir} and its --repo")
      ->required()
      ->expected(1, 2);
  command
      ->add_option("--repo", options->repository,
                   "git repository of ENGINE; {dir} in the command becomes a commit's folder")
      ->type_name("DIR");
  declare_backend(*command, options->judging);
  declare_engine_python(*command);
  declare_decisions_timeout(*command, options->judging.decisions.timeout_s);
  declare_reports(*command, options->reports, "the change and both verdicts as JSON");
  run_when_chosen(*command, options, exit_code, bisect);
}

}  // namespace lockstep
