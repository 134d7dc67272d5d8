// Any sequence of calls (requests, aborts, steps, outputs, resets) keeps a scheduler's accounting
// right. Only properties of every decision are checked.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/state.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <ostream>
#include <ranges>
#include <set>
#include <string>
#include <vector>

#include "reference/defects/scheduler_defect.h"
#include "reference/schedule/scheduler.h"
#include "tests/properties/planted_defects.h"

namespace lockstep {
namespace {

constexpr int kSchedulerCommandsMax = 600;  // of a sequence

// What was generated is counted: a run that never met these would prove little.
struct SeenByScheduler {
  std::map<std::string, std::int64_t> times;
  void operator()(const std::string& what, bool holds = true) { times[what] += holds ? 1 : 0; }
};

struct DrawnEngine {
  EngineConfig engine;
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks = 0;
};

// A request of max_model_len just fits into the pool, as the engine asks for at start.
DrawnEngine draw_engine_and_pool(const std::string& engine) {
  DrawnEngine setup;
  const auto block_size = *rc::gen::inRange(2, 5);
  const auto num_groups = *rc::gen::inRange(1, 3);
  const auto blocks_of_request = *rc::gen::inRange(1, 6);
  for (std::int32_t g = 0; g < num_groups; ++g) {
    KVCacheSpec spec;
    spec.block_size = block_size;
    if (g > 0) spec.kind = CacheKind::sliding_window;
    if (g > 0) spec.sliding_window = *rc::gen::inRange(2, 9);
    setup.groups.push_back({.layer_names = {}, .spec = spec, .layer_specs = {}});
  }
  setup.num_blocks = 1 + num_groups * blocks_of_request + *rc::gen::element(0, 0, 1, 4);
  EngineConfig& config = setup.engine;
  config.engine = engine;
  config.block_size = block_size;
  config.max_model_len = blocks_of_request * block_size;
  config.max_num_seqs = *rc::gen::inRange(1, 5);
  config.max_num_batched_tokens = config.max_num_seqs + *rc::gen::element(1, 4, 16);
  config.async_scheduling = *rc::gen::arbitrary<bool>();
  config.policy = *rc::gen::element(SchedulingPolicy::fcfs, SchedulingPolicy::priority);
  config.scheduler_reserve_full_isl = *rc::gen::arbitrary<bool>();
  config.enable_prefix_caching = *rc::gen::weightedElement<bool>({{4, true}, {1, false}});
  return setup;
}

// All that a sequence of commands depends on: what the scheduler does with it is its own affair.
struct Asked {
  std::int64_t num_added = 0;
};

Scheduler scheduler_with(SchedulerDefect defect, const DrawnEngine& setup) {
  const PlantedParts planted(defect);
  return Scheduler::create(setup.engine, setup.groups, setup.num_blocks, {},
                           defect == SchedulerDefect::none ? nullptr : &planted)
      .value();
}

class Driven {
 public:
  Driven(const DrawnEngine& setup, SchedulerDefect defect, SeenByScheduler& seen)
      : setup_(setup), seen_(seen), scheduler_(scheduler_with(defect, setup)) {}

  void add(RequestSpec spec) {
    spec.name = "r" + std::to_string(num_added_);
    spec.arrival_ns = num_added_++;
    const std::int64_t num_tokens = spec.prompt.size();
    const auto id = scheduler_.add_request(std::move(spec));
    RC_ASSERT(id.has_value());
    RC_ASSERT(live_.emplace(*id, num_tokens).second);
  }

  void abort(std::size_t pick) {
    if (live_.empty()) return;
    const RequestId id =
        std::next(live_.begin(), static_cast<std::ptrdiff_t>(pick % live_.size()))->first;
    const RequestStatus status = scheduler_.status(id);
    seen_("abort of one that waits", status == RequestStatus::waiting);
    seen_("abort of one that runs", status == RequestStatus::running);
    seen_("abort of one that was preempted", status == RequestStatus::preempted);
    seen_("abort with a step in flight", !in_flight_.empty());
    scheduler_.abort_request(id);
    live_.erase(id);
  }

  void reset() {
    const bool is_unused = scheduler_.num_free_blocks() == setup_.num_blocks - 1;
    RC_ASSERT(scheduler_.reset_prefix_cache() == is_unused);
    seen_(is_unused ? "reset" : "refused reset");
    for (std::int32_t b = 1; b < setup_.num_blocks && is_unused; ++b)
      RC_ASSERT(!scheduler_.is_cached(BlockId{b}));
  }

  void step() {
    while (in_flight_.size() >= (setup_.engine.async_scheduling ? 2u : 1u)) output();
    scheduler_.take_cache_counters();
    const SchedulerOutput& decision = scheduler_.schedule();
    seen_("eviction", scheduler_.take_cache_counters().evicted > 0);
    seen_("preemption", !decision.preempted.empty());
    check_decision(decision);
    if (!decision.scheduled.empty()) in_flight_.push_back(answer(decision));
  }

  // Of the oldest step in flight, if there is one.
  void output() {
    if (in_flight_.empty()) return;
    for (const StoppedRequest& stopped : scheduler_.update_from_output(in_flight_.front())) {
      RC_ASSERT(live_.erase(stopped.id) == 1u);
      seen_("end");
    }
    in_flight_.pop_front();
  }

  void check() const {
    check_places();
    check_pool();
  }

 private:
  std::int32_t num_groups() const { return static_cast<std::int32_t>(setup_.groups.size()); }

  // One token for each row that reaches the end of its request, as the worker knows it: with the
  // tokens that are in flight.
  ModelOutput answer(const SchedulerOutput& decision) {
    ModelOutput answer;
    for (const ScheduledRequest& row : decision.scheduled) {
      std::int64_t& num_tokens = live_.at(row.id);
      if (row.computed + row.num_tokens >= num_tokens) {
        answer.tokens.push_back(7);
        ++num_tokens;
      }
      answer.token_ends.push_back(static_cast<std::uint32_t>(answer.tokens.size()));
    }
    return answer;
  }

  // Every live request is in one place, and none that has left is in any.
  void check_places() const {
    std::multiset<RequestId> places(scheduler_.running().begin(), scheduler_.running().end());
    for (const RequestId id : scheduler_.waiting()) {
      places.insert(id);
      for (std::int32_t g = 0; g < num_groups(); ++g)
        RC_ASSERT(scheduler_.block_table(id, g).empty());
    }
    RC_ASSERT(std::ranges::equal(places, live_ | std::views::keys));
    RC_ASSERT(std::ssize(scheduler_.running()) <= setup_.engine.max_num_seqs);
  }

  // Free blocks, held blocks and the null block are the pool; counts are those of the tables; a
  // cached block, or another of the same content, is found by what it is cached as.
  void check_pool() const {
    std::vector<std::int32_t> holders(static_cast<std::size_t>(setup_.num_blocks), 0);
    std::vector<std::int32_t> group_of(holders.size(), -1);
    for (const RequestId id : scheduler_.running())
      for (std::int32_t g = 0; g < num_groups(); ++g)
        for (const BlockId block : scheduler_.block_table(id, g)) {
          if (block == kNullBlock) continue;
          const auto b = static_cast<std::size_t>(index_of(block));
          ++holders.at(b);
          RC_ASSERT(group_of[b] == -1 || group_of[b] == g);
          group_of[b] = g;
        }
    const std::vector<BlockId> queue = scheduler_.pool().free_queue();
    const std::set<BlockId> free(queue.begin(), queue.end());
    RC_ASSERT(free.size() == queue.size());
    RC_ASSERT(std::ssize(queue) == scheduler_.num_free_blocks());
    RC_ASSERT(!free.contains(kNullBlock));
    RC_ASSERT(!scheduler_.is_cached(kNullBlock));
    for (std::int32_t b = 1; b < setup_.num_blocks; ++b) {
      const BlockId block{b};
      RC_ASSERT(scheduler_.ref_cnt(block) == holders[static_cast<std::size_t>(b)]);
      RC_ASSERT(free.contains(block) == (holders[static_cast<std::size_t>(b)] == 0));
      if (const auto content = scheduler_.cached_as(block))
        RC_ASSERT(scheduler_.find_cached(*content) != kNullBlock);
    }
  }

  // Within the limits, each request once, slots for all its tokens, and one writer to a block.
  void check_decision(const SchedulerOutput& decision) {
    std::int64_t num_tokens = 0;
    std::set<RequestId> scheduled;
    std::set<BlockId> written;
    for (const ScheduledRequest& row : decision.scheduled) {
      RC_ASSERT(live_.contains(row.id));
      RC_ASSERT(scheduled.insert(row.id).second);
      RC_ASSERT(row.num_tokens > 0);
      num_tokens += row.num_tokens;
      seen_("prefix hit", row.is_new && row.computed > 0);
      seen_("resumption", row.is_resumed);
      for (std::int32_t g = 0; g < num_groups(); ++g) {
        const auto table = scheduler_.block_table(row.id, g);
        const std::int64_t size = setup_.engine.block_size;
        const std::int64_t last = (row.computed + row.num_tokens - 1) / size;
        RC_ASSERT(last < std::ssize(table));
        for (std::int64_t i = row.computed / size; i <= last; ++i) {
          const BlockId block = table[static_cast<std::size_t>(i)];
          RC_ASSERT(block != kNullBlock);
          RC_ASSERT(written.insert(block).second);
        }
      }
    }
    RC_ASSERT(num_tokens == decision.total_num_scheduled_tokens);
    RC_ASSERT(num_tokens <= setup_.engine.max_num_batched_tokens);
    for (const RequestId id : decision.preempted) RC_ASSERT(!scheduled.contains(id));
  }

  const DrawnEngine& setup_;
  SeenByScheduler& seen_;
  Scheduler scheduler_;
  std::int64_t num_added_ = 0;
  std::map<RequestId, std::int64_t> live_;  // and their tokens, those in flight included
  std::deque<ModelOutput> in_flight_;
};

class SchedulerCommand : public rc::state::Command<Asked, Driven> {
 public:
  void run(const Asked&, Driven& driven) const final {
    ask(driven);
    driven.check();
  }

 protected:
  virtual void ask(Driven& driven) const = 0;
};

class Add final : public SchedulerCommand {
 public:
  explicit Add(std::int32_t max_model_len) : num_tokens_(*rc::gen::inRange(1, max_model_len)) {}
  void apply(Asked& asked) const override { ++asked.num_added; }
  void show(std::ostream& out) const override {
    out << "add " << num_tokens_ << " tokens of family " << family_ << ", " << max_tokens_
        << " to sample, priority " << priority_;
  }

 private:
  void ask(Driven& driven) const override {
    RequestSpec spec;
    spec.prompt.append(
        {TokenRun::Kind::seeded, family_, 0, static_cast<std::uint32_t>(num_tokens_)});
    spec.max_tokens = max_tokens_;
    spec.priority = priority_;
    driven.add(std::move(spec));
  }
  const std::int32_t num_tokens_;
  const std::uint64_t family_ = *rc::gen::inRange<std::uint64_t>(0, 3);
  const std::int32_t max_tokens_ = *rc::gen::inRange(1, 9);
  const std::int32_t priority_ = *rc::gen::inRange(0, 3);
};

class Abort final : public SchedulerCommand {
 public:
  void checkPreconditions(const Asked& asked) const override {
    RC_PRE(asked.num_added > 0);
    RC_PRE(is_done_);
  }
  void show(std::ostream& out) const override { out << "abort live request " << pick_; }

 private:
  void ask(Driven& driven) const override { driven.abort(pick_); }
  const std::size_t pick_ = *rc::gen::inRange<std::size_t>(0, 16);
  const bool is_done_ = *rc::gen::inRange(0, 3) == 0;  // otherwise few requests would go far
};

class Step final : public SchedulerCommand {
 public:
  void show(std::ostream& out) const override { out << "step"; }

 private:
  void ask(Driven& driven) const override { driven.step(); }
};

class Output final : public SchedulerCommand {
 public:
  void show(std::ostream& out) const override { out << "output"; }

 private:
  void ask(Driven& driven) const override { driven.output(); }
};

class ResetPrefixCache final : public SchedulerCommand {
 public:
  void show(std::ostream& out) const override { out << "reset"; }

 private:
  void ask(Driven& driven) const override { driven.reset(); }
};

bool in_order(const std::string& engine, SchedulerDefect defect, SeenByScheduler& seen) {
  return rc::check("the scheduler's bookkeeping is consistent after every command", [&] {
    const DrawnEngine setup = draw_engine_and_pool(engine);
    seen("two-block pool", setup.num_blocks == 2);
    RC_CLASSIFY(setup.num_blocks == 2, "two-block pool");
    RC_CLASSIFY(setup.engine.async_scheduling, "asynchronous");
    Driven driven(setup, defect, seen);
    const auto any = [&](const Asked&) {
      using rc::gen::exec;
      const auto make = [](auto command) {
        return std::shared_ptr<const SchedulerCommand::CommandType>(std::move(command));
      };
      const std::int32_t longest = setup.engine.max_model_len;
      return rc::gen::weightedOneOf<std::shared_ptr<const SchedulerCommand::CommandType>>(
          {{3, exec([=] { return make(std::make_shared<Add>(longest)); })},
           {6, exec([=] { return make(std::make_shared<Step>()); })},
           {4, exec([=] { return make(std::make_shared<Output>()); })},
           {1, exec([=] { return make(std::make_shared<Abort>()); })},
           {1, exec([=] { return make(std::make_shared<ResetPrefixCache>()); })}});
    };
    const Asked none_asked;
    const auto commands =
        *rc::gen::resize(kSchedulerCommandsMax, rc::state::gen::commands(none_asked, any));
    SeenByScheduler before = seen;
    rc::state::runAll(commands, none_asked, driven);
    for (const char* what : {"preemption", "eviction", "prefix hit"})
      if (seen.times[what] > before.times[what]) RC_TAG(std::string(what));
  });
}

class SchedulerCommands : public testing::TestWithParam<std::string> {};

TEST_P(SchedulerCommands, InAnyOrderLeaveItsBooksInOrder) {
  SeenByScheduler seen;
  EXPECT_TRUE(in_order(GetParam(), SchedulerDefect::none, seen));
  for (const char* what :
       {"preemption", "resumption", "eviction", "prefix hit", "two-block pool", "end", "reset",
        "refused reset", "abort of one that waits", "abort of one that runs",
        "abort of one that was preempted", "abort with a step in flight"})
    EXPECT_GT(seen.times[what], 0) << what;
}

INSTANTIATE_TEST_SUITE_P(Engines, SchedulerCommands, testing::Values("vllm-0.22.1", "vllm-0.33.0"),
                         name_of_engine);

TEST(SchedulerDefects, AreSeen) {
  expect_seen({SchedulerDefect::free_twice, SchedulerDefect::free_preempted_lost,
               SchedulerDefect::abort_in_flight_kept, SchedulerDefect::refused_hit_kept,
               SchedulerDefect::hash_stale, SchedulerDefect::hit_untouched_evicted},
              [](SchedulerDefect defect) {
                SeenByScheduler seen;
                return in_order("vllm-0.33.0", defect, seen);
              });
}

}  // namespace
}  // namespace lockstep
