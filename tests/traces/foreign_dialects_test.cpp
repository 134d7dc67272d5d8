// Traces of other tools (traces/samples/foreign): the request of each row, its dependencies, and
// what is refused by line.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "tests/traces/text_files.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::changed;
using testing_files::read_whole;
using testing_files::refusal;
using testing_files::write_temporary;

std::string sample(std::string_view name) {
  return (*find_samples_dir() / "foreign" / name).string();
}

std::string sample_text(std::string_view name) { return read_whole(sample(name)); }

Result<Trace> import_file(const std::string& path, const ImportOptions& options = {}) {
  LS_ASSIGN_OR_RETURN(const auto reader, open_trace(path, options));
  return read_all(*reader);
}

// As a request trace it is the same: so it keeps every rule of that format.
Trace imported(std::string_view name, const ImportOptions& options = {}) {
  const auto trace = import_file(sample(name), options);
  EXPECT_TRUE(trace) << trace.error().message;
  if (!trace) return {};
  const auto again = import_file(write_temporary(trace_to_text(*trace), "converted"));
  EXPECT_TRUE(again) << again.error().message;
  if (again) {
    EXPECT_EQ(*again, *trace) << name;
  }
  return *trace;
}

std::string refused(std::string_view text, const ImportOptions& options = {}) {
  const std::string path = write_temporary(text);
  return refusal(import_file(path, options), path);
}

// "NAME t=.. in=.. out=.." or "NAME after=a,b+delay in=.. out=..", times in ms.
std::string line_of(const TraceRequest& request) {
  std::string arrival = fmt::format("t={}", static_cast<double>(request.spec.arrival_ns) / 1e6);
  if (!request.after.empty())
    arrival = fmt::format("after={}+{}", fmt::join(request.after, ","),
                          static_cast<double>(request.delay_ns) / 1e6);
  return fmt::format("{} {} in={} out={}", request.spec.name, arrival, request.spec.prompt.size(),
                     request.output.length);
}

std::vector<std::string> lines_of(const Trace& trace) {
  std::vector<std::string> lines;
  for (const TraceRecord& record : trace.records)
    lines.push_back(line_of(std::get<TraceRequest>(record)));
  return lines;
}

const Prompt& prompt(const Trace& trace, std::size_t i) {
  return std::get<TraceRequest>(trace.records.at(i)).spec.prompt;
}

// Leading tokens that two prompts share.
std::int64_t shared(const Prompt& a, const Prompt& b) {
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < std::min(a.runs.size(), b.runs.size()); ++i) {
    if (a.runs[i].kind != b.runs[i].kind || a.runs[i].seed != b.runs[i].seed) break;
    tokens += std::min(a.runs[i].count, b.runs[i].count);
    if (a.runs[i].count != b.runs[i].count) break;
  }
  return tokens;
}

using Lines = std::vector<std::string>;

TEST(ForeignTraces, EverySampleIsRecognisedByItsContent) {
  const std::map<std::string, std::string> expected = {
      {"mooncake.jsonl", "Mooncake trace"},
      {"timed_trace.jsonl", "Mooncake trace"},
      {"agentic_mooncake.jsonl", "Mooncake trace"},
      {"weka.json", "Weka trace"},
      {"cc_traces.jsonl", "Weka trace"},
      {"bailian.jsonl", "Bailian trace"},
      {"burstgpt.csv", "BurstGPT trace"},
      {"llmservingsim.jsonl", "LLMServingSim workload"},
      {"llmservingsim_agentic.jsonl", "LLMServingSim workload"},
      {"llmservingsim_recorded.jsonl", "LLMServingSim workload"},
      {"dynamo.jsonl", "Dynamo request trace"},
      {"dynamo_agents.jsonl", "Dynamo request trace"},
      {"aiperf/manifest.json", "AIPerf manifest"},
      {"aiperf/dataset.jsonl", "Mooncake trace"},
  };
  std::size_t files = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(*find_samples_dir() / "foreign"))
    files += entry.is_regular_file() ? 1 : 0;
  EXPECT_EQ(files, expected.size());
  for (const auto& [name, format] : expected) {
    const auto found = detect_format(write_temporary(sample_text(name)));
    ASSERT_TRUE(found) << found.error().message;
    EXPECT_EQ(name_of(*found), format) << name;
  }
}

TEST(Weka, TurnsAndSubAgentsWaitForEachOther) {
  const Trace trace = imported("weka.json");
  EXPECT_EQ(
      lines_of(trace),
      (Lines{"trace_1/0 t=0 in=200 out=20", "trace_1/agent_001/0 after=trace_1/0+500 in=130 out=10",
             "trace_1/agent_001/1 after=trace_1/agent_001/0+1000 in=195 out=12",
             "trace_1/2 after=trace_1/0,trace_1/agent_001/1+1500 in=300 out=1",
             "trace_1/3 after=trace_1/2+3500 in=380 out=25"}));
  EXPECT_EQ(trace.header.ids, (HashIdConvention{64, IdTail::floor}));
  EXPECT_EQ(shared(prompt(trace, 0), prompt(trace, 3)), 192);
  EXPECT_EQ(shared(prompt(trace, 1), prompt(trace, 2)), 128);
  EXPECT_EQ(shared(prompt(trace, 0), prompt(trace, 1)), 0);
}

TEST(Weka, IdsAreLocalToAConversationUnlessTheFileSaysGlobal) {
  const Trace local = imported("cc_traces.jsonl");
  ASSERT_EQ(local.records.size(), 7u);
  EXPECT_EQ(std::get<TraceRequest>(local.records[1]).spec.name, "trace_2/0");
  EXPECT_EQ(shared(prompt(local, 0), prompt(local, 1)), 0);
  std::string text = sample_text("cc_traces.jsonl");
  for (int i = 0; i < 2; ++i)
    text = changed(text, "\"hash_id_scope\":\"local\"", "\"hash_id_scope\":\"global\"");
  const auto global = import_file(write_temporary(text));
  ASSERT_TRUE(global) << global.error().message;
  EXPECT_EQ(shared(prompt(*global, 0), prompt(*global, 1)), 128);
}

TEST(Weka, ADocumentOverManyLinesAndTimesFromTheConversationsStartAreRead) {
  const std::string text = sample_text("weka.json");
  const auto spread = import_file(write_temporary("{\n" + text.substr(1)));
  ASSERT_TRUE(spread) << spread.error().message;
  EXPECT_EQ(lines_of(*spread), lines_of(imported("weka.json")));
  std::string absolute =
      changed(text, "\"requests\":[{\"t\":0.0,\"type\":\"n\",\"model\":\"m\",\"in\":130",
              "\"requests\":[{\"t\":3.0,\"type\":\"n\",\"model\":\"m\",\"in\":130");
  absolute = changed(absolute, "\"t\":2.0,", "\"t\":5.0,");
  const auto same = import_file(write_temporary(absolute));
  ASSERT_TRUE(same) << same.error().message;
  EXPECT_EQ(lines_of(*same), lines_of(*spread));
}

TEST(Weka, WhatDoesNotFitIsRefusedByLine) {
  const std::string text = sample_text("cc_traces.jsonl");
  const std::string first = text.substr(0, text.find('\n') + 1);
  EXPECT_EQ(refused(changed(text, "trace_2", "trace_1")),
            "FILE:2: field `id`: found \"trace_1\"; expected a new conversation: editions with and "
            "without sub-agents share ids and cannot be mixed");
  EXPECT_EQ(refused(first + changed(text.substr(first.size()), "\"local\"", "\"global\"")),
            "FILE:2: field `hash_id_scope`: found \"global\"; expected the scope of the first "
            "conversation");
  EXPECT_EQ(refused(first + changed(text.substr(first.size()), ":64", ":16")),
            "FILE:2: field `block_size`: found 16; expected 64, as in the first conversation");
  EXPECT_EQ(refused(changed(text, "\"in\":200", "\"in\":193")), "read without an error")
      << "193 tokens are three whole blocks as well";
  EXPECT_EQ(refused(changed(text, "\"in\":200", "\"in\":257")),
            "FILE:1: field `requests[0].hash_ids`: found 3 ids for 257 tokens; expected 4, one per "
            "64 tokens");
  EXPECT_EQ(refused(changed(text, "\"type\":\"n\"", "\"type\":\"x\"")),
            "FILE:1: field `requests[0].type`: found \"x\"; expected \"n\", \"s\", or outside of a "
            "sub-agent \"subagent\"");
  EXPECT_EQ(refused(changed(text, "\"output_types\"", "\"output_tipes\"")),
            "FILE:1: field `requests[0].output_tipes`: found an unknown key; expected "
            "\"output_types\", or one that starts with x_");
  std::string mixed = first;
  for (const char* what : {"trace_1"}) mixed = changed(mixed, what, "trace_3");
  mixed = changed(mixed, "\"requests\":[{\"t\":0.0,\"type\":\"n\",\"model\":\"m\",\"in\":130",
                  "\"requests\":[{\"t\":3.0,\"type\":\"n\",\"model\":\"m\",\"in\":130");
  EXPECT_EQ(refused(first + changed(mixed, "\"t\":2.0,", "\"t\":5.0,")),
            "FILE:2: field `requests[1].requests`: found times that count from the start of the "
            "conversation; those of an earlier sub-agent do not: two editions cannot be mixed");
}

TEST(Bailian, ChatsKeepTheirTimesAndALastBlockThatIsNotFullIsNotShared) {
  const Trace trace = imported("bailian.jsonl");
  EXPECT_EQ(lines_of(trace), (Lines{"chat55 t=0 in=40 out=10", "chat60 t=1500 in=32 out=4",
                                    "chat159 t=61114 in=52 out=132"}));
  EXPECT_EQ(trace.header.ids, (HashIdConvention{16, IdTail::floor}));
  EXPECT_EQ(shared(prompt(trace, 0), prompt(trace, 2)), 32);
  EXPECT_EQ(shared(prompt(trace, 0), prompt(trace, 1)), 16);
}

TEST(Bailian, CirclesAndTurnsOutOfOrderAreRefused) {
  const std::string text = sample_text("bailian.jsonl");
  EXPECT_EQ(refused(changed(changed(text, "\"parent_chat_id\":-1", "\"parent_chat_id\":159"),
                            "61.114", "0.0")),
            "FILE:1: request chat55 waits for chat159, which waits for chat55: none of them can "
            "start");
  EXPECT_EQ(refused(changed(text, "\"parent_chat_id\":-1", "\"parent_chat_id\":55")),
            "FILE:1: request chat55 waits for itself: none of them can start");
  EXPECT_EQ(refused(changed(text, "\"parent_chat_id\":-1", "\"parent_chat_id\":60")),
            "FILE:1: request chat55 is before chat60, which it follows");
  EXPECT_EQ(refused(changed(text, "\"turn\":2", "\"turn\":1")),
            "FILE:3: field `turn`: found 1; expected more than 1, the turn of its parent_chat_id");
  EXPECT_EQ(refused(changed(text, "\"chat_id\":60", "\"chat_id\":55")),
            "FILE:2: field `chat_id`: found 55; expected a chat_id that is new");
  EXPECT_EQ(refused(changed(text, "[100,103]", "[100,103,7]")),
            "FILE:2: field `hash_ids`: found 3 ids for 32 tokens; expected 2, one per 16 tokens");
}

TEST(BurstGpt, ColumnsAreFoundByNameAndAFailedRequestFollowsThePolicy) {
  EXPECT_EQ(
      lines_of(imported("burstgpt.csv")),
      (Lines{"r0 t=5000 in=472 out=18", "r1 t=45000 in=1087 out=230", "r2 t=45500 in=417 out=1"}));
  EXPECT_EQ(lines_of(imported("burstgpt.csv", {.zero_output = ZeroOutput::skip})).size(), 2u);
  const auto other = import_file(write_temporary(
      "Session ID,Response tokens,Elapsed time,Request tokens,Timestamp\nx,2,1.5,10,0.25\n"));
  ASSERT_TRUE(other) << other.error().message;
  EXPECT_EQ(lines_of(*other), (Lines{"r0 t=250 in=10 out=2"}));
}

TEST(BurstGpt, WrongCellsAreRefused) {
  const std::string text = sample_text("burstgpt.csv");
  EXPECT_EQ(refused(changed(text, "490", "491")),
            "FILE:2: field `Total tokens`: found \"491\"; expected 490, request and response");
  EXPECT_EQ(refused(changed(text, "45,", "4,")),
            "FILE:3: field `Timestamp`: found \"4\"; expected seconds, not before those of the row "
            "above, and not below 0");
  EXPECT_EQ(refused(changed(text, "45,", "99999999999999,")),
            "FILE:3: field `Timestamp`: found \"99999999999999\"; expected seconds up to "
            "9223372036, with at most 9 digits after the point");
  EXPECT_EQ(
      refused(changed(text, "472", "-1")),
      "FILE:2: field `Request tokens`: found \"-1\"; expected an integer from 1 to 2147483647");
  EXPECT_EQ(
      refused(changed(text, "Log Type", "Log tokens")),
      "FILE:1: field `header`: found \"Log tokens\"; expected one of Timestamp, Request tokens, "
      "Response tokens, Total tokens, Model, Log Type, Session ID, Elapsed time");
  EXPECT_EQ(refused(changed(text, ",API log", "")),
            "FILE:4: field `row`: found \"45.5,GPT-4,417,0,417\"; expected 6 cells");
}

TEST(LlmServingSim, WorkloadsSessionsAndRecordedRunsAreRead) {
  const Trace flat = imported("llmservingsim.jsonl");
  EXPECT_EQ(lines_of(flat), (Lines{"r0 t=0 in=5 out=3", "r1 t=2.499 in=6 out=2"}));
  EXPECT_EQ(prompt(flat, 0).materialize(), (std::vector<std::int32_t>{7, 8, 9, 10, 11}));
  EXPECT_EQ(std::get<TraceRequest>(flat.records[0]).output.tokens,
            (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(
      lines_of(imported("llmservingsim_agentic.jsonl")),
      (Lines{"s0/0 t=0 in=4 out=2", "s0/1 after=s0/0+300 in=7 out=1", "s1/0 t=50 in=3 out=9"}));
  EXPECT_EQ(lines_of(imported("llmservingsim_recorded.jsonl")),
            (Lines{"bench-0 t=0 in=2358 out=531", "bench-1 t=265.0914 in=1034 out=769"}));
  EXPECT_EQ(refused(changed(sample_text("llmservingsim.jsonl"), "[1,2,3]", "[1,2]")),
            "FILE:1: field `output_tok_ids`: found 2 tokens; expected 3, as the row says");
  EXPECT_EQ(refused(changed(sample_text("llmservingsim_agentic.jsonl"), "\"s0\"", "7")),
            "FILE:1: field `session_id`: found 7; expected a string");
  EXPECT_EQ(refused(changed(sample_text("llmservingsim_recorded.jsonl"), "bench-1", "bench-0")),
            "FILE:2: request bench-0 has the name of an earlier request");
}

TEST(Dynamo, RowsWithoutContextArriveAsRecorded) {
  const Trace trace = imported("dynamo.jsonl");
  EXPECT_EQ(lines_of(trace), (Lines{"a t=0 in=128 out=16", "b t=400 in=130 out=3"}));
  EXPECT_EQ(shared(prompt(trace, 0), prompt(trace, 1)), 64);
}

TEST(Dynamo, SessionsWaitForEachOther) {
  EXPECT_EQ(lines_of(imported("dynamo_agents.jsonl")),
            (Lines{"plan t=0 in=100 out=16", "look after=plan+200 in=64 out=8",
                   "answer after=plan,look+500 in=192 out=4"}));
}

TEST(Dynamo, SessionsKeepTheirLinksWhereAllArriveAtOnce) {
  EXPECT_EQ(lines_of(imported("dynamo_agents.jsonl", {.arrivals = Arrivals::closed})),
            lines_of(imported("dynamo_agents.jsonl")));
}

TEST(Dynamo, WhatIsNotWholeIsRefused) {
  const std::string text = sample_text("dynamo_agents.jsonl");
  EXPECT_EQ(refused(changed(text, "\"input_length\":100", "\"input_length\":200")),
            "FILE:1: field `request.replay.input_sequence_hashes`: found 2 ids for 200 tokens; "
            "expected 4, one per 64 tokens");
  EXPECT_EQ(refused(text + sample_text("dynamo.jsonl")),
            "FILE:5: found no agent_context; all rows have one, or none");
  EXPECT_EQ(refused(changed(text, "trace.v1", "trace.v2")),
            "FILE:1: field `schema`: found \"dynamo.request.trace.v2\"; expected "
            "\"dynamo.request.trace.v1\"");
  EXPECT_EQ(
      refused(changed(text, "\"trace_block_size\":64,\"input_length\":64",
                      "\"trace_block_size\":32,\"input_length\":32")),
      "FILE:3: field `request.replay.trace_block_size`: found 32; expected 64, as in the first "
      "row");
  // Two sessions that are each other's parent.
  EXPECT_EQ(refused(changed(text, "{\"session_id\":\"main\"}",
                            "{\"session_id\":\"main\",\"parent_session_id\":\"reader\"}")),
            "read without an error")
      << "no request of the reader began before the first of main";
}

TEST(AgenticMooncake, RowsWaitForThoseTheyName) {
  EXPECT_EQ(lines_of(imported("agentic_mooncake.jsonl")),
            (Lines{"plan t=0 in=600 out=30", "read after=plan+105 in=520 out=15",
                   "answer after=plan,read+20 in=1200 out=60"}));
  const std::string text = sample_text("agentic_mooncake.jsonl");
  EXPECT_EQ(
      refused(changed(text, "\"wait_for\":[\"plan\"]", "\"wait_for\":[\"answer\"]")),
      "FILE:2: request answer waits for read, which waits for answer: none of them can start");
  EXPECT_EQ(refused(changed(text, "\"wait_for\":[\"plan\"]", "\"wait_for\":[\"plane\"]")),
            "FILE:3: field `wait_for`: found \"plane\"; expected the request_id of a row");
}

// Two requests per layer, each of which waits for both of the next layer: 2^40 ways lead through
// them, and the file has the waiting ones first.
TEST(AgenticMooncake, RequestsThatAreLeftOutAreWalkedOnce) {
  std::string text;
  for (int layer = 40; layer >= 0; --layer)
    for (const char side : {'a', 'b'})
      text += fmt::format(
          R"({{"request_id":"{}{}","timestamp":0,"input_length":5,"output_length":{}{}}})"
          "\n",
          side, layer, layer == 40 || layer == 0 ? 1 : 0,
          layer == 0 ? "" : fmt::format(R"(,"wait_for":["a{0}","b{0}"])", layer - 1));
  const auto trace = import_file(write_temporary(text), {.zero_output = ZeroOutput::skip});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(lines_of(*trace),
            (Lines{"a0 t=0 in=5 out=1", "b0 t=0 in=5 out=1", "a40 after=a0,b0+0 in=5 out=1",
                   "b40 after=a0,b0+0 in=5 out=1"}));
}

TEST(AgenticMooncake, ARequestThatIsLeftOutHandsOnWhomItWaitedFor) {
  const std::string text =
      changed(sample_text("agentic_mooncake.jsonl"), "\"output_length\":15", "\"output_length\":0");
  const auto trace = import_file(write_temporary(text), {.zero_output = ZeroOutput::skip});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(lines_of(*trace),
            (Lines{"plan t=0 in=600 out=30", "answer after=plan+20 in=1200 out=60"}));
  EXPECT_EQ(refused(text, {.zero_output = ZeroOutput::refuse}),
            "FILE:3: request read has no output; expected at least one token");
}

TEST(Aiperf, AManifestsTurnsAddToTheirSession) {
  const Trace trace = imported("aiperf/manifest.json");
  EXPECT_EQ(lines_of(trace), (Lines{"s-0 t=0 in=130 out=12", "s-0/1 after=s-0+1500.5 in=212 out=9",
                                    "s-1 t=250 in=128 out=5"}));
  const auto& first = std::get<TraceRequest>(trace.records[0]);
  std::vector<std::int32_t> so_far = first.spec.prompt.materialize();
  so_far.insert(so_far.end(), first.output.tokens.begin(), first.output.tokens.end());
  std::vector<std::int32_t> next = prompt(trace, 1).materialize();
  next.resize(142);
  EXPECT_EQ(next, so_far) << "a turn begins with all earlier turns";
  EXPECT_EQ(lines_of(imported("aiperf/dataset.jsonl", {.block_tokens = 64})), lines_of(trace))
      << "the rows alone, with the manifest's block size";
}

TEST(AgenticMooncake, AddedTurnsContinueTheRecordedAnswer) {
  const auto trace = import_file(
      write_temporary(
          "{\"session_id\":\"s\",\"timestamp\":0,\"input_length\":4,\"output_length\":2,"
          "\"output_token_ids\":[7,9]}\n"
          "{\"session_id\":\"s\",\"timestamp\":5,\"input_length\":3,\"output_length\":1}\n"),
      {.turns = Turns::added});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(std::get<TraceRequest>(trace->records[0]).output.tokens, (std::vector{7, 9}));
  const std::vector<std::int32_t> next = prompt(*trace, 1).materialize();
  ASSERT_EQ(next.size(), 9u);
  EXPECT_EQ(std::vector(next.begin() + 4, next.begin() + 6), (std::vector{7, 9}));
}

TEST(AgenticMooncake, MinTokensAboveTheOutputAreRefused) {
  EXPECT_EQ(refused("{\"request_id\":\"a\",\"timestamp\":0,\"input_length\":4,"
                    "\"output_length\":2,\"extra\":{\"min_tokens\":3}}\n"),
            "FILE:1: found min_tokens 3; expected at most the output_length, 2");
}

TEST(Aiperf, AManifestThatDoesNotFitItsRowsIsRefused) {
  const std::string folder = testing_files::temporary_path("aiperf");
  std::filesystem::create_directories(folder);
  const auto refused_manifest = [&](const std::string& manifest) {
    std::filesystem::copy_file(sample("aiperf/dataset.jsonl"), folder + "/dataset.jsonl",
                               std::filesystem::copy_options::overwrite_existing);
    std::filesystem::copy_file(write_temporary(manifest), folder + "/m.json",
                               std::filesystem::copy_options::overwrite_existing);
    return refusal(import_file(folder + "/m.json"), folder + "/m.json");
  };
  const std::string manifest = sample_text("aiperf/manifest.json");
  EXPECT_EQ(refused_manifest(changed(manifest, "\"num_sessions\": 2", "\"num_sessions\": 3")),
            folder + "/dataset.jsonl: found 2 sessions; expected 3, as its manifest states");
  EXPECT_EQ(refused_manifest(changed(manifest, "\"block_size\": 64", "\"block_size\": 512")),
            folder +
                "/dataset.jsonl:1: field `hash_ids`: found 3 ids for 130 tokens; expected 1, "
                "one per 512 tokens");
}

TEST(TimedTrace, IdsOfSixteenTokensAndSecondsAreRecognised) {
  const Trace trace = imported("timed_trace.jsonl");
  EXPECT_EQ(lines_of(trace),
            (Lines{"r0 t=0 in=40 out=8", "r1 t=250 in=48 out=4", "r2 t=1500 in=9 out=16"}));
  EXPECT_EQ(trace.header.source.kind, "timed_trace");
  EXPECT_EQ(trace.header.ids, (HashIdConvention{16, IdTail::ceil}));
  EXPECT_EQ(shared(prompt(trace, 0), prompt(trace, 1)), 32);
}

TEST(MooncakeRows, TextAndRowsWithoutIdsAreToldApart) {
  EXPECT_EQ(
      refused("{\"timestamp\":0,\"text_input\":\"hi\",\"hash_ids\":[1],\"output_length\":4}\n"),
      "FILE:1: field `text_input`: found text; expected input_length and hash_ids: only the "
      "model's tokenizer can count the tokens of a text");
  // AIPerf's own template has such rows, the last with too few ids.
  EXPECT_EQ(
      refused("{\"timestamp\":0,\"input_length\":512,\"output_length\":128}\n"
              "{\"timestamp\":120,\"input_length\":1024,\"output_length\":256,\"hash_ids\":"
              "[1,2,3]}\n"),
      "FILE:2: field `hash_ids`: found 3 ids for 1024 tokens; expected 2, one per 512 tokens");
  EXPECT_EQ(
      refused("{\"session_id\":\"s\",\"timestamp\":5,\"input_length\":5,\"output_length\":1}\n"
              "{\"session_id\":\"s\",\"timestamp\":4,\"input_length\":5,\"output_length\":1}\n"),
      "FILE:2: found a turn before that of its session above; expected a later timestamp, or "
      "a delay");
}

TEST(ImportOptionsText, EachIsSetOnceAndWhatIsNoneIsRefused) {
  const auto options = import_options_from_text("block=16,time=s,turns=added,zero=skip");
  ASSERT_TRUE(options) << options.error().message;
  EXPECT_EQ(options->block_tokens, 16);
  EXPECT_EQ(options->time_unit, TimeUnit::s);
  EXPECT_EQ(options->turns, Turns::added);
  EXPECT_EQ(options->zero_output, ZeroOutput::skip);
  const auto refused_text = [](std::string_view text) {
    return import_options_from_text(text).error().message;
  };
  EXPECT_EQ(refused_text("block"), "found \"block\"; expected NAME=VALUE, as in block=16,time=s");
  EXPECT_EQ(refused_text("block=0"), "block: found \"0\"; expected a number of tokens");
  EXPECT_EQ(refused_text("time=h"), "time: found \"h\"; expected one of ms, s");
  EXPECT_EQ(refused_text("time=s,time=ms"), "found time twice");
  EXPECT_EQ(refused_text("unit=s"),
            "found \"unit\"; expected block, time, turns, zero, arrival or torn");
}

}  // namespace
}  // namespace lockstep
