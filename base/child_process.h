// Work done in a child process, so that a crash or a hang of it is an answer and not the end.
//
// Invariants
// (1) Whatever the child does to its memory, the caller sees only the text that it answers.
// (2) After end(), a crash or a hang no child is left.
//
// REQUIRES: a caller without other threads that hold locks; the child is a fork of this process. An
// answer has no NUL.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace lockstep {

struct ChildAnswer {
  enum class End : std::uint8_t { answered, crashed, timed_out };
  End end = End::answered;
  std::string text;        // what the work returned
  std::string last_words;  // of a child that crashed: the end of what it printed
  std::string signal;      // of a child that crashed: "SIGABRT"; empty: it left by itself
};

// Keeps the end of what a child prints: at least the last kLastWordsBytes, at most twice as many.
inline constexpr std::size_t kLastWordsBytes = 2000;
void keep_last_words(std::string& words);
std::string signal_name(int signal);  // "SIGABRT"

// How long the process, or the one of its descendants that waited longest (a command runs behind a
// shell), was ready to run and had no processor, since it began (first threads;
// /proc/PID/schedstat). 0: not known. Time limits leave it out: a busy machine makes no hang.
std::chrono::milliseconds time_without_processor(pid_t child);

// One child for many pieces of work. A fork costs more than most generated cases, so the child
// follows its parent: after its answer run() returns in both processes, and both reach the next
// run(), where the child works and the parent waits.
//
// REQUIRES: between two calls, the caller does what the answers alone decide.
class FollowingChild {
 public:
  explicit FollowingChild(std::chrono::milliseconds time_limit) : time_limit_(time_limit) {}
  FollowingChild(const FollowingChild&) = delete;
  ~FollowingChild() { end(); }

  std::chrono::milliseconds time_limit() const { return time_limit_; }
  // Forks a child if none lives. The time limit is for this piece of work. Errors: no process or
  // pipe to be had.
  Result<ChildAnswer> run(const std::function<std::string()>& work);
  // Returns only in the parent. The next run() forks again.
  void end();

 private:
  Result<void> start();
  bool listen(ChildAnswer& answer) const;

  const std::chrono::milliseconds time_limit_;
  pid_t child_ = -1;  // -1: none lives, 0: this process is the child
  int line_fd_ = -1;  // to the other process
  int words_fd_ = -1;
};

// The same with a child for this work only.
Result<ChildAnswer> run_in_child(const std::function<std::string()>& work,
                                 std::chrono::milliseconds time_limit);

// A child process that exchanges lines: its standard input and output are pipes, its standard error
// is kept for error messages.
//
// Invariants
// (1) After the destructor no child is left: its input ends, and it is killed if it does not exit.
// (2) No call blocks longer than its time limit and the time in which the child had no processor,
//     whatever the child does.
//
// REQUIRES: one caller at a time. A fork of this process may use the child in its place if the
// two take turns; only the process that started it ends it.

class LineProcess {
 public:
  // `command` is a line for /bin/sh. Errors: no process or pipe to be had. That a command is not
  // found shows in its first answer: it has ended.
  static Result<std::unique_ptr<LineProcess>> start(const std::string& command);
  LineProcess(const LineProcess&) = delete;
  ~LineProcess();

  enum class End : std::uint8_t { answered, ended, timed_out };
  // `line` ends in a newline. Not answered: it is not said to have been read.
  End send(std::string_view line, std::chrono::milliseconds time_limit);
  // The next line of the child, without its newline; stays until the next call.
  End receive(std::string_view& line, std::chrono::milliseconds time_limit);

  // Ends its standard input; nothing can be sent after that.
  void end_input();

  // The end of what it wrote to standard error so far, at most 2,000 bytes.
  std::string last_words();
  // How it ended: "exit status 1", "SIGSEGV". REQUIRES: a call said `ended`.
  std::string how_it_ended();

 private:
  using Clock = std::chrono::steady_clock;
  LineProcess() = default;
  bool wait_for(int fd, short events, Clock::time_point until);
  void take_words();

  pid_t owner_ = -1;  // the process that started it
  pid_t child_ = -1;
  int status_ = 0;
  bool reaped_ = false;
  int to_child_ = -1, from_child_ = -1, words_fd_ = -1;
  std::string buffer_;     // received and not yet returned
  std::size_t given_ = 0;  // of it, with the last line
  std::string words_;
};

// Of last_words(): the last line, which mostly has the reason.
std::string last_line(std::string_view words);
// How an engine ends that lacks a package: the last line of its standard error names the package
// and what to do (docs/protocols.md).
inline constexpr std::string_view kEngineNotReady = "exit status 78";

}  // namespace lockstep
