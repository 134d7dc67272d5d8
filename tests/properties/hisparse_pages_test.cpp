// HiSparse's pages in generated workloads: every row that attention reads is where the decisions
// put it, with small pools, hits, loads, preemptions and disconnecting clients; and a coordinator
// with one wrong step is caught by the named check.
#include "properties/invariants/host_pages.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <functional>
#include <memory>

#include "base/seeded_random.h"
#include "reference/defects/scheduler_defect.h"
#include "reference/schedule/scheduler_impl.h"
#include "sim/conform/conform.h"

namespace lockstep::hisparse_pages_tests {
namespace {

constexpr std::int32_t kBlockSize = 4;
constexpr int kSteps = 150;

struct Drawn {
  EngineConfig engine;
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks = 0;
};

KVCacheGroupSpec group_of(CacheKind kind, const std::string& layer) {
  KVCacheGroupSpec group;
  group.layer_names = {layer};
  group.spec.kind = kind;
  group.spec.block_size = kBlockSize;
  return group;
}

Drawn draw(SeededRandom& random) {
  Drawn drawn;
  drawn.engine.max_num_seqs = static_cast<std::int32_t>(random.between(1, 4));
  drawn.engine.max_num_batched_tokens = 16 << random.below(2);
  drawn.engine.max_model_len = 48;
  drawn.engine.block_size = kBlockSize;
  drawn.engine.enable_prefix_caching = random.below(8) != 0;
  drawn.engine.async_scheduling = random.below(3) == 0;
  if (!drawn.engine.async_scheduling && random.below(3) == 0) {
    drawn.engine.num_spec_tokens = 2;
    drawn.engine.spec_method = SpecMethod::ngram;
    drawn.engine.max_num_batched_tokens = 32;
  }
  const std::int64_t pages = drawn.engine.max_model_len / kBlockSize + 2;
  drawn.engine.host_pool_num_blocks = 2 + pages * random.between(1, 4);
  drawn.groups = {group_of(CacheKind::mla, "source"), group_of(CacheKind::mla, "indexer")};
  drawn.groups[0].role = kPageSourceRole;
  drawn.groups[1].role = kPageIndexerRole;
  const std::int64_t num_resident = random.between(1, 2);
  for (std::int64_t i = 0; i < num_resident; ++i)
    drawn.groups.push_back(group_of(CacheKind::hisparse_resident, fmt::format("resident{}", i)));
  for (std::int64_t i = 0; i < num_resident; ++i) {
    drawn.groups.push_back(group_of(CacheKind::hisparse_hot, fmt::format("hot{}", i)));
    drawn.groups.back().spec.blocks_per_request = random.between(1, 3);
  }
  drawn.num_blocks = 8 + (1 + num_resident) * pages * random.between(2, 4) / 2;
  return drawn;
}

// Knows the head of some prompts; what it sends is there some steps later, or never.
class Peers final : public KVConnector {
 public:
  explicit Peers(SeededRandom& random) : random_(random), has_any_(random.below(2) == 0) {}

  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override {
    asked_[query.request] = {std::string(query.name), query.num_local_tokens, 0};
    const std::int32_t left = query.num_tokens - query.num_local_tokens;
    if (!has_any_ || left < 1 || random_.below(3) != 0) return {};
    const auto tokens = 1 + static_cast<std::int32_t>(random_.below(left));
    return {.num_tokens = tokens, .is_async = true};
  }
  void update_state_after_alloc(RequestId id, std::span<const BlockId>,
                                std::int32_t num_external) override {
    if (num_external == 0) return;
    HostPages::Load load = asked_[id];
    load.last = load.first + num_external;
    loading_.push_back({id, load, static_cast<int>(random_.below(4))});
  }
  bool request_finished(RequestId, std::string_view) override { return false; }

  struct Loading {
    RequestId id{};
    HostPages::Load load;
    int steps = 0;
  };
  // Loads that complete with this step.
  std::vector<Loading> arrive() {
    std::vector<Loading> done;
    std::erase_if(loading_, [&](Loading& loading) {
      if (loading.steps-- > 0) return false;
      done.push_back(loading);
      return true;
    });
    return done;
  }

 private:
  SeededRandom& random_;
  bool has_any_;
  std::map<RequestId, HostPages::Load> asked_;
  std::vector<Loading> loading_;
};

struct Totals {
  std::int64_t rows_read = 0;
  std::int64_t rows_read_from_host = 0;
  std::int64_t finished = 0;
};

class DrawnRun {
 public:
  DrawnRun(std::uint64_t seed, const SchedulerParts* parts, bool loses_loads = false)
      : loses_loads_(loses_loads),
        random_(seed),
        drawn_(draw(random_)),
        peers_(random_),
        pages_(drawn_.groups) {
    auto made =
        Scheduler::create(drawn_.engine, drawn_.groups, drawn_.num_blocks, {&peers_}, parts);
    EXPECT_TRUE(made) << made.error().message;
    scheduler_.emplace(*std::move(made));
    delay_ = static_cast<int>(random_.below(4));
  }

  std::optional<Violation> to_its_end(Totals& totals) {
    for (int step = 0; step < kSteps && !pages_.violation(); ++step) {
      if (step < kSteps / 2) arrive();
      one_step();
    }
    while (!live_.empty()) leave(0);
    for (int step = 0; step < 12 && !pages_.violation(); ++step) one_step();
    if (!pages_.violation()) pages_.end(*scheduler_, drawn_.engine.host_pool_num_blocks);
    totals.rows_read += pages_.rows_read();
    totals.rows_read_from_host += pages_.rows_read_from_host();
    totals.finished += num_finished_;
    return pages_.violation();
  }

 private:
  struct Decided {
    std::vector<std::uint32_t> most;  // tokens that a row can bring
    KVConnectorOutput report;
  };

  void arrive() {
    if (random_.below(3) != 0) return;
    RequestSpec request;
    request.name = fmt::format("r{}", num_added_++);
    const auto append = [&](std::int64_t seed, std::int64_t count) {
      request.prompt.append({TokenRun::Kind::seeded, static_cast<std::uint64_t>(seed), 0,
                             static_cast<std::uint32_t>(count)});
    };
    append(random_.below(2), random_.between(1, 24));
    append(random_.between(100, 149), random_.between(1, 16));
    request.max_tokens = static_cast<std::int32_t>(random_.between(1, 12));
    const auto id = scheduler_->add_request(std::move(request));
    if (id) live_.push_back(*id);
  }
  void leave(std::size_t index) {
    scheduler_->abort_request(live_[index]);
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void one_step() {
    if (!live_.empty() && random_.below(16) == 0)
      leave(static_cast<std::size_t>(random_.below(std::ssize(live_))));
    if (random_.below(20) == 0) scheduler_->reset_prefix_cache();
    const SchedulerOutput& decision = scheduler_->schedule();
    pages_.decided(decision, *scheduler_);
    Decided decided;
    for (std::size_t row = 0; row < decision.scheduled.size(); ++row)
      decided.most.push_back(static_cast<std::uint32_t>(scheduler_->num_sampled_max(row)));
    decided.report = work(decision);
    const bool is_empty = decision.scheduled.empty();
    in_flight_.push_back(std::move(decided));
    const std::size_t most = drawn_.engine.async_scheduling && !is_empty ? 1 : 0;
    while (in_flight_.size() > most) take_output();
  }

  // What the workers and peers have done by the end of the step.
  KVConnectorOutput work(const SchedulerOutput& decision) {
    KVConnectorOutput report;
    std::vector<HostPages::Load> loads;
    std::vector<RequestId> loading;
    for (const Peers::Loading& load : peers_.arrive()) {
      report.finished_recving.push_back(load.id);
      if (random_.below(6) == 0) {
        report.failed_recving.push_back(load.id);
        continue;
      }
      if (!loses_loads_) loads.push_back(load.load);
      loading.push_back(load.id);
    }
    for (const std::int64_t id : started_) report.enqueued.push_back({id, 1});
    for (const std::int64_t id : std::exchange(started_, {}))
      moving_.push_back({id, static_cast<int>(random_.below(delay_ + 1))});
    for (const PageTransfer& transfer : decision.host_pages.transfers) {
      if (!transfer.restores) {
        started_.push_back(transfer.id);
        continue;
      }
      report.enqueued.push_back({transfer.id, 1});
      moving_.push_back({transfer.id, 0});
    }
    std::erase_if(moving_, [&](auto& transfer) {
      if (transfer.second-- > 0) return false;
      report.completed.push_back({transfer.first, 1});
      return true;
    });
    pages_.reported(report, *scheduler_, loading, loads);
    return report;
  }

  void take_output() {
    const Decided decided = std::move(in_flight_.front());
    in_flight_.pop_front();
    ModelOutput output;
    for (const std::uint32_t most : decided.most) {
      const std::int64_t count = most == 0 ? 0 : random_.between(1, most);
      for (std::int64_t i = 0; i < count; ++i)
        output.tokens.push_back(static_cast<std::int32_t>(random_.below(1000)));
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
      for (int i = 0; i < drawn_.engine.num_spec_tokens && count > 0; ++i)
        output.draft_tokens.push_back(static_cast<std::int32_t>(random_.below(1000)));
      if (drawn_.engine.num_spec_tokens > 0)
        output.draft_ends.push_back(static_cast<std::uint32_t>(output.draft_tokens.size()));
    }
    output.kv_connector_output = decided.report;
    for (const StoppedRequest& stopped : scheduler_->update_from_output(output)) {
      std::erase(live_, stopped.id);
      ++num_finished_;
    }
  }

  const bool loses_loads_;
  SeededRandom random_;
  Drawn drawn_;
  Peers peers_;
  HostPages pages_;
  std::optional<Scheduler> scheduler_;
  std::vector<RequestId> live_;
  std::deque<Decided> in_flight_;
  std::vector<std::int64_t> started_;                 // submitted with the next step
  std::vector<std::pair<std::int64_t, int>> moving_;  // steps left
  int num_added_ = 0, num_finished_ = 0, delay_ = 0;
};

TEST(HostPages, EveryRowThatIsReadIsWhereTheDecisionsSay) {
  Totals totals;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const auto violation = DrawnRun(seed, nullptr).to_its_end(totals);
    ASSERT_FALSE(violation) << "seed " << seed << ", step " << violation->step << ", "
                            << violation->name << ", " << violation->request << ": "
                            << violation->what;
  }
  EXPECT_GT(totals.finished, 1000);
  EXPECT_GT(totals.rows_read, 100000);
  EXPECT_GT(totals.rows_read_from_host, 10000);
}

// What vLLM itself decided, as far as the model decides the same: conform holds that it does.
class RecordedPagesRun final : public StepObserver {
 public:
  // Loads within a step end it, unless they are followed: their last page is a finding.
  RecordedPagesRun(const RecordingHeader& header, const RecordingWorkload& workload,
                   bool follows_loads_within)
      : pages_(header.groups), workload_(workload), follows_loads_within_(follows_loads_within) {}

  bool decided(const StepView& view) override {
    const RecordedStep& step = workload_.current();
    std::vector<HostPages::Load> within;
    if (step.connector)
      for (const RecordedConnectorAnswer& answer : *step.connector) {
        const HostPages::Load load = {answer.id, answer.local,
                                      answer.local + answer.external.value_or(0)};
        answers_[answer.id] = load;
        if (load.last == load.first || answer.async) continue;
        for (const ScheduledRequest& row : view.decision.scheduled)
          if (view.name(row.id) == answer.id) within.push_back(load);
      }
    if (!within.empty() && !follows_loads_within_) return false;
    pages_.decided(view.decision, view.model(), within);
    if (step.worker) report(*step.worker, view);
    return !pages_.violation();
  }
  const HostPages& pages() const { return pages_; }

 private:
  void report(const RecordedWorker& worker, const StepView& view) {
    KVConnectorOutput report;
    report.enqueued = worker.enqueued;
    report.completed = worker.completed;
    std::vector<HostPages::Load> loads;
    std::vector<RequestId> loading;
    for (const SkippedRequest& request : view.decisions.skipped()) loading.push_back(request.id);
    for (const HeldRequest& request : view.decisions.held()) loading.push_back(request.id);
    for (const std::string& name : worker.received)
      if (std::ranges::find(worker.failed, name) == worker.failed.end())
        loads.push_back(answers_[name]);
    pages_.reported(report, view.model(), loading, loads);
  }

  HostPages pages_;
  const RecordingWorkload& workload_;
  const bool follows_loads_within_;
  std::map<std::string, HostPages::Load> answers_;
};

HostPages pages_of(const std::string& path, bool follows_loads_within = false) {
  auto reader = RecordingReader::open(path);
  EXPECT_TRUE(reader) << reader.error().message;
  const RecordingHeader header = reader->header();
  auto run = ConformRun::open(header, make_recording_workload(*std::move(reader)));
  EXPECT_TRUE(run) << run.error().message;
  RecordedPagesRun pages(header, (*run)->workload(), follows_loads_within);
  (*run)->session().observe(0, pages);
  EXPECT_TRUE((*run)->session().run());
  return pages.pages();
}

TEST(HostPages, WhatTheEngineItselfDecidedReadsTheRightRows) {
  const std::filesystem::path folder =
      std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "tests/conformance/hisparse";
  std::int64_t rows_read = 0, from_host = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder)) {
    if (!file.is_regular_file() || file.path().string().find("async_drafts") != std::string::npos)
      continue;
    const HostPages pages = pages_of(file.path().string());
    const auto& violation = pages.violation();
    EXPECT_FALSE(violation) << file.path() << ", step " << violation->step << ", "
                            << violation->name << ", " << violation->request << ": "
                            << violation->what;
    rows_read += pages.rows_read();
    from_host += pages.rows_read_from_host();
  }
  EXPECT_GT(rows_read, 10000);
  EXPECT_GT(from_host, 1000);
}

// Finding 46.
TEST(HostPages, TheLastPageOfALoadWithinAStepIsReadAndNothingIsThere) {
  const auto violation =
      pages_of(std::string(LOCKSTEP_SOURCE_DIR) +
                   "/tests/regressions/vllm_0_33_0_load_within_a_step_is_not_restored.jsonl",
               true)
          .violation();
  ASSERT_TRUE(violation);
  EXPECT_EQ(violation->name, "read_page");
  EXPECT_EQ(violation->what, "token 0 is read from device block 2, which holds nothing");
}

// The names of the checks that caught it, and in how many of the runs.
std::map<std::string, int> caught(SchedulerDefect defect) {
  const PlantedParts parts(defect);
  std::map<std::string, int> names;
  Totals totals;
  for (std::uint64_t seed = 0; seed < 60; ++seed)
    if (const auto violation = DrawnRun(seed, &parts).to_its_end(totals))
      ++names[std::string(violation->name)];
  return names;
}

TEST(HostPages, ALoadThatFillsNothingAndSaysItDidIsFoundByWhoLoaded) {
  std::map<std::string, int> names;
  Totals totals;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    if (const auto violation = DrawnRun(seed, nullptr, true).to_its_end(totals))
      ++names[std::string(violation->name)];
  EXPECT_GT(names["hit_row"], 0);
}
TEST(HostPages, BlocksAreHeldWhileATransferIsUnderWayAndNoLonger) {
  EXPECT_GT(caught(SchedulerDefect::page_copy_unheld)["page_under_way"], 0);
  EXPECT_GT(caught(SchedulerDefect::page_host_held_twice)["page_leak"], 0);
}
TEST(HostPages, APageThatWorkersDoNotKnowOfIsWritten) {
  EXPECT_GT(caught(SchedulerDefect::page_last_untold)["written_page"], 0);
}
TEST(HostPages, ALostPageThatNobodyIsToldOfIsReadFromAnotherRequest) {
  EXPECT_GT(caught(SchedulerDefect::page_loss_forgotten)["read_page"], 0);
  EXPECT_GT(caught(SchedulerDefect::page_loss_untold)["read_page"], 0);
}
TEST(HostPages, ACopyInABlockThatWasHandedOutIsAdopted) {
  EXPECT_GT(caught(SchedulerDefect::page_copy_stale)["read_page"], 0);
}
TEST(HostPages, ATailThatIsNotRestoredIsReadFromAnEmptyPage) {
  EXPECT_GT(caught(SchedulerDefect::page_restore_dropped)["read_page"], 0);
}
TEST(HostPages, RowsThatAreNotMirroredAreMissedWhenThePagePassesForClean) {
  EXPECT_GT(caught(SchedulerDefect::page_mirror_short)["clean_page"], 0);
}
TEST(HostPages, WhoReadsFromTheHostHasAHotRegion) {
  EXPECT_GT(caught(SchedulerDefect::page_without_hot_region)["hot_region"], 0);
}
TEST(HostPages, AStepThatReadsFromTheHostSaysSo) {
  EXPECT_GT(caught(SchedulerDefect::page_all_resident)["all_resident"], 0);
}

}  // namespace
}  // namespace lockstep::hisparse_pages_tests
