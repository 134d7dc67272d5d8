// fuzz_corpus FOLDER: writes the first inputs of every fuzz target, each target into a folder of
// its own.
#include <filesystem>
#include <fstream>

#include "tests/fuzz/targets.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (const lockstep::FuzzTarget& target : lockstep::fuzz_targets()) {
    const std::filesystem::path folder = std::filesystem::path(argv[1]) / target.name;
    std::filesystem::create_directories(folder);
    int number = 0;
    for (const std::string& seed : target.seeds())
      std::ofstream(folder / std::to_string(number++), std::ios::binary) << seed;
  }
  return 0;
}
