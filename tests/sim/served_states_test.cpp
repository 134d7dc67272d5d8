// States as vLLM 0.33.0 serves them, on a backend: prefills that export a state from inside a
// chunk, and hits that end inside a block and continue in a copy of it. What the worker receives,
// and that every byte of it is compared.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBlockSize = 32;

struct Serving {
  const char* title;
  std::int64_t alignment = 1;   // of checkpoints; 0: none are exported
  std::int32_t match_unit = 0;  // tokens to a hash; 0: hits end at whole blocks
  Numbers numbers = Numbers::words;
};
void PrintTo(const Serving& serving, std::ostream* out) { *out << serving.title; }

LockstepConfig make_serving(const Serving& serving) {
  KVCacheSpec states = mamba_spec(MambaCacheMode::align, kBlockSize);
  states.states = {{{3, 8}, DType::bf16}, {{2, 4, 6}, DType::fp32}};
  states.num_prefill_checkpoint_blocks = serving.alignment > 0 ? 1 : 0;
  states.prefill_checkpoint_alignment = serving.alignment;
  LockstepConfig config =
      make_world({make_group("a", 1, full_spec(kBlockSize)), make_group("m", 2, states)}, 40);
  config.engine.engine = "vllm-0.33.0";
  config.engine.prefix_match_unit = serving.match_unit;
  config.engine.prefix_cache_retention_interval = 0;
  config.engine.max_num_batched_tokens = 160;
  config.backend =
      make_backend_config(config.engine, config.backend.plan, AttentionBackend::flash_attn);
  config.backend.numbers = serving.numbers;
  return config;
}

// A backend that records what it received.
class Told final : public Backend {
 public:
  explicit Told(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  std::string_view name() const override { return backend_->name(); }
  std::string device() const override { return backend_->device(); }
  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    programs.push_back(program);
    return backend_->execute(program, readback);
  }
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override {
    return backend_->fingerprint_pages(pages, fingerprints);
  }
  Result<std::vector<std::uint8_t>> read_page(PageId page) override {
    return backend_->read_page(page);
  }
  std::optional<Writer> who_wrote(PageId page, std::int64_t byte) override {
    return backend_->who_wrote(page, byte);
  }

  std::vector<StateUpdate> checkpoints() const {
    std::vector<StateUpdate> found;
    for (const StepProgram& program : programs)
      for (const StateUpdate& update : program.state_updates)
        if (update.is_checkpoint) found.push_back(update);
    return found;
  }
  std::vector<PartCopy> parts() const {
    std::vector<PartCopy> found;
    for (const StepProgram& program : programs)
      found.insert(found.end(), program.parts.begin(), program.parts.end());
    return found;
  }

  std::vector<StepProgram> programs;

 private:
  std::unique_ptr<Backend> backend_;
};

TraceRequest request_of(std::string name, std::uint32_t shared, std::uint32_t own) {
  TraceRequest request;
  request.spec.name = std::move(name);
  request.spec.prompt.append({TokenRun::Kind::seeded, 1, 0, shared});
  if (own > 0) request.spec.prompt.append({TokenRun::Kind::seeded, 1000 + own, 0, own});
  request.output.length = request.spec.max_tokens = 4;
  return request;
}

// A prompt of 90 tokens, then twice more: the same prompt, and the same with another end.
Trace make_resends() {
  Trace trace;
  trace.header.source = {.kind = "generated", .name = "resends", .seed = 1};
  TraceRequest again = request_of("again", 90, 0);
  TraceRequest longer = request_of("longer", 90, 30);
  again.after = {"first"};
  longer.after = {"again"};
  trace.records = {request_of("first", 90, 0), again, longer};
  return trace;
}

RunSummary run_on(Told& backend, const LockstepConfig& config, const Trace& trace) {
  const auto run = run_world(config, trace, &backend);
  if (!run) {
    ADD_FAILURE() << run.error().message;
    return {};
  }
  return run->summary;
}

Told told_simt(const LockstepConfig& config) {
  auto backend = make_simt_backend(config.backend);
  if (!backend) ADD_FAILURE() << backend.error().message;
  return Told(std::move(*backend));
}

class ServedStates : public testing::TestWithParam<Serving> {};

TEST_P(ServedStates, OfResentPromptsAgreeInEveryByte) {
  const LockstepConfig config = make_serving(GetParam());
  Told backend = told_simt(config);
  const RunSummary run = run_on(backend, config, make_resends());
  EXPECT_EQ(run.verdict, Verdict::agreed) << (run.divergence ? to_text(*run.divergence) : "stuck");
  EXPECT_GE(run.hits, 2);
  EXPECT_EQ(!backend.checkpoints().empty(), GetParam().alignment > 0);
  EXPECT_EQ(!backend.parts().empty(), GetParam().match_unit > 0);
}

TEST_P(ServedStates, OfTrafficAgreeWithEveryAccessWatchedOverLateStreams) {
  LockstepConfig config = make_serving(GetParam());
  config.backend.check = CheckMode::check;
  config.backend.num_streams = 3;
  config.backend.delay_streams = true;
  config.backend.max_cudagraph_capture_size = 32;
  Told backend = told_simt(config);
  const RunSummary run = run_on(backend, config, make_traffic(3, 20));
  EXPECT_EQ(run.verdict, Verdict::agreed) << (run.divergence ? to_text(*run.divergence) : "stuck");
  EXPECT_GT(run.hits, 0);
}

TEST_P(ServedStates, OfTrafficAgreeOnPlainLoops) {
  const LockstepConfig config = make_serving(GetParam());
  if (GetParam().numbers == Numbers::real) return;  // loops know words alone
  Told backend(std::make_unique<PlainBackend>(config.backend));
  const RunSummary run = run_on(backend, config, make_traffic(5, 30));
  EXPECT_EQ(run.verdict, Verdict::agreed) << (run.divergence ? to_text(*run.divergence) : "stuck");
}

INSTANTIATE_TEST_SUITE_P(
    Servings, ServedStates,
    testing::Values(Serving{"checkpoints"}, Serving{"checkpoints_on_a_grid", 16},
                    Serving{"parts_of_blocks", 0, 8}, Serving{"checkpoints_inside_blocks", 1, 8},
                    Serving{"checkpoints_of_numbers", 1, 0, Numbers::real},
                    Serving{"checkpoints_of_numbers_inside_blocks", 1, 8, Numbers::real},
                    Serving{"parts_of_numbers", 0, 16, Numbers::real}),
    [](const auto& serving) { return serving.param.title; });

TEST(ServedStatesProgram, APrefillExportsTheLastStateThatAResendCanHit) {
  const LockstepConfig config = make_serving({"", 1});
  Told backend(std::make_unique<PlainBackend>(config.backend));
  run_on(backend, config, make_resends());
  const StepProgram& first = backend.programs.front();
  ASSERT_EQ(first.state_updates.size(), 2u);
  const StateUpdate& checkpoint = first.state_updates[0];
  const StateUpdate& rest = first.state_updates[1];
  EXPECT_TRUE(checkpoint.is_checkpoint);
  EXPECT_EQ(checkpoint.source, kNullBlock);
  EXPECT_EQ(checkpoint.first_position, 0);
  EXPECT_EQ(checkpoint.num_tokens, 64);  // of 90
  EXPECT_FALSE(rest.is_checkpoint);
  EXPECT_EQ(rest.source, checkpoint.target);
  EXPECT_EQ(rest.first_position, 64);
  EXPECT_EQ(rest.num_tokens, 26);
  EXPECT_NE(rest.target, checkpoint.target);
  // What the resend continues from.
  const auto hit = std::ranges::find_if(backend.programs, [&](const StepProgram& program) {
    return !program.rows.empty() && program.rows[0].first_position == 64;
  });
  ASSERT_NE(hit, backend.programs.end());
  ASSERT_EQ(hit->copies.size(), 1u);
  EXPECT_EQ(hit->copies[0].source, checkpoint.target);
}

TEST(ServedStatesProgram, AHitInsideABlockCopiesTheBlockOfEveryGroup) {
  const LockstepConfig config = make_serving({"", 1, 8});
  Told backend(std::make_unique<PlainBackend>(config.backend));
  run_on(backend, config, make_resends());
  const auto step = std::ranges::find_if(
      backend.programs, [](const StepProgram& program) { return !program.parts.empty(); });
  ASSERT_NE(step, backend.programs.end());
  ASSERT_EQ(step->rows.size(), 1u);
  EXPECT_EQ(step->rows[0].first_position, 88);  // of 90, in units of 8
  ASSERT_EQ(step->parts.size(), 2u);
  EXPECT_EQ(step->parts[0].group, 0);
  EXPECT_EQ(step->parts[0].num_rows, 88 - 64);
  EXPECT_EQ(step->parts[1].group, 1);
  for (const PartCopy& part : step->parts) {
    EXPECT_NE(part.source, part.target);
    EXPECT_TRUE(
        std::ranges::any_of(
            step->poison, [&](const PoisonBlock& poison) { return poison.block == part.target; }) ||
        std::ranges::find(step->table_block_ids, part.target) != step->table_block_ids.end());
  }
}

struct PlantedInServing {
  const char* mutant;
  Serving serving;
};

TEST(ServedStatesDivergence, APlantedDefectIsSeenWhereItWasWritten) {
  const Serving checkpoints{"", 1}, parts{"", 0, 8};
  const Serving of_numbers{"", 1, 0, Numbers::real}, parts_of_numbers{"", 0, 8, Numbers::real};
  for (const auto& [mutant, serving] : {PlantedInServing{"checkpoint-lost", checkpoints},
                                        PlantedInServing{"checkpoint-lost", of_numbers},
                                        PlantedInServing{"checkpoint-early", checkpoints},
                                        PlantedInServing{"checkpoint-early", of_numbers},
                                        PlantedInServing{"checkpoint-last-inputs", of_numbers},
                                        PlantedInServing{"part-copy-lost", parts},
                                        PlantedInServing{"part-copy-lost", parts_of_numbers},
                                        PlantedInServing{"part-copy-late", parts},
                                        PlantedInServing{"part-copy-late", parts_of_numbers}}) {
    LockstepConfig config = make_serving(serving);
    config.backend.mutant = mutant;
    Told backend = told_simt(config);
    const RunSummary run = run_on(backend, config, make_resends());
    ASSERT_EQ(run.verdict, Verdict::divergence) << mutant;
    EXPECT_EQ(run.divergence->phase, Phase::page_written) << mutant << to_text(*run.divergence);
    const StepProgram& last = backend.programs.back();
    if (std::string_view(mutant).starts_with("part")) {
      EXPECT_FALSE(last.parts.empty()) << mutant;
      EXPECT_TRUE(std::ranges::any_of(
          last.parts,
          [&](const PartCopy& part) { return index_of(part.target) == run.divergence->block; }))
          << mutant << to_text(*run.divergence);
    } else {
      ASSERT_EQ(last.state_updates.size(), 2u) << mutant;
      EXPECT_EQ(run.divergence->block, index_of(last.state_updates[0].target)) << mutant;
    }
  }
}

// The chunk continues whether or not its checkpoint is stored: only the checkpoint is wrong.
TEST(ServedStatesDivergence, ALostCheckpointLeavesTheRunningStateRight) {
  const LockstepConfig words = make_serving({"", 1});
  Told plain(std::make_unique<PlainBackend>(words.backend));
  run_on(plain, words, make_resends());
  const StepProgram& program = plain.programs.front();
  ASSERT_EQ(program.state_updates.size(), 2u);
  for (const Numbers numbers : {Numbers::words, Numbers::real}) {
    LockstepConfig config = make_serving({"", 1, 0, numbers});
    Told sound = told_simt(config);
    config.backend.mutant = "checkpoint-lost";
    Told planted = told_simt(config);
    StepReadback readback;
    ASSERT_TRUE(sound.execute(program, readback));
    ASSERT_TRUE(planted.execute(program, readback));
    for (std::int32_t tensor = 0; tensor < std::ssize(config.backend.plan.tensors); ++tensor) {
      const PageId checkpoint{tensor, program.state_updates[0].target};
      const PageId running{tensor, program.state_updates[1].target};
      EXPECT_NE(*planted.read_page(checkpoint), *sound.read_page(checkpoint));
      EXPECT_EQ(*planted.read_page(running), *sound.read_page(running));
    }
  }
}

}  // namespace
}  // namespace lockstep
