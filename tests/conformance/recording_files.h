// The recordings of a folder, for tests that replay or compare all of them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

// In the order of their paths, folders below included; none where there is no such folder.
std::vector<std::string> recordings_under(const std::filesystem::path& folder);
// The model decides as each of them says, in every field of every step.
void expect_all_agree(const std::vector<std::string>& paths);
// Recordings that are compared at a time.
int conform_jobs();

}  // namespace lockstep
