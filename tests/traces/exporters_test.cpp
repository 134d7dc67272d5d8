// Exports: what is shared stays shared, rows come back as they were, and what a format cannot say
// is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/traces/text_files.h"
#include "traces/exporters/export_trace.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::read_whole;
using testing_files::write_temporary;

Trace read_for_export(const std::string& path, const ImportOptions& options = {}) {
  auto reader = open_trace(path, options);
  EXPECT_TRUE(reader) << reader.error().message;
  if (!reader) return {};
  auto trace = read_all(**reader);
  EXPECT_TRUE(trace) << trace.error().message;
  return trace ? *std::move(trace) : Trace();
}

TraceRequest request(std::string name, Prompt prompt, std::int64_t t_ns = 0) {
  TraceRequest request;
  request.spec.name = std::move(name);
  request.spec.prompt = std::move(prompt);
  request.spec.arrival_ns = t_ns;
  request.output.length = request.spec.max_tokens = 4;
  return request;
}

Prompt seeded(std::initializer_list<std::pair<std::uint64_t, std::uint32_t>> segments) {
  Prompt prompt;
  for (const auto& [seed, count] : segments)
    prompt.append({.kind = TokenRun::Kind::seeded, .seed = seed, .first = 0, .count = count});
  return prompt;
}

std::string text_of(const Trace& trace, ExportAs as, bool is_lossy = false,
                    std::optional<std::int32_t> block = {}) {
  const auto exported =
      export_trace("F", trace, {.as = as, .block_tokens = block, .is_lossy = is_lossy});
  return exported ? exported->text : exported.error().message;
}

// Every format of the samples and back: the same arrivals, lengths and shared prefixes.
void expect_round_trip(const Trace& trace, ExportAs as) {
  const auto exported = export_trace("F", trace, {.as = as, .block_tokens = {}, .is_lossy = false});
  ASSERT_TRUE(exported) << exported.error().message;
  ImportOptions options{.block_tokens = exported->block_tokens, .time_unit = {}, .turns = {}};
  if (as == ExportAs::timed_trace) options.time_unit = TimeUnit::s;
  const Trace again = read_for_export(write_temporary(exported->text, "exported"), options);
  ASSERT_EQ(again.records.size(), trace.records.size());
  std::vector<const TraceRequest*> before, after;
  for (std::size_t i = 0; i < trace.records.size(); ++i) {
    before.push_back(&std::get<TraceRequest>(trace.records[i]));
    after.push_back(&std::get<TraceRequest>(again.records[i]));
    EXPECT_EQ(after[i]->spec.arrival_ns, before[i]->spec.arrival_ns);
    EXPECT_EQ(after[i]->spec.prompt.size(), before[i]->spec.prompt.size());
    EXPECT_EQ(after[i]->output.length, before[i]->output.length);
    if (as == ExportAs::aiperf) {
      EXPECT_EQ(after[i]->spec.name, before[i]->spec.name);
    }
  }
  EXPECT_EQ(prefix_ids(after, 1), prefix_ids(before, 1)) << "what is shared, token by token";
}

TEST(Export, EverySampleWithFixedArrivalsComesBack) {
  const auto folder = *find_samples_dir() / "foreign";
  for (const char* name : {"mooncake.jsonl", "timed_trace.jsonl", "bailian.jsonl", "burstgpt.csv",
                           "llmservingsim.jsonl", "dynamo.jsonl"}) {
    for (const ExportFormat& format : export_formats()) {
      SCOPED_TRACE(fmt::format("{} as {}", name, format.name));
      expect_round_trip(read_for_export((folder / name).string()), format.as);
    }
  }
}

TEST(Export, AMooncakeTraceIsWrittenRowForRow) {
  const auto path = (*find_samples_dir() / "foreign/mooncake.jsonl").string();
  std::string rows = read_whole(path);
  // An output of no tokens has become one.
  rows = testing_files::changed(rows, "\"output_length\":0", "\"output_length\":1");
  EXPECT_EQ(text_of(read_for_export(path), ExportAs::mooncake), rows);
}

TEST(Export, TheBlockIsTheLargestThatTellsAllThatIsShared) {
  Trace trace;
  trace.records = {request("a", seeded({{1, 24}, {2, 10}})),
                   request("b", seeded({{1, 24}, {3, 9}})),
                   request("c", seeded({{1, 24}, {2, 10}})), request("d", seeded({{4, 5}}))};
  EXPECT_EQ(text_of(trace, ExportAs::timed_trace),
            "{\"timestamp\":0,\"input_length\":34,\"output_length\":4,\"hash_ids\":[0,1,2,3,4]}\n"
            "{\"timestamp\":0,\"input_length\":33,\"output_length\":4,\"hash_ids\":[0,1,2,5,6]}\n"
            "{\"timestamp\":0,\"input_length\":34,\"output_length\":4,\"hash_ids\":[0,1,2,3,4]}\n"
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":4,\"hash_ids\":[7]}\n");
  EXPECT_EQ(text_of(trace, ExportAs::mooncake, false, 16),
            "F: mooncake cannot hold 24 tokens of a shared prefix in ids of 16, as --block 8 does "
            "(requests b and a); --lossy leaves it out");
  EXPECT_NE(text_of(trace, ExportAs::mooncake, true, 16).find("[0,1,2]"), std::string::npos);
}

TEST(Export, EqualTokensAreEqualWhereverTheyComeFrom) {
  Trace trace;
  Prompt tokens;
  tokens.tokens = seeded({{1, 8}}).materialize();
  tokens.runs = {{.kind = TokenRun::Kind::literal, .seed = 0, .first = 0, .count = 8}};
  Prompt symbolic;
  symbolic.append({.kind = TokenRun::Kind::symbolic, .seed = 1, .first = 0, .count = 8});
  trace.records = {request("a", seeded({{1, 8}})), request("b", tokens), request("c", symbolic)};
  EXPECT_EQ(text_of(trace, ExportAs::timed_trace),
            "{\"timestamp\":0,\"input_length\":8,\"output_length\":4,\"hash_ids\":[0]}\n"
            "{\"timestamp\":0,\"input_length\":8,\"output_length\":4,\"hash_ids\":[0]}\n"
            "{\"timestamp\":0,\"input_length\":8,\"output_length\":4,\"hash_ids\":[1]}\n");
}

TEST(Export, RequestsOfDifferentSaltsShareNothing) {
  Trace trace;
  TraceRequest salted = request("b", seeded({{1, 16}}), 1'500'000);
  salted.spec.cache_salt = "s";
  trace.records = {request("a", seeded({{1, 16}})), salted};
  EXPECT_EQ(text_of(trace, ExportAs::mooncake),
            "{\"timestamp\":0,\"input_length\":16,\"output_length\":4,\"hash_ids\":[0]}\n"
            "{\"timestamp\":1.5,\"input_length\":16,\"output_length\":4,\"hash_ids\":[1]}\n");
}

// "b" and "c" share the 16 tokens before their images, which have the same token ids.
TEST(Export, PromptsShareWhatPrecedesTheFirstImageThatDiffers) {
  Trace trace;
  trace.records = {request("a", seeded({{1, 32}})), request("b", seeded({{1, 32}})),
                   request("c", seeded({{1, 32}})), request("d", seeded({{1, 32}}))};
  const auto image = [&](std::size_t i, const char* name) {
    std::get<TraceRequest>(trace.records[i]).spec.keys.mm = {{name, 16, 4}};
  };
  image(1, "cat");
  image(2, "dog");
  image(3, "cat");
  EXPECT_EQ(text_of(trace, ExportAs::mooncake),
            "{\"timestamp\":0,\"input_length\":32,\"output_length\":4,\"hash_ids\":[0,1]}\n"
            "{\"timestamp\":0,\"input_length\":32,\"output_length\":4,\"hash_ids\":[0,2]}\n"
            "{\"timestamp\":0,\"input_length\":32,\"output_length\":4,\"hash_ids\":[0,3]}\n"
            "{\"timestamp\":0,\"input_length\":32,\"output_length\":4,\"hash_ids\":[0,2]}\n");
}

TEST(Export, WhatAFormatHasNoWordForIsRefusedOrCounted) {
  const auto refused = [](auto change, ExportAs as = ExportAs::timed_trace) {
    Trace trace;
    TraceRequest changed = request("r", seeded({{1, 3}}));
    change(changed);
    trace.records = {changed};
    return text_of(trace, as);
  };
  EXPECT_EQ(refused([](TraceRequest& r) { r.abort = AbortPlan{.t_ns = 5, .after_tokens = {}}; }),
            "F: timed_trace cannot hold an abort (request r); --lossy leaves it out");
  EXPECT_EQ(refused([](TraceRequest& r) { r.spec.priority = 2; }),
            "F: timed_trace cannot hold a priority (request r); --lossy leaves it out");
  EXPECT_EQ(refused([](TraceRequest& r) { r.spec.priority = 2; }, ExportAs::aiperf),
            "{\"session_id\":\"r\",\"timestamp\":0,\"input_length\":3,\"output_length\":4,\"hash_"
            "ids\":[0],\"extra\":{\"ignore_eos\":true,\"priority\":2}}\n");
  EXPECT_EQ(
      refused([](TraceRequest& r) { r.spec.eos_token = 2; }),
      "F: timed_trace cannot hold an end by a token (eos, stop_token_ids) (request r); --lossy "
      "leaves it out");
  EXPECT_EQ(refused([](TraceRequest& r) { r.after = {"q"}; }),
            "F: timed_trace cannot hold an arrival after another request ends (request r); "
            "--lossy leaves it out");
  Trace reset;
  reset.records = {request("r", seeded({{1, 3}})), TraceControl{}};
  EXPECT_EQ(text_of(reset, ExportAs::mooncake),
            "F: mooncake cannot hold a reset of the prefix cache (the trace); --lossy leaves it "
            "out");
  const auto lossy =
      export_trace("F", reset, {.as = ExportAs::mooncake, .block_tokens = {}, .is_lossy = true});
  ASSERT_TRUE(lossy);
  ASSERT_EQ(lossy->left_out.size(), 1u);
  EXPECT_EQ(lossy->left_out[0].count, 1);
  EXPECT_EQ(text_of({}, ExportAs::mooncake), "F: no requests to export");
}

TEST(Export, AllThatAFormatCannotHoldIsNamedAtOnce) {
  Trace trace;
  TraceRequest first = request("a", seeded({{1, 24}, {2, 10}})),
               second = request("b", seeded({{1, 24}}));
  first.spec.priority = second.spec.priority = 2;
  second.after = {"a"};
  trace.records = {first, second, TraceControl{}};
  EXPECT_EQ(text_of(trace, ExportAs::mooncake, false, 16),
            "F: mooncake cannot hold 4 things: a priority (request a and 1 more), an arrival after "
            "another request ends (request b), a reset of the prefix cache (the trace), 24 "
            "tokens of a shared prefix in ids of 16, as --block 8 does (requests b and a); --lossy "
            "leaves them out");
}

// The delay counts from the arrival of the request that the format cannot wait for.
TEST(Export, WithoutAWordForItARequestArrivesAfterTheOtherArrived) {
  Trace trace;
  TraceRequest last = request("last", seeded({{3, 4}}));
  last.after = {"a"};
  last.delay_ns = 7'000'000;
  trace.records = {request("a", seeded({{1, 4}}), 5'000'000), last,
                   request("b", seeded({{2, 4}}), 9'000'000)};
  EXPECT_EQ(text_of(trace, ExportAs::mooncake, true),
            "{\"timestamp\":5,\"input_length\":4,\"output_length\":4,\"hash_ids\":[0]}\n"
            "{\"timestamp\":9,\"input_length\":4,\"output_length\":4,\"hash_ids\":[1]}\n"
            "{\"timestamp\":12,\"input_length\":4,\"output_length\":4,\"hash_ids\":[2]}\n");
}

// 12,031 real rows, where the data are available.
TEST(ExportOptionalData, AWholeMooncakeTraceIsWrittenRowForRow) {
  const auto data = find_data_dir();
  if (!data || !std::filesystem::exists(*data / "traces/full/mooncake/conversation_trace.jsonl"))
    GTEST_SKIP() << "no optional data (LOCKSTEP_DATA)";
  const std::string path = (*data / "traces/full/mooncake/conversation_trace.jsonl").string();
  std::string rows = read_whole(path);
  std::erase(rows, ' ');
  EXPECT_TRUE(text_of(read_for_export(path), ExportAs::mooncake) == rows);
}

}  // namespace
}  // namespace lockstep
