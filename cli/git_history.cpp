#include "cli/git_history.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cli/output/again.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFirstSecond = 1'000'000'000;  // 2001
constexpr auto kGitLimit = std::chrono::minutes(10);

// The lines that a shell command prints. A hook's environment would name another repository.
Result<std::vector<std::string>> lines_of(const std::string& command) {
  LS_ASSIGN_OR_RETURN(auto process,
                      LineProcess::start("unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE; " + command));
  process->end_input();
  std::vector<std::string> lines;
  LineProcess::End end;
  for (std::string_view line;
       (end = process->receive(line, kGitLimit)) == LineProcess::End::answered;)
    lines.emplace_back(line);
  if (end == LineProcess::End::timed_out) return fail(fmt::format("`{}` hangs", command));
  const std::string how = process->how_it_ended();
  if (how == "exit status 0") return lines;
  const std::string words = last_line(process->last_words());
  return fail(words.empty() ? fmt::format("`{}`: {}", command, how) : words);
}

std::string git(const std::string& repository, const std::string& words) {
  return fmt::format("git -C {} {}", shell_word(repository), words);
}

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
    if (second == std::string::npos) return fail(fmt::format("git log printed {}", line));
    commits.push_back({.hash = line.substr(0, first),
                       .abbreviation = line.substr(first + 1, second - first - 1),
                       .subject = line.substr(second + 1)});
  }
  return commits;
}

}  // namespace

Result<std::vector<Commit>> commits_between(const std::string& repository, const std::string& good,
                                            const std::string& bad) {
  for (const std::string& end : {good, bad}) {
    const std::string commit = shell_word(end + "^{commit}");
    if (auto known = lines_of(git(repository, "rev-parse --verify --end-of-options " + commit));
        !known)
      return fail(
          fmt::format("{}: {} names no commit: {}", repository, end, known.error().message));
  }
  const std::string from = shell_word(good + "^{commit}");
  const std::string to = shell_word(bad + "^{commit}");
  if (!lines_of(git(repository,
                    fmt::format("merge-base --is-ancestor --end-of-options {} {}", from, to))))
    return fail(fmt::format("{}: {} is not an ancestor of {}", repository, good, bad));
  LS_ASSIGN_OR_RETURN(auto commits, log_of(repository, "-1 --end-of-options " + from));
  LS_ASSIGN_OR_RETURN(
      auto later,
      log_of(repository, fmt::format("--first-parent --reverse --end-of-options {}",
                                     shell_word(good + "^{commit}.." + bad + "^{commit}"))));
  if (later.empty())
    return fail(fmt::format("{}: {} and {} are the same commit", repository, good, bad));
  commits.insert(commits.end(), later.begin(), later.end());
  return commits;
}

Result<std::unique_ptr<TemporaryExports>> TemporaryExports::create() {
  std::unique_ptr<TemporaryExports> exports(new TemporaryExports);
  std::error_code error;
  std::string folder = (fs::temp_directory_path(error) / "lockstep-bisect.XXXXXX").string();
  if (error || ::mkdtemp(folder.data()) == nullptr)
    return fail(fmt::format("{}: cannot make a temporary folder; set TMPDIR", folder));
  exports->folder_ = std::move(folder);
  // An engine may still write as it ends: the second attempt removes that too.
  const std::string remove = "rm -rf -- " + shell_word(exports->folder_);
  const std::string wait =
      fmt::format("cat >/dev/null; {} 2>/dev/null; sleep 1; {}", remove, remove);
  LS_ASSIGN_OR_RETURN(exports->remover_,
                      LineProcess::start("exec setsid sh -c " + shell_word(wait)));
  return exports;
}

TemporaryExports::~TemporaryExports() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

Result<std::string> TemporaryExports::put(const std::string& repository, const Commit& commit) {
  const std::string folder = path("commit");
  const std::string in_folder = fmt::format(
      "of=$({2}) && mkdir -p {0} && cd {0} && export GIT_INDEX_FILE={1} && "
      "here() {{ git --git-dir=\"$of\" --work-tree=. \"$@\"; }} && ",
      shell_word(folder), shell_word(path("index")),
      git(repository, "rev-parse --absolute-git-dir"));
  // Python takes a compiled module for current by the second and the size of its source: the files
  // that differ get a second of their own.
  const std::string changed = exported_.empty()
                                  ? fmt::format("ls-tree -r -z --name-only {}", commit.hash)
                                  : fmt::format("diff-tree -r -z --name-only --diff-filter=d {} {}",
                                                exported_, commit.hash);
  LS_RETURN_IF_ERROR(lines_of(
      in_folder +
      fmt::format("here read-tree --reset -u {} && here clean -ffdxq && here {} | xargs -0 -r "
                  "touch -chd @{} -- && {{ here update-index -q --refresh || true; }}",
                  commit.hash, changed, kFirstSecond + ++num_exported_)));
  exported_ = commit.hash;
  return folder;
}

}  // namespace lockstep
