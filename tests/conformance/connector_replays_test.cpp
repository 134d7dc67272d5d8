// Recordings of vLLM 0.22.1 with a KV connector, decided by the model and executed by the kernels
// on the CPU executor: what was loaded is brought by the harness as rows of the right tokens, what
// was sent is stored, and every byte is compared. Those that end in a deadlock of vLLM's own
// (docs/findings.md) end there.
#include <gtest/gtest.h>

#include <filesystem>

#include "cuda_backend/backends.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"
#include "tests/conformance/recording_files.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

Result<RunSummary> replay_with_connector(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader header = reader->header();
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (!plan) return tl::unexpected(plan.error());
  LockstepConfig config;
  config.engine = header.options.config;
  const AttentionBackend attention = attention_backend_for(*plan);
  config.backend = make_backend_config(config.engine, std::move(*plan), attention);
  config.backend.num_host_blocks = header.num_blocks;
  config.connector.load_failure_policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  SessionParts parts;
  parts.clients = make_recording_workload(std::move(*reader));
  parts.backend = make_simt_backend;
  const auto session = Session::open(config, std::move(parts));
  if (!session) return tl::unexpected(session.error());
  auto report = (*session)->run();
  if (!report) return tl::unexpected(report.error());
  return std::move(report->summary);
}

struct ConnectorTally {
  std::int64_t replayed = 0;
  std::int64_t stuck = 0;
  std::int64_t blocks_loaded = 0, blocks_stored = 0, blocks_lost = 0;
};

void replay(const std::string& path, ConnectorTally& tally) {
  const auto summary = replay_with_connector(path);
  ASSERT_TRUE(summary) << path << ": " << summary.error().message;
  if (summary->divergence) ADD_FAILURE() << path << "\n" << to_text(*summary->divergence);
  ++tally.replayed;
  tally.stuck += summary->verdict == Verdict::liveness ? 1 : 0;
  tally.blocks_loaded += summary->blocks_loaded;
  tally.blocks_stored += summary->blocks_stored;
  tally.blocks_lost += summary->blocks_lost;
}

TEST(ConnectorReplays, OneOfEveryBundledFamilyAgreesOnTheKernels) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  ConnectorTally tally;
  for (const std::string& path : recordings_under(*samples / "recordings/vllm-0.22.1/connectors"))
    if (path.find("connector_served_async") == std::string::npos) replay(path, tally);
  EXPECT_EQ(tally.replayed, 7);
  EXPECT_GT(tally.blocks_loaded, 0);
  EXPECT_GT(tally.blocks_stored, 0);
  EXPECT_GT(tally.blocks_lost, 0);
}

// Recordings with drafts, or with lost blocks that the engine continues after (docs/findings.md,
// 15), are followed by decisions only.
TEST(ConnectorReplays, WithAsynchronousSchedulingAgreeOrSayWhyTheyAreRefused) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  const auto folder = *samples / "recordings/vllm-0.22.1/connectors/connector_served_async";
  ConnectorTally tally;
  for (const char* name : {"0110.jsonl", "0131.jsonl", "0156.jsonl"})
    replay((folder / name).string(), tally);
  EXPECT_EQ(tally.replayed, 3);
  EXPECT_GT(tally.blocks_loaded, 0);
  const auto refusal = [&](const char* name) {
    const auto summary = replay_with_connector((folder / name).string());
    return summary ? std::string() : summary.error().message;
  };
  EXPECT_NE(refusal("0113.jsonl").find("step 2: blocks that a load did not fill"),
            std::string::npos);
  EXPECT_NE(refusal("0143.jsonl").find("step 4: blocks that a load did not fill"),
            std::string::npos);
}

TEST(ConnectorReplaysSlow, All168AgreeOnTheKernels) {
  const auto data = find_data_dir();
  if (!data) GTEST_SKIP() << "recordings of vLLM 0.22.1 with connectors: " << data_dir_hint();
  ConnectorTally tally;
  for (const std::string& path : recordings_under(*data / "recordings/vllm-0.22.1/connectors"))
    replay(path, tally);
  EXPECT_EQ(tally.replayed, 168);
  EXPECT_EQ(tally.stuck, 2);  // findings 7 and 8
  EXPECT_GT(tally.blocks_loaded, 1000);
}

}  // namespace
}  // namespace lockstep
