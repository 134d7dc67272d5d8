// Whatever bytes a file holds, every reader gives records or one printable sentence, and ends.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "reference/types/token_rows.h"
#include "tests/traces/sample_generator.h"
#include "tests/traces/text_files.h"
#include "traces/formats/plan_recording.h"
#include "traces/formats/saved_case.h"
#include "traces/formats/step_hashes.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::read_whole;
using testing_files::write_temporary;

std::string error_of_hashes(const std::string& path) {
  auto reader = StepHashesReader::open(path);
  if (!reader) return reader.error().message;
  StepHashes step;
  Result<bool> more = true;
  while (more && *more) more = reader->next(step);
  return more ? "" : more.error().message;
}

std::string text_of_hashes() {
  const std::string hash(32, 'a');
  return fmt::format(
      "{{\"lockstep_hashes\":1,\"engine\":\"vllm-0.33.0\",\"backend\":\"simt\","
      "\"has_pages\":true}}\n"
      "{{\"step\":0,\"hash\":\"{0}\",\"decision\":\"{0}\",\"tables\":{{\"r0\":[\"{0}\"]}},"
      "\"pages\":[[0,1,2,\"{0}\"]],\"ended\":[\"r0\"]}}\n"
      "{{\"end\":true,\"steps\":1,\"verdict\":\"agreed\"}}\n",
      hash);
}

// The error of whichever reader takes the file; empty when it was read to its end.
std::string error_of(const std::string& path) {
  if (StepHashesReader::is_header(read_whole(path))) return error_of_hashes(path);
  const auto format = detect_format(path);
  if (!format) return format.error().message;
  const auto message = [](const auto& result) { return result ? "" : result.error().message; };
  switch (*format) {
    case FileFormat::recording:
      return message(read_recording(path));
    case FileFormat::saved_case:
      return message(read_saved_case(path));
    default:
      break;
  }
  const auto reader = open_trace(path);
  return reader ? message(read_all(**reader)) : reader.error().message;
}

std::vector<std::string> texts_of_every_format() {
  SavedCase saved;
  saved.cache.num_blocks = 4;
  saved.cache.groups = {
      {.layer_names = {"l"}, .spec = {}, .layer_specs = {}, .layers_per_page = 1}};
  saved.cache.tensors = {{.size_bytes = 4096, .shared_by = {"l"}}};
  saved.kernel_block_sizes = {16};
  saved.faults = {{.kind = "flip", .step = 1, .arguments = {{"byte", 3}}}};
  saved.trace = make_sample_trace({.num_requests = 6});
  std::vector<std::string> texts = {
      saved_case_to_text(saved),
      trace_to_text(make_sample_trace({.num_requests = 12})),
      text_of_hashes(),
      "{\"timestamp\": 0, \"input_length\": 1030, \"output_length\": 5, \"hash_ids\": [0, 1, 2]}\n",
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n",
  };
  const auto recordings = find_samples_dir().value() / "recordings/vllm-0.22.1";
  for (const char* name :
       {"connectors/connector_mixed_tight/0001.jsonl", "mamba_only/0023.jsonl"}) {
    texts.push_back(read_whole((recordings / name).string()).substr(0, 4000));
  }
  texts.push_back(read_whole((recordings / "benchmarks/full.jsonl").string()).substr(0, 1500));
  return texts;
}

void change(std::string& bytes, std::uint64_t bits) {
  const std::size_t at = (bits >> 8) % bytes.size();
  constexpr std::string_view kTelling = "0123456789-+.eE\"{}[]:,\\ \n\r\t\xff";
  switch (bits % 5) {
    case 0:
      bytes[at] = static_cast<char>(bits >> 56);
      break;
    case 1:
      bytes[at] = kTelling[(bits >> 40) % kTelling.size()];
      break;
    case 2:
      bytes.insert(at, 1, kTelling[(bits >> 40) % kTelling.size()]);
      break;
    case 3:
      bytes.erase(at, 1 + (bits >> 40) % 9);
      break;
    case 4:
      bytes.insert(at, bytes.substr(at, (bits >> 40) % 40));
      break;
  }
  if (bytes.empty()) bytes = "\n";
}

TEST(HostileFiles, ChangedBytesGiveRecordsOrOnePrintableSentence) {
  std::uint64_t draws = 0;
  int refused = 0;
  for (const std::string& text : texts_of_every_format()) {
    for (int round = 0; round < 300; ++round) {
      std::string bytes = text;
      for (int i = 0; i <= round % 3; ++i) change(bytes, splitmix64(draws++));
      const std::string path = write_temporary(bytes);
      const std::string message = error_of(path);
      refused += !message.empty();
      EXPECT_TRUE(message.empty() || message.starts_with(path + ":") ||
                  message.starts_with(path + ": "))
          << message;
      for (const char c : message) ASSERT_TRUE(c >= 0x20 && c < 0x7f) << message;
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(HostileFiles, AWholeFileOfStepHashesIsRead) {
  EXPECT_EQ(error_of(write_temporary(text_of_hashes())), "");
}

TEST(HostileFiles, ARecordedPlanNamesItsEngine) {
  const std::string path = write_temporary(
      "{\"layout_recording\":1,\"engine\":{\"name\":7,\"version\":\"0.22.1\"},\"model\":\"m\"}\n");
  EXPECT_EQ(testing_files::refusal(read_plan_recordings(path), path),
            "FILE:1: field `engine.name`: found 7; expected a string");
}

TEST(HostileFiles, RandomBytesAreNoKnownFormat) {
  for (std::uint64_t round = 0; round < 200; ++round) {
    std::string bytes;
    for (std::uint64_t i = 0; i < 1 + round; ++i) {
      bytes.push_back(static_cast<char>(splitmix64(round * 1000 + i) >> 56));
    }
    EXPECT_NE(error_of(write_temporary(bytes)), "") << round;
  }
}

}  // namespace
}  // namespace lockstep
