// Beyond the recorded families: configurations that only their neighbours reach (draft models,
// windows of one token, groups of one spec, hybrids under decode context parallelism, replicated
// caches, retention, lookahead hashes), recorded from vLLM by the project's own recorder.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/recording_files.h"

namespace lockstep {
namespace {

TEST(Neighbours, AgreeInEveryField) {
  const auto paths =
      recordings_under(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/conformance/neighbours");
  ASSERT_EQ(paths.size(), 17u);
  expect_all_agree(paths);
}

}  // namespace
}  // namespace lockstep
