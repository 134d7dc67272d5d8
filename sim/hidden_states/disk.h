// A disk in virtual time: writes take a while and are visible while in progress; they fail, and a
// failed write may leave a part; renames take a while and also fail.
//
// Invariants
// (1) Its behaviour depends only on the seed and its calls, in order.
// (2) read() shows what any observer would see at that moment: of a write in progress, the part
//     that is written. A rename is atomic.
// (3) Every write and every rename completes once. A failed write leaves a part of its bytes (a
//     torn write), or nothing; a failed rename changes nothing.
// (4) At most one write per file is in progress.
//
// Not simulated: folders, space, a crash of the machine, a disk that reports false success.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/seeded_random.h"

namespace lockstep {

struct DiskOptions {
  std::uint64_t seed = 0;
  std::int64_t delay_ns_min = 100'000;
  std::int64_t delay_ns_max = 2'000'000;
  std::int32_t fail_percent = 0;   // of writes and of renames
  std::int32_t torn_percent = 50;  // of failed writes leave a part
  bool operator==(const DiskOptions&) const = default;
};

enum class DiskTicket : std::uint64_t {};

struct DiskCompletion {
  DiskTicket ticket{};
  bool is_done = false;  // otherwise it failed
};

struct DiskCounts {
  std::int64_t writes = 0;
  std::int64_t writes_failed = 0;
  std::int64_t writes_torn = 0;  // of the failed ones
  std::int64_t renames = 0;
  std::int64_t renames_failed = 0;
};

class Disk {
 public:
  explicit Disk(const DiskOptions& options) : options_(options), random_(options.seed) {}

  // Empties the file, then fills it with `bytes` over time. REQUIRES: no write of it is in
  // progress; times never decrease, over all calls.
  DiskTicket write(std::int64_t now_ns, const std::string& path, std::vector<std::uint8_t> bytes);
  // `to` is replaced. REQUIRES: `from` exists when it is carried out.
  DiskTicket rename(std::int64_t now_ns, const std::string& from, const std::string& to);

  // Removes it at once. REQUIRES: it exists; no write or rename of it is in progress.
  void remove(const std::string& path);

  // The next operation completed by then; absent: none.
  std::optional<DiskCompletion> complete(std::int64_t now_ns);
  std::optional<std::int64_t> next_due_ns() const;

  // What is there at that moment; none: no such file.
  std::optional<std::vector<std::uint8_t>> read(std::int64_t now_ns, const std::string& path) const;
  std::vector<std::string> paths() const;
  const DiskCounts& counts() const { return counts_; }

 private:
  struct File {
    std::vector<std::uint8_t> bytes;  // that will be there
    std::int64_t begin_ns = 0;        // of the write; bytes appear evenly until end_ns
    std::int64_t end_ns = 0;
  };
  struct UnderWay {
    DiskTicket ticket{};
    bool is_done = false;
    std::string path;
    std::string renamed_to;     // empty: a write
    std::size_t num_bytes = 0;  // that stay
  };
  std::int64_t end_ns(std::int64_t now_ns);

  const DiskOptions options_;
  SeededRandom random_;
  std::map<std::string, File> files_;
  std::multimap<std::int64_t, UnderWay> under_way_;
  std::uint64_t num_tickets_ = 0;
  std::int64_t now_ns_ = 0;
  DiskCounts counts_;
};

// Files that an observer sees whole or not at all, on a disk that fails: each is written aside,
// under another name, and renamed when all of it is there.
//
// (1) Under a name that was put, read() finds nothing, or all bytes of one put() of that name;
//     after the last put of a name was reported done, those of that one.
// (2) Every put is reported once: done, or given up after `tries_max` failures.
// (3) What a try that failed has left aside is removed.

inline constexpr std::string_view kAside = ".part";  // behind a name, and a number

class WholeFiles {
 public:
  // `writes_in_place`: a planted defect, nothing is written aside.
  WholeFiles(Disk& disk, std::int32_t tries_max, bool writes_in_place = false)
      : disk_(disk), tries_max_(tries_max), writes_in_place_(writes_in_place) {}

  struct Outcome {
    std::string name;
    bool is_done = false;
  };

  // REQUIRES: no put of that name is in progress.
  void put(std::int64_t now_ns, const std::string& name, std::vector<std::uint8_t> bytes);
  // What has been reported since the last call, up to that time. To be called at every
  // Disk::next_due_ns(): it takes the disk's completions, all of which are its own.
  std::vector<Outcome> take_outcomes(std::int64_t now_ns);
  std::int64_t num_retries() const { return num_retries_; }

 private:
  struct Put {
    std::string name;
    std::string aside;
    std::vector<std::uint8_t> bytes;
    std::int32_t tries = 0;
    bool is_written = false;
  };
  void write(std::int64_t now_ns, Put put);

  Disk& disk_;
  const std::int32_t tries_max_;
  const bool writes_in_place_;
  std::map<DiskTicket, Put> under_way_;
  std::uint64_t num_asides_ = 0;
  std::int64_t num_retries_ = 0;
};

}  // namespace lockstep
