// Blocks to the host tier and back, on random traffic: after every step the model, plain loops and
// the kernels on the CPU hold the same bytes in every page and in every host block.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda_backend/backends.h"
#include "reference/memory/memory_model.h"
#include "reference/memory/model_placement.h"
#include "reference/types/token_rows.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBlocks = 13;
constexpr std::int64_t kHosts = 7;

struct TierSetting {
  const char* title;
  std::vector<KVCacheGroupSpec> groups;
  CacheLayout layout = CacheLayout::NHD;
};

std::vector<TierSetting> settings() {
  return {
      {"one group, K and V apart", {make_group("a", 2, full_spec())}, CacheLayout::NHD},
      {"two groups, HND",
       {make_group("a", 2, full_spec()), make_group("w", 1, sliding_spec(40))},
       CacheLayout::HND},
      {"padded pages and states",
       {make_group("a", 1, full_spec()), make_group("m", 2, mamba_spec(MambaCacheMode::all))},
       CacheLayout::NHD},
      {"elements of a byte",
       {make_group("a", 3, full_spec(16, DType::fp8_e4m3))},
       CacheLayout::NHD},
  };
}

// Random programs together with the memory model. A block belongs to one group while it is used.
class Traffic {
 public:
  Traffic(MemoryModel& model, std::uint64_t seed) : model_(model), seed_(seed) {
    writer_ = model_.add_writer("r");
  }

  StepProgram next() {
    StepProgram program;
    program.step = ++step_;
    model_.begin_step(step_);
    if (below(3) == 0) poison(program);
    for (std::uint64_t i = below(3); i > 0; --i) load(program);
    write(program);
    std::vector<int> taken(kHosts);
    for (std::uint64_t i = below(4); i > 0; --i) store(program, taken);
    return program;
  }
  std::int64_t num_loads = 0, num_stores = 0;

 private:
  std::uint64_t below(std::uint64_t bound) { return splitmix64(seed_ += 0x1234567) % bound; }
  BlockId any_block() { return static_cast<BlockId>(1 + below(kBlocks - 1)); }
  bool can_belong(BlockId block, std::int32_t group) const {
    return model_.block(block).group == -1 || model_.block(block).group == group;
  }

  void poison(StepProgram& program) {
    program.poison.push_back({any_block(), Poison::freed});
    model_.poison(program.poison.back().block, Unwritten::freed);
  }
  void load(StepProgram& program) {
    const auto host = static_cast<HostBlockId>(below(kHosts));
    const BlockId block = any_block();
    const std::int32_t group = model_.host_block(host).group;
    for (const HostTransfer& other : program.loads)
      if (other.block == block) return;
    if (group < 0 || !can_belong(block, group)) return;
    program.loads.push_back({group, block, host});
    EXPECT_EQ(model_.load(group, block, host), std::nullopt);
    ++num_loads;
  }
  // Some tokens of a request that has one block in every group.
  void write(StepProgram& program) {
    std::vector<BlockId> blocks;
    for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
      const BlockId block = any_block();
      if (!can_belong(block, g) || std::ranges::count(blocks, block) > 0) return;
      blocks.push_back(block);
    }
    const auto num_tokens = static_cast<std::int32_t>(1 + below(16));
    for (std::int32_t i = 0; i < num_tokens; ++i)
      program.contents.push_back(below(~std::uint64_t{0}));
    program.num_padded_tokens = num_tokens;
    program.rows.push_back({0, 0, num_tokens, 0});
    program.table_block_ids = blocks;
    for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
      const BlockId block = blocks[static_cast<std::size_t>(g)];
      program.table_updates.push_back({0, g, 0, static_cast<std::uint32_t>(g), 1});
      for (std::int32_t i = 0; i < num_tokens && !model_.is_state_group(g); ++i)
        model_.write_token(g, block, i, program.contents[static_cast<std::size_t>(i)], writer_, i);
      if (!model_.is_state_group(g)) continue;
      program.state_updates.push_back({0, g, kNullBlock, block, 0, num_tokens, 0});
      EXPECT_EQ(
          model_.advance_state(g, kNullBlock, block, 0, kEmptyPrefix, program.contents, writer_),
          std::nullopt);
    }
  }
  void store(StepProgram& program, std::vector<int>& taken) {
    const BlockId block = any_block();
    const auto host = static_cast<HostBlockId>(below(kHosts));
    const std::int32_t group = model_.block(block).group;
    if (group < 0 || taken[static_cast<std::size_t>(index_of(host))]++ != 0) return;
    program.stores.push_back({group, block, host});
    EXPECT_EQ(model_.store(group, block, host), std::nullopt);
    ++num_stores;
  }

  MemoryModel& model_;
  std::uint64_t seed_;
  WriterId writer_ = kNobody;
  std::int64_t step_ = 0;
};

// Empty: every page and every host block is as it should be.
std::string difference(MemoryModel& model, Backend& backend) {
  for (std::int32_t t = 0; t < model.num_tensors(); ++t)
    for (std::int32_t p = 0; p < model.num_blocks(); ++p)
      if (*backend.read_page({t, BlockId{p}}) != model.page_image({t, p}))
        return fmt::format("page {} of tensor {}", p, t);
  for (std::int32_t h = 0; h < kHosts; ++h) {
    const HostBlockId host{h};
    const HostContent& expected = model.host_block(host);
    for (std::int32_t g = 0; g < model.num_groups(); ++g) {
      const auto begin = expected.bytes->begin();
      const std::vector<std::uint8_t> bytes(begin, begin + model.host_bytes_of(g));
      if (*backend.read_host_block(g, host) != bytes)
        return fmt::format("host block {}, as group {}", h, g);
    }
    Fingerprint sum;
    const auto done = backend.fingerprint_host_blocks(std::span(&host, 1), std::span(&sum, 1));
    if (!done || sum != Fingerprint{expected.sum.a, expected.sum.b})
      return fmt::format("fingerprint of host block {}", h);
  }
  return {};
}

LockstepConfig world_of(const TierSetting& setting) {
  LockstepConfig config = make_world(setting.groups, kBlocks);
  config.backend.layout = setting.layout;
  config.backend.num_host_blocks = kHosts;
  config.backend.num_rows = 4;
  return config;
}

// Random traffic on backends made with `config`; what the first one that differs shows.
std::string first_difference(const LockstepConfig& config, std::span<Backend* const> backends) {
  auto model = MemoryModel::create(config.backend.plan, config.backend.attention_backend,
                                   config.backend.layout, config.backend.layout_rule, kHosts);
  if (!model) return model.error().message;
  Traffic traffic(*model, 7);
  StepReadback readback;
  for (int step = 0; step < 40; ++step) {
    const StepProgram program = traffic.next();
    for (Backend* backend : backends) {
      if (auto done = backend->execute(program, readback); !done) return done.error().message;
      if (!readback.reports.empty()) return readback.reports.front().message;
      if (std::string found = difference(*model, *backend); !found.empty())
        return fmt::format("step {}, {}: {}", step, backend->name(), found);
    }
  }
  EXPECT_GT(traffic.num_loads, 10);
  EXPECT_GT(traffic.num_stores, 30);
  return {};
}

}  // namespace

TEST(HostTier, ModelPlainLoopsAndKernelsHoldTheSameBytesAfterEveryStep) {
  for (const TierSetting& setting : settings())
    for (const int num_streams : {1, 3}) {
      LockstepConfig config = world_of(setting);
      config.backend.check = CheckMode::check;
      config.backend.num_streams = num_streams;
      config.backend.delay_streams = num_streams > 1;
      auto simt = make_simt_backend(config.backend);
      ASSERT_TRUE(simt) << setting.title << ": " << simt.error().message;
      PlainBackend plain(config.backend);
      Backend* const backends[] = {&plain, simt->get()};
      EXPECT_EQ(first_difference(config, backends), "") << setting.title;
    }
}

// The memory of releases whose groups overlay one allocation. Nothing: the order does not take such
// a cache.
std::optional<LockstepConfig> overlaid_world(TierSetting setting, CacheLayout order) {
  setting.layout = order;
  LockstepConfig config = world_of(setting);
  const auto placed = placed_layout(config.backend.plan, config.backend.attention_backend, order);
  if (!placed) return std::nullopt;
  config.backend.plan = with_placed_tensors(std::move(config.backend.plan), *placed);
  return config;
}

std::string difference_on_simt(const LockstepConfig& config) {
  auto simt = make_simt_backend(config.backend);
  if (!simt) return simt.error().message;
  Backend* const backends[] = {simt->get()};
  return first_difference(config, backends);
}

TEST(HostTier, BlocksComeBackWholeInEveryOrderOfTheOverlaidMemory) {
  int worlds = 0;
  for (const TierSetting& setting : settings())
    for (const CacheLayout order : kOverlaidLayouts) {
      auto config = overlaid_world(setting, order);
      if (!config) continue;
      ++worlds;
      const std::string where = fmt::format("{} in {}", setting.title, name_of(order));
      config->backend.check = CheckMode::hunt;
      EXPECT_EQ(difference_on_simt(*config), "") << where;
      config->backend.check = CheckMode::fast;
      for (const char* mutant : {"transfer-wrong-end", "transfer-flatten"}) {
        config->backend.mutant = mutant;
        EXPECT_NE(difference_on_simt(*config), "") << mutant << ", " << where;
      }
    }
  EXPECT_GE(worlds, 3 * 6 + 4);  // padded pages lie in the orders whose pages are one run
}

TEST(HostTier, PlantedDefectsOfItsCopiesShowInBytesOrInTheOrderOfStreams) {
  struct Planted {
    const char* mutant;
    std::size_t setting;
    int num_streams;
    const char* shows;
  };
  for (const Planted& planted : {Planted{"transfer-wrong-end", 0, 1, "step "},
                                 {"transfer-flatten", 2, 1, "step "},
                                 {"copy-unordered", 0, 3, "_blocks on stream"}}) {
    LockstepConfig config = world_of(settings()[planted.setting]);
    config.backend.mutant = planted.mutant;
    config.backend.num_streams = planted.num_streams;
    auto simt = make_simt_backend(config.backend);
    ASSERT_TRUE(simt) << simt.error().message;
    Backend* const backends[] = {simt->get()};
    const std::string found = first_difference(config, backends);
    EXPECT_NE(found.find(planted.shows), std::string::npos) << planted.mutant << ": " << found;
  }
}

}  // namespace lockstep
