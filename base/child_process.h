// Work done in a child process, so that a crash or a hang of it is an answer and not the end.
//
// (1) Whatever the child does to its memory, nothing of it is seen here but the text it answers.
// (2) After the call no child is left.
//
// REQUIRES: a caller without other threads that hold locks; the child is a fork of this process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>

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

// Errors: no process or pipe to be had.
Result<ChildAnswer> run_in_child(const std::function<std::string()>& work,
                                 std::chrono::milliseconds time_limit);

}  // namespace lockstep
