// Every family of recordings, decided by the model and executed by the kernels on the CPU executor,
// every step compared. A replay diverges only where the audit, which shares nothing with it, says
// that the engine's own decisions are wrong; where those write the same content twice, no read
// shows it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cuda_backend/backends.h"
#include "properties/audit/audit.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"
#include "tests/conformance/recording_files.h"
#include "traces/models/model_file.h"

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

// Blocks of as many tokens with little in them: the same decisions, on a CPU.
std::vector<KVCacheGroupSpec> with_small_pages(std::vector<KVCacheGroupSpec> groups) {
  const auto shrink = [](KVCacheSpec& spec) {
    spec.page_size_padded.reset();
    if (spec.kind != CacheKind::mamba) {
      spec.num_kv_heads = 1;
      spec.head_size = 8;
      if (spec.head_size_v != 0) spec.head_size_v = 8;
      return;
    }
    const bool has_recurrence = spec.states.size() > 1;
    spec.states = {{{3 + spec.num_speculative_blocks, 8}, DType::bf16}};
    if (has_recurrence) spec.states.push_back({{2, 4, 6}, DType::fp32});
  };
  for (KVCacheGroupSpec& group : groups) {
    group.layer_names.resize(1);
    if (!group.layer_specs.empty()) group.layer_specs.resize(1);
    shrink(group.spec);
    std::ranges::for_each(group.layer_specs, shrink);
  }
  return groups;
}

struct PageSetting {
  bool are_small = false;
  Numbers numbers = Numbers::words;
};

Result<RunSummary> replay_on_simt(const std::string& path, PageSetting pages = {}) {
  auto reader = RecordingReader::open(path);
  if (!reader) return tl::unexpected(reader.error());
  const RecordingHeader header = reader->header();
  LockstepConfig config;
  config.engine = header.options.config;
  auto plan = plan_for_groups(pages.are_small ? with_small_pages(header.groups) : header.groups,
                              header.num_blocks);
  if (!plan) return tl::unexpected(plan.error());
  const AttentionBackend attention = attention_backend_for(*plan);
  config.backend = make_backend_config(config.engine, std::move(*plan), attention);
  config.backend.numbers = pages.numbers;
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

void replay_and_audit(const std::string& path, Tally& tally, PageSetting pages = {}) {
  const auto audited = audit_recording(path);
  ASSERT_TRUE(audited) << audited.error().message;
  const auto replayed = replay_on_simt(path, pages);
  ASSERT_TRUE(replayed) << path << ": " << replayed.error().message;
  ++tally.replayed;
  tally.with_findings += audited->findings.empty() ? 0 : 1;
  tally.diverged += replayed->verdict == Verdict::divergence ? 1 : 0;
  EXPECT_GT(replayed->table_entries_checked, 0) << path;
  if (!audited->findings.empty()) return;
  EXPECT_EQ(replayed->verdict, Verdict::agreed) << path;
  if (replayed->divergence) ADD_FAILURE() << to_text(*replayed->divergence);
}

TEST(ReplayedRecordings, OneOfEveryFamilyDivergesOnlyWhereTheAuditFindsWhy) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  const auto families = families_under(*samples / "recordings");
  EXPECT_EQ(families.size(), 24u + 23u);
  Tally tally;
  for (const auto& [family, paths] : families) replay_and_audit(paths.front(), tally);
  EXPECT_EQ(tally.replayed, 24 + 23);
}

// What 0.33.0 does as it is served.
TEST(ReplayedRecordings, AsServedAgree) {
  for (const std::string& path :
       recordings_under(fs::path(LOCKSTEP_SOURCE_DIR) / "tests/conformance/as_served")) {
    const auto replayed = replay_on_simt(path);
    ASSERT_TRUE(replayed) << path << ": " << replayed.error().message;
    EXPECT_EQ(replayed->verdict, Verdict::agreed) << path;
    if (replayed->divergence) ADD_FAILURE() << to_text(*replayed->divergence);
  }
}

// Finding 17: a backend is not asked to read the state that the audit finds wrong.
TEST(ReplayedRecordings, AStateUnderALongerPrefixIsSeenWhereItIsRead) {
  const auto replayed = replay_on_simt(
      LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_33_0_state_under_longer_prefix.jsonl");
  ASSERT_TRUE(replayed) << replayed.error().message;
  ASSERT_EQ(replayed->verdict, Verdict::divergence);
  EXPECT_EQ(replayed->divergence->step, 8);
  EXPECT_EQ(replayed->divergence->request, "reader");
  EXPECT_NE(
      replayed->divergence->message.find("a state after 4 tokens is read from block 12, which "
                                         "holds short's after 2 tokens"),
      std::string::npos)
      << replayed->divergence->message;
}

TEST(ReplayedServedModelsSlow, DivergeOnlyWhereTheAuditFindsWhy) {
  const auto data = find_data_dir();
  const fs::path root = data.value_or("") / "recordings_more" / "vllm-0.33.0" / "schedules_served";
  if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  Tally tally;
  for (const auto& [family, paths] : families_under(root))
    for (const std::string& path : paths) replay_and_audit(path, tally, {.are_small = true});
  EXPECT_EQ(tally.replayed, 272);
  EXPECT_EQ(tally.diverged, 6);  // findings 16 and 17
}

TEST(ReplayedRecordingsSlow, AllDivergeOnlyWhereTheAuditFindsWhy) {
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
