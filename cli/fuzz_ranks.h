// The processes that a fuzz run is spread over: this one alone, or those that mpirun has started,
// in a build that has found MPI.
//
// Invariants
// (1) Rank i of n judges shard i/n; the reports merge into the one of a single process.
// (2) Every rank joins, and every rank gathers, whatever became of its part.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

class FuzzRanks {
 public:
  FuzzRanks();  // joins the others, if mpirun has started this process
  ~FuzzRanks();
  FuzzRanks(const FuzzRanks&) = delete;
  FuzzRanks& operator=(const FuzzRanks&) = delete;

  int rank() const { return rank_; }
  int count() const { return count_; }
  // The texts of all ranks, in their order, on rank 0; nothing on the others.
  std::vector<std::string> gather(const std::string& mine) const;

 private:
  int rank_ = 0;
  int count_ = 1;
};

}  // namespace lockstep
