// A recording's requests as a trace: arrivals by step, outputs as long as recorded.
#include "traces/formats/recording.h"
#include "traces/formats/request_trace.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace lockstep {
namespace {

RecordedEvent add(std::string name, std::int32_t max_tokens, std::optional<std::int32_t> eos = {}) {
  RecordedEvent event;
  event.request.name = std::move(name);
  event.request.prompt.append({TokenRun::Kind::seeded, 1, 0, 20});
  event.request.max_tokens = max_tokens;
  event.request.eos_token = eos;
  return event;
}

RecordedEvent event_of(RecordedEvent::Kind kind) {
  RecordedEvent event;
  event.kind = kind;
  return event;
}

RecordedEvent abort_of(std::string name) {
  RecordedEvent event = event_of(RecordedEvent::Kind::abort);
  event.name = std::move(name);
  return event;
}

const TraceRequest& recorded_request(const Trace& trace, std::size_t i) {
  return std::get<TraceRequest>(trace.records.at(i));
}

TEST(RecordingTrace, HasArrivalsByStepAndOutputsAsRecorded) {
  Recording recording;
  recording.steps.resize(3);
  for (std::size_t i = 0; i < 3; ++i) recording.steps[i].step = static_cast<std::int64_t>(i);
  recording.steps[0].before = {add("ends", 9), add("stops", 9, 5)};
  recording.steps[0].sampled = {{"ends", {1}}, {"stops", {4}}};
  recording.steps[1].before = {add("aborted", 9), add("late", 3)};
  recording.steps[1].sampled = {{"ends", {2}}, {"stops", {5, 6}}};
  recording.steps[1].stopped = {{"stops", "stop"}, {"ends", "length"}};
  recording.steps[2].before = {abort_of("aborted"), abort_of("nobody")};
  const Result<Trace> trace = trace_of(recording, 10);
  ASSERT_TRUE(trace);
  ASSERT_EQ(trace->records.size(), 4u);
  EXPECT_EQ(recorded_request(*trace, 0).output.tokens, (std::vector{1, 2}));
  EXPECT_EQ(recorded_request(*trace, 0).spec.max_tokens, 2);
  EXPECT_EQ(recorded_request(*trace, 1).output.tokens,
            (std::vector{4, 5}));  // 6 was cut off by the stop
  EXPECT_FALSE(recorded_request(*trace, 1).spec.eos_token);
  EXPECT_EQ(recorded_request(*trace, 2).spec.arrival_ns, 10);
  EXPECT_EQ(recorded_request(*trace, 2).abort->t_ns, 20);
  EXPECT_EQ(recorded_request(*trace, 3).output.length, 3);  // it did not end: all its tokens
}

TEST(RecordingTrace, LeavesAcceptedPlaceholdersToTheReplay) {
  Recording recording;
  recording.steps.resize(1);
  recording.steps[0].before = {add("a", 3)};
  recording.steps[0].sampled = {{"a", {-1, 7}}};
  recording.steps[0].stopped = {{"a", "length"}};
  const Result<Trace> trace = trace_of(recording, 10);
  ASSERT_TRUE(trace);
  EXPECT_EQ(recorded_request(*trace, 0).output.length, 2);
  EXPECT_TRUE(recorded_request(*trace, 0).output.tokens.empty());
}

TEST(RecordingTrace, NumbersTheRequestsOfOneName) {
  Recording recording;
  recording.steps.resize(3);
  recording.steps[0].before = {add("a", 9)};
  recording.steps[0].sampled = {{"a", {1}}};
  recording.steps[0].stopped = {{"a", "stop"}};
  recording.steps[0].during = {add("a", 9)};
  recording.steps[1].sampled = {{"a", {2, 3}}};
  recording.steps[1].stopped = {{"a", "length"}};
  recording.steps[2].before = {add("a#2", 4)};
  const Result<Trace> trace = trace_of(recording, 10);
  ASSERT_TRUE(trace);
  ASSERT_EQ(trace->records.size(), 3u);
  EXPECT_EQ(recorded_request(*trace, 0).output.tokens, std::vector{1});
  EXPECT_EQ(recorded_request(*trace, 1).spec.name, "a#2");
  EXPECT_EQ(recorded_request(*trace, 1).output.tokens, (std::vector{2, 3}));
  EXPECT_EQ(recorded_request(*trace, 2).spec.name, "a#2#2");
}

TEST(RecordingTrace, AnOutputThatAnAbortCutShortLowersMinTokens) {
  Recording recording;
  recording.steps.resize(1);
  recording.steps[0].before = {add("a", 9)};
  recording.steps[0].before[0].request.min_tokens = 5;
  recording.steps[0].sampled = {{"a", {1, 2}}};
  recording.steps[0].stopped = {{"a", "abort"}};
  EXPECT_EQ(recorded_request(*trace_of(recording, 10), 0).spec.min_tokens, 2);
}

TEST(RecordingTrace, KeepsThatAnEncoderReadsTheItems) {
  Recording recording;
  EXPECT_FALSE(trace_of(recording, 10)->header.is_encoder_decoder);
  recording.header.options.inputs.is_encoder_decoder = true;
  EXPECT_TRUE(trace_of(recording, 10)->header.is_encoder_decoder);
}

TEST(RecordingTrace, RefusesAnEventThatATraceCannotHoldByItsName) {
  Recording recording;
  recording.steps.resize(1);
  using Kind = RecordedEvent::Kind;
  for (const auto& [kind, name] : {std::pair{Kind::chunk, "chunk"}, std::pair{Kind::close, "close"},
                                   std::pair{Kind::grammar_ready, "grammar_ready"},
                                   std::pair{Kind::grammar_failed, "grammar_failed"},
                                   std::pair{Kind::reset_encoder_cache, "reset_encoder_cache"}}) {
    recording.steps[0].during = {event_of(kind)};
    const Result<Trace> trace = trace_of(recording, 10);
    ASSERT_FALSE(trace) << name;
    EXPECT_NE(trace.error().message.find(fmt::format("step 0: found `{}`", name)),
              std::string::npos)
        << trace.error().message;
  }
  recording.steps[0].during = {event_of(Kind::reset_prefix_cache), event_of(Kind::output),
                               event_of(Kind::pause_state)};
  recording.steps[0].during.back().pause_state = PauseState::paused_new;
  const Trace trace = *trace_of(recording, 10);
  ASSERT_EQ(trace.records.size(), 2u);
  EXPECT_EQ(std::get<TraceControl>(trace.records[1]).kind, TraceControl::Kind::pause_state);
  EXPECT_EQ(std::get<TraceControl>(trace.records[1]).pause_state, PauseState::paused_new);
}

TEST(RecordingTrace, OfAConnectorIsRefused) {
  Recording recording;
  recording.header.connector.emplace();
  EXPECT_FALSE(trace_of(recording, 10));
}

}  // namespace
}  // namespace lockstep
