// Who waits for whom when nothing runs: requests that wait for blocks, requests that stand behind
// others in the queue, and the circle that none of them can leave.
//
// A request waits for
// (1) the requests that stand before it in the queue and do not fit: the scheduler looks no further
//     than the first of them;
// (2) every request that holds blocks, if it does not fit and would not fit either once the
//     transfers that end by themselves (those of finished requests, and of requests before all that
//     do not fit) have given back theirs.
// A request that loads waits for its transfer as well, which is no part of the graph: when it is
// over, (1) still holds.
//
// Not decided here: how many blocks a request needs; whoever asks counts them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct WaitingRequest {
  std::string name;
  std::int64_t blocks_held = 0;
  std::int64_t blocks_missing = 0;  // that it needs beside those, to go on
  std::int64_t held_since = -1;     // step; -1: holds none
  bool is_loading = false;
};

// A moment at which no request runs.
struct Standstill {
  std::vector<WaitingRequest> queue;  // in the order in which the scheduler looks at them
  std::int64_t blocks_held_by_finished = 0;
  std::int64_t free_blocks = 0;
  std::int64_t total_blocks = 0;  // without the null block
};

struct WaitCycle {
  std::vector<std::string> requests;  // in queue order
  bool head_holds_blocks = false;     // the first of them has loaded a part, and needs more
  std::string text;                   // who of them waits for what, in one or more sentences
};

// The circle that the foremost of the queue is in; nothing when all waiting may end by itself, or
// can never end because a request is larger than the pool.
std::optional<WaitCycle> find_wait_cycle(const Standstill& standstill);

}  // namespace lockstep
