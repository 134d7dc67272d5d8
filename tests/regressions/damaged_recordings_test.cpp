// Recordings that tell what no engine has done, and on which conform, audit or replay once stopped
// the process: the smallest of each kind. Each is a refusal of that file, a mismatch or a finding.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "properties/audit/audit.h"
#include "reference/plan/limits.h"
#include "sim/conform/conform.h"
#include "sim/connectors/recorded_connector.h"
#include "sim/recording/recording_workload.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

// The report on a file: an Error, a mismatch or a finding; empty: no problem.
struct Damaged {
  const char* name;
  const char* conform;
  const char* audit;
  const char* replay;
};

constexpr const char* kNotModelled = "FILE:1: encoder_only groups: ";

const Damaged kDamaged[] = {
    {"chunk_of_no_session", "FILE:2: resumable: a request is a session",
     "step 0: gets a chunk of input, and is no live session",
     "FILE:2: resumable: a request is a session"},
    {"load_into_a_block_that_another_hit", "step 0: connector[0].local: 4 and not 0",
     "step 0: block 1 becomes entry 0 of the table, beyond the hit of 8 tokens, while request "
     "first still loads it",
     "FILE:3: step 1: worker.received: nothing of request first is being transferred"},
    {"more_sampled_than_in_flight", "step 0: sampled.r0: [7,8,9] and not at most 1",
     "step 0: 3 tokens are sampled from a row that verifies 0 drafts",
     "FILE:2: step 0: sampled: 3 tokens of request r0; expected at most 1"},
    {"more_drafts_than_tokens", "step 0: scheduled[0].spec: [5,6,7] and not absent",
     "step 0: 3 drafts are to be verified in a step of 2 tokens", ""},
    {"row_of_no_tokens", "step 0: scheduled[0].tokens: 0 and not 2",
     "step 0: its row schedules 0 tokens", ""},
    {"more_loaded_than_there_is", "step 0: connector[0].external: 16 and not null",
     "step 0: 0 tokens are reported here and 16 elsewhere, of 6",
     "FILE:2: step 0: connector: 16 external tokens of request r0; expected at most 6"},
    {"hit_beyond_the_prompt", "step 0: scheduled[0].computed: 12 and not 4",
     "step 0: tokens [12, 14) are scheduled, but only 6 are known", ""},
    {"load_that_ends_twice", "FILE:4: step 2: worker: a transfer of request r0 completes",
     "step 3: a load is reported complete that is not in flight",
     "FILE:4: step 2: worker: a transfer of request r0 completes, but already completed in step 1"},
    {"two_of_one_name", "FILE:2: two live requests have the name r0",
     "step 0: two live requests have this name", "FILE:2: two live requests have the name r0"},
    {"prompt_beyond_the_model", "step 0: waiting: [\"r0\"] and not []",
     "step 0: is in the waiting queue, and no live request has this name", ""},
    {"group_of_cross_attention", "FILE:1: config.is_encoder_decoder", "",
     "FILE:1: cross attention (cross_attention) with prefix caching: "},
    {"group_of_encoder_only", kNotModelled, "", kNotModelled},
    {"blocks_beyond_any_pool", "FILE:1: num_blocks: 2147483647", "FILE:1: num_blocks: 2147483647",
     "FILE:1: num_blocks: 2147483647"},
    {"window_of_no_token_in_32_bits", "FILE:1: groups: chunked_local: attention_chunk_size: ",
     "FILE:1: groups: chunked_local: attention_chunk_size: ",
     "FILE:1: groups: chunked_local: attention_chunk_size: "},
    {"block_of_all_ranks_of_no_token_in_32_bits", "FILE:1: dcp: 65536", "FILE:1: dcp: 65536",
     "FILE:1: dcp: 65536"},
    {"two_tokens_ahead_in_a_hash", "FILE:1: num_hash_lookahead_tokens: 2",
     "FILE:1: num_hash_lookahead_tokens: 2", "FILE:1: num_hash_lookahead_tokens: 2"},
};

std::string without_folder(std::string text, const std::string& path) {
  const std::size_t at = text.find(path);
  if (at != std::string::npos) text.replace(at, path.size(), "FILE");
  return text;
}

std::string conformed(const std::string& path) {
  const auto file = conform_recording(path);
  if (!file) return without_folder(file.error().message, path);
  if (!file->mismatch) return "";
  return fmt::format("step {}: {}: {} and not {}", file->mismatch->step, file->mismatch->what,
                     file->mismatch->recorded, file->mismatch->model);
}

std::string audited(const std::string& path) {
  const auto file = audit_recording(path);
  if (!file) return without_folder(file.error().message, path);
  if (file->findings.empty()) return "";
  return fmt::format("step {}: {}", file->findings[0].step, file->findings[0].what);
}

std::string replayed(const std::string& path) {
  auto reader = RecordingReader::open(path);
  if (!reader) return without_folder(reader.error().message, path);
  const RecordingHeader header = reader->header();
  LockstepConfig config;
  config.engine = header.options.config;
  config.backend.plan.num_blocks = header.num_blocks;
  config.backend.plan.groups = header.groups;
  config.connector.load_failure_policy = kv_transfer(header, nullptr).kv_load_failure_policy;
  SessionParts parts;
  parts.clients = make_recording_workload(std::move(*reader));
  const auto session = Session::open(config, std::move(parts));
  if (!session) return "FILE:1: " + session.error().message;
  const auto report = (*session)->run();
  return report ? "" : without_folder(report.error().message, path);
}

void expect_said(const std::string& said, const std::string& expected) {
  if (expected.empty())
    EXPECT_EQ(said, "");
  else
    EXPECT_EQ(said.substr(0, expected.size()), expected);
}

class DamagedRecording : public testing::TestWithParam<Damaged> {};

TEST_P(DamagedRecording, IsARefusalAMismatchOrAFinding) {
  const Damaged& damaged = GetParam();
  const std::string path =
      fmt::format("{}/tests/regressions/damaged/{}.jsonl", LOCKSTEP_SOURCE_DIR, damaged.name);
  expect_said(conformed(path), damaged.conform);
  expect_said(audited(path), damaged.audit);
  expect_said(replayed(path), damaged.replay);
}

INSTANTIATE_TEST_SUITE_P(Each, DamagedRecording, testing::ValuesIn(kDamaged),
                         [](const auto& damaged) { return std::string(damaged.param.name); });

}  // namespace
}  // namespace lockstep
