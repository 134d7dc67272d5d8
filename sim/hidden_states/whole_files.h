// Files that an observer sees whole or not at all, on a disk that fails: each is written aside,
// under a name of its own, and renamed when all of it is there.
//
// (1) Under a name that was put, read() finds nothing, or all bytes of one put() of that name;
//     after the last put of a name was reported done, those of that one.
// (2) Every put is reported once: done, or given up after `tries_max` failures.
// (3) What a try that failed has left aside is removed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/hidden_states/disk.h"

namespace lockstep {

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

  // REQUIRES: no put of that name is under way.
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
