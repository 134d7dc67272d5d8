// The page is whole, needs nothing from outside, and cannot be broken by what is in the data; what
// it draws is what happened.
#include "sim/report/timeline.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tests/sim/world.h"

namespace lockstep {
namespace {

LockstepConfig reported_world() {
  return make_world({make_group("a", 2, full_spec()), make_group("b", 1, sliding_spec(40))}, 30);
}

nlohmann::json data_of(const std::string& html) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const std::size_t begin = html.find(open) + open.size();
  return nlohmann::json::parse(html.substr(begin, html.find("</script>", begin) - begin));
}

TEST(Report, IsOnePageThatNeedsNothingFromOutside) {
  const LockstepConfig config = reported_world();
  PlainBackend backend(config.backend);
  TimelineRecorder recorder(config);
  const auto run = run_world(config, make_traffic(3, 60), &backend, &recorder);
  ASSERT_TRUE(run);
  const std::string html =
      html_report({"a trace", "lockstep replay a", "a world"}, run->summary, recorder.take());
  EXPECT_TRUE(html.starts_with("<!doctype html>"));
  EXPECT_TRUE(html.ends_with("</html>\n"));
  for (const char* outside :
       {"http://", "https://", "src=", "@import", "url(", "fetch(", "import("})
    EXPECT_EQ(html.find(outside), std::string::npos) << outside;
  const nlohmann::json data = data_of(html);
  EXPECT_EQ(data["summary"]["steps"], run->summary.steps);
  EXPECT_EQ(data["summary"]["verdict"], "agreed");
}

TEST(Report, UsesTheTermsOfTheField) {
  for (const char* words : {"output tokens", "tokens per step", "Deadlock"})
    EXPECT_NE(report_page().find(words), std::string_view::npos) << words;
  for (const char* words : {"answered", "} a step", "who holds", "lies there", "any more", "alone"})
    EXPECT_EQ(report_page().find(words), std::string_view::npos) << words;
}

TEST(Report, HasWordsForEveryVerdict) {
  for (int i = 0; i <= static_cast<int>(Verdict::harness); ++i) {
    const std::string entry = std::string(name_of(static_cast<Verdict>(i))) + ": [\"";
    EXPECT_NE(report_page().find(entry), std::string_view::npos) << entry;
  }
}

TEST(Report, NamesFromATraceCannotEndTheScript) {
  Timeline timeline;
  timeline.lanes.emplace_back().name = "</script><script>alert(1)</script>";
  const std::string html = html_report({"<!-- </script>", "", ""}, RunSummary(), timeline);
  EXPECT_EQ(html.find("alert(1)</script>"), std::string::npos);
  EXPECT_EQ(data_of(html)["timeline"]["lanes"][0]["name"], "</script><script>alert(1)</script>");
}

TEST(Timeline, SumsOverItsColumnsAreTheCountsOfTheRunHoweverFewColumnsThereAre) {
  for (const std::int64_t steps_max : {std::int64_t{4096}, std::int64_t{16}}) {
    const LockstepConfig config = reported_world();
    TimelineRecorder recorder(config, {.steps_max = steps_max});
    const auto run = run_world(config, make_traffic(3, 60), nullptr, &recorder);
    ASSERT_TRUE(run);
    const Timeline timeline = recorder.take();
    TimelineStep sum{.num_steps = 0};
    for (const TimelineStep& step : timeline.steps) {
      EXPECT_EQ(step.step, sum.num_steps);
      sum.num_steps += step.num_steps;
      sum.scheduled_tokens += step.scheduled_tokens;
      sum.preempted += step.preempted;
      sum.evicted += step.evicted;
      EXPECT_EQ(step.used_blocks + step.cached_blocks + step.free_blocks, 29);
    }
    EXPECT_EQ(sum.num_steps, run->summary.steps);
    EXPECT_EQ(sum.scheduled_tokens, run->summary.scheduled_tokens);
    EXPECT_EQ(sum.preempted, run->summary.preemptions);
    EXPECT_EQ(sum.evicted, run->summary.evictions);
    EXPECT_LE(static_cast<std::int64_t>(timeline.steps.size()), steps_max);
    EXPECT_EQ(timeline.notes.empty(), steps_max == 4096);
    EXPECT_EQ(timeline.lanes.size(), static_cast<std::size_t>(run->summary.requests));
  }
}

// 10 tokens in 4 merged steps are 2.5 per step: a double in field 44 of a TrackEvent. Blocks are
// those after the last of the steps: an integer in field 30.
TEST(Perfetto, CountersOfMergedStepsAreMeansPerStep) {
  Timeline timeline;
  timeline.num_steps = 4;
  timeline.steps.push_back({.num_steps = 4, .scheduled_tokens = 10, .used_blocks = 7});
  const std::string trace = perfetto_trace("a trace", RunSummary(), timeline);
  using namespace std::string_literals;
  EXPECT_NE(trace.find("\xe1\x02\0\0\0\0\0\0\x04\x40"s), std::string::npos);
  EXPECT_EQ(trace.find("\xf0\x01\x0a"s), std::string::npos);
  EXPECT_NE(trace.find("\xf0\x01\x07"s), std::string::npos);
  EXPECT_NE(trace.find("tokens scheduled per step"), std::string::npos);
}

// Compares the tables of every step with the map of blocks.
class Tables final : public StepObserver {
 public:
  bool decided(const StepView& view) override {
    std::map<std::int32_t, std::int32_t> holders;
    for (const RequestId id : view.decisions.running())
      for (std::int32_t g = 0; g < 2; ++g)
        for (const BlockId block : view.model().block_table(id, g))
          if (block != kNullBlock) ++holders[index_of(block)];
    steps.push_back(holders);
    return true;
  }
  std::vector<std::map<std::int32_t, std::int32_t>> steps;
};

TEST(Timeline, TheMapOfBlocksSaysAtEveryStepHowManyHoldEach) {
  const LockstepConfig config = reported_world();
  Tables tables;
  TimelineRecorder recorder(config);
  ObserverList both;
  both.add(tables);
  both.add(recorder);
  const auto run = run_world(config, make_traffic(3, 60), nullptr, &both);
  ASSERT_TRUE(run);
  std::map<std::int32_t, std::int32_t> holders;
  std::size_t at = 0;
  const std::vector<BlockChange> changes = recorder.take().block_changes;
  for (std::size_t step = 0; step < tables.steps.size(); ++step) {
    for (; at < changes.size() && changes[at].step == static_cast<std::int64_t>(step); ++at) {
      holders[changes[at].block] = changes[at].holders;
      if (changes[at].holders == 0) holders.erase(changes[at].block);
    }
    ASSERT_EQ(holders, tables.steps[step]) << "step " << step;
  }
  EXPECT_EQ(at, changes.size());
}

TEST(Timeline, AFullListOfChangesIsThinnedAndSaysSo) {
  const LockstepConfig config = reported_world();
  TimelineRecorder recorder(config, {.block_changes_max = 100});
  ASSERT_TRUE(run_world(config, make_traffic(3, 60), nullptr, &recorder));
  const Timeline timeline = recorder.take();
  EXPECT_FALSE(timeline.notes.empty());
  for (std::size_t i = 1; i < timeline.block_changes.size(); ++i)
    EXPECT_LE(timeline.block_changes[i - 1].step, timeline.block_changes[i].step);
}

}  // namespace
}  // namespace lockstep
