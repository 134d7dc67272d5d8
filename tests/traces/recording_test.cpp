// Recordings: what an engine decided is read in full, written back byte for byte, and nothing that
// is not as documented goes through.
#include "traces/formats/recording.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/traces/text_files.h"
#include "traces/importers/foreign_traces.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::changed;
using testing_files::read_whole;
using testing_files::refusal;
using testing_files::Refused;
using testing_files::temporary_path;
using testing_files::write_temporary;

const std::string kHeader =
    R"({"schedule_recording":1,"engine":{"name":"vllm","version":"0.22.1"},"family":"f","seed":0,)"
    R"("config":{"max_num_seqs":4,"block_size":16},"groups":[{"layers":["l0"],)"
    R"("spec":{"type":"full",)"
    R"("block_size":16,"num_kv_heads":2,"head_size":64,"dtype":"bf16"}}],"num_blocks":9,)"
    R"("scheduler_block_size":16,"hash_block_size":16})"
    "\n";
const std::string kStep =
    R"({"step":0,"before":[{"add":"r0","prompt":[[7,20]],"max_tokens":2,)"
    R"("arrival":0.5,"priority":0,)"
    R"("cache_salt":"a","eos":9},{"abort":"r1"},{"reset_prefix_cache":true}],)"
    R"("scheduled":[{"id":"r0",)"
    R"("tokens":20,"new":true,"computed":0,"blocks":[[1,2]]}],"common_prefix_blocks":[0],)"
    R"("running":["r0"],"waiting":[],"free_blocks":6,"tables":{"r0":[[1,2]]},"sampled":{"r0":[5]},)"
    R"("stopped":[["r0","length"]],"stored":1})"
    "\n";
const std::string kEnd = "{\"end\":true,\"steps\":1,\"unfinished\":[\"r9\"]}\n";
const std::string kRecording = kHeader + kStep + kEnd;

std::string to_text(const Recording& recording) {
  std::string text = recording_header_line(recording.header);
  for (const RecordedStep& step : recording.steps) text += recording_step_line(step);
  return text + recording_end_line(recording.end);
}

TEST(Recording, APriorityHas64BitsAsInVllm) {
  const std::string text = changed(kRecording, "\"priority\":0", "\"priority\":-4294967296");
  const auto recording = read_recording(write_temporary(text));
  ASSERT_TRUE(recording) << recording.error().message;
  EXPECT_EQ(recording->steps[0].before[0].request.priority, -4294967296);
  EXPECT_EQ(to_text(*recording), text);
}

TEST(Recording, EveryFieldIsRead) {
  const auto recording = read_recording(write_temporary(kRecording));
  ASSERT_TRUE(recording) << recording.error().message;
  EXPECT_EQ(recording->header.options.config.engine, "vllm-0.22.1");
  EXPECT_EQ(recording->header.options.config.max_num_seqs, 4);
  EXPECT_EQ(recording->header.options.given,
            (std::vector<std::string>{"max_num_seqs", "block_size"}));
  ASSERT_EQ(recording->steps.size(), 1u);
  const RecordedStep& step = recording->steps[0];
  ASSERT_EQ(step.before.size(), 3u);
  EXPECT_EQ(step.before[0].request.arrival_ns, 500'000'000);
  EXPECT_TRUE(step.before[0].priority_given);
  EXPECT_EQ(step.before[0].request.prompt.size(), 20);
  EXPECT_EQ(step.before[1].name, "r1");
  EXPECT_TRUE(step.before[2].reset_succeeded);
  EXPECT_EQ(step.scheduled[0].blocks, (BlocksPerGroup{{BlockId{1}, BlockId{2}}}));
  EXPECT_EQ(step.common_prefix_blocks, std::vector<std::int32_t>{0});
  EXPECT_FALSE(step.drafts) << "absent is not empty";
  EXPECT_FALSE(step.output_of_step);
  EXPECT_EQ(step.stopped[0].reason, "length");
  EXPECT_EQ(recording->end.unfinished, std::vector<std::string>{"r9"});
  EXPECT_EQ(to_text(*recording), kRecording);
}

// Requests of a serving engine: tokens instead of seeds, several stop tokens, and clients that
// disconnect while the model runs.
TEST(Recording, ServedRequestsAreReadAndWrittenBackByteForByte) {
  std::string text = changed(kRecording, "[[7,20]]", R"({"tokens":[5,6,7]})");
  text = changed(text, R"("eos":9)", R"("eos":9,"stop_token_ids":[10,11])");
  text = changed(text, R"(,"sampled")", R"(,"during":[{"abort":"r0"}],"sampled")");
  const auto recording = read_recording(write_temporary(text));
  ASSERT_TRUE(recording) << recording.error().message;
  const RecordedStep& step = recording->steps[0];
  EXPECT_EQ(step.before[0].request.prompt.materialize(), (std::vector<std::int32_t>{5, 6, 7}));
  EXPECT_EQ(step.before[0].request.stop_token_ids, (std::vector<std::int32_t>{10, 11}));
  ASSERT_EQ(step.during.size(), 1u);
  EXPECT_EQ(step.during[0].kind, RecordedEvent::Kind::abort);
  EXPECT_EQ(step.during[0].name, "r0");
  EXPECT_EQ(to_text(*recording), text);
}

// Groups, requests, events and ends of an engine of 0.33.0 as it is served.
TEST(Recording, WhatAServerSetsIsReadAndWrittenBackByteForByte) {
  std::string text = changed(kRecording, R"("common_prefix_blocks":[0],)", "");
  const auto insert = [&](const std::string& before, const std::string& what) {
    text = changed(text, before, what + before);
  };
  text = changed(text, R"("max_num_seqs":4)",
                 R"("num_prefill_lookahead_tokens":3,"prefix_match_unit":8)");
  insert(R"({"layers":["l0"])",
         R"({"layers":["s"],"spec":{"type":"mamba","block_size":16,"shapes":[[4]],)"
         R"("dtypes":["bf16"],"mamba_cache_mode":"align","num_speculative_blocks":0,)"
         R"("num_prefill_checkpoint_blocks":1,"prefill_checkpoint_alignment":64}},)"
         R"({"layers":["w"],"spec":{"type":"sliding_window_mla","block_size":16,"num_kv_heads":1,)"
         R"("head_size":64,"dtype":"bf16","sliding_window":8,"tokens_per_state":4,)"
         R"("extra_retained_tokens":2,"bounded_replay":true}},)"
         R"({"layers":["r"],"spec":{"type":"circular_buffer","block_size":8,"num_kv_heads":1,)"
         R"("head_size":64,"dtype":"fp32","head_size_v":0}},)");
  text =
      changed(text, R"("dtype":"bf16"}}],"num_blocks")",
              R"("dtype":"bf16"},"is_eagle_group":true,"role":"hisparse_source"}],"num_blocks")");
  text = changed(text, R"("blocks":[[1,2]])", R"("blocks":[[1],[2],[3],[4]])");
  text = changed(text, R"("tables":{"r0":[[1,2]]})", R"("tables":{"r0":[[],[],[],[4]]})");
  text = changed(text, R"("eos":9)",
                 R"("eos":9,"min_tokens":2,"repetition_detection":{"max_pattern_size":4,)"
                 R"("min_pattern_size":1,"min_count":3},"skip_reading_prefix_cache":true)");
  text = changed(text, R"({"abort":"r1"})", R"({"pause_state":"PAUSED_NEW"})");
  insert(R"("running")", R"("copies":[[1,2],[3,4]],)");
  text = changed(text, R"("unfinished":["r9"])",
                 R"("unfinished":["r9"],"steps_in_flight":1,)"
                 R"("failure":{"check":"liveness","what":"r9 waits"})");
  const auto recording = read_recording(write_temporary(text));
  ASSERT_TRUE(recording) << recording.error().message;
  const std::vector<KVCacheGroupSpec>& groups = recording->header.groups;
  EXPECT_EQ(recording->header.options.config.num_prefill_lookahead_tokens, 3);
  EXPECT_EQ(recording->header.options.config.prefix_match_unit, 8);
  EXPECT_EQ(groups[0].spec.num_prefill_checkpoint_blocks, 1);
  EXPECT_EQ(groups[0].spec.prefill_checkpoint_alignment, 64);
  EXPECT_TRUE(is_mla_window(groups[1].spec.kind) && groups[1].spec.bounded_replay);
  EXPECT_EQ(groups[1].spec.extra_retained_tokens, 2);
  EXPECT_EQ(groups[1].spec.tokens_per_state, TokensPerState{4});
  EXPECT_EQ(groups[2].spec.kind, CacheKind::circular_buffer);
  EXPECT_EQ(groups[3].role, "hisparse_source");
  const RecordedStep& step = recording->steps[0];
  EXPECT_EQ(step.before[0].request.min_tokens, 2);
  EXPECT_EQ(step.before[0].request.repetition_detection, (RepetitionDetection{4, 1, 3}));
  EXPECT_TRUE(step.before[0].request.skip_reading_prefix_cache);
  EXPECT_EQ(step.before[1].pause_state, PauseState::paused_new);
  EXPECT_EQ(step.copies[1], (KVCacheBlockCopy{BlockId{3}, BlockId{4}}));
  EXPECT_EQ(recording->end.steps_in_flight, 1);
  EXPECT_EQ(recording->end.failed_check, "liveness");
  EXPECT_EQ(to_text(*recording), text);
}

// What hashes cover in addition to tokens, and late drafts and outputs.
TEST(Recording, WhatAnEngineMayTellBesideIsReadAndWrittenBackByteForByte) {
  std::string text = changed(kRecording, R"("hash_block_size":16)",
                             R"("hash_block_size":16,"held_drafts":1,"stale_outputs":1)");
  text = changed(
      text, R"("eos":9)",
      R"("eos":9,"lora":{"name":"sql","id":2,"path":"/a"},"mm":[{"id":"cat","kind":"image",)"
      R"("at":0,"n":4,"embed":[[1,2]]},{"id":"dog","kind":"audio","at":4,"n":16}],)"
      R"("embeds":{"digest_tokens":16,"digests":["01ab","02"]})");
  text = changed(text, R"("tables")", R"("held_drafts":{"r1":[-1],"r2":[5,6]},"tables")");
  text = changed(text, R"("stopped")",
                 R"("stale_outputs":[{"id":"r1","of_step":0,"taken":2}],"stopped")");
  const auto recording = read_recording(write_temporary(text));
  ASSERT_TRUE(recording) << recording.error().message;
  const RecordedStep& step = recording->steps[0];
  const RequestKeys& keys = step.before[0].request.keys;
  EXPECT_EQ(keys.lora, (Adapter{"sql", 2, "/a"}));
  EXPECT_EQ(keys.mm,
            (std::vector<PromptItem>{{"cat", 0, 4, "image", {{1, 2}}}, {"dog", 4, 16, "audio"}}));
  EXPECT_EQ(keys.embeds.digests, (std::vector<std::string>{"01ab", "02"}));
  EXPECT_EQ(step.held_drafts[1], (RecordedTokens{"r2", {5, 6}}));
  EXPECT_EQ(step.stale_outputs[0], (RecordedStaleOutput{"r1", 0, 2}));
  EXPECT_EQ(to_text(*recording), text);
}

TEST(Recording, AbsentAndEmptyAreKeptApart) {
  const std::string bare =
      R"({"step":0,"scheduled":[{"id":"r0","tokens":1,"computed":3,"blocks":null}],"running":[],)"
      R"("waiting":[],"free_blocks":8,"sampled":{}})"
      "\n";
  const std::string empty =
      R"({"step":0,"connector":[],"scheduled":[],"common_prefix_blocks":[],)"
      R"("running":[],"waiting":[],)"
      R"("skipped":[],"free_blocks":8,"tables":{},"loading":{},"worker":{"received":[],"sent":[],)"
      R"("invalid_blocks":[]},"sampled":{},"output_of_step":0,"drafts":{}})"
      "\n";
  for (const std::string& step : {bare, empty}) {
    const auto recording = read_recording(write_temporary(kHeader + step + kEnd));
    ASSERT_TRUE(recording) << recording.error().message;
    EXPECT_EQ(recording->steps[0].tables.has_value(), step == empty);
    EXPECT_EQ(recording->steps[0].worker.has_value(), step == empty);
    EXPECT_EQ(to_text(*recording), kHeader + step + kEnd);
  }
}

TEST(Recording, AReportOfAWorkerIsWrittenBackWithAllItsKeys) {
  const std::string report =
      R"("loading":{},"worker":{"received":["r0","r1"],"sent":["r2"],"invalid_blocks":[3],)"
      R"("failed":["r1"],)"
      R"("jobs":[4,7],"store_events":[2],"enqueued":[[1,2]],"completed":[[0,1]]},)";
  const std::string text = changed(kRecording, R"("sampled":)", report + R"("sampled":)");
  const auto recording = read_recording(write_temporary(text));
  ASSERT_TRUE(recording) << recording.error().message;
  const RecordedWorker& worker = recording->steps[0].worker.value();
  EXPECT_EQ(worker.failed, std::vector<std::string>{"r1"});
  EXPECT_EQ(worker.jobs, (std::vector<std::int64_t>{4, 7}));
  EXPECT_EQ(to_text(*recording), text);
}

// What vLLM decided with HiSparse's groups (python/tests/record_hisparse.py): loads fail, too.
TEST(Recording, EveryStepWithHiSparsesPagesIsReadAsItWasWritten) {
  std::int64_t num_failed = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           LOCKSTEP_SOURCE_DIR "/tests/conformance/hisparse")) {
    if (!entry.is_regular_file()) continue;
    const auto recording = read_recording(entry.path().string());
    ASSERT_TRUE(recording) << recording.error().message;
    const auto again = read_recording(write_temporary(to_text(*recording)));
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_TRUE(again->steps == recording->steps) << entry.path();
    for (const RecordedStep& step : recording->steps)
      if (step.worker) num_failed += std::ssize(step.worker->failed);
  }
  EXPECT_GT(num_failed, 0);
}

// All samples: 24 families of 0.22.1, 22 of 0.33.0, 7 with a connector, 6 files of one family more.
TEST(Recording, EverySampleIsWrittenBackByteForByte) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  int recordings = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(*samples / "recordings")) {
    const std::string path = entry.path().string();
    if (!entry.is_regular_file() || path.find("benchmarks") != path.npos ||
        path.ends_with("layouts.jsonl") || path.ends_with("block_hashes.jsonl")) {
      continue;
    }
    const auto recording = read_recording(path);
    ASSERT_TRUE(recording) << recording.error().message;
    EXPECT_EQ(to_text(*recording), read_whole(path)) << path;
    ++recordings;
  }
  EXPECT_EQ(recordings, 2 * 24 + 22 + 7 + 6 + 2);
}

TEST(Recording, TheWriterWritesWhatTheReaderReads) {
  const auto recording = read_recording(write_temporary(kRecording));
  ASSERT_TRUE(recording);
  const std::string path = temporary_path("written");
  {
    auto writer = RecordingWriter::create(path, recording->header);
    ASSERT_TRUE(writer) << writer.error().message;
    ASSERT_TRUE(writer->write(recording->steps[0]));
    EXPECT_FALSE(std::filesystem::exists(path)) << "half a recording under its final name";
    ASSERT_TRUE(writer->close(recording->end));
  }
  EXPECT_EQ(read_whole(path), kRecording);
}

TEST(Recording, AWriterThatIsNotClosedLeavesNothing) {
  const auto recording = read_recording(write_temporary(kRecording));
  ASSERT_TRUE(recording);
  const std::string folder = temporary_path("folder");
  std::filesystem::create_directory(folder);
  { ASSERT_TRUE(RecordingWriter::create(folder + "/r.jsonl", recording->header)); }
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

// The recording whose request has one key more.
std::string with_key(const std::string& key) {
  return changed(kRecording, "\"eos\":9", "\"eos\":9," + key);
}

// The recording with drafts or an output of a request that come too late.
std::string with_late(const std::string& key, const std::string& request) {
  const std::string text =
      changed(kRecording, "\"hash_block_size\":16", "\"hash_block_size\":16,\"" + key + "\":1");
  return key == "held_drafts"
             ? changed(text, "\"tables\"", "\"held_drafts\":{\"" + request + "\":[5]},\"tables\"")
             : changed(text, "\"stopped\"",
                       "\"stale_outputs\":[{\"id\":\"" + request +
                           "\",\"of_step\":0,\"taken\":1}],\"stopped\"");
}

class RefusedRecording : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedRecording, NamesFileLineAndField) {
  const std::string path = write_temporary(GetParam().text);
  EXPECT_EQ(refusal(read_recording(path), path), GetParam().message) << GetParam().what;
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedRecording,
    ::testing::Values(
        Refused{"empty file", "", "FILE: found an empty file; expected records"},
        Refused{"byte-order mark", "\xef\xbb\xbf" + kRecording,
                "FILE:1: found a byte-order mark; expected UTF-8 without one"},
        Refused{"empty line", kHeader + "\n" + kStep + kEnd,
                "FILE:2: found an empty line; expected a record"},
        Refused{"a line after the end", kRecording + kStep,
                "FILE:4: found a line after the end line; expected none"},
        Refused{"a version of the future", changed(kRecording, "recording\":1", "recording\":2"),
                "FILE:1: field `schedule_recording`: found 2; expected the integer 1"},
        Refused{
            "unknown option", changed(kRecording, "max_num_seqs", "max_seqs"),
            "FILE:1: field `config.max_seqs`: found an unknown option; expected a known option"},
        Refused{"hash lookahead below -1",
                changed(kRecording, "max_num_seqs\":4", "num_hash_lookahead_tokens\":-2"),
                "FILE:1: field `config.num_hash_lookahead_tokens`: found -2; expected an integer "
                "from -1 to 2147483647"},
        Refused{
            "hash lookahead in words",
            changed(kRecording, "max_num_seqs\":4", "num_hash_lookahead_tokens\":\"1\""),
            "FILE:1: field `config.num_hash_lookahead_tokens`: found \"1\"; expected an integer "
            "from -1 to 2147483647"},
        Refused{"option out of range", changed(kRecording, "max_num_seqs\":4", "max_num_seqs\":0"),
                "FILE:1: field `config.max_num_seqs`: found 0; expected an integer from 1 to "
                "2147483647"},
        Refused{"unknown kind of cache", changed(kRecording, "\"full\"", "\"fuller\""),
                "FILE:1: field `groups[0].spec.type`: found \"fuller\"; expected a kind of cache "
                "(full, "
                "mla, sliding_window, sliding_window_mla, chunked_local, mamba, hidden_state, "
                "cross_attention, encoder_only, circular_buffer, hisparse_resident, hisparse_hot)"},
        Refused{"a window that is replayed and is none of MLA",
                changed(kRecording, "\"full\"",
                        "\"sliding_window\",\"sliding_window\":8,\"bounded_replay\":true"),
                "FILE:1: field `groups[0].spec.bounded_replay`: found true; expected false, or a "
                "sliding_window_mla"},
        Refused{"a copy of one block",
                changed(kRecording, "\"running\"", "\"copies\":[[1]],\"running\""),
                "FILE:2: field `copies[0]`: found an array of 1 element; expected [from, to]"},
        Refused{"a pause of no kind",
                changed(kRecording, "\"abort\":\"r1\"", "\"pause_state\":\"PAUSED\""),
                "FILE:2: field `before[1].pause_state`: found \"PAUSED\"; expected one of "
                "\"UNPAUSED\", \"PAUSED_NEW\", \"PAUSED_ALL\""},
        Refused{"an output between two steps",
                changed(kRecording, "\"abort\":\"r1\"", "\"output_of_step\":0"),
                "FILE:2: field `before[1]`: found an object; expected an output in \"during\""},
        Refused{
            "an output of its own step among the events",
            changed(kRecording, "\"sampled\"", "\"during\":[{\"output_of_step\":0}],\"sampled\""),
            "FILE:2: field `during[0]`: found an object; expected a step before this one"},
        Refused{"spec key missing", changed(kRecording, "\"head_size\":64,", ""),
                "FILE:1: field `groups[0].spec`: found no key \"head_size\"; expected it"},
        Refused{"steps out of order", changed(kRecording, "\"step\":0", "\"step\":1"),
                "FILE:2: field `step`: found 1; expected the integer 0"},
        Refused{"unknown key", changed(kRecording, "\"stored\":1", "\"stored\":1,\"strord\":2"),
                "FILE:2: field `strord`: found an unknown key; expected a known key, or one that "
                "starts with x_"},
        Refused{"events that the header does not speak of",
                changed(kRecording, "\"stored\":1", "\"stored\":1,\"events\":[]"),
                "FILE:2: field `events`: found an array of 0 elements; expected no events: the "
                "header has no \"hash_algorithm\""},
        Refused{"events of unknown hashes",
                changed(kRecording, "\"num_blocks\"", "\"hash_algorithm\":\"md5\",\"num_blocks\""),
                "FILE:1: field `hash_algorithm`: found \"md5\"; expected one of \"sha256_cbor\", "
                "\"xxhash_cbor\""},
        Refused{"held drafts that the header does not speak of",
                changed(kRecording, "\"tables\"", "\"held_drafts\":{\"r1\":[5]},\"tables\""),
                "FILE:2: field `held_drafts`: found an object; expected no such key: the header "
                "has no \"held_drafts\""},
        Refused{"another version of held drafts",
                changed(kRecording, "\"num_blocks\"", "\"held_drafts\":2,\"num_blocks\""),
                "FILE:1: field `held_drafts`: found 2; expected the integer 1"},
        Refused{"held drafts of a request that is scheduled", with_late("held_drafts", "r0"),
                "FILE:2: field `held_drafts.r0`: found drafts of a request that the step "
                "schedules; expected \"spec\""},
        Refused{"held drafts that are none", changed(with_late("held_drafts", "r1"), ":[5]", ":[]"),
                "FILE:2: field `held_drafts.r1`: found an array of 0 elements; expected at least "
                "one draft, or no such request"},
        Refused{"held drafts out of order",
                changed(with_late("held_drafts", "r2"), ":[5]", ":[5],\"r1\":[6]"),
                "FILE:2: field `held_drafts.r1`: found a name out of order; expected ascending "
                "names"},
        Refused{"stale outputs that the header does not speak of",
                changed(kRecording, "\"stopped\"", "\"stale_outputs\":[],\"stopped\""),
                "FILE:2: field `stale_outputs`: found an array of 0 elements; expected no such "
                "key: the header has no \"stale_outputs\""},
        Refused{"another version of stale outputs",
                changed(kRecording, "\"num_blocks\"", "\"stale_outputs\":0,\"num_blocks\""),
                "FILE:1: field `stale_outputs`: found 0; expected the integer 1"},
        Refused{"a stale output of a later step",
                changed(with_late("stale_outputs", "r1"), "\"of_step\":0", "\"of_step\":1"),
                "FILE:2: field `stale_outputs[0].of_step`: found 1; expected the integer 0"},
        Refused{"a stale output that does not say what was taken",
                changed(with_late("stale_outputs", "r1"), ",\"taken\":1", ""),
                "FILE:2: field `stale_outputs[0]`: found no key \"taken\"; expected it"},
        Refused{"an adapter without a name", with_key(R"("lora":{"name":"","id":1,"path":"/a"})"),
                "FILE:2: field `before[0].lora.name`: found \"\"; expected a string that is not "
                "empty"},
        Refused{"an adapter that lies nowhere", with_key(R"("lora":{"name":"sql","id":1})"),
                "FILE:2: field `before[0].lora`: found no key \"path\"; expected it"},
        Refused{"an image over another",
                with_key(R"("mm":[{"id":"cat","kind":"image","at":0,"n":4},)"
                         R"({"id":"dog","kind":"image","at":3,"n":4}])"),
                "FILE:2: field `before[0].mm[1].at`: found 3; expected an integer from 4 to 19"},
        Refused{"an image beyond its prompt",
                with_key(R"("mm":[{"id":"cat","kind":"image","at":18,"n":3}])"),
                "FILE:2: field `before[0].mm[0].n`: found 3; expected an integer from 1 to 2"},
        Refused{"no image in a list of them", with_key(R"("mm":[])"),
                "FILE:2: field `before[0].mm`: found an array of 0 elements; expected at least "
                "one item, or no such key"},
        Refused{"rows of an image beyond it",
                with_key(R"("mm":[{"id":"cat","kind":"image","at":0,"n":4,"embed":[[2,5]]}])"),
                "FILE:2: field `before[0].mm[0].embed[0][1]`: found 5; expected an integer from 1 "
                "to 4"},
        Refused{"embeddings without a digest",
                with_key(R"("embeds":{"digest_tokens":16,"digests":["xy","00"]})"),
                "FILE:2: field `before[0].embeds.digests[0]`: found \"xy\"; expected a digest, "
                "hexadecimal"},
        Refused{"too few digests", with_key(R"("embeds":{"digest_tokens":16,"digests":["00"]})"),
                "FILE:2: field `before[0].embeds`: found 1 digests; expected 2 for 20 tokens"},
        Refused{"rows of embeddings without a place",
                with_key(R"("embeds":{"rows":[[1,2]],"width":4})"),
                "FILE:2: field `before[0].embeds`: found 2 rows; expected 0, as many as the "
                "prompt has of token 50004"},
        Refused{"a role that vLLM refuses",
                changed(kRecording, "\"groups\"",
                        R"("connector":{"kv_load_failure_policy":"fail",)"
                        R"("supports_hybrid_groups":true,"kv_role":"producer"},"groups")"),
                "FILE:1: field `connector.kv_role`: found \"producer\"; expected one of "
                "\"kv_both\", \"kv_producer\", \"kv_consumer\""},
        Refused{"key twice", changed(kRecording, "\"stored\":1", "\"stored\":1,\"stored\":1"),
                "FILE:2: found the key \"stored\" twice; expected it once"},
        Refused{"key missing", changed(kRecording, "\"free_blocks\":6,", ""),
                "FILE:2: found no key \"free_blocks\"; expected it"},
        Refused{
            "a block outside the pool", changed(kRecording, "[[1,2]]}],", "[[1,9]]}],"),
            "FILE:2: field `scheduled[0].blocks[0][1]`: found 9; expected an integer from 0 to 8"},
        Refused{
            "blocks of too many groups", changed(kRecording, "[[1,2]]}],", "[[1],[2]]}],"),
            "FILE:2: field `scheduled[0].blocks`: found an array of 2 elements; expected one list "
            "of blocks for each of the 1 groups"},
        Refused{"negative tokens", changed(kRecording, "\"tokens\":20", "\"tokens\":-20"),
                "FILE:2: field `scheduled[0].tokens`: found -20; expected an integer from 0 to "
                "536870912"},
        Refused{
            "a prompt of no tokens", changed(kRecording, "[[7,20]]", "[]"),
            "FILE:2: field `before[0].prompt`: found an array of 0 elements; expected a prompt of "
            "at least one token"},
        Refused{"a prompt of no literal tokens", changed(kRecording, "[[7,20]]", "{\"tokens\":[]}"),
                "FILE:2: field `before[0].prompt`: found an object; expected a prompt of at least "
                "one token"},
        Refused{"a prompt with a length alone", changed(kRecording, "[[7,20]]", "{\"length\":20}"),
                "FILE:2: field `before[0].prompt`: found no key \"tokens\"; expected it"},
        Refused{
            "a seed of 33 bits", changed(kRecording, "[[7,20]]", "[[4294967296,20]]"),
            "FILE:2: field `before[0].prompt[0][0]`: found 4294967296; expected an integer from 0 "
            "to 4294967295"},
        Refused{
            "a segment of one number", changed(kRecording, "[[7,20]]", "[[7]]"),
            "FILE:2: field `before[0].prompt[0]`: found an array of 1 element; expected [seed, n] "
            "or [seed, first, n]"},
        Refused{"an arrival with too many digits", changed(kRecording, "0.5", "0.5000000001"),
                "FILE:2: field `before[0].arrival`: found 0.5000000001; expected a number with at "
                "most 9 digits after the point, no exponent, and at most 9223372036854775807 when "
                "multiplied by 10^9"},
        Refused{
            "an event of no kind", changed(kRecording, "{\"abort\":\"r1\"}", "{}"),
            "FILE:2: field `before[1]`: found none of \"add\", \"abort\", \"reset_prefix_cache\", "
            "\"pause_state\"; expected one"},
        Refused{"wrong number of steps", changed(kRecording, "\"steps\":1", "\"steps\":2"),
                "FILE:3: field `steps`: found 2; expected the integer 1"},
        Refused{"another block size than the only group's",
                changed(kRecording, "scheduler_block_size\":16", "scheduler_block_size\":32"),
                "FILE:1: field `scheduler_block_size`: found 32; expected the block_size of the "
                "only group, 16"},
        Refused{"a load that ends and was in no list",
                changed(kRecording, R"("sampled":)",
                        R"("worker":{"received":["r0"],"sent":[],"invalid_blocks":[]},"sampled":)"),
                "FILE:2: worker.received: found a load that has ended, and no step lists loads in "
                "flight; expected `loading` in each step that has some"},
        Refused{"a load that no request waits for", changed(kRecording, "tables", "loading"),
                "FILE:2: loading: found a load in flight, and no step lists the requests that wait "
                "for one; expected `skipped`"},
        Refused{"end is false", changed(kRecording, "\"end\":true", "\"end\":false"),
                "FILE:3: field `end`: found false; expected true"}));

// Characters have several bytes: a file may break off in the middle of each.
TEST(Recording, ARecordingThatIsCutOffAnywhereHasTheWholeStepsBefore) {
  const std::string second = changed(changed(kStep, R"("step":0)", R"("step":1)"), R"("eos":9)",
                                     R"("eos":9,"x_note":"\u00e9é\n€ 1.5e3",)"
                                     R"("x_numbers":[-1.5e3,true,false,null])");
  const std::string whole = kHeader + kStep + second + changed(kEnd, "1,", "2,");
  ASSERT_TRUE(read_recording(write_temporary(whole)));
  for (std::size_t size = 1; size + 1 < whole.size(); ++size) {
    const auto read = read_recording(write_temporary(whole.substr(0, size)));
    if (size + 1 < kHeader.size()) {
      EXPECT_FALSE(read) << size << ": a header that is torn says nothing";
      continue;
    }
    // The newline alone is not missed.
    const std::size_t steps = (size + 1 >= (kHeader + kStep).size() ? 1u : 0u) +
                              (size + 1 >= (kHeader + kStep + second).size() ? 1u : 0u);
    ASSERT_TRUE(read) << size << read.error().message;
    EXPECT_EQ(read->steps.size(), steps) << size;
    EXPECT_TRUE(read->end.is_cut_off) << size;
    EXPECT_EQ(read->end.steps, std::ssize(read->steps)) << size;
  }
}

TEST(Recording, ACutOffNamesTheLastWholeStepAndStaysInASavedCase) {
  const auto none = read_recording(write_temporary(kHeader));
  const auto one = read_recording(write_temporary(kHeader + kStep + kStep.substr(0, 40)));
  ASSERT_TRUE(none && one);
  EXPECT_EQ(cut_off_text(none->end), "cut off before its first step");
  EXPECT_EQ(cut_off_text(one->end), "cut off after step 0");
  EXPECT_EQ(read_recording(write_temporary(to_text(*one)))->end, one->end);
  EXPECT_EQ(cut_off_text(read_recording(write_temporary(kRecording))->end), "");
}

TEST(Recording, ALineThatIsTornAndNotTheLastIsRefusedWithItsNumber) {
  for (const std::string& torn : {kHeader + kStep.substr(0, 40) + "\n" + kStep + kEnd,
                                  kHeader + kStep.substr(0, 40) + "\n"}) {
    const std::string path = write_temporary(torn);
    EXPECT_TRUE(refusal(read_recording(path), path).starts_with("FILE:2: column "))
        << refusal(read_recording(path), path);
  }
}

TEST(Recording, AFileThatIsNotThereOrAFolderIsRefused) {
  const std::string path = temporary_path("nothing");
  EXPECT_EQ(refusal(read_recording(path), path),
            "FILE: cannot be opened: No such file or directory");
  std::filesystem::create_directory(path);
  EXPECT_EQ(refusal(read_recording(path), path), "FILE: found a folder; expected a file");
}

TEST(BenchmarkFile, TotalsAndRequestsAreRead) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const auto file =
      read_benchmark_file((*samples / "recordings/vllm-0.22.1/benchmarks/full.jsonl").string());
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->totals, (BenchmarkTotals{1298, 1859889, 287492}));
  EXPECT_EQ(file->requests.size(), 2000u);
  EXPECT_EQ(file->requests[3].name, "r3");
  EXPECT_EQ(file->requests[3].prompt.size(), 512 + 1031);
  EXPECT_EQ(file->requests[3].max_tokens, 198);
  EXPECT_EQ(file->sampled_token, 7);
  EXPECT_EQ(file->options.config.engine, "vllm-0.22.1");
}

TEST(BenchmarkFile, ARequestOfTheSameNameIsRefused) {
  const std::string path = write_temporary(
      R"({"benchmark":"b","engine":{"name":"vllm","version":"1"},"config":{},)"
      R"("groups":[{"layers":["l"],)"
      R"("spec":{"type":"mla","block_size":16,"num_kv_heads":1,"head_size":64,"dtype":"fp8"}}],)"
      R"("num_blocks":9,)"
      R"("sampled_token":7,"totals":{"steps":1,"scheduled_tokens":1,"request_steps":1}})"
      "\n{\"add\":\"r\",\"prompt\":[[1,2]],\"max_tokens\":1}\n"
      "{\"add\":\"r\",\"prompt\":[[1,2]],\"max_tokens\":1}\n");
  EXPECT_EQ(refusal(read_benchmark_file(path), path),
            "FILE:3: field `add`: found \"r\"; expected a name that no earlier request has");
}

}  // namespace
}  // namespace lockstep
