// Files of hidden states as a trainer sees them: whole from the first moment on, on a disk that
// takes its time and fails, or a finding.
#include "sim/hidden_states/hidden_states.h"

#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

HiddenStates states_of(std::string request, std::int64_t num_tokens) {
  HiddenStates states{.request = std::move(request), .contents = {}, .layers = {}};
  for (std::int64_t token = 0; token < num_tokens; ++token)
    states.contents.push_back(static_cast<ContentId>(token * 31 + 7));
  states.layers.push_back({.layer = "h",
                           .dtype = DType::bf16,
                           .num_heads = 1,
                           .row_size_bytes = 8,
                           .bytes = std::vector<std::uint8_t>(
                               static_cast<std::size_t>(num_tokens * 8), std::uint8_t{0x3F})});
  return states;
}

TEST(WatchedFiles, EveryFileIsSeenOnceAndWholeWhateverTheDiskDoes) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    WatchedFiles files(seed, HiddenStateDefect::none);
    for (std::int64_t i = 0; i < 20; ++i) {
      files.save(i * 700'000, i, states_of("r" + std::to_string(i % 3), 1 + i));
      EXPECT_TRUE(files.look((i + 1) * 700'000));
    }
    EXPECT_LT(files.num_seen(), 20);
    EXPECT_TRUE(files.finish());
    EXPECT_EQ(files.num_seen(), 20);
  }
}

TEST(WatchedFiles, AFileWrittenUnderItsOwnNameIsSeenWithAPartOfItsBytes) {
  WatchedFiles files(3, HiddenStateDefect::hidden_save_race);
  files.save(0, 5, states_of("r17", 40));
  const auto found = files.look(5'000'000);
  ASSERT_TRUE(found.has_diverged());
  EXPECT_EQ(found.divergence().phase, Phase::hidden_file);
  EXPECT_EQ(found.divergence().request, "r17");
  EXPECT_EQ(found.divergence().step, 5);
  EXPECT_NE(found.divergence().message.find("r17.safetensors"), std::string::npos)
      << found.divergence().message;
}

TEST(WatchedFiles, FilesAreNamedAfterTheirRequestsAndNeverTwiceAlike) {
  HiddenStateFileNames names;
  EXPECT_EQ(names.next("chat-1.a_b"), "chat-1.a_b.safetensors");
  EXPECT_EQ(names.next("../etc/x"), "..%2Fetc%2Fx.safetensors");
  EXPECT_EQ(names.next("r"), "r.safetensors");
  EXPECT_EQ(names.next("r"), "r-2.safetensors");
  EXPECT_EQ(names.next("r-2"), "r-2-2.safetensors");
  EXPECT_EQ(names.next(""), ".safetensors");
}

LockstepConfig hidden_world() {
  KVCacheSpec hidden = full_spec();
  hidden.kind = CacheKind::hidden_state;
  hidden.num_kv_heads = 1;
  hidden.head_size = 10;
  return make_world({make_group("a", 1, full_spec()), make_group("h", 1, hidden)}, 44);
}

RunSummary run_with(HiddenStateDefect defect) {
  LockstepConfig config = hidden_world();
  config.hidden_state_defect = defect;
  const auto backend = make_simt_backend(config.backend);
  EXPECT_TRUE(backend) << backend.error().message;
  const auto run = run_world(config, make_traffic(3, 30), backend->get());
  EXPECT_TRUE(run) << run.error().message;
  return run->summary;
}

TEST(WatchedFiles, InARunEveryFinishedRequestLeavesAFileThatATrainerSeesWhole) {
  const RunSummary summary = run_with(HiddenStateDefect::none);
  EXPECT_EQ(summary.verdict, Verdict::agreed);
  EXPECT_GT(summary.finished_requests, 20);
  EXPECT_EQ(summary.hidden_files_seen, summary.finished_requests);
}

TEST(WatchedFiles, InARunAFileThatShowsTooEarlyEndsIt) {
  const RunSummary summary = run_with(HiddenStateDefect::hidden_save_race);
  ASSERT_TRUE(summary.divergence);
  EXPECT_EQ(summary.divergence->phase, Phase::hidden_file);
  EXPECT_EQ(name_of(summary.divergence->phase), "hidden_file");
}

}  // namespace
}  // namespace lockstep
