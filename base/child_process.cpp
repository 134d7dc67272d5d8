#include "base/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <utility>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/stop_signal.h"

extern char** environ;

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Marks a complete answer. A child that crashes in the middle of its answer leaves text without it.
constexpr char kEndOfAnswer = '\0';
// Of beat(), before the answer.
constexpr char kBeat = '\1';

void close_fd(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

// Opens a pipe that no other child inherits: an inherited write end would hide the end of the file.
// posix_spawn() duplicates the child's own ends, and duplicates are inherited.
bool open_pipe(std::array<int, 2>& ends) { return ::pipe2(ends.data(), O_CLOEXEC) == 0; }

// Writes all of `text`, or stops at the first error. The reader notices the missing rest.
void write_all(int fd, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t wrote = ::write(fd, text.data() + at, text.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    at += static_cast<std::size_t>(wrote);
  }
}

}  // namespace

// Twice the limit, so that erase() runs once per kLastWordsBytes and not once per read.
void keep_last_words(std::string& words) {
  if (words.size() > 2 * kLastWordsBytes) words.erase(0, words.size() - kLastWordsBytes);
}

// Work that ends within this time does without /proc.
constexpr std::chrono::milliseconds kAtOnce(20);

std::chrono::milliseconds time_without_processor(pid_t child) {
  // Fields of schedstat, in nanoseconds: time on a processor, time in the run queue, number of
  // slices.
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

Result<void> FollowingChild::start() {
  std::array<int, 2> line{-1, -1}, words{-1, -1};
  // The parent detects a crash by the closed ends of the child. Another child that inherited them
  // would keep them open, so forks are serialized until the parent has closed its copies.
  static std::mutex one_fork;
  const std::scoped_lock held(one_fork);
  const bool open =
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, line.data()) == 0 && open_pipe(words);
  if (open) child_ = ::fork();
  const std::string why = child_ < 0 ? std::strerror(errno) : "";
  const std::size_t own = child_ == 0 ? 1 : 0;  // end of each
  line_fd_ = std::exchange(line[own], -1);
  words_fd_ = std::exchange(words[own], -1);
  for (auto* ends : {&line, &words})
    for (int& fd : *ends) close_fd(fd);
  if (child_ < 0) end();
  if (child_ < 0) return fail("cannot start a child process: {}", why);
  if (child_ > 0) return {};
  // From here on, in the child: what the work prints goes to the parent.
  leave_stop_signals_to_parent();
  ::dup2(words_fd_, STDOUT_FILENO);
  ::dup2(words_fd_, STDERR_FILENO);
  close_fd(words_fd_);
  return {};
}

// Reads the answer and the child's output until the answer is complete or the child has closed both
// ends. False: neither happened within the time limit. REQUIRES: called by the parent.
bool FollowingChild::listen(ChildAnswer& answer) const {
  auto until = Clock::now() + time_limit_;
  // Only time lost during this piece of work extends the limit. /proc is read only for work that
  // does not end at once.
  std::optional<std::chrono::milliseconds> lost_before;
  std::array<pollfd, 2> ends = {{{words_fd_, POLLIN, 0}, {line_fd_, POLLIN, 0}}};
  std::array<char, 4096> buffer;
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0 && lost_before) left += time_without_processor(child_) - *lost_before;
    if (left.count() <= 0) return false;
    if (!lost_before) left = std::min(left, kAtOnce);
    const int ready = ::poll(ends.data(), ends.size(), static_cast<int>(left.count()));
    // A signal that interrupts poll() is not a failure of the child.
    if (ready < 0 && errno != EINTR) return false;
    if (ready == 0 && !lost_before) lost_before = time_without_processor(child_);
    if (ready <= 0) continue;
    for (pollfd& end : ends) {
      if (end.fd < 0 || end.revents == 0) continue;
      const ssize_t got = ::read(end.fd, buffer.data(), buffer.size());
      std::string& text = end.fd == line_fd_ ? answer.text : answer.last_words;
      if (got > 0) text.append(buffer.data(), static_cast<std::size_t>(got));
      if (std::erase(answer.text, kBeat) > 0) {
        until = Clock::now() + time_limit_;
        lost_before.reset();
        if (stop_requested()) return false;
      }
      // A socket whose peer was killed with unread data reports ECONNRESET instead of its end.
      if (got == 0 || (got < 0 && errno == ECONNRESET)) end.fd = -1;
    }
    keep_last_words(answer.last_words);
    if (answer.text.ends_with(kEndOfAnswer)) return true;
  }
  return true;
}

Result<ChildAnswer> FollowingChild::run(const std::function<std::string()>& work) {
  if (child_ > 0 && stop_requested()) end();  // the child does not see the signal
  if (child_ < 0) LS_RETURN_IF_ERROR(start());
  ChildAnswer answer;
  char next = 0;
  if (child_ == 0) {
    // The child: waits for its turn. The parent's end is closed if the parent has ended.
    if (::read(line_fd_, &next, 1) != 1) ::_exit(0);
    answer.text = work();
    write_all(line_fd_, answer.text + kEndOfAnswer);
    return answer;
  }
  // The byte starts the child's work. A child that is already gone shows as a closed end in
  // listen().
  (void)::send(line_fd_, &next, 1, MSG_NOSIGNAL);
  if (!listen(answer)) {
    answer.end = ChildAnswer::End::timed_out;
  } else if (answer.text.ends_with(kEndOfAnswer)) {
    answer.text.pop_back();
    return answer;
  } else {
    // Both ends are closed without a complete answer: the child is dead or about to be.
    answer.end = ChildAnswer::End::crashed;
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) continue;
    if (WIFSIGNALED(status)) answer.signal = signal_name(WTERMSIG(status));
    child_ = -1;
  }
  end();
  return answer;
}

void FollowingChild::beat() const { write_all(line_fd_, std::string(1, kBeat)); }

// _exit() in the child: the parent owns the buffers and temporary files that atexit handlers would
// flush or remove.
void FollowingChild::end() {
  if (child_ == 0) ::_exit(0);
  if (child_ > 0) {
    ::kill(child_, SIGKILL);
    while (::waitpid(child_, nullptr, 0) < 0 && errno == EINTR) continue;
  }
  child_ = -1;
  close_fd(line_fd_);
  close_fd(words_fd_);
}

Result<ChildAnswer> run_in_child(const std::function<std::string()>& work,
                                 std::chrono::milliseconds time_limit) {
  return FollowingChild(time_limit).run(work);
}

namespace {

using namespace std::chrono_literals;

// Time for an engine to shut down after its input has ended, before it is killed.
constexpr auto kGraceOnEnd = 2000ms;

// `status`: of waitpid(), and final.
std::string ended_as(int status) {
  if (WIFEXITED(status)) return fmt::format("exit status {}", WEXITSTATUS(status));
  return signal_name(WTERMSIG(status));
}

}  // namespace

Result<std::unique_ptr<LineProcess>> LineProcess::start(const std::string& command) {
  // A write to a child that has ended must return EPIPE instead of killing this process.
  static const auto ignored = std::signal(SIGPIPE, SIG_IGN);
  (void)ignored;
  std::array<int, 2> in{-1, -1}, out{-1, -1}, words{-1, -1};
  const auto close_all = [&] {
    for (auto* ends : {&in, &out, &words})
      for (int& fd : *ends) close_fd(fd);
  };
  if (!open_pipe(in) || !open_pipe(out) || !open_pipe(words)) {
    const std::string why = std::strerror(errno);
    close_all();
    return fail("cannot create a pipe to `{}`: {}", command, why);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, words[1], STDERR_FILENO);
  // A new process group, so that a kill reaches everything that the shell starts. SIGPIPE has its
  // default action again, as programs expect.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t defaults;
  sigemptyset(&defaults);
  for (const int signal : {SIGPIPE, SIGXFSZ}) sigaddset(&defaults, signal);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  std::string line = command;
  std::array<char*, 4> arguments{const_cast<char*>("sh"), const_cast<char*>("-c"), line.data(),
                                 nullptr};
  pid_t child = -1;
  const int error =
      ::posix_spawn(&child, "/bin/sh", &actions, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    close_all();
    return fail("`{}` does not start: {}", command, std::strerror(error));
  }
  std::unique_ptr<LineProcess> started(new LineProcess);
  started->owner_ = ::getpid();
  started->child_ = child;
  add_group_to_kill(child);
  started->to_child_ = std::exchange(in[1], -1);
  started->from_child_ = std::exchange(out[0], -1);
  started->words_fd_ = std::exchange(words[0], -1);
  close_all();
  // All waiting happens in wait_for(), which has a time limit and drains standard error.
  for (const int fd : {started->to_child_, started->from_child_, started->words_fd_})
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
  return started;
}

LineProcess::~LineProcess() {
  // The child exits at the end of its input.
  close_fd(to_child_);
  if (::getpid() == owner_ && !reaped_) {
    // Drains standard error while it waits: a child that writes a long report on exit would block
    // on a full pipe.
    const auto until = Clock::now() + kGraceOnEnd;
    while (::waitpid(child_, &status_, WNOHANG) == 0) {
      if (Clock::now() > until) {
        ::kill(-child_, SIGKILL);
        ::waitpid(child_, &status_, 0);
        break;
      }
      take_words();
      ::poll(nullptr, 0, 1);
    }
  }
  // Only after the child is gone: its group id may be reused from now on.
  if (::getpid() == owner_) remove_group_to_kill(child_);
  close_fd(from_child_);
  close_fd(words_fd_);
}

// Waits until `fd` is ready; false: the time limit has passed. Meanwhile it reads the child's
// standard error, so that the child never blocks on a full pipe. After the first second, time in
// which the child had no processor is added to the limit: reading /proc costs more than most
// replies take.
bool LineProcess::wait_for(int fd, short events, Clock::time_point until) {
  std::optional<std::chrono::milliseconds> before;
  for (;;) {
    const auto lost = before ? std::max(time_without_processor(child_) - *before, 0ms) : 0ms;
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until + lost - Clock::now());
    if (left.count() < 0) return false;
    if (!before) left = std::min<std::chrono::milliseconds>(left, 1s);
    std::array<pollfd, 2> ends{{{fd, events, 0}, {words_fd_, POLLIN, 0}}};
    const int ready = ::poll(ends.data(), ends.size(), static_cast<int>(left.count()) + 1);
    if (ready < 0 && errno != EINTR) return false;
    if (ready <= 0 && !before) before = time_without_processor(child_);
    if (ready <= 0) continue;
    if (ends[1].revents != 0) take_words();
    if (ends[0].revents != 0) return true;
  }
}

// Reads what is there without waiting. The end of the file closes the descriptor; poll() ignores
// -1.
void LineProcess::take_words() {
  std::array<char, 4096> chunk;
  for (;;) {
    const ssize_t got = words_fd_ < 0 ? 0 : ::read(words_fd_, chunk.data(), chunk.size());
    if (got == 0) close_fd(words_fd_);
    if (got <= 0) return;
    words_.append(chunk.data(), static_cast<std::size_t>(got));
    keep_last_words(words_);
  }
}

LineProcess::End LineProcess::send(std::string_view line, std::chrono::milliseconds time_limit) {
  const auto until = Clock::now() + time_limit;
  while (!line.empty()) {
    const ssize_t wrote = ::write(to_child_, line.data(), line.size());
    if (wrote > 0) {
      line.remove_prefix(static_cast<std::size_t>(wrote));
    } else if (errno == EAGAIN) {
      if (!wait_for(to_child_, POLLOUT, until)) return End::timed_out;
    } else if (errno != EINTR) {
      return End::ended;
    }
  }
  return End::answered;
}

// Consumes the previous line first, which is why it is valid until this call and not longer.
LineProcess::End LineProcess::receive(std::string_view& line,
                                      std::chrono::milliseconds time_limit) {
  const auto until = Clock::now() + time_limit;
  buffer_.erase(0, given_);
  given_ = 0;
  std::size_t looked_at = 0;
  for (;;) {
    const std::size_t end = buffer_.find('\n', looked_at);
    if (end != std::string::npos) {
      line = std::string_view(buffer_).substr(0, end);
      given_ = end + 1;
      return End::answered;
    }
    looked_at = buffer_.size();
    // Longer than any record: stops buffering. The JSON reader reports the length.
    if (looked_at > kJsonTextBytesMax) {
      line = buffer_;
      given_ = looked_at;
      return End::answered;
    }
    std::array<char, 65536> chunk;
    const ssize_t got = ::read(from_child_, chunk.data(), chunk.size());
    if (got > 0) {
      buffer_.append(chunk.data(), static_cast<std::size_t>(got));
    } else if (got == 0) {
      return End::ended;
    } else if (errno == EAGAIN) {
      if (!wait_for(from_child_, POLLIN, until)) return End::timed_out;
    } else if (errno != EINTR) {
      return End::ended;
    }
  }
}

void LineProcess::end_input() { close_fd(to_child_); }

// Other bytes become '?'.
std::string LineProcess::last_words() {
  take_words();
  std::string_view words = words_;
  if (words.size() > kLastWordsBytes) {
    words.remove_prefix(words.size() - kLastWordsBytes);
    for (int rest = 0; rest < 3 && (words.front() & 0xC0) == 0x80; ++rest) words.remove_prefix(1);
  }
  std::string text;
  while (!words.empty()) {
    const std::size_t length = std::max<std::size_t>(utf8_length(words), 1);
    const std::string_view character = words.substr(0, length);
    const bool is_kept = length > 1 || character == "\n" || character == "\t" ||
                         (character >= " " && character <= "~");
    text += is_kept ? character : "?";
    words.remove_prefix(length);
  }
  return text;
}

std::string LineProcess::how_it_ended() {
  // Only the parent of a process can wait for it, and a fork is not the parent.
  if (::getpid() != owner_) return "it has ended";
  const auto until = Clock::now() + kGraceOnEnd;
  while (!reaped_ && Clock::now() < until) {
    reaped_ = ::waitpid(child_, &status_, WNOHANG) == child_;
    if (!reaped_) ::poll(nullptr, 0, 1);
  }
  return reaped_ ? ended_as(status_) : "it has closed its standard output";
}

std::string last_line(std::string_view words) {
  while (words.ends_with('\n')) words.remove_suffix(1);
  return std::string(words.substr(words.rfind('\n') + 1));
}

}  // namespace lockstep
