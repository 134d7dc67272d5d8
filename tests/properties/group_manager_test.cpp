// The manager of each kind of cache does, over any sequence of admissions, steps and departures,
// what a page of naive code does: the same tables, the same hits, the same free queue.
#include "reference/cache/group_manager.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/child_process.h"
#include "properties/generate/choices.h"
#include "reference/cache/block_pool.h"
#include "reference/defects/scheduler_defect.h"
#include "tests/properties/naive_cache.h"

namespace lockstep {
namespace {

constexpr std::int32_t kLongest = 48;  // tokens

struct Kind {
  std::string name;
  CacheKind kind = CacheKind::full_attention;
  MambaCacheMode mode = MambaCacheMode::none;
  bool can_hit = true;
  std::string engine = "vllm-0.33.0";
};

std::vector<Kind> kinds() {
  return {{"full", CacheKind::full_attention},
          {"full_0_22_1", CacheKind::full_attention, MambaCacheMode::none, true, "vllm-0.22.1"},
          {"mla", CacheKind::mla},
          {"hidden_state", CacheKind::hidden_state},
          {"sliding_window", CacheKind::sliding_window},
          {"sliding_window_0_22_1", CacheKind::sliding_window, MambaCacheMode::none, true,
           "vllm-0.22.1"},
          {"chunked_local", CacheKind::chunked_local},
          {"states_none", CacheKind::mamba, MambaCacheMode::none, false},
          {"states_align", CacheKind::mamba, MambaCacheMode::align},
          {"states_all", CacheKind::mamba, MambaCacheMode::all}};
}

struct SeenByManager {
  std::int64_t hits = 0;
  std::int64_t hits_on_free_blocks = 0;
  std::int64_t retired = 0;
  std::int64_t evictions = 0;
  std::int64_t too_little = 0;  // the pool could not give what a step needs
  std::int64_t steps_over_several_blocks = 0;
};

// A request in both worlds.
struct Both {
  explicit Both(Request real) : request(std::move(real)) {}
  Request request;
  NaiveGroup::Table table;
};

class Worlds {
 public:
  Worlds(const Kind& kind, ChoiceSource& choices, SchedulerDefect defect, SeenByManager& seen)
      : choices_(choices),
        seen_(seen),
        spec_(spec_of(kind, choices)),
        config_(config_of(kind)),
        num_blocks_(static_cast<std::int32_t>(choices.between(2, 24))),
        freed_(engine_profile(kind.engine).freed_blocks),
        planted_(defect),
        parts_(defect == SchedulerDefect::none ? usual_ : planted_),
        pool_(parts_.pool(num_blocks_, true, freed_)),
        naive_pool_(num_blocks_, freed_),
        naive_(spec_, naive_pool_),
        sizes_{static_cast<std::int32_t>(spec_.block_size),
               static_cast<std::int32_t>(spec_.block_size)},
        manager_(parts_.manager(spec_, 0, config_, sizes_, *pool_)),
        can_hit_(kind.can_hit) {}

  void turn() {
    manager_->begin_step();
    const std::int64_t choice = choices_.below(5);
    if (choice == 0) return admit();
    if (requests_.empty()) return;
    const auto which = static_cast<std::size_t>(choices_.below(std::ssize(requests_)));
    if (choice == 4) return leave(which);
    step(requests_[which], static_cast<std::int32_t>(choices_.between(1, 9)), nullptr);
  }

  // Where the two worlds differ; empty: nowhere.
  std::string difference() const {
    const std::vector<BlockId> queue = pool_->free_queue();
    const auto& naive_queue = naive_pool_.free_queue();
    if (!std::ranges::equal(queue, naive_queue)) return "free queue";
    for (std::int32_t i = 1; i < num_blocks_; ++i) {
      if (pool_->ref_cnt(BlockId{i}) != naive_pool_.ref_cnt(BlockId{i})) return "ref_cnt";
      if (pool_->cache().contains(BlockId{i}) != naive_pool_.is_cached(BlockId{i})) return "cached";
    }
    for (const Both& both : requests_)
      if (both.request.groups[0].blocks != both.table.blocks) return "table of a request";
    return wrong_;
  }

 private:
  static KVCacheSpec spec_of(const Kind& kind, ChoiceSource& choices) {
    KVCacheSpec spec;
    spec.kind = kind.kind;
    spec.block_size = choices.between(1, 4);
    spec.mamba_cache_mode = kind.mode;
    if (kind.kind == CacheKind::mamba && kind.mode == MambaCacheMode::none)
      spec.block_size = kLongest;
    if (kind.kind == CacheKind::sliding_window) spec.sliding_window = choices.between(2, 12);
    if (kind.kind == CacheKind::chunked_local) spec.attention_chunk_size = choices.between(1, 12);
    return spec;
  }
  static EngineConfig config_of(const Kind& kind) {
    EngineConfig config;
    config.engine = kind.engine;
    config.max_model_len = kLongest;
    config.mamba_cache_mode = kind.mode;
    return config;
  }

  std::vector<BlockKey> keys_of(const Request& request) const {
    std::vector<BlockKey> keys;
    for (std::size_t i = 0; i < request.hashes.size(); ++i) keys.push_back(request.hashes[i]);
    return keys;
  }

  // A request of one of three families, with a hit in both worlds, and its first step.
  void admit() {
    RequestSpec spec;
    spec.name = "r" + std::to_string(num_admitted_++);
    const auto prompt = choices_.between(1, kLongest - 1);
    spec.prompt.append({TokenRun::Kind::seeded, static_cast<std::uint64_t>(choices_.below(3)), 0,
                        static_cast<std::uint32_t>(prompt)});
    Both both(Request(std::move(spec), 1));
    both.request.hashes.extend({HashAlgorithm::content, sizes_.hash_block_size},
                               both.request.tokens, "");
    std::vector<BlockId> hit;
    if (can_hit_) {
      const std::int32_t groups[] = {0};
      std::vector<BlockId>* hits[] = {&hit};
      const std::int32_t most = both.request.num_tokens() - 1;
      manager_->find_longest_cache_hit({both.request.hashes, most, false}, groups, hits);
      if (hit != naive_.hit(keys_of(both.request), most)) wrong_ = "hit of a new request";
    }
    seen_.hits += hit.empty() ? 0 : 1;
    for (const BlockId block : hit) seen_.hits_on_free_blocks += pool_->is_evictable(block) ? 1 : 0;
    requests_.push_back(std::move(both));
    const auto chunk = static_cast<std::int32_t>(choices_.between(1, 20));
    if (!step(requests_.back(), chunk, &hit)) requests_.pop_back();
  }

  // What KVCacheCoordinator::allocate_slots does for a group, in both worlds. False: no room.
  bool step(Both& both, std::int32_t num_new, const std::vector<BlockId>* hit) {
    Request& request = both.request;
    const auto size = static_cast<std::int32_t>(spec_.block_size);
    if (hit != nullptr) request.num_computed_tokens = static_cast<std::int32_t>(hit->size()) * size;
    const std::int32_t computed = request.num_computed_tokens;
    while (request.num_tokens() <= computed) request.tokens.append(7 + request.num_tokens());
    request.hashes.extend({HashAlgorithm::content, size}, request.tokens, "");
    const std::int32_t end = std::min({computed + num_new, request.num_tokens(), kLongest});
    if (end <= computed) return hit == nullptr;

    const std::int64_t held = std::ssize(request.groups[0].blocks) -
                              std::ranges::count(request.groups[0].blocks, kNullBlock);
    manager_->remove_skipped_blocks(request, computed);
    naive_.retire(both.table, computed);
    seen_.retired += held - (std::ssize(request.groups[0].blocks) -
                             std::ranges::count(request.groups[0].blocks, kNullBlock));
    const SlotDemand demand{end, end, computed, false};
    const std::int64_t cost = manager_->num_blocks_to_allocate(
        request, hit == nullptr ? std::span<const BlockId>() : std::span(*hit), demand);
    const std::int64_t free = pool_->num_free_blocks();
    if (cost > free) {
      ++seen_.too_little;
      return false;
    }
    pool_->take_counters();
    if (hit != nullptr && !hit->empty()) {
      manager_->take_computed_blocks(request, *hit, computed);
      naive_.take_hit(both.table, *hit, computed);
    }
    manager_->allocate_new_blocks(request, demand);
    naive_.grow(both.table, end);
    if (free - pool_->num_free_blocks() != cost) wrong_ = "predicted cost and blocks taken";
    manager_->cache_blocks(request, end);
    naive_.publish(both.table, keys_of(request), end);
    seen_.evictions += pool_->take_counters().evicted;
    seen_.steps_over_several_blocks += end / size > computed / size + 1 ? 1 : 0;
    request.num_computed_tokens = end;
    return true;
  }

  void leave(std::size_t which) {
    manager_->free(requests_[which].request);
    naive_.free(requests_[which].table);
    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(which));
  }

  ChoiceSource& choices_;
  SeenByManager& seen_;
  const KVCacheSpec spec_;
  const EngineConfig config_;
  const std::int32_t num_blocks_;
  const FreedBlocks freed_;
  CacheParts usual_;
  PlantedParts planted_;
  const CacheParts& parts_;
  std::unique_ptr<BlockPool> pool_;
  NaiveBlockPool naive_pool_;
  NaiveGroup naive_;
  const BlockSizes sizes_;
  std::unique_ptr<GroupManager> manager_;
  const bool can_hit_;
  std::vector<Both> requests_;
  std::int64_t num_admitted_ = 0;
  std::string wrong_;
};

// The first turn after which the worlds differ, and in what; empty: they never do.
std::string first_difference(const Kind& kind, std::span<const std::uint64_t> words,
                             SchedulerDefect defect, SeenByManager& seen) {
  WordChoices choices(words);
  Worlds worlds(kind, choices, defect, seen);
  for (std::size_t turn = 0; turn < words.size() / 4; ++turn) {
    worlds.turn();
    if (const std::string what = worlds.difference(); !what.empty())
      return what + " after turn " + std::to_string(turn);
  }
  return {};
}

class GroupManagerProperty : public testing::TestWithParam<Kind> {};

TEST_P(GroupManagerProperty, DoesWhatTheNaiveGroupDoes) {
  const Kind& kind = GetParam();
  SeenByManager seen;
  const bool holds = rc::check("manager and naive group agree after every operation", [&] {
    const auto words = *rc::gen::scale(
        6, rc::gen::container<std::vector<std::uint64_t>>(rc::gen::arbitrary<std::uint64_t>()));
    const std::string difference = first_difference(kind, words, SchedulerDefect::none, seen);
    if (!difference.empty()) RC_FAIL(difference);
  });
  EXPECT_TRUE(holds);
  EXPECT_GT(seen.too_little, 0);
  if (kind.can_hit) {
    EXPECT_GT(seen.hits, 0);
    EXPECT_GT(seen.hits_on_free_blocks, 0);
    EXPECT_GT(seen.evictions, 0);
    EXPECT_GT(seen.steps_over_several_blocks, 0);
  }
  const bool lets_go = kind.kind == CacheKind::sliding_window ||
                       kind.kind == CacheKind::chunked_local ||
                       (kind.kind == CacheKind::mamba && kind.can_hit);
  if (lets_go) {
    EXPECT_GT(seen.retired, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, GroupManagerProperty, testing::ValuesIn(kinds()),
                         [](const auto& kind) { return kind.param.name; });

// Whether the planted defect makes the worlds differ, or runs into a check of the manager's own. In
// a child, because of the latter.
bool is_seen(const Kind& kind, SchedulerDefect defect) {
  const auto answer = run_in_child(
      [&] {
        SeenByManager seen;
        for (std::uint64_t seed = 1; seed <= 300; ++seed) {
          std::vector<std::uint64_t> words;
          for (std::uint64_t i = 0; i < 240; ++i) words.push_back(splitmix64(seed << 32 | i));
          const std::string what = first_difference(kind, words, defect, seen);
          if (!what.empty()) return what;
        }
        return std::string();
      },
      std::chrono::seconds(60));
  return answer && (answer->end == ChildAnswer::End::crashed || !answer->text.empty());
}

TEST(GroupManagerDefects, ThatLieInAManagerOrThePoolAreSeen) {
  struct Planted {
    SchedulerDefect defect;
    std::string kind;
  };
  const std::vector<Planted> all = {{SchedulerDefect::free_window_early, "sliding_window"},
                                    {SchedulerDefect::hit_window_short, "sliding_window"},
                                    {SchedulerDefect::free_forward_order, "full"},
                                    {SchedulerDefect::free_twice, "full"},
                                    {SchedulerDefect::hash_stale, "full"},
                                    {SchedulerDefect::state_partial_block, "states_all"},
                                    {SchedulerDefect::state_freed_early, "states_align"}};
  const std::vector<Kind> kinds_there = kinds();
  for (const Planted& planted : all) {
    const Kind& kind = *std::ranges::find(kinds_there, planted.kind, &Kind::name);
    EXPECT_FALSE(is_seen(kind, SchedulerDefect::none)) << planted.kind;
    EXPECT_TRUE(is_seen(kind, planted.defect)) << name_of(planted.defect);
  }
}

}  // namespace
}  // namespace lockstep
