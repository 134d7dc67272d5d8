// Every family of recordings, decided by the model and executed by the kernels on the CPU executor,
// every step compared. A replay diverges only where the audit, which shares nothing with it, says
// that the engine's own decisions are wrong; where those write the same content twice, no read
// shows it.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cuda_backend/simt_backend.h"
#include "properties/audit/audit.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"
#include "tests/conformance/recording_files.h"
#include "traces/models/data_dir.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// The recordings of a folder by engine and family, without those of connectors, whose loads are not
// executed.
std::map<std::string, std::vector<std::string>> families_under(const fs::path& folder) {
  std::map<std::string, std::vector<std::string>> families;
  for (const std::string& path : recordings_under(folder))
    if (path.find("connector") == std::string::npos)
      families[fs::relative(fs::path(path).parent_path(), folder).string()].push_back(path);
  return families;
}

Result<RunSummary> replay_on_simt(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader header = reader->header();
  LockstepConfig config;
  config.engine = header.options.config;
  auto plan = plan_for_groups(header.groups, header.num_blocks);
  if (!plan) return tl::unexpected(plan.error());
  const AttentionBackend attention = attention_backend_for(*plan);
  config.backend = make_backend_config(config.engine, std::move(*plan), attention);
  SessionParts parts;
  parts.clients = make_recording_workload(std::move(*reader));
  parts.backend = make_simt_backend;
  const auto session = Session::open(config, std::move(parts));
  if (!session) return tl::unexpected(session.error());
  auto report = (*session)->run();
  if (!report) return tl::unexpected(report.error());
  return std::move(report->summary);
}

struct Tally {
  std::int64_t replayed = 0;
  std::int64_t with_findings = 0;
  std::int64_t diverged = 0;
};

void replay_and_audit(const std::string& path, Tally& tally) {
  const auto audited = audit_recording(path);
  ASSERT_TRUE(audited) << audited.error().message;
  const auto replayed = replay_on_simt(path);
  ASSERT_TRUE(replayed) << path << ": " << replayed.error().message;
  ++tally.replayed;
  tally.with_findings += audited->findings.empty() ? 0 : 1;
  tally.diverged += replayed->verdict == Verdict::divergence ? 1 : 0;
  EXPECT_GT(replayed->table_entries_checked, 0) << path;
  if (!audited->findings.empty()) return;
  EXPECT_EQ(replayed->verdict, Verdict::agreed) << path;
  if (replayed->divergence) ADD_FAILURE() << to_text(*replayed->divergence);
}

TEST(ReplayedRecordings, one_of_every_family_diverges_only_where_the_audit_finds_why) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  const auto families = families_under(*samples / "recordings");
  EXPECT_EQ(families.size(), 24u + 22u);
  Tally tally;
  for (const auto& [family, paths] : families) replay_and_audit(paths.front(), tally);
  EXPECT_EQ(tally.replayed, 24 + 22);
}

// What 0.33.0 does as it is served: pages that are not modelled are refused by the key's name.
TEST(ReplayedRecordings, as_served_agree_or_are_refused_by_name) {
  const std::map<std::string, std::string> refused = {
      {"bounded_replay", "bounded_replay"},
      {"checkpoint_inside_a_block", "hits inside blocks"},
      {"circular_buffer", "circular_buffer"},
      {"hash_lookahead_of_states", "num_prefill_checkpoint_blocks"},
      {"hit_inside_a_block", "hits inside blocks"},
      {"prefill_checkpoint", "num_prefill_checkpoint_blocks"},
      {"prefill_checkpoint_dense", "num_prefill_checkpoint_blocks"},
      {"prefill_checkpoint_off_its_grid", "num_prefill_checkpoint_blocks"},
  };
  std::size_t num_refused = 0;
  for (const std::string& path :
       recordings_under(fs::path(LOCKSTEP_SOURCE_DIR) / "tests/conformance/as_served")) {
    const auto replayed = replay_on_simt(path);
    const auto key = refused.find(fs::path(path).stem().string());
    if (key != refused.end()) {
      ++num_refused;
      ASSERT_FALSE(replayed) << path;
      EXPECT_NE(replayed.error().message.find(key->second), std::string::npos)
          << replayed.error().message;
      continue;
    }
    ASSERT_TRUE(replayed) << path << ": " << replayed.error().message;
    EXPECT_EQ(replayed->verdict, Verdict::agreed) << path;
    if (replayed->divergence) ADD_FAILURE() << to_text(*replayed->divergence);
  }
  EXPECT_EQ(num_refused, refused.size());
}

TEST(ReplayedRecordingsSlow, all_diverge_only_where_the_audit_finds_why) {
  const auto data = find_data_dir();
  if (!data) GTEST_SKIP() << "recordings of both releases: " << data_dir_hint();
  const auto families = families_under(*data / "recordings");
  Tally tally;
  for (const auto& [family, paths] : families)
    for (const std::string& path : paths) replay_and_audit(path, tally);
  EXPECT_EQ(tally.replayed, 768 + 704);
  EXPECT_EQ(tally.with_findings, 13);  // docs/findings.md
  EXPECT_EQ(tally.diverged, 11);       // one writes the same content twice
}

}  // namespace
}  // namespace lockstep
