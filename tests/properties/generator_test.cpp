// What the generator makes: the same case of the same choices, whatever they come from, and cases
// that a file can hold and an engine will run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>

#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "sim/session/session.h"
#include "tests/support/temporary_folder.h"

namespace lockstep {
namespace {

GeneratorOptions decisions_alone() {
  GeneratorOptions options;
  options.backend = "none";
  return options;
}

TEST(Generator, TheSameSeedGivesTheSameCase) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    EXPECT_EQ(generate_case(seed), generate_case(seed)) << seed;
    EXPECT_FALSE(generate_case(seed) == generate_case(seed + 1)) << seed;
  }
}

TEST(Generator, ChoicesThatHaveRunOutGiveThePlainestCase) {
  WordChoices words({});
  ByteChoices bytes({});
  const SavedCase plain = generate_case(words, decisions_alone());
  EXPECT_EQ(plain, generate_case(bytes, decisions_alone()));
  ASSERT_EQ(plain.cache.groups.size(), 1u);
  EXPECT_EQ(plain.cache.groups[0].spec.kind, CacheKind::full_attention);
  EXPECT_EQ(plain.trace.records.size(), 1u);
  EXPECT_EQ(judge(plain).kind, OutcomeKind::agreed);
}

TEST(Generator, BytesOfAChoiceAreAsManyAsItsRangeNeeds) {
  const std::uint8_t bytes[] = {5, 1, 2, 7};
  ByteChoices choices(bytes);
  EXPECT_EQ(choices.below(10), 5);
  EXPECT_EQ(choices.below(1'000), 258);
  EXPECT_EQ(choices.below(1), 0);  // nothing to choose, nothing taken
  EXPECT_EQ(choices.below(256), 7);
  EXPECT_EQ(choices.below(256), 0);
}

TEST(Generator, NoCaseIsRefusedByTheTableOfCompatibility) {
  for (std::uint64_t seed = 1; seed <= 1'500; ++seed)
    for (const GeneratorOptions& options : {decisions_alone(), GeneratorOptions{}}) {
      const auto sound = check_setup(config_of(generate_case(seed, options)));
      EXPECT_TRUE(sound) << options.backend << " " << seed << ": " << sound.error().message;
    }
}

TEST(Generator, ACaseReadBackFromItsFileIsTheSameCase) {
  const std::string path = tests::temporary_path("generated.case.jsonl");
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const SavedCase saved =
        generate_case(seed, seed % 2 == 0 ? decisions_alone() : GeneratorOptions{});
    ASSERT_TRUE(write_saved_case(path, saved));
    const auto read = read_saved_case(path);
    ASSERT_TRUE(read) << "seed " << seed << ": " << read.error().message;
    EXPECT_EQ(saved_case_to_text(*read), saved_case_to_text(saved)) << seed;
    EXPECT_EQ(judge(*read), judge(saved)) << seed;
  }
}

TEST(Generator, FeaturesThatAreAskedForAreThereAndOthersAreNot) {
  GeneratorOptions options = decisions_alone();
  options.always = {Feature::states, Feature::prefix_caching, Feature::priority_policy};
  options.never = {Feature::several_groups, Feature::full_attention, Feature::mla,
                   Feature::sliding_window, Feature::chunked_local,  Feature::bounded_replay,
                   Feature::rings,          Feature::compressed_rows};
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const SavedCase saved = generate_case(seed, options);
    ASSERT_EQ(saved.cache.groups.size(), 1u) << seed;
    EXPECT_EQ(saved.cache.groups[0].spec.kind, CacheKind::mamba) << seed;
    EXPECT_EQ(saved.engine.policy, SchedulingPolicy::priority) << seed;
  }
}

std::size_t num_layers(const SavedCase& saved) {
  std::size_t count = 0;
  for (const KVCacheGroupSpec& group : saved.cache.groups) count += group.layer_names.size();
  return count;
}

TEST(Generator, CasesOfAWorkerKeepToWhatItTakes) {
  GeneratorOptions options;
  options.backend = "worker:mine";
  options.check = "fast";
  options.never = {Feature::states, Feature::mla, Feature::hidden_state, Feature::scaled_rows,
                   Feature::kernel_blocks};
  options.worker.emplace();
  options.worker->dtypes = {DType::fp16, DType::bf16};
  options.worker->one_dtype = true;
  std::int64_t small_blocks = 0, drafts = 0, async = 0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    const SavedCase saved = generate_case(seed, options);
    const DType dtype = saved.cache.groups[0].spec.dtype;
    EXPECT_TRUE(dtype == DType::fp16 || dtype == DType::bf16) << seed;
    for (const KVCacheGroupSpec& group : saved.cache.groups) {
      EXPECT_EQ(group.spec.dtype, dtype) << seed;
      small_blocks += group.spec.block_size < 16;
    }
    EXPECT_FALSE(saved.engine.async_scheduling && saved.engine.num_spec_tokens > 0) << seed;
    EXPECT_EQ(saved.cache.groups.back().layer_names.back(),
              fmt::format("layers.{}", num_layers(saved) - 1))
        << seed;
    drafts += saved.engine.num_spec_tokens > 0;
    async += saved.engine.async_scheduling;
    std::vector<std::int64_t> sizes;
    for (const KVCacheGroupSpec& group : saved.cache.groups) sizes.push_back(group.spec.block_size);
    EXPECT_EQ(saved.kernel_block_sizes, sizes) << seed;
  }
  EXPECT_GT(small_blocks, 0);
  EXPECT_GT(drafts, 0);
  EXPECT_GT(async, 0);
}

// A pool is only as good as the engine's check at start: it holds a request of max_model_len.
TEST(Generator, EveryCaseIsTakenByTheEngineAndByTheBackend) {
  for (std::uint64_t seed = 1; seed <= 2'000; ++seed) {
    const Outcome outcome = judge(generate_case(seed, decisions_alone()));
    EXPECT_NE(outcome.kind, OutcomeKind::refused) << seed << ": " << outcome.what;
  }
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    const SavedCase saved = generate_case(seed);
    const auto backend = make_simt_backend(config_of(saved).backend);
    EXPECT_TRUE(backend) << seed << ": " << backend.error().message;
  }
}

}  // namespace
}  // namespace lockstep
