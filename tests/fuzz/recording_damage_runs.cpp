#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "base/check.h"
#include "base/child_process.h"
#include "properties/audit/audit.h"
#include "reference/plan/limits.h"
#include "sim/conform/conform.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/recording_damage.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

constexpr std::int64_t kRunsOfChild = 500;
constexpr std::chrono::minutes kTimeOfChild{3};

// A refusal is one line that begins with the file and one of its lines.
template <class T>
bool is_taken(const Result<T>& result, const std::string& path) {
  if (result) return true;
  const std::string& what = result.error().message;
  const bool has_place = what.starts_with(path + ":") && what.size() > path.size() + 1 &&
                         std::isdigit(static_cast<unsigned char>(what[path.size() + 1])) != 0;
  LS_CHECK(has_place && what.find('\n') == std::string::npos, "refused without a place: {}", what);
  return false;
}

// What `lockstep replay FILE --backend none` does.
Result<RunReport> replay_decisions(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader header = reader->header();
  const EngineConfig& engine = header.options.config;
  if (auto sound = check_limits(engine, header.groups, header.num_blocks); !sound)
    return fail(fmt::format("{}:1: {}", path, sound.error().message));
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (!plan) return fail(fmt::format("{}:1: {}", path, plan.error().message));
  LockstepConfig config;
  config.engine = engine;
  const AttentionBackend attention = attention_backend_for(*plan);
  config.backend = make_backend_config(engine, std::move(*plan), attention);
  config.connector.load_failure_policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  SessionParts parts;
  parts.clients = make_recording_workload(std::move(*reader));
  const auto session = Session::open(config, std::move(parts));
  if (!session) return fail(fmt::format("{}:1: {}", path, session.error().message));
  return (*session)->run();
}

// Where a child has come to; its parent sees it when the child is gone.
struct Progress {
  std::uint64_t seed = 0;
  DamageCounts counts;
};

class SharedProgress {
 public:
  SharedProgress()
      : memory_(mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0)) {
    LS_CHECK(memory_ != MAP_FAILED, "no shared memory");
    new (memory_) Progress;
  }
  ~SharedProgress() { munmap(memory_, sizeof(Progress)); }
  SharedProgress(const SharedProgress&) = delete;
  SharedProgress& operator=(const SharedProgress&) = delete;
  Progress& operator*() { return *static_cast<Progress*>(memory_); }
  Progress* operator->() { return static_cast<Progress*>(memory_); }

 private:
  void* memory_;
};

std::string recording_of(std::uint64_t seed) {
  SeededChoices choices(seed);
  return damaged_recording(choices);
}

// A number in a file must not cost memory without bound. Sanitizers reserve more than all of it.
void limit_memory() {
#if !defined(__SANITIZE_ADDRESS__)
  const rlimit limit{std::uint64_t{8} << 30, std::uint64_t{8} << 30};
  setrlimit(RLIMIT_AS, &limit);
#endif
}

// The line of a child's last output that describes the failure: equal for two crashes of one kind.
std::string kind_of(const ChildAnswer& answer) {
  if (answer.end == ChildAnswer::End::timed_out) return "takes too long";
  for (const char* mark : {"check failed", "runtime error", "SUMMARY", "what()"}) {
    const std::size_t at = answer.last_words.find(mark);
    if (at == std::string::npos) continue;
    const std::size_t begin = answer.last_words.rfind('\n', at) + 1;
    return answer.last_words.substr(begin, answer.last_words.find('\n', at) - begin);
  }
  return answer.signal + " " + answer.last_words;
}

}  // namespace

DamageOutcome judge_damaged(const std::string& recording) {
  const MemoryFile file(recording);
  DamageOutcome outcome;
  outcome.is_read = is_taken(read_recording(file.path()), file.path());
  const auto conformed = conform_recording(file.path());
  if (is_taken(conformed, file.path())) {
    outcome.conforms = !conformed->mismatch;
    outcome.parts = !outcome.conforms;
  }
  const auto audited = audit_recording(file.path());
  if (is_taken(audited, file.path())) {
    outcome.is_clean = audited->findings.empty();
    outcome.is_faulted = !outcome.is_clean;
  }
  outcome.is_replayed = is_taken(replay_decisions(file.path()), file.path());
  return outcome;
}

void DamageCounts::add(const DamageOutcome& outcome) {
  add(DamageCounts{.runs = 1,
                   .read = outcome.is_read,
                   .conforming = outcome.conforms,
                   .parting = outcome.parts,
                   .clean = outcome.is_clean,
                   .faulted = outcome.is_faulted,
                   .replayed = outcome.is_replayed});
}

void DamageCounts::add(const DamageCounts& counts) {
  runs += counts.runs;
  read += counts.read;
  conforming += counts.conforming;
  parting += counts.parting;
  clean += counts.clean;
  faulted += counts.faulted;
  replayed += counts.replayed;
}

DamageRuns run_damaged(std::uint64_t first_seed, std::int64_t runs) {
  DamageRuns total;
  std::set<std::string> kinds;
  SharedProgress progress;
  recording_of(first_seed);  // the sound recordings are read once, before the first fork
  const std::uint64_t end = first_seed + static_cast<std::uint64_t>(runs);
  for (std::uint64_t seed = first_seed; seed < end;) {
    const std::uint64_t last = std::min<std::uint64_t>(seed + kRunsOfChild, end);
    const auto work = [&]() -> std::string {
      limit_memory();
      for (; seed < last; ++seed) {
        progress->seed = seed;
        progress->counts.add(judge_damaged(recording_of(seed)));
      }
      return "done";
    };
    const auto answer = run_in_child(work, kTimeOfChild);
    LS_CHECK(answer.has_value(), "{}", answer.error().message);
    seed = last;
    if (answer->end == ChildAnswer::End::answered && answer->text == "done") continue;
    seed = progress->seed + 1;
    ++total.crashes;
    std::string kind = kind_of(*answer);
    // Up to the values, which differ from one to the next.
    const std::size_t values = kind.find("check failed");
    if (!kinds.insert(values == std::string::npos ? kind : kind.substr(0, values)).second) continue;
    total.report += fmt::format("seed {}: {}\n{}\n", seed - 1, kind, recording_of(seed - 1));
  }
  total.counts = progress->counts;
  return total;
}

}  // namespace lockstep
