// Shrinking against predicates in a line of code: what is left is exactly what the predicate asks
// for, and nothing that it does not.
#include "properties/shrink/shrinker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "properties/shrink/case_parts.h"
#include "reference/plan/page_size.h"
#include "tests/properties/large_case.h"

namespace lockstep {
namespace {

constexpr std::int64_t kOneStep = 1;

StillFails when(const std::function<bool(const SavedCase&)>& fails) {
  return [fails](const SavedCase& saved, std::int64_t) {
    return fails(saved) ? std::optional(kOneStep) : std::nullopt;
  };
}

std::int64_t prompt_tokens(const SavedCase& saved) {
  std::int64_t sum = 0;
  for (const RequestSpec* request : requests_of(saved)) sum += request->prompt.size();
  return sum;
}

TEST(Shrinker, ACaseThatDoesNotFailHasNothingToShrink) {
  EXPECT_FALSE(shrink(large_case(3), when([](const SavedCase&) { return false; })));
}

TEST(Shrinker, ACaseThatAlwaysFailsBecomesOneLayerAndNoRequest) {
  const auto result = shrink(large_case(20), when([](const SavedCase&) { return true; }));
  ASSERT_TRUE(result);
  EXPECT_TRUE(result->is_minimal);
  EXPECT_EQ(size_of(result->smallest),
            (CaseSize{.requests = 0, .tokens = 0, .groups = 1, .layers = 1, .blocks = 2}));
  EXPECT_EQ(result->smallest.cache.groups[0].spec.block_size, 1);
  EXPECT_EQ(result->smallest.cache.groups[0].spec.head_size, 4);  // a word of bf16
  EXPECT_EQ(result->smallest.engine.max_num_seqs, 1);
  EXPECT_EQ(result->smallest.backend, "none");
}

TEST(Shrinker, WhatTheFailureNeedsStaysAndEverythingElseGoes) {
  const auto needs = [](const SavedCase& saved) {
    const bool window = std::ranges::any_of(saved.cache.groups, [](const auto& group) {
      return is_sliding_window(group.spec.kind) && group.spec.sliding_window >= 3;
    });
    const auto requests = requests_of(saved);
    const bool salted = std::ranges::any_of(
        requests, [](const auto* request) { return !request->cache_salt.empty(); });
    return window && salted && prompt_tokens(saved) >= 7 && saved.cache.num_blocks >= 5 &&
           saved.engine.policy == SchedulingPolicy::priority;
  };
  const auto result = shrink(large_case(40), when(needs));
  ASSERT_TRUE(result);
  EXPECT_TRUE(result->is_minimal);
  const SavedCase& smallest = result->smallest;
  EXPECT_EQ(
      size_of(smallest),
      (CaseSize{.requests = 1, .tokens = 8, .groups = 1, .layers = 1, .blocks = 5, .options = 1}));
  EXPECT_EQ(smallest.cache.groups[0].spec.kind, CacheKind::sliding_window);
  EXPECT_EQ(smallest.cache.groups[0].spec.sliding_window, 3);
  EXPECT_EQ(smallest.engine.policy, SchedulingPolicy::priority);
  EXPECT_EQ(requests_of(smallest)[0]->prompt.runs.size(), 1u) << saved_case_to_text(smallest);
  EXPECT_EQ(requests_of(smallest)[0]->name, "r0");
}

// vLLM refuses the first, and an executor cannot view the second.
TEST(Shrinker, StatesKeepOneBlockSizeAndPagesOfWholeElements) {
  SavedCase start = large_case(2);
  KVCacheGroupSpec states = start.cache.groups[2];
  states.layer_names = {"more.0"};
  start.cache.groups.push_back(states);
  start.kernel_block_sizes.push_back(start.kernel_block_sizes[2]);
  ASSERT_TRUE(plan_again(start));
  const auto result = shrink(start, when([](const SavedCase& saved) {
                               const auto& groups = saved.cache.groups;
                               return groups.size() == 4 && groups[2].spec.block_size >= 3 &&
                                      groups[0].spec.head_size >= 5;
                             }));
  ASSERT_TRUE(result);
  const auto& groups = result->smallest.cache.groups;
  EXPECT_EQ(groups[2].spec.block_size, 3);
  EXPECT_EQ(groups[3].spec.block_size, 3);
  for (const KVCacheGroupSpec& group : {groups[2], groups[3]})
    for (const StateTensorSpec& state : group.spec.states)
      EXPECT_EQ(page_size_bytes(group.spec) % itemsize_bytes(state.dtype), 0)
          << saved_case_to_text(result->smallest);
}

TEST(Shrinker, RequestsThatWaitForOneAnotherStayTogetherOnlyWhenItMatters) {
  const auto waits = [](const SavedCase& saved) {
    SavedCase copy = saved;
    return std::ranges::any_of(trace_requests_of(copy),
                               [](const TraceRequest* request) { return !request->after.empty(); });
  };
  const auto result = shrink(large_case(30), when(waits));
  ASSERT_TRUE(result);
  SavedCase smallest = result->smallest;
  const auto requests = trace_requests_of(smallest);
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[1]->after, std::vector<std::string>{"r0"});
  EXPECT_EQ(requests[1]->delay_ns, 0);
}

TEST(Shrinker, APassMayKeepWhatItReadWhileItAttempts) {
  ShrinkTrial trial(large_case(3), kOneStep, when([](const SavedCase&) { return true; }), 100, {});
  const auto& before = trial.best().trace.records;
  ASSERT_TRUE(trial.attempt_with([](SavedCase& saved) { saved.trace.records.pop_back(); }));
  EXPECT_EQ(before.size(), large_case(3).trace.records.size());
  EXPECT_EQ(trial.best().trace.records.size(), before.size() - 1);
}

// One pass lowers several numbers of a request, the later ones down to the arrival.
TEST(Shrinker, ARequestThatWaitsAndIsAbortedLosesItsDelayAndTheTimeToItsAbort) {
  SavedCase start = large_case(2);
  TraceRequest& request = *trace_requests_of(start).back();
  request.after = {trace_requests_of(start).front()->spec.name};
  request.delay_ns = 5'000;
  request.abort = AbortPlan{.t_ns = 9'000, .after_tokens = {}};
  const auto result =
      shrink(start, when([](const SavedCase& saved) {
               SavedCase copy = saved;
               return std::ranges::any_of(trace_requests_of(copy), [](const TraceRequest* at) {
                 return !at->after.empty() && at->abort && at->abort->t_ns;
               });
             }));
  ASSERT_TRUE(result);
  SavedCase smallest = result->smallest;
  EXPECT_EQ(trace_requests_of(smallest).back()->delay_ns, 0);
  EXPECT_EQ(trace_requests_of(smallest).back()->abort->t_ns, 0);
}

TEST(Shrinker, EveryCandidateIsTriedOnceAndReadsBackAsItWasWritten) {
  std::set<std::string> tried;
  std::int64_t count = 0;
  const auto result = shrink(large_case(12), [&](const SavedCase& saved, std::int64_t) {
    ++count;
    const std::string text = saved_case_to_text(saved);
    EXPECT_TRUE(tried.insert(text).second) << "tried before:\n" << text;
    const auto read = saved_case_from_text("candidate", text);
    EXPECT_TRUE(read && *read == saved) << (read ? text : read.error().message);
    return prompt_tokens(saved) >= 30 ? std::optional(kOneStep) : std::nullopt;
  });
  ASSERT_TRUE(result);
  EXPECT_EQ(count, result->evaluations);
  EXPECT_GT(count, 30);
}

TEST(Shrinker, TheSameCaseShrinksToTheSameBytesInTheSameNumberOfEvaluations) {
  const auto needs = when([](const SavedCase& saved) { return prompt_tokens(saved) >= 21; });
  const auto first = shrink(large_case(25), needs);
  const auto second = shrink(large_case(25), needs);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(saved_case_to_text(first->smallest), saved_case_to_text(second->smallest));
  EXPECT_EQ(first->evaluations, second->evaluations);
}

TEST(Shrinker, OutOfEvaluationsItLeavesACaseThatFailsAndSaysSo) {
  const auto needs = when([](const SavedCase& saved) { return prompt_tokens(saved) >= 21; });
  const auto result = shrink(large_case(25), needs, {.evaluations_max = 15, .progress = {}});
  ASSERT_TRUE(result);
  EXPECT_FALSE(result->is_minimal);
  EXPECT_LE(result->evaluations, 16);
  EXPECT_GE(prompt_tokens(result->smallest), 21);
  EXPECT_LT(result->smallest.trace.records.size(), large_case(25).trace.records.size());
}

// More steps are no smaller case, whatever else went down.
TEST(Shrinker, FaultsGoOneByOneAndWhatIsLeftOfThemIsSmall) {
  SavedCase start = large_case(3);
  start.faults = {{"refuse_allocation", 7, {{"steps", 5}}},
                  {"pinch_pool", 4, {{"steps", 6}, {"blocks", 9}}},
                  {"abort_decode", 9, {{"place", 3}}}};
  const auto result = shrink(start, when([](const SavedCase& saved) {
                               return std::ranges::any_of(saved.faults, [](const Fault& fault) {
                                 return fault.kind == "pinch_pool" && fault.step >= 2;
                               });
                             }));
  ASSERT_TRUE(result);
  ASSERT_EQ(result->smallest.faults.size(), 1u);
  EXPECT_EQ(result->smallest.faults[0], (Fault{"pinch_pool", 2, {{"steps", 1}, {"blocks", 0}}}));
}

// A prompt whose tokens are written out: [seeded 3] [7 x 6] [seeded 2] [7 x 5].
SavedCase with_tokens_written_out() {
  SavedCase saved = large_case(2);
  saved.engine.max_model_len = 64;
  Prompt& prompt = requests_of(saved).front()->prompt;
  prompt.tokens.assign(11, 7);
  prompt.runs = {{.seed = 9, .count = 3},
                 {.kind = TokenRun::Kind::literal, .first = 0, .count = 6},
                 {.seed = 9, .first = 3, .count = 2},
                 {.kind = TokenRun::Kind::literal, .first = 6, .count = 5}};
  return saved;
}

std::int64_t tokens_written_out(const SavedCase& saved) {
  std::int64_t count = 0;
  for (const RequestSpec* request : requests_of(saved))
    for (const TokenRun& run : request->prompt.runs)
      if (run.kind == TokenRun::Kind::literal) count += run.count;
  return count;
}

TEST(Shrinker, TokensThatAreWrittenOutGoOneByOne) {
  const auto result =
      shrink(with_tokens_written_out(),
             when([](const SavedCase& saved) { return tokens_written_out(saved) >= 4; }));
  ASSERT_TRUE(result);
  const Prompt& prompt = requests_of(result->smallest)[0]->prompt;
  EXPECT_EQ(prompt.runs.size(), 1u) << saved_case_to_text(result->smallest);
  EXPECT_EQ(prompt.tokens, std::vector<std::int32_t>(4, 7));
}

TEST(Shrinker, TokensThatAreWrittenOutBecomeAnyWhereTheyDoNotMatter) {
  const auto result =
      shrink(with_tokens_written_out(),
             when([](const SavedCase& saved) { return prompt_tokens(saved) >= 8; }));
  ASSERT_TRUE(result);
  EXPECT_EQ(prompt_tokens(result->smallest), 8);
  EXPECT_EQ(tokens_written_out(result->smallest), 0) << saved_case_to_text(result->smallest);
}

TEST(Shrinker, OnlyACandidateWithLessOfWhatWeighsMoreMayRunMoreSteps) {
  constexpr std::int64_t kSteps = 7;
  std::size_t num_records_before = 99;
  std::set<std::int64_t> limits;
  const auto result = shrink(large_case(4), [&](const SavedCase& saved, std::int64_t steps_max) {
    if (num_records(saved) < num_records_before) {
      EXPECT_EQ(steps_max, 0);
    }
    num_records_before = num_records(saved);
    limits.insert(steps_max);
    return std::optional(kSteps);
  });
  ASSERT_TRUE(result);
  EXPECT_EQ(limits, (std::set<std::int64_t>{0, kSteps}));
}

TEST(Shrinker, StepsCountBeforeTokens) {
  const auto result = shrink(large_case(4), [](const SavedCase& saved, std::int64_t) {
    const std::int64_t tokens = prompt_tokens(saved);
    return tokens == 0 ? std::nullopt : std::optional(tokens >= 6 ? std::int64_t{2} : 50);
  });
  ASSERT_TRUE(result);
  EXPECT_EQ(prompt_tokens(result->smallest), 6);
  EXPECT_EQ(result->steps, 2);
}

TEST(Shrinker, TheModelLengthShrinksWithTheOutputThatReachesIt) {
  SavedCase first = large_case(1);
  const auto left = [](const SavedCase& saved, const RequestSpec& request) {
    return saved.engine.max_model_len - request.prompt.size();
  };
  for (TraceRequest* request : trace_requests_of(first))
    request->end_at_length(static_cast<std::int32_t>(left(first, request->spec)));
  const auto reaches_the_end = [&](const SavedCase& saved) {
    return std::ranges::any_of(requests_of(saved), [&](const RequestSpec* request) {
      return request->max_tokens >= 3 && request->max_tokens == left(saved, *request);
    });
  };
  const auto result = shrink(first, when(reaches_the_end));
  ASSERT_TRUE(result);
  EXPECT_EQ(result->smallest.engine.max_model_len, 4) << saved_case_to_text(result->smallest);
}

TEST(Shrinker, ARecordingBecomesATraceWhereTheFailureLetsIt) {
  const SavedCase start = recorded(large_case(10));
  const auto result =
      shrink(start, when([](const SavedCase& saved) { return size_of(saved).requests >= 2; }));
  ASSERT_TRUE(result);
  EXPECT_FALSE(result->smallest.recording);
  EXPECT_EQ(size_of(result->smallest).requests, 2);
}

TEST(Shrinker, ARecordingIsCutInPlaceWhereItMustStayOne) {
  const SavedCase start = recorded(large_case(10));
  ASSERT_GT(start.recording->steps.size(), 10u);
  const auto result = shrink(start, when([](const SavedCase& saved) {
                               return saved.recording && size_of(saved).requests >= 2;
                             }));
  ASSERT_TRUE(result);
  ASSERT_TRUE(result->smallest.recording);
  EXPECT_EQ(size_of(result->smallest).requests, 2);
  EXPECT_LE(result->smallest.recording->steps.size(), 2u);
  for (const RecordedStep& step : result->smallest.recording->steps)
    for (const RecordedScheduled& scheduled : step.scheduled)
      EXPECT_TRUE(std::ranges::any_of(requests_of(result->smallest), [&](const RequestSpec* r) {
        return r->name == scheduled.id;
      })) << scheduled.id;
}

// In a followed recording only steps without a decision go, and their events move on.
TEST(Shrinker, ADroppedStepLeavesItsEventsToTheNext) {
  SavedCase start = recorded(large_case(4));
  start.decide = Decides::recording;
  std::vector<RecordedStep>& steps = start.recording->steps;
  RecordedStep idle;
  idle.before = std::move(steps.front().before);
  steps.front().before.clear();
  ASSERT_FALSE(idle.before.empty());
  for (RecordedStep& step : steps) {
    ++step.step;
    if (step.output_of_step) ++*step.output_of_step;
  }
  steps.insert(steps.begin(), idle);
  ++start.recording->end.steps;
  const std::int64_t num_requests = size_of(start).requests;
  const auto result =
      shrink(start, when([&](const SavedCase& saved) {
               return saved.decide == Decides::recording && size_of(saved).requests == num_requests;
             }));
  ASSERT_TRUE(result);
  const std::vector<RecordedStep>& left = result->smallest.recording->steps;
  ASSERT_FALSE(left.empty());
  EXPECT_FALSE(left.front().scheduled.empty()) << saved_case_to_text(result->smallest);
  EXPECT_EQ(left.front().before.size(), idle.before.size());
}

}  // namespace
}  // namespace lockstep
