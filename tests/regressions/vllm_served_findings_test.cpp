// Defects of vLLM that the audit found in what the recorder wrote while vLLM's own loop served
// (docs/findings.md), each in the smallest case that still shows it. The case is a recording of
// that release beside this file: its profile decides exactly so, and the audit says what is wrong.
#include <gtest/gtest.h>

#include <string>

#include "properties/audit/audit.h"
#include "sim/conform/conform.h"

namespace lockstep {
namespace {

void expect_finding(const std::string& file_name, std::int64_t step, const std::string& request,
                    const std::string& what) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name;
  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
  const auto audited = audit_recording(path);
  ASSERT_TRUE(audited) << audited.error().message;
  ASSERT_EQ(audited->findings.size(), 1u);
  EXPECT_EQ(audited->findings[0].step, step);
  EXPECT_EQ(audited->findings[0].request, request);
  EXPECT_NE(audited->findings[0].what.find(what), std::string::npos) << audited->findings[0].what;
}

TEST(VllmServedFindings, a_request_preempted_in_its_own_step_leaves_blocks_that_nobody_computed) {
  for (const std::string release : {"0_22_1", "0_33_0"}) {
    SCOPED_TRACE(release);
    expect_finding("vllm_" + release + "_preempted_in_its_own_step.jsonl", 4, "low",
                   "attention of tokens [28, 33) reads token 24 from slot 0");
  }
}

TEST(VllmServedFindings,
     a_window_is_freed_by_drafts_that_are_rejected_in_0_22_1_and_not_in_0_33_0) {
  const std::string folder = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/";
  for (const std::string release : {"0_22_1", "0_33_0"}) {
    SCOPED_TRACE(release);
    const std::string path = folder + "vllm_" + release + "_window_freed_by_drafts.jsonl";
    const auto conformed = conform_recording(path);
    ASSERT_TRUE(conformed) << conformed.error().message;
    EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
    const auto audited = audit_recording(path);
    ASSERT_TRUE(audited) << audited.error().message;
    if (release == "0_33_0") {
      EXPECT_TRUE(audited->findings.empty());
      continue;
    }
    ASSERT_FALSE(audited->findings.empty());
    EXPECT_EQ(audited->findings[0].step, 2);
    EXPECT_NE(audited->findings[0].what.find("while request reader still reads it"),
              std::string::npos)
        << audited->findings[0].what;
  }
}

}  // namespace
}  // namespace lockstep
