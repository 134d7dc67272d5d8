// Commits of a git repository, each exported into a temporary folder.
//
// Invariants
// (1) The repository is only read: its index, its work tree and its list of work trees stay.
// (2) The temporary folder is removed when the process ends, even by SIGKILL: a process in its own
//     session waits for that end.
//
// Not exported: submodules.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/child_process.h"
#include "base/result.h"

namespace lockstep {

struct Commit {
  std::string hash;  // all of its digits
  std::string abbreviation;
  std::string subject;
};

// GOOD, and every first-parent commit after it up to BAD. Errors: git's, and a GOOD that is not an
// ancestor of BAD.
Result<std::vector<Commit>> commits_between(const std::string& repository, const std::string& good,
                                            const std::string& bad);

class TemporaryExports {
 public:
  static Result<std::unique_ptr<TemporaryExports>> create();
  TemporaryExports(const TemporaryExports&) = delete;
  ~TemporaryExports();

  // The folder that holds this commit's files, in place of the previous commit's. Files that do not
  // differ keep their time, so that what was compiled from them stays valid.
  Result<std::string> put(const std::string& repository, const Commit& commit);
  std::string path(std::string_view name) const { return folder_ + "/" + std::string(name); }

 private:
  TemporaryExports() = default;

  std::string folder_;
  std::string exported_;  // the previous commit; empty: none
  std::int64_t num_exported_ = 0;
  std::unique_ptr<LineProcess> remover_;
};

}  // namespace lockstep
