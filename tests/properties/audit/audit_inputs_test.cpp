// Adapters, images, embeddings, grammars, sessions and poolers: recordings of vLLM 0.33.0 that are
// right, and the same with a defect planted in what they decide.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

const std::string kFolder = LOCKSTEP_SOURCE_DIR "/tests/properties/audit/inputs/";

Recording recording_of(const std::string& family) {
  const Result<Recording> recording = read_recording(kFolder + family + ".jsonl");
  EXPECT_TRUE(recording) << recording.error().message;
  return recording ? *recording : Recording{};
}

TEST(AuditInputs, RecordingsOfEveryInputAreCleanAndAreReadAsTheyAreWritten) {
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    const std::string path = entry.path().string();
    const auto file = audit_recording(path);
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(file->skipped, "") << path;
    for (const AuditFinding& finding : file->findings) ADD_FAILURE() << line_of(finding);
    const auto read = read_recording(path);
    ASSERT_TRUE(read) << read.error().message;
    const std::string copy = ::testing::TempDir() + entry.path().filename().string();
    auto writer = RecordingWriter::create(copy, read->header);
    ASSERT_TRUE(writer) << writer.error().message;
    for (const RecordedStep& step : read->steps) ASSERT_TRUE(writer->write(step));
    ASSERT_TRUE(writer->close(read->end));
    const auto again = read_recording(copy);
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(*again, *read) << path;
    ++num_files;
  }
  EXPECT_EQ(num_files, 8);
}

struct InputMutant {
  std::string name;
  std::string family;
  AuditRule rule;
  std::function<bool(Recording& recording, std::size_t at)> plant;
};

// The row of a request that is in the step.
RecordedScheduled* row_of(RecordedStep& step, const std::string& id) {
  const auto row = std::ranges::find(step.scheduled, id, &RecordedScheduled::id);
  return row == step.scheduled.end() ? nullptr : &*row;
}

std::vector<InputMutant> input_mutants() {
  return {
      {"MoreAdaptersThanThereIsRoomFor", "lora", AuditRule::limits,
       [](Recording& recording, std::size_t) {
         recording.header.options.inputs.max_loras = 1;
         return true;
       }},
      {"AnImageIsNotEncoded", "multimodal", AuditRule::inputs,
       [](Recording& recording, std::size_t at) {
         for (RecordedScheduled& row : recording.steps[at].scheduled)
           if (!std::exchange(row.encode, {}).empty()) return true;
         return false;
       }},
      {"MoreRowsAreEncodedThanTheEncoderHas", "multimodal", AuditRule::limits,
       [](Recording& recording, std::size_t at) {
         for (RecordedScheduled& row : recording.steps[at].scheduled) {
           if (row.encode.empty()) continue;
           row.encode.assign(1000, row.encode[0]);
           return true;
         }
         return false;
       }},
      {"TheEncoderSCacheIsSmallerThanWhatItHolds", "multimodal", AuditRule::limits,
       [](Recording& recording, std::size_t) {
         recording.header.encoder_cache_size = 1;
         return true;
       }},
      {"AnImageSRowsAreDroppedBeforeTheyAreRead", "multimodal", AuditRule::inputs,
       [](Recording& recording, std::size_t at) {
         RecordedStep& step = recording.steps[at];
         for (const RecordedStep& before : recording.steps)
           for (const RecordedEvent& event : before.before)
             for (const PromptItem& item : event.request.keys.mm)
               step.inputs.free_encoder.push_back(item.identifier);
         return true;
       }},
      {"ARequestDoesNotWaitForItsGrammar", "structured_output", AuditRule::inputs,
       [](Recording& recording, std::size_t at) {
         return std::erase_if(recording.steps[at].before, [](const RecordedEvent& event) {
                  return event.kind == RecordedEvent::Kind::grammar_ready;
                }) > 0;
       }},
      {"APromptIsPooledBeforeItsEnd", "pooling", AuditRule::sampled,
       [](Recording& recording, std::size_t at) {
         for (const RecordedScheduled& row : recording.steps[at].scheduled)
           if (at + 1 < recording.steps.size() &&
               row_of(recording.steps[at + 1], row.id) != nullptr) {
             recording.steps[at].inputs.pooled.push_back(row.id);
             return true;
           }
         return false;
       }},
      {"ASessionComesBackToAnotherBlock", "streaming_session", AuditRule::attention_read,
       [](Recording& recording, std::size_t at) {
         for (RecordedScheduled& row : recording.steps[at].scheduled) {
           if (!row.is_new || row.computed == 0 || (*row.blocks)[0].size() < 2) continue;
           (*row.blocks)[0][0] = (*row.blocks)[0].back();
           return true;
         }
         return false;
       }},
      {"RowsOfAnEncoderGetNoBlock", "encoder_decoder", AuditRule::attention_read,
       [](Recording& recording, std::size_t at) {
         for (RecordedScheduled& row : recording.steps[at].scheduled)
           if (row.is_new && row.blocks) {
             (*row.blocks)[1][0] = kNullBlock;
             return true;
           }
         return false;
       }},
      {"EmbeddingsAreLeftOutOfTheHash", "prompt_embeds", AuditRule::attention_read,
       [](Recording& recording, std::size_t at) {
         for (const RecordedScheduled& row : recording.steps[at].scheduled) {
           if (!row.is_new || row.resumed || row.computed == 0) continue;
           for (RecordedStep& step : recording.steps)
             for (RecordedEvent& event : step.before)
               if (event.kind == RecordedEvent::Kind::add && event.request.name == row.id &&
                   !event.request.keys.embeds.rows.empty()) {
                 ++event.request.keys.embeds.rows[0].seed;
                 return true;
               }
         }
         return false;
       }},
      {"AStoredBlockIsNotToldOf", "kv_events", AuditRule::cache_events,
       [](Recording& recording, std::size_t at) {
         auto& events = recording.steps[at].events;
         if (events.empty() || events[0].kind != RecordedCacheEvent::Kind::stored) return false;
         events.erase(events.begin());
         return true;
       }},
      {"AnEventNamesAnotherAdapter", "kv_events", AuditRule::cache_events,
       [](Recording& recording, std::size_t at) {
         for (RecordedCacheEvent& event : recording.steps[at].events)
           if (event.lora_id) return ++*event.lora_id, true;
         return false;
       }},
      {"AnEventNamesAnotherWindow", "kv_events", AuditRule::cache_events,
       [](Recording& recording, std::size_t at) {
         for (RecordedCacheEvent& event : recording.steps[at].events)
           if (event.kind == RecordedCacheEvent::Kind::stored)
             return event.kv_cache_spec_sliding_window = 5, true;
         return false;
       }},
  };
}

class EveryInputMutant : public testing::TestWithParam<InputMutant> {};

TEST_P(EveryInputMutant, IsAccusedByItsRule) {
  const InputMutant& mutant = GetParam();
  const Recording good = recording_of(mutant.family);
  for (std::size_t at = 0; at < good.steps.size(); ++at) {
    Recording bad = good;
    if (!mutant.plant(bad, at)) continue;
    const std::vector<AuditFinding> findings = audit(bad, AuditScope::whole_recording);
    if (std::ranges::find(findings, mutant.rule, &AuditFinding::rule) != findings.end()) return;
  }
  FAIL() << "no step of " << mutant.family << " shows it";
}

INSTANTIATE_TEST_SUITE_P(AuditInputs, EveryInputMutant, testing::ValuesIn(input_mutants()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace lockstep
