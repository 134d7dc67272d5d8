// Defects of vLLM 0.22.1 that the audit found in recordings of what requests bring (adapters,
// sessions, resets, a connector's stores): docs/findings.md, 29 to 33. Each is such a recording.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "properties/audit/audit.h"

namespace lockstep {
namespace {

struct Shown {
  std::string_view file;
  AuditRule rule;
  std::int64_t step;
  std::string_view request;
  std::string_view what;  // a part of the sentence
};

const Shown kShown[] = {
    {"retrained_adapter", AuditRule::attention_read, 16, "r3",
     "which holds token 0 of request r8: the same tokens under an adapter from another place"},
    {"session_keeps_its_limit", AuditRule::sampled, 12, "r0",
     "ends for its length with 1 tokens sampled of 8"},
    {"session_stops_in_flight", AuditRule::sampled, 6, "r0",
     "2 tokens are sampled from a row that verifies 0 drafts"},
    {"reset_drops_drafts_twice", AuditRule::sampled, 18, "r3",
     "3 tokens are sampled from a row that verifies 1 drafts"},
    {"store_counts_as_common", AuditRule::common_prefix, 7, "r5",
     "1 blocks are reported as common to all running requests"},
};

class VllmInputFindings : public testing::TestWithParam<Shown> {};

TEST_P(VllmInputFindings, IsToldWhereItFirstShows) {
  const Shown& shown = GetParam();
  const auto audited =
      audit_recording(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/vllm_0_22_1_" +
                      std::string(shown.file) + ".jsonl");
  ASSERT_TRUE(audited) << audited.error().message;
  ASSERT_FALSE(audited->findings.empty());
  const AuditFinding& first = audited->findings.front();
  EXPECT_EQ(first.rule, shown.rule);
  EXPECT_EQ(first.step, shown.step);
  EXPECT_EQ(first.request, shown.request);
  EXPECT_NE(first.what.find(shown.what), std::string::npos) << first.what;
}

INSTANTIATE_TEST_SUITE_P(Each, VllmInputFindings, testing::ValuesIn(kShown),
                         [](const auto& shown) { return std::string(shown.param.file); });

}  // namespace
}  // namespace lockstep
