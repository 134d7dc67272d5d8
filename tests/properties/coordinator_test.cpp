// The groups of an engine together do, over any sequence of commands, what naive groups over one
// naive pool do: hits that all of them have, room for all of them or for none, the same tables.
#include "reference/cache/kv_cache_coordinator.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/state.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "reference/defects/scheduler_defect.h"
#include "tests/properties/naive_cache.h"
#include "tests/properties/planted_defects.h"

namespace lockstep {
namespace {

constexpr std::int32_t kLongestRequest = 40;  // tokens
constexpr int kCoordinatorCommandsMax = 200;  // of a sequence

// What was generated is counted: a run that never met these would prove little.
struct SeenByCoordinator {
  std::int64_t hits = 0;
  std::int64_t shortened_hits = 0;  // full attention alone had more
  std::int64_t hits_on_free_blocks = 0;
  std::int64_t evictions = 0;
  std::int64_t refusals = 0;  // the pool has too little, for a new request or another step
  std::int64_t retired = 0;
  std::int64_t resets = 0;
  std::int64_t two_block_pools = 0;
};

struct World {
  std::vector<KVCacheGroupSpec> groups;
  std::int32_t block_size = 0;
  std::int32_t num_blocks = 0;
  EngineConfig engine;
};

World draw_world(std::string engine) {
  World world;
  world.block_size = *rc::gen::inRange(1, 5);
  world.num_blocks = *rc::gen::element(2, 4, 6, 8, 10, 12, 16, 20, 24);
  world.engine.engine = std::move(engine);
  world.engine.max_model_len = kLongestRequest;
  const auto num_groups = *rc::gen::element(1, 2, 2, 3, 3);
  for (std::int32_t g = 0; g < num_groups; ++g) {
    KVCacheSpec spec;
    spec.block_size = world.block_size;
    spec.kind = *rc::gen::element(CacheKind::full_attention, CacheKind::sliding_window,
                                  CacheKind::chunked_local);
    if (spec.kind == CacheKind::sliding_window) spec.sliding_window = *rc::gen::inRange(2, 13);
    if (spec.kind == CacheKind::chunked_local)
      spec.attention_chunk_size = world.block_size * *rc::gen::inRange(1, 5);
    world.groups.push_back({.layer_names = {}, .spec = spec, .layer_specs = {}});
  }
  return world;
}

// A prompt of one of a few families: requests of one family share what both have.
Request coordinator_request(std::uint64_t family, std::int32_t num_tokens, const World& world) {
  RequestSpec spec;
  spec.name = "r";
  spec.prompt.append({TokenRun::Kind::seeded, family, 0, static_cast<std::uint32_t>(num_tokens)});
  Request request(std::move(spec), static_cast<std::int32_t>(world.groups.size()));
  request.hashes.extend({HashAlgorithm::content, world.block_size}, request.tokens, "");
  return request;
}

struct NaiveRequest {
  std::vector<BlockKey> keys;
  std::uint64_t family = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_computed = 0;
  std::vector<NaiveGroup::Table> tables;  // by group
};

struct CoordinatorModel {
  explicit CoordinatorModel(std::shared_ptr<const World> of)
      : world(std::move(of)),
        pool(world->num_blocks, engine_profile(world->engine.engine).freed_blocks) {}

  std::size_t num_groups() const { return world->groups.size(); }
  NaiveGroup group(std::size_t g) {
    return {world->groups[g].spec, pool, static_cast<std::int32_t>(g)};
  }

  // The longest prefix that every group has, with the last token left to compute: by trying.
  std::vector<std::vector<BlockId>> hit(const NaiveRequest& request) {
    const std::int32_t size = world->block_size;
    for (std::int32_t length = (request.num_tokens - 1) / size; length > 0; --length) {
      std::vector<std::vector<BlockId>> blocks;
      for (std::size_t g = 0; g < num_groups(); ++g)
        blocks.push_back(group(g).hit(request.keys, std::int64_t{length} * size));
      if (std::ranges::all_of(blocks, [&](const auto& of) { return std::ssize(of) == length; }))
        return blocks;
    }
    return std::vector<std::vector<BlockId>>(num_groups());
  }

  // False: not enough blocks. What the request no longer needs is freed anyway.
  bool step(NaiveRequest& request, std::int32_t num_new,
            const std::vector<std::vector<BlockId>>* hit) {
    if (hit == nullptr)
      for (std::size_t g = 0; g < num_groups(); ++g)
        group(g).retire(request.tables[g], request.num_computed);
    NaiveRequest grown = request;
    CoordinatorModel after = *this;
    if (hit != nullptr) {
      grown.num_computed = static_cast<std::int32_t>(std::ssize(hit->front())) * world->block_size;
      for (std::size_t g = 0; g < num_groups(); ++g)
        after.group(g).take_hit(grown.tables[g], (*hit)[g], grown.num_computed);
    }
    const std::int32_t end = std::min(grown.num_computed + num_new, grown.num_tokens);
    const std::int64_t blocks_at_end = (end + world->block_size - 1) / world->block_size;
    std::int64_t missing = 0;
    for (const NaiveGroup::Table& table : grown.tables)
      missing += std::max<std::int64_t>(0, blocks_at_end - std::ssize(table.blocks));
    if (missing > std::ssize(after.pool.free_queue())) return false;
    for (std::size_t g = 0; g < num_groups(); ++g) after.group(g).grow(grown.tables[g], end);
    for (std::size_t g = 0; g < num_groups(); ++g)
      after.group(g).publish(grown.tables[g], grown.keys, end);
    grown.num_computed = end;
    request = std::move(grown);
    pool = std::move(after.pool);
    return true;
  }

  std::shared_ptr<const World> world;
  NaiveBlockPool pool;
  std::vector<NaiveRequest> requests;
  std::vector<NaiveRequest> gone;  // in the order in which they left
};

struct Coordinated {
  std::unique_ptr<KVCacheCoordinator> coordinator;
  std::vector<Request> requests;  // those of the model, in its order
  SeenByCoordinator& seen;
};

std::int64_t num_held(const Request& request) {
  std::int64_t count = 0;
  for (const GroupBlocks& group : request.groups)
    count += std::ssize(group.blocks) - std::ranges::count(group.blocks, kNullBlock);
  return count;
}

void expect_same(const CoordinatorModel& model, const Coordinated& real) {
  const BlockPool& pool = real.coordinator->pool();
  const std::vector<BlockId> queue = pool.free_queue();
  RC_ASSERT(std::ranges::equal(queue, model.pool.free_queue()));
  for (std::int32_t i = 1; i < model.world->num_blocks; ++i) {
    RC_ASSERT(pool.ref_cnt(BlockId{i}) == model.pool.ref_cnt(BlockId{i}));
    RC_ASSERT(pool.is_cached(BlockId{i}) == model.pool.is_cached(BlockId{i}));
  }
  RC_ASSERT(real.requests.size() == model.requests.size());
  for (std::size_t r = 0; r < real.requests.size(); ++r)
    for (std::size_t g = 0; g < model.num_groups(); ++g)
      RC_ASSERT(real.requests[r].groups[g].blocks == model.requests[r].tables[g].blocks);
}

// A command changes the model in apply(), the coordinator in act(); then the two are equal.
class CoordinatorCommand : public rc::state::Command<CoordinatorModel, Coordinated> {
 public:
  void run(const CoordinatorModel& before, Coordinated& real) const final {
    real.coordinator->begin_step();
    real.coordinator->pool().take_counters();
    act(before, real);
    real.seen.evictions += real.coordinator->pool().take_counters().evicted;
    CoordinatorModel after = before;
    apply(after);
    expect_same(after, real);
  }

 protected:
  virtual void act(const CoordinatorModel& before, Coordinated& real) const = 0;
  static bool allocate(Coordinated& real, Request& request, std::int32_t num_new,
                       const PrefixHit* hit) {
    std::vector<std::size_t> first_new(request.groups.size());
    const std::int32_t computed = hit == nullptr ? request.num_computed_tokens : hit->num_tokens;
    num_new = std::min(num_new, request.num_tokens() - computed);
    const bool fits = real.coordinator->allocate_slots(request, num_new, 0, hit, false, first_new);
    if (fits) request.num_computed_tokens = computed + num_new;
    real.seen.refusals += fits ? 0 : 1;
    return fits;
  }
  const std::int32_t chunk_ = *rc::gen::inRange(1, 21);
  const std::size_t pick_ = *rc::gen::inRange<std::size_t>(0, 8);  // of the requests that are there
};

// Of one family, with this many tokens.
struct DrawnPrompt {
  std::uint64_t family = 0;
  std::int32_t num_tokens = 0;
};

// A new request with its hit and its first chunk; without enough blocks it is not admitted.
class Enter : public CoordinatorCommand {
 public:
  void apply(CoordinatorModel& model) const final {
    NaiveRequest request = naive(model);
    const auto hit = model.hit(request);
    if (model.step(request, chunk_, &hit)) model.requests.push_back(std::move(request));
  }

 protected:
  virtual DrawnPrompt prompt(const CoordinatorModel& model) const = 0;

 private:
  NaiveRequest naive(const CoordinatorModel& model) const {
    const auto [family, num_tokens] = prompt(model);
    const Request real = coordinator_request(family, num_tokens, *model.world);
    NaiveRequest request;
    request.family = family;
    request.num_tokens = num_tokens;
    request.keys.assign(real.hashes.keys().begin(), real.hashes.keys().end());
    request.tables.resize(model.num_groups());
    return request;
  }
  void act(const CoordinatorModel& before, Coordinated& real) const final {
    const NaiveRequest same = naive(before);
    Request request = coordinator_request(same.family, same.num_tokens, *before.world);
    PrefixHit hit;
    real.coordinator->find_longest_cache_hit(request, hit);
    CoordinatorModel model = before;
    RC_ASSERT(hit.blocks == model.hit(same));
    count(before, same, hit, real);
    if (allocate(real, request, chunk_, &hit)) real.requests.push_back(std::move(request));
  }
  void count(const CoordinatorModel& before, const NaiveRequest& request, const PrefixHit& hit,
             Coordinated& real) const {
    if (hit.num_tokens > 0) ++real.seen.hits;
    CoordinatorModel model = before;
    for (std::size_t g = 0; g < before.num_groups(); ++g) {
      for (const BlockId block : hit.blocks[g])
        real.seen.hits_on_free_blocks += real.coordinator->pool().is_evictable(block) ? 1 : 0;
      if (before.world->groups[g].spec.kind == CacheKind::full_attention &&
          model.group(g).hit(request.keys, request.num_tokens - 1).size() > hit.blocks[g].size())
        ++real.seen.shortened_hits;
    }
  }
};

class Admit final : public Enter {
 public:
  void show(std::ostream& out) const override {
    out << "admit " << num_tokens_ << " tokens of family " << family_ << ", " << chunk_
        << " at once";
  }

 private:
  DrawnPrompt prompt(const CoordinatorModel&) const override { return {family_, num_tokens_}; }
  const std::uint64_t family_ = *rc::gen::inRange<std::uint64_t>(0, 3);
  const std::int32_t num_tokens_ = *rc::gen::inRange(1, kLongestRequest + 1);
};

// One that has left comes back with more: its blocks are free, and a hit as long as they are there.
class Return final : public Enter {
 public:
  void checkPreconditions(const CoordinatorModel& model) const override {
    RC_PRE(!model.gone.empty());
  }
  void show(std::ostream& out) const override {
    out << "one that left comes back with " << more_ << " tokens more, " << chunk_ << " at once";
  }

 private:
  DrawnPrompt prompt(const CoordinatorModel& model) const override {
    const NaiveRequest& old = model.gone[model.gone.size() - 1 - pick_ % model.gone.size()];
    return {old.family, std::min(old.num_computed + more_, kLongestRequest)};
  }
  const std::int32_t more_ = *rc::gen::inRange(1, 13);
};

// Another chunk of a request that has tokens left; without room it waits.
class Continue final : public CoordinatorCommand {
 public:
  void checkPreconditions(const CoordinatorModel& model) const override {
    RC_PRE(pick_ < model.requests.size());
    RC_PRE(model.requests[pick_].num_computed < model.requests[pick_].num_tokens);
  }
  void apply(CoordinatorModel& model) const override {
    model.step(model.requests[pick_], chunk_, nullptr);
  }
  void show(std::ostream& out) const override {
    out << "continue request " << pick_ << " with " << chunk_ << " tokens";
  }

 private:
  void act(const CoordinatorModel& before, Coordinated& real) const override {
    Request& request = real.requests[pick_];
    CoordinatorModel model = before;
    NaiveRequest retired = before.requests[pick_];
    const std::int64_t held = num_held(request);
    for (std::size_t g = 0; g < model.num_groups(); ++g)
      model.group(g).retire(retired.tables[g], retired.num_computed);
    for (const NaiveGroup::Table& table : retired.tables)
      real.seen.retired -= std::ssize(table.blocks) - std::ranges::count(table.blocks, kNullBlock);
    real.seen.retired += held;
    allocate(real, request, chunk_, nullptr);
  }
};

class Leave final : public CoordinatorCommand {
 public:
  void checkPreconditions(const CoordinatorModel& model) const override {
    RC_PRE(pick_ < model.requests.size());
  }
  void apply(CoordinatorModel& model) const override {
    for (std::size_t g = 0; g < model.num_groups(); ++g)
      model.group(g).free(model.requests[pick_].tables[g]);
    model.gone.push_back(model.requests[pick_]);
    model.requests.erase(model.requests.begin() + static_cast<std::ptrdiff_t>(pick_));
  }
  void show(std::ostream& out) const override { out << "request " << pick_ << " leaves"; }

 private:
  void act(const CoordinatorModel&, Coordinated& real) const override {
    real.coordinator->free(real.requests[pick_]);
    real.requests.erase(real.requests.begin() + static_cast<std::ptrdiff_t>(pick_));
  }
};

class ResetCache final : public CoordinatorCommand {
 public:
  void checkPreconditions(const CoordinatorModel&) const override { RC_PRE(pick_ < 3); }
  void apply(CoordinatorModel& model) const override { model.pool.reset_prefix_cache(); }
  void show(std::ostream& out) const override { out << "reset the prefix cache"; }

 private:
  void act(const CoordinatorModel& before, Coordinated& real) const override {
    CoordinatorModel model = before;
    const bool is_done = real.coordinator->pool().reset_prefix_cache();
    RC_ASSERT(is_done == model.pool.reset_prefix_cache());
    real.seen.resets += is_done ? 1 : 0;
  }
};

bool agree(const std::string& engine, SchedulerDefect defect, SeenByCoordinator& seen) {
  return rc::check("coordinator and naive groups agree after every command", [&] {
    const auto world = std::make_shared<const World>(draw_world(engine));
    RC_CLASSIFY(world->num_blocks == 2, "two-block pool");
    RC_CLASSIFY(world->groups.size() > 1, "several groups");
    seen.two_block_pools += world->num_blocks == 2 ? 1 : 0;
    const BlockSizes sizes{world->block_size, world->block_size};
    const PlantedParts planted(defect);
    const CacheParts usual;
    const CacheParts& parts = defect == SchedulerDefect::none ? usual : planted;
    Coordinated real{
        parts.coordinator(world->engine, world->groups, sizes, world->num_blocks), {}, seen};
    const CoordinatorModel model(world);
    const auto commands = *rc::gen::resize(
        kCoordinatorCommandsMax,
        rc::state::gen::commands(
            model, rc::state::gen::execOneOfWithArgs<Admit, Return, Continue, Continue, Leave,
                                                     Leave, ResetCache>()));
    const SeenByCoordinator before = seen;
    rc::state::runAll(commands, model, real);
    RC_CLASSIFY(seen.evictions > before.evictions, "eviction");
    RC_CLASSIFY(seen.hits > before.hits, "hit");
  });
}

class CoordinatorProperty : public testing::TestWithParam<std::string> {};

TEST_P(CoordinatorProperty, DoesWhatNaiveGroupsOverOnePoolDo) {
  SeenByCoordinator seen;
  EXPECT_TRUE(agree(GetParam(), SchedulerDefect::none, seen));
  EXPECT_GT(seen.hits, 0);
  EXPECT_GT(seen.shortened_hits, 0);
  EXPECT_GT(seen.hits_on_free_blocks, 0);
  EXPECT_GT(seen.evictions, 0);
  EXPECT_GT(seen.refusals, 0);
  EXPECT_GT(seen.retired, 0);
  EXPECT_GT(seen.resets, 0);
  EXPECT_GT(seen.two_block_pools, 0);
}

INSTANTIATE_TEST_SUITE_P(Engines, CoordinatorProperty,
                         testing::Values("vllm-0.22.1", "vllm-0.33.0"), name_of_engine);

TEST(CoordinatorDefects, AreSeen) {
  expect_seen({SchedulerDefect::hit_longest_group, SchedulerDefect::hit_whole_prompt,
               SchedulerDefect::hit_window_short, SchedulerDefect::free_window_early,
               SchedulerDefect::free_forward_order, SchedulerDefect::free_twice,
               SchedulerDefect::refused_hit_kept, SchedulerDefect::hash_stale,
               SchedulerDefect::hit_untouched_evicted},
              [](SchedulerDefect defect) {
                SeenByCoordinator seen;
                return agree("vllm-0.33.0", defect, seen);
              });
}

}  // namespace
}  // namespace lockstep
