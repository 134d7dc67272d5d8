// A defect planted in a backend is found in the step where it happens, in the phase where it shows
// first, and reported exactly: request, layer, block, slot, byte. Each saboteur spoils one thing,
// once.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "tests/sim/world.h"

namespace lockstep {
namespace {

constexpr std::int64_t kStep = 25;

// Runs plain loops and lets a saboteur at the memory or at the readback of one step.
class Saboteur final : public PlainBackend {
 public:
  using Hook = std::function<void(Saboteur&, const StepProgram&, StepReadback&)>;
  Saboteur(const BackendConfig& config, Hook before, Hook after)
      : PlainBackend(config), before_(std::move(before)), after_(std::move(after)) {}

  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    const bool now = !done_ && program.step >= kStep && !program.rows.empty();
    if (now && before_) before_(*this, program, readback);
    auto done = PlainBackend::execute(program, readback);
    if (now && after_) after_(*this, program, readback);
    return done;
  }
  void set_done(const StepProgram& program) {
    done_ = true;
    step = program.step;
  }

  std::int64_t step = -1;  // of the deed
  std::int64_t block = -1, byte = -1, token = -1, slot = -1;
  int row = -1;

 private:
  Hook before_, after_;
  bool done_ = false;
};

LockstepConfig world() {
  return make_world({make_group("a", 2, full_spec()), make_group("b", 1, sliding_spec(40))}, 30);
}

struct Outcome {
  RunSummary summary;
  Divergence divergence;
};

Outcome sabotage(Saboteur& backend, const LockstepConfig& config) {
  auto report = run_world(config, make_traffic(3, 60), &backend);
  EXPECT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->summary.verdict, Verdict::divergence);
  if (!report->summary.divergence) return {};
  return {report->summary, *report->summary.divergence};
}

TEST(Divergence, AByteOfARowJustWritten) {
  const LockstepConfig config = world();
  Saboteur backend(
      config.backend, {}, [](Saboteur& self, const StepProgram& program, StepReadback& back) {
        const RowSlice& slice = program.rows.back();
        const auto& layer = self.layers()[1];
        self.slot = back.slot_mappings[0][static_cast<std::size_t>(slice.first_token)];
        self.block = self.slot / 16;
        const std::int64_t at = self.row_offset(layer, self.block, 1, self.slot % 16, 1) + 3;
        self.byte = at % self.page_bytes(layer.tensor);
        self.tensor(layer.tensor)[static_cast<std::size_t>(at)] ^= 0x40;
        self.token = slice.first_position;
        self.set_done(program);
      });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::page_written);
  EXPECT_EQ(found.step, backend.step);
  EXPECT_EQ(found.layer, 1);
  EXPECT_EQ(found.layer_name, "a.1");
  EXPECT_EQ(found.part, "V");
  EXPECT_EQ(found.head, 1);
  EXPECT_EQ(found.block, backend.block);
  EXPECT_EQ(found.slot, backend.slot);
  EXPECT_EQ(found.byte, backend.byte);
  EXPECT_EQ(found.token, backend.token);
  EXPECT_EQ(found.wrong_bytes, 1);
  EXPECT_EQ(found.owner, "the right row, 1 of its 32 bytes differ");
  EXPECT_FALSE(found.request.empty());
  EXPECT_NE(found.writer.find("plain loops"), std::string::npos) << found.writer;
}

TEST(Divergence, ARowWrittenToAnotherSlotIsNamedByWhoseContentLiesThere) {
  const LockstepConfig config = world();
  // The row of the step's first token lands one slot further on, as with an offset one too large.
  Saboteur backend(
      config.backend, {}, [](Saboteur& self, const StepProgram& program, StepReadback& back) {
        const RowSlice& slice = program.rows.front();
        self.slot = back.slot_mappings[0][static_cast<std::size_t>(slice.first_token)];
        if (slice.num_tokens != 1 || self.slot % 16 == 15)
          return;  // wait for a decode inside a block
        const auto& layer = self.layers()[0];
        auto& bytes = self.tensor(layer.tensor);
        const auto from =
            static_cast<std::size_t>(self.row_offset(layer, self.slot / 16, 0, self.slot % 16, 0));
        const auto to = static_cast<std::size_t>(
            self.row_offset(layer, self.slot / 16, 0, self.slot % 16 + 1, 0));
        std::memcpy(&bytes[to], &bytes[from], static_cast<std::size_t>(layer.row_bytes));
        self.token = slice.first_position;
        self.set_done(program);
      });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::page_written);
  EXPECT_EQ(found.step, backend.step);
  EXPECT_EQ(found.slot, backend.slot + 1);
  EXPECT_EQ(found.wrong_bytes, 32);
  EXPECT_NE(found.owner.find("K of head 0 of layer 0 of r"), std::string::npos) << found.owner;
  EXPECT_NE(found.owner.find("token " + std::to_string(backend.token)), std::string::npos)
      << found.owner;
}

TEST(Divergence, APageThatTheStepDidNotTouchIsFoundInRotation) {
  LockstepConfig config = world();
  config.budget.untouched_pages = 1 << 20;
  Saboteur backend(config.backend, {},
                   [](Saboteur& self, const StepProgram& program, StepReadback&) {
                     self.byte = 77;
                     self.tensor(0)[77] ^= 1;  // in the null block
                     self.set_done(program);
                   });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::page_untouched);
  EXPECT_EQ(found.step, backend.step);
  EXPECT_EQ(found.block, 0);
  EXPECT_EQ(found.byte, 77);
}

TEST(Divergence, WithoutRotationAStrayWriteIsFoundAtTheEndOrBeforeReuse) {
  for (const std::int64_t block : {std::int64_t{0}, std::int64_t{9}}) {
    LockstepConfig config = world();
    config.budget.untouched_pages = 0;
    config.budget.probe_rows = 0;
    Saboteur backend(
        config.backend, {}, [block](Saboteur& self, const StepProgram& program, StepReadback&) {
          self.byte = 100;
          self.tensor(0)[static_cast<std::size_t>(block * self.page_bytes(0) + 100)] ^= 1;
          self.set_done(program);
        });
    const Divergence found = sabotage(backend, config).divergence;
    EXPECT_EQ(found.block, block);
    EXPECT_EQ(found.byte, 100);
    EXPECT_EQ(found.phase == Phase::page_final, block == 0);
  }
}

TEST(Divergence, AStaleTableEntry) {
  const LockstepConfig config = world();
  Saboteur backend(config.backend, {},
                   [](Saboteur& self, const StepProgram& program, StepReadback& back) {
                     self.row = 0;
                     back.tables[1][back.table_ends[1][0] - 1] += 1;
                     self.set_done(program);
                   });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::block_table);
  EXPECT_EQ(found.step, backend.step);
  EXPECT_EQ(found.group, 1);
  EXPECT_EQ(std::stoi(found.found), std::stoi(found.expected) + 1);
  EXPECT_NE(found.message.find("entry"), std::string::npos);
}

TEST(Divergence, ATableRowThatIsTooLong) {
  const LockstepConfig config = world();
  Saboteur backend(config.backend, {},
                   [](Saboteur& self, const StepProgram& program, StepReadback& back) {
                     back.tables[0].push_back(5);
                     back.table_ends[0].back() += 1;
                     self.set_done(program);
                   });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::block_table);
  EXPECT_EQ(found.expected, "no entry");
  EXPECT_EQ(found.found, "5");
}

TEST(Divergence, AWrongSlotAndAPaddedSlotThatIsNotPAD) {
  for (const bool padded : {false, true}) {
    const LockstepConfig config = world();
    Saboteur backend(config.backend, {},
                     [padded](Saboteur& self, const StepProgram& program, StepReadback& back) {
                       const std::size_t entry =
                           padded ? program.contents.size() : program.contents.size() - 1;
                       if (entry >= back.slot_mappings[0].size())
                         return;  // no padding in this step
                       Slot& slot = back.slot_mappings[0][entry];
                       self.slot = slot;
                       slot = padded ? 0 : slot + 1;
                       self.set_done(program);
                     });
    const Divergence found = sabotage(backend, config).divergence;
    EXPECT_EQ(found.phase, Phase::slot_mapping);
    EXPECT_EQ(found.step, backend.step);
    EXPECT_EQ(found.slot, backend.slot);
    EXPECT_EQ(found.request.empty(), padded);
  }
}

TEST(Divergence, AttentionThatReadsAWrongBlockIsNarrowedDownToTheToken) {
  const LockstepConfig config = world();
  // The table is read back before the probes run and is right; the probes read through a spoiled
  // one.
  class Misreader final : public PlainBackend {
   public:
    using PlainBackend::PlainBackend;
    Result<void> execute(const StepProgram& program, StepReadback& readback) override {
      auto done = PlainBackend::execute(program, readback);
      for (std::size_t i = 0; i < program.probes.size() && program.step >= kStep; ++i) {
        const AttentionProbe& probe = program.probes[i];
        if (probe.layer != 2 || probe.first > 20 || probe.last <= 20) continue;
        readback.digests[i] ^= 1;  // whatever reads token 20
        row = probe.row;
        if (step < 0) step = program.step;
      }
      return done;
    }
    std::int64_t step = -1;
    int row = -1;
  };
  Misreader backend(config.backend);
  const auto report = run_world(config, make_traffic(3, 60), &backend);
  ASSERT_TRUE(report && report->summary.divergence);
  const Divergence& found = *report->summary.divergence;
  EXPECT_EQ(found.phase, Phase::attention_digest);
  EXPECT_EQ(found.step, backend.step);
  EXPECT_EQ(found.layer, 2);
  EXPECT_EQ(found.group, 1);
  EXPECT_EQ(found.token, 20);
  EXPECT_EQ(found.slot % 16, 4);
}

TEST(Divergence, AnAttentionOutputOutsideItsTolerance) {
  const LockstepConfig config = world();
  Saboteur backend(config.backend, {},
                   [](Saboteur& self, const StepProgram& program, StepReadback& back) {
                     if (back.outputs.size() < 40) return;
                     back.outputs[17] += 0.001f;
                     self.set_done(program);
                   });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::attention_output);
  EXPECT_EQ(found.step, backend.step);
  EXPECT_EQ(found.head, 1);  // element 17 of heads of 16
}

TEST(Divergence, AReportOfTheBackendsOwnChecker) {
  const LockstepConfig config = world();
  Saboteur backend(config.backend, {},
                   [](Saboteur& self, const StepProgram& program, StepReadback& back) {
                     MemoryReport race;
                     race.kind = "race";
                     race.kernel = "write_rows";
                     race.message = "two threads meet";
                     race.page = PageId{0, BlockId{3}};
                     race.byte_in_page = 40;
                     back.reports.push_back(race);
                     self.set_done(program);
                   });
  const Divergence found = sabotage(backend, config).divergence;
  EXPECT_EQ(found.phase, Phase::memory_check);
  EXPECT_EQ(found.block, 3);
  EXPECT_NE(found.message.find("race in kernel write_rows: two threads meet"), std::string::npos);
}

TEST(Divergence, TextAndJsonTellTheSame) {
  const LockstepConfig config = world();
  Saboteur backend(config.backend, {},
                   [](Saboteur& self, const StepProgram& program, StepReadback&) {
                     self.tensor(1)[5] ^= 1;
                     self.set_done(program);
                   });
  const Divergence found = sabotage(backend, config).divergence;
  const std::string text = to_text(found);
  const std::string json = to_json(found);
  EXPECT_NE(text.find("tensor 1, block 0, byte 5"), std::string::npos) << text;
  EXPECT_NE(json.find("\"byte\": 5"), std::string::npos);
  EXPECT_NE(json.find("\"found_page\""), std::string::npos);
  EXPECT_NE(json.find(std::string(name_of(found.phase))), std::string::npos);
}

}  // namespace
}  // namespace lockstep
