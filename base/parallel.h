// Work over a range of indices, shared out among threads.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {

// Calls work(i) once for each i from 0 to count - 1, in `jobs` threads including the caller's, and
// returns when all have returned. Indices are distributed in order. `go_on` is called before each
// index, by one thread at a time; its first false ends the distribution. Absent: true.
// REQUIRES: jobs >= 1; work does not throw.
void for_each_in_parallel(std::int64_t count, int jobs,
                          const std::function<void(std::int64_t index)>& work,
                          const std::function<bool()>& go_on = {});

}  // namespace lockstep
