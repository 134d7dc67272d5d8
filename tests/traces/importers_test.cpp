// Foreign traces: every row becomes the request it describes, exactly, or is refused by line and
// field.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/json_reader.h"
#include "tests/traces/sample_generator.h"
#include "tests/traces/text_files.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::changed;
using testing_files::refusal;
using testing_files::temporary_path;
using testing_files::write_temporary;

Result<Trace> import(const std::string& path, const ImportOptions& options = {}) {
  auto reader = open_trace(path, options);
  if (!reader) return tl::unexpected(reader.error());
  return read_all(**reader);
}

std::string import_refusal(std::string_view text, const ImportOptions& options = {}) {
  const std::string path = write_temporary(text);
  return refusal(import(path, options), path);
}

const TraceRequest& request(const Trace& trace, std::size_t i) {
  return std::get<TraceRequest>(trace.records.at(i));
}

const std::string kMooncake =
    "{\"timestamp\": 0, \"input_length\": 1030, \"output_length\": 5, \"hash_ids\": [0, 1, 2]}\n"
    "{\"timestamp\": 27482, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": [0, 7]}\n"
    "{\"timestamp\": 27482, \"input_length\": 1, \"output_length\": 2, \"hash_ids\": [9]}\n";

TEST(Mooncake, AnIdIsTheSeedOfItsBlockAndTheLastCoversWhatIsLeft) {
  const auto trace = import(write_temporary(kMooncake));
  ASSERT_TRUE(trace) << trace.error().message;
  ASSERT_EQ(trace->records.size(), 3u);
  using Kind = TokenRun::Kind;
  EXPECT_EQ(
      request(*trace, 0).spec.prompt.runs,
      (std::vector<TokenRun>{
          {Kind::symbolic, 0, 0, 512}, {Kind::symbolic, 1, 0, 512}, {Kind::symbolic, 2, 0, 6}}));
  EXPECT_EQ(request(*trace, 1).spec.prompt.size(), 1024);
  EXPECT_EQ(request(*trace, 1).spec.prompt.runs[0], request(*trace, 0).spec.prompt.runs[0]);
  EXPECT_EQ(request(*trace, 1).spec.arrival_ns, 27'482'000'000);
  EXPECT_EQ(request(*trace, 2).spec.name, "r2");
  EXPECT_EQ(request(*trace, 0).spec.max_tokens, 5);
  EXPECT_EQ(request(*trace, 0).output, (OutputPlan{.length = 5, .tokens = {}, .fill = {}}));
  EXPECT_EQ(trace->header.ids, (HashIdConvention{512, IdTail::ceil}));
}

TEST(Mooncake, AnImportedTraceCanBeWrittenAsARequestTrace) {
  const auto trace = import(write_temporary(kMooncake));
  ASSERT_TRUE(trace);
  const auto again = import(write_temporary(trace_to_text(*trace), "converted"));
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, *trace);
  EXPECT_NE(trace_to_text(*trace).find("\"prompt\":{\"ids\":[[0,3]],\"length\":1030}"),
            std::string::npos);
}

TEST(Mooncake, DynamosNamesAndDecimalTimesAreRead) {
  const auto trace = import(
      write_temporary(
          R"({"created_time":46.926808,"input_tokens":20,"output_tokens":3,"hash_ids":[5,6]})"
          "\n"),
      {.block_tokens = 16});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(request(*trace, 0).spec.arrival_ns, 46'926'808);
  EXPECT_EQ(request(*trace, 0).spec.prompt.runs[1].count, 4u);
}

TEST(Mooncake, RowsThatAreNotWholeAreRefused) {
  const auto refused = [](std::string_view from, std::string_view to) {
    return import_refusal(changed(kMooncake, from, to));
  };
  EXPECT_EQ(
      refused("[0, 1, 2]", "[0, 1]"),
      "FILE:1: field `hash_ids`: found 2 ids for 1030 tokens; expected 3, one per 512 tokens");
  EXPECT_EQ(
      refused("[0, 7]", "[0, 7, 8]"),
      "FILE:2: field `hash_ids`: found 3 ids for 1024 tokens; expected 2, one per 512 tokens");
  EXPECT_EQ(
      refused("[9]", "[-9]"),
      "FILE:3: field `hash_ids[0]`: found -9; expected an integer from 0 to 18446744073709551615");
  EXPECT_EQ(
      refused("\"timestamp\": 0", "\"timestamp\": 27483"),
      "FILE:2: field `timestamp`: found 27482; expected a time not before that of the row above, "
      "and not below 0");
  EXPECT_EQ(
      refused("\"timestamp\": 0", "\"timestamp\": -1"),
      "FILE:1: field `timestamp`: found -1; expected a time not before that of the row above, and "
      "not below 0");
  EXPECT_EQ(refused("\"timestamp\": 0", "\"timestamp\": \"0\""),
            "FILE:1: field `timestamp`: found \"0\"; expected a number with at most 6 digits after "
            "the point, no exponent, and at most 9223372036854775807 when multiplied by 10^6");
  EXPECT_EQ(refused("\"input_length\": 1030", "\"input_length\": 0"),
            "FILE:1: field `input_length`: found 0; expected an integer from 1 to 2147483647");
  EXPECT_EQ(refused("\"output_length\": 5, ", ""),
            "FILE:1: found no key \"output_length\"; expected it");
  EXPECT_EQ(refused("\"output_length\": 5", "\"output_length\": 5, \"output_tokens\": 5"),
            "FILE:1: found both \"output_length\" and \"output_tokens\"; expected one");
  EXPECT_EQ(refused("\"output_length\": 5", "\"output_length\": 5, \"colour_tokens\": \"s\""),
            "FILE:1: field `colour_tokens`: found an unknown key; expected a known key, or one "
            "that starts with x_");
  EXPECT_NE(
      import_refusal(kMooncake.substr(0, kMooncake.size() - 10)).find("the file is cut off here"),
      std::string::npos);
}

TEST(Importers, AnOutputOfNoTokensFollowsThePolicy) {
  const std::string mooncake = changed(kMooncake, "\"output_length\": 1", "\"output_length\": 0");
  const std::string azure =
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n2023-11-16 18:17:03,2,0\n"
      "2023-11-16 18:17:04,3,1\n";
  for (const std::string& text : {mooncake, azure}) {
    const auto kept = import(write_temporary(text));
    ASSERT_TRUE(kept) << kept.error().message;
    EXPECT_EQ(kept->records.size(), 3u);
    EXPECT_EQ(request(*kept, 1).output.length, 1);
    EXPECT_EQ(request(*kept, 1).spec.max_tokens, 1);
    const auto left_out = import(write_temporary(text), {.zero_output = ZeroOutput::skip});
    ASSERT_TRUE(left_out);
    ASSERT_EQ(left_out->records.size(), 2u);
    EXPECT_EQ(request(*left_out, 1).spec.name, "r2") << "a request is named after its row";
  }
  EXPECT_EQ(import_refusal(mooncake, {.zero_output = ZeroOutput::refuse}),
            "FILE:2: field `output_length`: found 0; expected at least one output token");
  EXPECT_EQ(
      import_refusal(azure, {.zero_output = ZeroOutput::refuse}),
      "FILE:3: field `GeneratedTokens`: found \"0\"; expected an integer from 1 to 2147483647");
}

const std::string kAzure =
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
    "2023-11-16 18:17:04.0319601,4808,27";

TEST(Azure, TimesKeepEveryDigitAndPromptsShareNothing) {
  const auto trace = import(write_temporary(kAzure));
  ASSERT_TRUE(trace) << trace.error().message;
  ASSERT_EQ(trace->records.size(), 3u);
  EXPECT_EQ(request(*trace, 0).spec.arrival_ns, 0);
  EXPECT_EQ(request(*trace, 1).spec.arrival_ns, 52'000'000);
  EXPECT_EQ(request(*trace, 2).spec.arrival_ns, 52'000'100);
  EXPECT_EQ(request(*trace, 0).spec.prompt, private_prompt(4808, 0));
  EXPECT_EQ(request(*trace, 2).spec.prompt, private_prompt(4808, 2));
  EXPECT_EQ(request(*trace, 2).output.length, 27);
  const auto again = import(write_temporary(trace_to_text(*trace), "converted"));
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, *trace);
}

TEST(Azure, ColumnsAreFoundByTheirNames) {
  const auto trace = import(write_temporary(
      "GeneratedTokens,TIMESTAMP,ContextTokens\n8,2024-05-10 00:00:00.009930+00:00,2162\n"));
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(request(*trace, 0).spec.prompt.size(), 2162);
  EXPECT_EQ(request(*trace, 0).output.length, 8);
}

TEST(Azure, TimestampsAreUtcNanoseconds) {
  EXPECT_EQ(utc_ns_of("1970-01-01 00:00:00"), 0);
  EXPECT_EQ(utc_ns_of("1970-01-02T00:00:00.5Z"), 86'400'500'000'000);
  EXPECT_EQ(utc_ns_of("2000-02-29 23:59:59.999999999"), 951'868'799'999'999'999);
  EXPECT_EQ(utc_ns_of("2023-11-16 18:17:03.9799600"), 1'700'158'623'979'960'000);
  EXPECT_EQ(utc_ns_of("2024-10-15T12:00:05.819Z"), 1'728'993'605'819'000'000);
  EXPECT_EQ(utc_ns_of("2024-05-10 02:00:00.009930+02:00"), utc_ns_of("2024-05-10 00:00:00.009930"));
  EXPECT_EQ(utc_ns_of("2024-05-09 19:30:00-04:30"), utc_ns_of("2024-05-10 00:00:00"));
}

TEST(Azure, WhatIsNoTimeIsNone) {
  for (const char* text : {"",
                           "2023-11-16",
                           "2023-11-16 18:17",
                           "2023-11-16 18:17:3",
                           "2023-13-16 18:17:03",
                           "2023-02-29 18:17:03",
                           "2100-02-29 00:00:00",
                           "2023-11-31 18:17:03",
                           "2023-11-16 24:00:00",
                           "2023-11-16 18:60:00",
                           "2023-11-16 18:17:60",
                           "2023-11-16 18:17:03.",
                           "2023-11-16 18:17:03.1x",
                           "2023-11-16 18:17:03.1234567891",
                           "2023-11-16 18:17:03+1",
                           "2023-11-16 18:17:03+25:00",
                           "1969-12-31 23:59:59",
                           "2023/11/16 18:17:03",
                           "20231116T181703",
                           " 2023-11-16 18:17:03",
                           "2023-11-16 -8:17:03",
                           "2023-11-16_18:17:03",
                           "9999-11-16 18:17:03"}) {
    EXPECT_EQ(utc_ns_of(text), std::nullopt) << text;
  }
}

TEST(Azure, RowsThatAreWrongAreRefused) {
  const auto refused = [](std::string_view from, std::string_view to) {
    return import_refusal(changed(kAzure, from, to));
  };
  EXPECT_EQ(
      refused("2023-11-16 18:17:04.0319600", "2023-11-16 18:17:03.9"),
      "FILE:3: field `TIMESTAMP`: found \"2023-11-16 18:17:03.9\"; expected a time not before "
      "that of the row above");
  EXPECT_EQ(refused("2023-11-16 18:17:04.0319600", "yesterday"),
            "FILE:3: field `TIMESTAMP`: found \"yesterday\"; expected a time like 2023-11-16 "
            "18:17:03.9799600");
  EXPECT_EQ(refused(",3180,", ",0,"),
            "FILE:3: field `ContextTokens`: found \"0\"; expected an integer from 1 to 2147483647");
  EXPECT_EQ(
      refused(",3180,", ",31 80,"),
      "FILE:3: field `ContextTokens`: found \"31 80\"; expected an integer from 1 to 2147483647");
  EXPECT_EQ(
      refused(",3180,", ",99999999999999999999,"),
      "FILE:3: field `ContextTokens`: found \"99999999999999999999\"; expected an integer from 1 "
      "to 2147483647");
  EXPECT_EQ(
      refused(",27", ",-27"),
      "FILE:4: field `GeneratedTokens`: found \"-27\"; expected an integer from 0 to 2147483647");
  EXPECT_EQ(refused(",3180,8", ",3180"),
            "FILE:3: field `row`: found \"2023-11-16 18:17:04.0319600,3180\"; expected 3 cells");
  EXPECT_EQ(
      refused("TIMESTAMP", "TIMESTAMP,ImageTokens"),
      "FILE:1: field `header`: found \"ImageTokens\"; expected one of TIMESTAMP, ContextTokens, "
      "GeneratedTokens");
  EXPECT_EQ(refused(",3180,8\r\n", ",3180,8\r\n\r\n"),
            "FILE:4: found an empty line; expected a record");
  EXPECT_EQ(import_refusal("\xef\xbb\xbf" + kAzure),
            "FILE:1: found a byte-order mark; expected UTF-8 without one");
}

TEST(DetectFormat, TheFirstLineTellsEveryFormatApart) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const auto detected = [](const std::filesystem::path& path) {
    const auto format = detect_format(path.string());
    return format ? std::string(name_of(*format)) : format.error().message;
  };
  EXPECT_EQ(detected(*samples / "shared_prefixes.jsonl"), "request trace");
  const auto recordings = *samples / "recordings/vllm-0.22.1";
  EXPECT_EQ(detected(recordings / "mla/0014.jsonl"), "engine recording");
  EXPECT_EQ(detected(recordings / "benchmarks/full.jsonl"), "benchmark file");
  EXPECT_EQ(detected(write_temporary("{\"lockstep_case\":1}\n", "case")), "saved case");
  EXPECT_EQ(detected(write_temporary(kMooncake, "mooncake.csv")), "Mooncake trace");
  EXPECT_EQ(detected(write_temporary(kAzure, "azure.jsonl")), "Azure trace");
}

TEST(DetectFormat, AnUnknownFileIsRefusedWithTheFormatsThatAreKnown) {
  const std::string own =
      "expected one of: request trace ({\"lockstep_trace\":1,...}), engine recording "
      "({\"schedule_recording\":1,...}), benchmark file ({\"benchmark\":...}), saved case "
      "({\"lockstep_case\":1,...}), layout recording ({\"layout_recording\":1,...}), Azure trace "
      "(TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT trace (Timestamp,Request "
      "tokens,Response "
      "tokens,...), Weka trace ({\"id\":..,\"block_size\":..,\"requests\":[..],...}), ";
  const auto refused = [](std::string_view text) {
    const std::string path = write_temporary(text);
    return refusal(detect_format(path), path);
  };
  const auto unknown = [&](std::string_view shown) {
    return fmt::format("FILE:1: found \"{}\", the first line of no known format; {}", shown, own);
  };
  EXPECT_TRUE(refused("{\"hash\":1}\n").starts_with(unknown("{\"hash\":1}")));
  EXPECT_TRUE(refused("{\"hash\":1}\n")
                  .ends_with("Mooncake trace ({\"timestamp\":..,\"hash_ids\":[..],...})"));
  EXPECT_TRUE(refused("hello\n").starts_with(unknown("hello")));
  EXPECT_TRUE(refused(std::string_view("\x7f"
                                       "ELF\0\n",
                                       6))
                  .starts_with(unknown("\\x7fELF\\x00")));
  EXPECT_TRUE(refused("[1,2]\n").starts_with(unknown("[1,2]")));
  EXPECT_EQ(refused("\x28\xb5\x2f\xfd\n"), "FILE: a zstd file; unpack it first: zstd -d FILE");
  EXPECT_EQ(refused(std::string_view("\xff\xfe{\0\n", 5)),
            "FILE: text in UTF-16; convert it to UTF-8 first: iconv -f UTF-16 -t UTF-8 FILE");
  EXPECT_EQ(refused("\x1f\x8b\x08\n"), "FILE: the gzip data ends early; expected a whole file");
  EXPECT_EQ(refused(""), "FILE: found an empty file; expected records");
  EXPECT_EQ(refusal(detect_format(::testing::TempDir()), ::testing::TempDir()),
            "FILE: found a folder; expected a file");
}

TEST(OpenTrace, ABenchmarkFileArrivesAtOnceWithItsOneToken) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const auto trace =
      import((*samples / "recordings/vllm-0.22.1/benchmarks/mamba_align.jsonl").string());
  ASSERT_TRUE(trace) << trace.error().message;
  ASSERT_EQ(trace->records.size(), 2000u);
  EXPECT_EQ(request(*trace, 1999).spec.arrival_ns, 0);
  EXPECT_EQ(request(*trace, 0).output, (OutputPlan{.length = 248, .tokens = {}, .fill = 7}));
  EXPECT_EQ(trace->header.engine->num_blocks, 6000);
}

TEST(OpenTrace, ARecordingOrACaseIsNoTrace) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const std::string path = (*samples / "recordings/vllm-0.22.1/mla/0014.jsonl").string();
  EXPECT_EQ(refusal(import(path), path),
            "FILE:1: found an engine recording; expected requests and their arrivals");
  EXPECT_EQ(import_refusal("{\"lockstep_case\":1}\n"),
            "FILE:1: found a saved case; expected requests and their arrivals");
}

TEST(OpenTrace, OnlyFormatsOfOtherToolsHaveShards) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const std::string layouts = (*samples / "recordings/vllm-0.33.0/layouts.jsonl").string();
  EXPECT_EQ(refusal(open_trace(layouts, {.shards = {layouts}}), layouts),
            "FILE: found a layout recording after a layout recording; several files must be shards "
            "of one trace of another tool");
}

TEST(LineReader, ALineThatIsTooLongIsRefusedWithoutReadingItAll) {
  const std::string path =
      write_temporary(kMooncake + std::string(kJsonTextBytesMax + 2, ' ') + "{}\n");
  EXPECT_EQ(refusal(import(path), path),
            "FILE:4: found a line of more than 16777216 bytes; expected at most 16777216");
}

TEST(DataDir, ANamedFolderIsUsedOrNothing) {
  const char* before = std::getenv("LOCKSTEP_DATA");
  const std::string saved = before == nullptr ? "" : before;
  const std::string folder = temporary_path("data");
  ::setenv("LOCKSTEP_DATA", folder.c_str(), 1);
  EXPECT_FALSE(find_data_dir());
  EXPECT_EQ(data_dir_hint(), "no folder " + folder + " ($LOCKSTEP_DATA)");
  std::filesystem::create_directory(folder);
  EXPECT_EQ(find_data_dir(), std::filesystem::path(folder));
  before == nullptr ? ::unsetenv("LOCKSTEP_DATA") : ::setenv("LOCKSTEP_DATA", saved.c_str(), 1);
}

}  // namespace
}  // namespace lockstep
