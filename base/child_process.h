// Runs work in child processes, so that a crash or a hang of the work is an outcome instead of the
// end of this process.
//
// Two kinds: FollowingChild and run_in_child() fork this process and run a function there.
// LineProcess starts another program, an engine's adapter, and exchanges lines with it.
//
// Invariants
// (1) Whatever a forked child does to its memory, the caller receives only the text of its answer.
// (2) No child is left after end(), a crash or a hang.
//
// REQUIRES: the caller has no other threads that hold locks, since fork() copies only the calling
// thread. An answer contains no NUL, which ends it on the pipe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace lockstep {

// Outcome of one piece of work.
struct ChildAnswer {
  enum class End : std::uint8_t { answered, crashed, timed_out };
  End end = End::answered;
  std::string text;        // returned by the work; incomplete unless answered
  std::string last_words;  // end of the child's standard output and error
  std::string signal;      // crashed: "SIGABRT"; empty: the child exited by itself
};

// Truncates `words` to its last kLastWordsBytes as soon as it holds twice as many. Between two
// calls it has at least the last kLastWordsBytes, and the cost per byte is constant.
inline constexpr std::size_t kLastWordsBytes = 2000;
void keep_last_words(std::string& words);
std::string signal_name(int signal);  // "SIGABRT"

// Returns how long the process was ready to run but had no processor, since its start
// (/proc/PID/schedstat, first thread). For a tree of processes the longest such time counts, since
// a command runs below a shell. Time limits subtract it: on a busy machine a slow child is not a
// hang. 0: unknown.
std::chrono::milliseconds time_without_processor(pid_t child);

// One child for many pieces of work. A fork costs more than judging most generated cases, so the
// child follows its parent: after an answer run() returns in both processes, and both reach the
// next run(), where the child works and the parent waits.
//
// The child therefore repeats everything that the parent does between two calls. Its state stays
// equal to the parent's as long as that code depends only on the answers.
//
// REQUIRES: between two calls, the caller's actions depend only on the answers. Output to files
// between two calls would be written twice.
class FollowingChild {
 public:
  explicit FollowingChild(std::chrono::milliseconds time_limit) : time_limit_(time_limit) {}
  FollowingChild(const FollowingChild&) = delete;
  ~FollowingChild() { end(); }

  std::chrono::milliseconds time_limit() const { return time_limit_; }
  // Runs `work` in the child and returns its answer in both processes. Forks the child if there is
  // none. A child that crashes or exceeds the time limit is gone afterwards; the next run() forks a
  // new one from the parent's state. An answer is text without '\0' and '\1'. In the child,
  // `last_words` is always empty. Errors: the system has no process or pipe left.
  Result<ChildAnswer> run(const std::function<std::string()>& work);
  // Extends the time limit, which then counts from here: for work that has many parts. REQUIRES:
  // called by the work of run().
  void beat() const;
  // Ends the child. Returns only in the parent; in the child it exits the process with status 0.
  void end();

 private:
  Result<void> start();
  bool listen(ChildAnswer& answer) const;

  const std::chrono::milliseconds time_limit_;
  pid_t child_ = -1;   // -1: no child, 0: this process is the child
  int line_fd_ = -1;   // socket to the other process: requests and answers
  int words_fd_ = -1;  // pipe: in the parent, what the child prints
};

// Runs `work` in a child that ends after it.
Result<ChildAnswer> run_in_child(const std::function<std::string()>& work,
                                 std::chrono::milliseconds time_limit);

// Another program that exchanges lines with this one. Its standard input and output are pipes; its
// standard error is kept for error messages.
//
// Invariants
// (1) No child is left after the destructor. The destructor closes the child's input, waits two
//     seconds for its exit, and then kills its process group.
// (2) No call blocks longer than its time limit plus the time in which the child had no processor,
//     whatever the child does.
//
// REQUIRES: one caller at a time. A fork of this process may use the child in its place if the two
// take turns; only the process that started the child ends it.

class LineProcess {
 public:
  // Starts `command`, a line for /bin/sh. Errors: the system has no process or pipe left. A command
  // that the shell does not find is not an error here: the first receive() reports `ended`.
  static Result<std::unique_ptr<LineProcess>> start(const std::string& command);
  LineProcess(const LineProcess&) = delete;
  ~LineProcess();

  enum class End : std::uint8_t { answered, ended, timed_out };
  // Writes `line`, which ends in a newline. `answered` means that the pipe accepted the bytes, not
  // that the child has read them.
  End send(std::string_view line, std::chrono::milliseconds time_limit);
  // Reads the child's next line, without its newline. The view is valid until the next call. A line
  // longer than kJsonTextBytesMax is returned cut, and the JSON reader then refuses it.
  End receive(std::string_view& line, std::chrono::milliseconds time_limit);

  // Closes the child's standard input. Nothing can be sent after that.
  void end_input();

  // Returns the last bytes of standard error, at most kLastWordsBytes, from a whole character on,
  // as printable UTF-8: a saved text must equal a repeated one.
  std::string last_words();
  // Returns how the child ended: "exit status 1", "SIGSEGV". Waits up to two seconds for the exit.
  // REQUIRES: a call returned `ended`.
  std::string how_it_ended();

 private:
  using Clock = std::chrono::steady_clock;
  LineProcess() = default;
  bool wait_for(int fd, short events, Clock::time_point until);
  void take_words();

  pid_t owner_ = -1;  // process that started the child; a fork of it only uses the pipes
  pid_t child_ = -1;
  int status_ = 0;
  bool reaped_ = false;  // status_ is final, child_ may have been reused
  int to_child_ = -1, from_child_ = -1, words_fd_ = -1;
  std::string buffer_;     // received and not yet returned
  std::size_t given_ = 0;  // leading bytes of it that the last line occupies
  std::string words_;      // standard error, as keep_last_words() leaves it
};

// Returns the last line of last_words(), which usually contains the reason.
std::string last_line(std::string_view words);
// Exit status of an adapter whose engine lacks a package. The last line of its standard error then
// names the package and the command that installs it (docs/protocols.md).
inline constexpr std::string_view kEngineNotReady = "exit status 78";

}  // namespace lockstep
