// Everything in the optional data folder that has one of our formats is read in full: all
// recordings byte for byte, all traces with their known counts. Skipped, with the reason, without
// it.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/traces/text_files.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::string step_text(RecordingReader& reader) {
  std::string text = recording_header_line(reader.header());
  while (true) {
    RecordedStep step;
    const auto more = reader.next(step);
    if (!more) return more.error().message;
    if (!*more) return text + recording_end_line(reader.end());
    text += recording_step_line(step);
  }
}

TEST(OptionalData, EveryRecordingIsReadAndWrittenBackByteForByte) {
  const auto data = find_data_dir();
  if (!data || !fs::is_directory(*data / "recordings")) {
    GTEST_SKIP() << "recordings not checked: " << data_dir_hint();
  }
  int recordings = 0;
  for (const auto& entry : fs::recursive_directory_iterator(*data / "recordings")) {
    const std::string path = entry.path().string();
    if (!entry.is_regular_file() ||
        (path.find("/schedules") == path.npos && path.find("/connectors/") == path.npos)) {
      continue;
    }
    auto reader = RecordingReader::open(path);
    ASSERT_TRUE(reader) << reader.error().message;
    ASSERT_TRUE(step_text(*reader) == testing_files::read_whole(path)) << path;
    ++recordings;
  }
  EXPECT_GT(recordings, 0);
}

struct Known {
  const char* path;
  std::size_t requests;
  std::int64_t prompt_tokens;
  std::int64_t output_tokens;
};

// Rows and sums counted by another program (a CSV and a JSON reader of Python's).
TEST(OptionalData, EveryTraceHasItsRowsAndTokens) {
  const auto data = find_data_dir();
  if (!data || !fs::is_directory(*data / "traces")) {
    GTEST_SKIP() << "public traces not checked: " << data_dir_hint();
  }
  for (const Known& known :
       {Known{"full/mooncake/conversation_trace.jsonl", 12031, 144793823, 4122048},
        Known{"full/mooncake/synthetic_trace.jsonl", 3993, 61194628, 595432},
        Known{"slices/mooncake_conversation_first1000.jsonl", 1000, 13732944, 349357},
        Known{"slices/mooncake_synthetic_first1000.jsonl", 1000, 11851558, 196039},
        Known{"slices/mooncake_arxiv_first20.jsonl", 20, 256262, 5675},
        Known{"full/azure/AzureLLMInferenceTrace_code.csv", 8819, 18059974, 245896},
        Known{"full/azure/AzureLLMInferenceTrace_conv.csv", 19366, 22361870, 4088665},
        Known{"slices/azure2023_code_first3000.csv", 3000, 6017797, 84937},
        Known{"slices/azure2023_conv_first6000.csv", 6000, 6903766, 1515140}}) {
    const fs::path path = *data / "traces" / known.path;
    auto reader = open_trace(path.string());
    ASSERT_TRUE(reader) << reader.error().message;
    std::size_t requests = 0;
    std::int64_t prompt_tokens = 0, output_tokens = 0;
    TraceRecord record;
    for (auto more = (*reader)->next(record); !more || *more; more = (*reader)->next(record)) {
      ASSERT_TRUE(more) << more.error().message;
      const auto& request = std::get<TraceRequest>(record);
      ++requests;
      prompt_tokens += request.spec.prompt.size();
      output_tokens += request.output.length;
    }
    EXPECT_EQ(requests, known.requests) << path;
    EXPECT_EQ(prompt_tokens, known.prompt_tokens) << path;
    EXPECT_EQ(output_tokens, known.output_tokens) << path;
  }
}

}  // namespace
}  // namespace lockstep
