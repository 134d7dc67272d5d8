#include "cli/fuzz_ranks.h"

#ifdef LOCKSTEP_HAVE_MPI
#include <mpi.h>

#include <cstdlib>
#include <numeric>
#endif

namespace lockstep {

#ifdef LOCKSTEP_HAVE_MPI

namespace {

// Set by the launchers of Open MPI and of MPICH. Without them there is no other process to join.
bool has_launcher() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

}  // namespace

FuzzRanks::FuzzRanks() {
  if (!has_launcher()) return;
  MPI_Init(nullptr, nullptr);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &count_);
}

FuzzRanks::~FuzzRanks() {
  if (has_launcher()) MPI_Finalize();
}

std::vector<std::string> FuzzRanks::gather(const std::string& mine) const {
  if (count_ == 1) return {mine};
  const int size = static_cast<int>(mine.size());
  std::vector<int> sizes(static_cast<std::size_t>(count_));
  MPI_Gather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
  std::vector<int> begins(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), 0);
  std::string all(rank_ == 0 ? static_cast<std::size_t>(begins.back() + sizes.back()) : 0, '\0');
  MPI_Gatherv(mine.data(), size, MPI_CHAR, all.data(), sizes.data(), begins.data(), MPI_CHAR, 0,
              MPI_COMM_WORLD);
  std::vector<std::string> texts;
  for (std::size_t i = 0; rank_ == 0 && i < sizes.size(); ++i)
    texts.push_back(
        all.substr(static_cast<std::size_t>(begins[i]), static_cast<std::size_t>(sizes[i])));
  return texts;
}

#else

FuzzRanks::FuzzRanks() = default;
FuzzRanks::~FuzzRanks() = default;

std::vector<std::string> FuzzRanks::gather(const std::string& mine) const { return {mine}; }

#endif

}  // namespace lockstep
