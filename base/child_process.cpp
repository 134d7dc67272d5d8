#include "base/child_process.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>

#include "base/stop_signal.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Both ends of a pipe; closed when it goes.
class Pipe {
 public:
  Pipe() { open_ = ::pipe(ends_.data()) == 0; }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  bool is_open() const { return open_; }
  int read_end() const { return ends_[0]; }
  int write_end() const { return ends_[1]; }
  void close_end(std::size_t end) {
    if (ends_[end] >= 0) ::close(ends_[end]);
    ends_[end] = -1;
  }

 private:
  std::array<int, 2> ends_ = {-1, -1};
  bool open_ = false;
};

void write_all(int fd, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t wrote = ::write(fd, text.data() + at, text.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    at += static_cast<std::size_t>(wrote);
  }
}

// In the child; does not come back. What the work prints goes where the parent hears it.
[[noreturn]] void work_in_child(const std::function<std::string()>& work, Pipe& answer,
                                Pipe& words) {
  leave_stop_signals_to_parent();
  ::dup2(words.write_end(), STDOUT_FILENO);
  ::dup2(words.write_end(), STDERR_FILENO);
  answer.close_end(0);
  words.close_end(0);
  write_all(answer.write_end(), work());
  ::_exit(0);
}

// Reads both pipes until the child has closed them. False: it did not within the limit.
bool listen(pid_t child, int answer_fd, int words_fd, Clock::time_point until,
            ChildAnswer& answer) {
  std::array<pollfd, 2> ends = {{{answer_fd, POLLIN, 0}, {words_fd, POLLIN, 0}}};
  std::array<char, 4096> buffer;
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0) left += time_without_processor(child);
    if (left.count() <= 0) return false;
    const int ready = ::poll(ends.data(), ends.size(), static_cast<int>(left.count()));
    if (ready < 0 && errno != EINTR) return false;
    if (ready <= 0) continue;
    for (pollfd& end : ends) {
      if (end.fd < 0 || end.revents == 0) continue;
      const ssize_t got = ::read(end.fd, buffer.data(), buffer.size());
      std::string& text = end.fd == answer_fd ? answer.text : answer.last_words;
      if (got > 0) text.append(buffer.data(), static_cast<std::size_t>(got));
      if (got == 0) end.fd = -1;
    }
    keep_last_words(answer.last_words);
  }
  return true;
}

}  // namespace

void keep_last_words(std::string& words) {
  if (words.size() > 2 * kLastWordsBytes) words.erase(0, words.size() - kLastWordsBytes);
}

std::chrono::milliseconds time_without_processor(pid_t child) {
  std::ifstream own(fmt::format("/proc/{}/schedstat", child));
  std::int64_t on_processor_ns = 0, waiting_ns = 0;
  if (!(own >> on_processor_ns >> waiting_ns)) return {};
  auto longest = std::chrono::milliseconds(waiting_ns / 1'000'000);
  std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", child));
  for (pid_t one = 0; children >> one;) longest = std::max(longest, time_without_processor(one));
  return longest;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal) : fmt::format("SIG{}", name);
}

Result<ChildAnswer> run_in_child(const std::function<std::string()>& work,
                                 std::chrono::milliseconds time_limit) {
  Pipe answer_pipe;
  Pipe words_pipe;
  if (!answer_pipe.is_open() || !words_pipe.is_open())
    return fail(fmt::format("no pipe to a child process: {}", std::strerror(errno)));
  const pid_t child = ::fork();
  if (child < 0) return fail(fmt::format("no child process: {}", std::strerror(errno)));
  if (child == 0) work_in_child(work, answer_pipe, words_pipe);
  answer_pipe.close_end(1);
  words_pipe.close_end(1);

  ChildAnswer answer;
  const bool ended = listen(child, answer_pipe.read_end(), words_pipe.read_end(),
                            Clock::now() + time_limit, answer);
  if (!ended) ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (!ended) {
    answer.end = ChildAnswer::End::timed_out;
  } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    answer.end = ChildAnswer::End::crashed;
    if (WIFSIGNALED(status)) answer.signal = signal_name(WTERMSIG(status));
  }
  return answer;
}

}  // namespace lockstep
