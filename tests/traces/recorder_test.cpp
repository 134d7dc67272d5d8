// The reader reads what an engine in C++ writes; what it cannot write ends the recording with one
// message.
#include "traces/recorder/recorder.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/traces/text_files.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

recorder::Engine drafting_engine() {
  recorder::Engine engine;
  engine.enable_prefix_caching = engine.async_scheduling = true;
  engine.num_spec_tokens = 2;
  engine.tells_held_drafts = engine.tells_stale_outputs = true;
  engine.num_blocks = 9;
  return engine;
}

TEST(Recorder, WritesKeysDraftsAndOutputsThatComeTooLateAsTheFormatHasThem) {
  const std::string path = testing_files::temporary_path("recorded");
  recorder::Recorder recorder(path, drafting_engine());
  recorder.add("a", {1, 2, 3, 4}, 5,
               {.cache_salt = "s",
                .lora = {"sql", 3, "/a"},
                .mm = {{"cat", 0, 2}, {"dog", 2, 1, "audio"}},
                .embeds = {3, {"01ab", "02"}}},
               {.eos = 0, .stop_token_ids = {6, 8}});
  recorder::Step step;
  step.scheduled = {{.id = "a", .tokens = 4, .is_new = true, .blocks = {{1}}, .spec = {7}}};
  step.running = {"a"};
  step.free_blocks = 7;
  step.sampled = {{"a", {7}}};
  step.drafts = {{"a", {8, 9}}};
  step.held_drafts = {{"c", {-1}}, {"b", {5, 6}}};
  step.stale_outputs = {{.id = "b", .of_step = 0, .taken = 2}};
  step.output_of_step = 0;
  recorder.step(step);
  recorder.end({"a"});
  EXPECT_EQ(recorder.error(), "");
  const auto read = read_recording(path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->header.options.config.num_spec_tokens, 2);
  EXPECT_EQ(read->header.options.config.spec_method, SpecMethod::ngram);
  EXPECT_TRUE(read->header.has_held_drafts && read->header.has_stale_outputs);
  const RecordedStep& found = read->steps.at(0);
  EXPECT_EQ(found.before.at(0).request.cache_salt, "s");
  EXPECT_EQ(found.before[0].request.eos_token, 0);
  EXPECT_EQ(found.before[0].request.stop_token_ids, (std::vector<std::int32_t>{6, 8}));
  RequestKeys keys{.lora = {"sql", 3, "/a"},
                   .mm = {{"cat", 0, 2, "image"}, {"dog", 2, 1, "audio"}}};
  keys.embeds.digest_tokens = 3;
  keys.embeds.digests = {"01ab", "02"};
  EXPECT_EQ(found.before[0].request.keys, keys);
  EXPECT_EQ(found.scheduled.at(0).spec, std::vector<std::int32_t>{7});
  EXPECT_EQ(found.drafts, (std::vector<RecordedTokens>{{"a", {8, 9}}}));
  EXPECT_EQ(found.held_drafts, (std::vector<RecordedTokens>{{"b", {5, 6}}, {"c", {-1}}}));
  EXPECT_EQ(found.stale_outputs, (std::vector<RecordedStaleOutput>{{"b", 0, 2}}));
  EXPECT_EQ(found.output_of_step, 0);
}

TEST(Recorder, AStepIsInTheFileWhenItIsWritten) {
  const std::string path = testing_files::temporary_path("killed");
  recorder::Recorder recorder(path, drafting_engine());
  recorder.step(recorder::Step());
  const auto read = read_recording(path + ".partial");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(cut_off_text(read->end), "cut off after step 0");
}

TEST(Recorder, ARequestThatReadersRefuseEndsTheRecording) {
  const auto error_of = [](const std::vector<std::int32_t>& prompt, std::int32_t max_tokens) {
    recorder::Recorder recorder(testing_files::temporary_path("refused"), {});
    recorder.add("a", prompt, max_tokens);
    return recorder.error();
  };
  EXPECT_EQ(error_of({}, 5), "request a: 0 prompt tokens, max_tokens 5; both are at least 1");
  EXPECT_EQ(error_of({1}, 0), "request a: 1 prompt tokens, max_tokens 0; both are at least 1");
  EXPECT_EQ(error_of({1}, 1), "");
}

TEST(Recorder, EndsWhereItIsToldWhatTheHeaderOrThePromptHasNoPlaceFor) {
  const auto error_of = [](recorder::Engine engine, const recorder::Keys& keys,
                           const recorder::Step& step) {
    const std::string path = testing_files::temporary_path("refused");
    recorder::Recorder recorder(path, engine);
    recorder.add("a", {1, 2, 3}, 5, keys);
    recorder.step(step);
    recorder.end();
    EXPECT_FALSE(std::filesystem::exists(path));
    return recorder.error();
  };
  recorder::Step held, stale;
  held.held_drafts = {{"b", {5}}};
  stale.stale_outputs = {{.id = "b"}};
  EXPECT_EQ(error_of({}, {}, held),
            "step 0: held_drafts of an engine that does not report them (tells_held_drafts)");
  EXPECT_EQ(error_of({}, {}, stale),
            "step 0: stale_outputs of an engine that does not report them (tells_stale_outputs)");
  for (const auto& items : {std::vector<recorder::PromptItem>{{"cat", 2, 2}},
                            std::vector<recorder::PromptItem>{{"cat", 1, 1}, {"dog", 1, 1}}})
    EXPECT_EQ(error_of({}, {.mm = items}, {}),
              "request a: images out of order or beyond the prompt of 3 tokens");
  EXPECT_EQ(error_of({}, {.embeds = {2, {"01"}}}, {}),
            "request a: 1 digests of embeddings; a prompt of 3 tokens has 2");
}

}  // namespace
}  // namespace lockstep
