// The hidden states of every finished request come out of the cache whole: padded pages, blocks of
// another size than attention's, prompts in chunks, prefix hits and preemption in between.
#include "sim/hidden_states/hidden_states.h"

#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

KVCacheSpec hidden_spec(std::int64_t block_size, std::int64_t num_heads, std::int64_t hidden_size) {
  KVCacheSpec spec = full_spec(block_size);
  spec.kind = CacheKind::hidden_state;
  spec.num_kv_heads = num_heads;
  spec.head_size = hidden_size;
  return spec;
}

LockstepConfig make_hidden_world(std::int64_t block_size, AttentionBackend attention) {
  LockstepConfig config = make_world(
      {make_group("a", 2, full_spec()), make_group("h", 1, hidden_spec(block_size, 2, 10))}, 44);
  config.engine.enable_prefix_caching = block_size == 16;
  config.backend = make_backend_config(config.engine, config.backend.plan, attention);
  return config;
}

// What a run must have extracted: every finished request, all its tokens but the last.
class CountFinished final : public StepObserver {
 public:
  bool finished(const StepView& view) override {
    for (const StoppedRequest& stopped : view.stopped)
      rows += view.decisions.num_tokens(stopped.id) - 1;
    return true;
  }
  std::int64_t rows = 0;
};

TEST(HiddenStateExtraction, EveryFinishedRequestIsReadWholeAndOnce) {
  for (const std::int64_t block_size : {16, 48})
    for (const AttentionBackend attention :
         {AttentionBackend::flash_attn, AttentionBackend::flashinfer}) {
      LockstepConfig config = make_hidden_world(block_size, attention);
      config.backend.check = CheckMode::check;
      ASSERT_TRUE(config.backend.plan.groups[1].spec.page_size_padded);
      auto backend = make_simt_backend(config.backend);
      ASSERT_TRUE(backend) << backend.error().message;
      CountFinished count;
      const auto run = run_world(config, make_traffic(3, 30), backend->get(), &count);
      ASSERT_TRUE(run) << run.error().message;
      EXPECT_EQ(run->summary.verdict, Verdict::agreed)
          << (run->summary.divergence ? to_text(*run->summary.divergence) : "stuck");
      EXPECT_GT(count.rows, 1000);
      EXPECT_EQ(run->summary.rows_extracted, count.rows);
    }
}

// An extraction that goes wrong in one of the ways that engines have shown.
class WrongExtraction final : public PlainBackend {
 public:
  enum class Way : std::uint8_t { flattens_padded_pages, saves_the_first_chunk };
  WrongExtraction(const BackendConfig& config, Way way) : PlainBackend(config), way_(way) {}

  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    if (auto done = PlainBackend::execute(program, readback); !done) return done;
    std::size_t at = 0;
    for (const RowExtraction& extraction : program.extractions) {
      const Layer& layer = layers()[extraction.layer];
      const auto token_bytes = static_cast<std::size_t>(layer.row_bytes) * layer.heads;
      const auto size = token_bytes * extraction.num_tokens;
      const auto out = std::span(readback.extracted).subspan(at, size);
      at += size;
      if (way_ == Way::saves_the_first_chunk) {
        for (std::size_t i = 64 * token_bytes; i < size; ++i) out[i] = 0;
        continue;
      }
      const std::int32_t block = tables(layer.group)[extraction.row].front();
      const auto& bytes = tensor(layer.tensor);
      for (std::size_t i = 0; i < size; ++i)
        out[i] = bytes[(block * page_bytes(layer.tensor) + i) % bytes.size()];
    }
    return {};
  }

 private:
  const Way way_;
};

Divergence divergence_of(WrongExtraction::Way way) {
  const LockstepConfig config = make_hidden_world(16, AttentionBackend::triton_attn);
  WrongExtraction backend(config.backend, way);
  const auto run = run_world(config, make_traffic(3, 30), &backend);
  EXPECT_TRUE(run && run->summary.divergence);
  return run && run->summary.divergence ? *run->summary.divergence : Divergence{};
}

TEST(HiddenStateExtraction, PaddingTakenForRowsIsFoundAtTheFirstTokenBehindIt) {
  const Divergence found = divergence_of(WrongExtraction::Way::flattens_padded_pages);
  EXPECT_EQ(found.phase, Phase::extraction);
  EXPECT_EQ(found.token, 16);  // the first of the second block
  EXPECT_EQ(found.group, 1);
  EXPECT_EQ(found.byte, 0);
}

TEST(HiddenStateExtraction, TokensOfLaterChunksThatAreMissingAreFound) {
  const Divergence found = divergence_of(WrongExtraction::Way::saves_the_first_chunk);
  EXPECT_EQ(found.phase, Phase::extraction);
  EXPECT_EQ(found.token, 64);
  EXPECT_NE(found.expected, found.found);
}

}  // namespace
}  // namespace lockstep
