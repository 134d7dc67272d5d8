// The block pool and its prefix cache do, over any sequence of commands, what a page of naive code
// does.
#include "reference/cache/block_pool.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/state.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <vector>

#include "tests/properties/naive_cache.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNumKeys = 6;
constexpr std::int32_t kNumGroups = 2;
constexpr int kPoolCommandsMax = 200;  // of a sequence; rapidcheck's default is 100

// What was generated is counted: a run that never met these would prove little.
struct SeenByPool {
  std::int64_t evictions = 0;
  std::int64_t hits_on_free_blocks = 0;
  std::int64_t shared = 0;
  std::int64_t duplicates = 0;
  std::int64_t resets = 0;
  std::int64_t refused_resets = 0;
  std::int64_t two_block_pools = 0;
};

struct PoolModel {
  NaiveBlockPool pool;
  std::vector<BlockId> held;  // one entry a reference
};
struct PoolUnderTest {
  BlockPool pool;
  std::int32_t num_blocks;
  SeenByPool& seen;
};

void expect_equal(const PoolModel& model, const PoolUnderTest& real) {
  const std::vector<BlockId> queue = real.pool.free_queue();
  RC_ASSERT(std::ranges::equal(queue, model.pool.free_queue()));
  for (std::int32_t i = 1; i < real.num_blocks; ++i) {
    RC_ASSERT(real.pool.ref_cnt(BlockId{i}) == model.pool.ref_cnt(BlockId{i}));
    RC_ASSERT(real.pool.cache().contains(BlockId{i}) == model.pool.is_cached(BlockId{i}));
  }
  for (std::uint64_t k = 0; k < kNumKeys; ++k)
    for (std::int32_t g = 0; g < kNumGroups; ++g)
      RC_ASSERT(real.pool.cache().find({k, 7}, g) == model.pool.find({k, 7}, g));
}

// A command changes the model in apply(), the pool in act(); then the two are equal.
class PoolCommand : public rc::state::Command<PoolModel, PoolUnderTest> {
 public:
  void run(const PoolModel& before, PoolUnderTest& real) const final {
    act(before, real);
    PoolModel after = before;
    apply(after);
    expect_equal(after, real);
  }

 protected:
  virtual void act(const PoolModel& before, PoolUnderTest& real) const = 0;
};

class Allocate final : public PoolCommand {
 public:
  void checkPreconditions(const PoolModel& model) const override {
    RC_PRE(count_ <= std::ssize(model.pool.free_queue()));
  }
  void apply(PoolModel& model) const override {
    const auto got = model.pool.get_new_blocks(count_);
    model.held.insert(model.held.end(), got.begin(), got.end());
  }
  void show(std::ostream& out) const override { out << "allocate " << count_; }

 private:
  void act(const PoolModel& before, PoolUnderTest& real) const override {
    std::vector<BlockId> got;
    real.pool.take_counters();
    real.pool.get_new_blocks(count_, got);
    real.seen.evictions += real.pool.take_counters().evicted;
    NaiveBlockPool naive = before.pool;
    RC_ASSERT(got == naive.get_new_blocks(count_));
  }
  const std::int64_t count_ = *rc::gen::inRange<std::int64_t>(0, 3);
};

// Of commands about some content: its key and group.
class ContentCommand : public PoolCommand {
 protected:
  const BlockKey key_{*rc::gen::inRange<std::uint64_t>(0, kNumKeys), 7};
  const std::int32_t group_ = *rc::gen::inRange(0, kNumGroups);
};

class Hit final : public ContentCommand {
 public:
  void checkPreconditions(const PoolModel& model) const override {
    RC_PRE(model.pool.find(key_, group_) != kNullBlock);
  }
  void apply(PoolModel& model) const override {
    const BlockId hit = model.pool.find(key_, group_);
    model.pool.touch(hit);
    model.held.push_back(hit);
  }
  void show(std::ostream& out) const override { out << "hit " << key_.low << " of " << group_; }

 private:
  void act(const PoolModel& before, PoolUnderTest& real) const override {
    const BlockId hit = before.pool.find(key_, group_);
    real.seen.hits_on_free_blocks += real.pool.is_evictable(hit) ? 1 : 0;
    real.seen.shared += real.pool.ref_cnt(hit) > 0 ? 1 : 0;
    real.pool.touch({&hit, 1});
  }
};

// Publishes the content of a held block; another block may hold the same content.
class Publish final : public ContentCommand {
 public:
  void checkPreconditions(const PoolModel& model) const override {
    RC_PRE(!model.held.empty());
    RC_PRE(!model.pool.is_cached(block(model)));
  }
  void apply(PoolModel& model) const override {
    model.pool.cache_block(block(model), key_, group_);
  }
  void show(std::ostream& out) const override {
    out << "publish " << key_.low << " of " << group_ << " in held block " << pick_;
  }

 private:
  void act(const PoolModel& before, PoolUnderTest& real) const override {
    real.seen.duplicates += before.pool.find(key_, group_) != kNullBlock ? 1 : 0;
    real.pool.cache_block(block(before), key_, group_);
  }
  BlockId block(const PoolModel& model) const { return model.held[pick_ % model.held.size()]; }
  const std::size_t pick_ = *rc::gen::inRange<std::size_t>(0, 16);
};

// The last few, tail first, as a request frees them; a null entry among them.
class Free final : public PoolCommand {
 public:
  void checkPreconditions(const PoolModel& model) const override {
    RC_PRE(count_ <= model.held.size());
  }
  void apply(PoolModel& model) const override {
    model.pool.free_blocks(blocks(model));
    model.held.resize(model.held.size() - count_);
  }
  void show(std::ostream& out) const override { out << "free " << count_; }

 private:
  void act(const PoolModel& before, PoolUnderTest& real) const override {
    real.pool.free_blocks(blocks(before));
  }
  std::vector<BlockId> blocks(const PoolModel& model) const {
    std::vector<BlockId> last(model.held.rbegin(),
                              model.held.rbegin() + static_cast<std::ptrdiff_t>(count_));
    last.insert(last.begin() + 1, kNullBlock);
    return last;
  }
  const std::size_t count_ = *rc::gen::inRange<std::size_t>(1, 4);
};

// Forgets all that is cached, where nothing is held: often enough refused.
class Reset final : public PoolCommand {
 public:
  Reset() { RC_PRE(*rc::gen::inRange(0, 4) == 0); }  // rare: there must be something to forget
  void apply(PoolModel& model) const override { model.pool.reset_prefix_cache(); }
  void show(std::ostream& out) const override { out << "reset"; }

 private:
  void act(const PoolModel& before, PoolUnderTest& real) const override {
    NaiveBlockPool naive = before.pool;
    const bool is_done = real.pool.reset_prefix_cache();
    RC_ASSERT(is_done == naive.reset_prefix_cache());
    ++(is_done ? real.seen.resets : real.seen.refused_resets);
  }
};

class BlockPoolProperty : public testing::TestWithParam<FreedBlocks> {};

TEST_P(BlockPoolProperty, DoesWhatTheNaivePoolDoes) {
  SeenByPool seen;
  const bool holds = rc::check("pool and naive pool agree after every command", [&] {
    const auto num_blocks = *rc::gen::inRange(2, 9);
    seen.two_block_pools += num_blocks == 2 ? 1 : 0;
    RC_CLASSIFY(num_blocks == 2, "two-block pool");
    const PoolModel model{NaiveBlockPool(num_blocks, GetParam()), {}};
    PoolUnderTest real{BlockPool(num_blocks, true, GetParam()), num_blocks, seen};
    const auto commands = *rc::gen::resize(
        kPoolCommandsMax,
        rc::state::gen::commands(
            model, rc::state::gen::execOneOfWithArgs<Allocate, Hit, Publish, Free, Reset>()));
    const std::int64_t evictions = seen.evictions;
    rc::state::runAll(commands, model, real);
    RC_CLASSIFY(seen.evictions > evictions, "eviction");
  });
  EXPECT_TRUE(holds);
  EXPECT_GT(seen.evictions, 0);
  EXPECT_GT(seen.hits_on_free_blocks, 0);
  EXPECT_GT(seen.shared, 0);
  EXPECT_GT(seen.duplicates, 0);
  EXPECT_GT(seen.resets, 0);
  EXPECT_GT(seen.refused_resets, 0);
  EXPECT_GT(seen.two_block_pools, 0);
}

INSTANTIATE_TEST_SUITE_P(Orders, BlockPoolProperty,
                         testing::Values(FreedBlocks::append, FreedBlocks::unhashed_first),
                         [](const auto& order) {
                           return order.param == FreedBlocks::append ? "append" : "unhashed_first";
                         });

}  // namespace
}  // namespace lockstep
