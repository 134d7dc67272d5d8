// Where optional data lies: recordings and traces too large for the project.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace lockstep {

// $LOCKSTEP_DATA when set (and a folder), otherwise the folder `shared` next to the project's
// source, otherwise ../shared seen from the current folder; absent when there is none.
std::optional<std::filesystem::path> find_data_dir();

// Where find_data_dir() looked, for the sentence that says why something was skipped.
std::string data_dir_hint();

// The project's own samples: traces/samples in the source folder this was built from, or ./traces/
// samples of the current folder; absent when there is neither.
std::optional<std::filesystem::path> find_samples_dir();

}  // namespace lockstep
