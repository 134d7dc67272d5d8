// The audit finds nothing in right decisions and every kind of wrong one.
#include "properties/audit/auditor.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/properties/audit/audited.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

std::string sample(const std::string& path) {
  return std::string(LOCKSTEP_SOURCE_DIR) + "/traces/samples/recordings/" + path;
}

// Two requests of one full-attention group with blocks of 4 tokens; the second hits the first's
// block 1.
Recording shared_prefix() {
  Recording recording = recording_of_one_group("0.22.1", 4, 6);
  RecordedStep first;
  first.before = {added_request("a", 6, 4), added_request("b", 5, 4)};
  first.scheduled = {scheduled_row("a", 0, 6, {{{BlockId{1}, BlockId{2}}}}),
                     scheduled_row("b", 4, 1, {{{BlockId{1}, BlockId{3}}}})};
  first.common_prefix_blocks = {{1}};
  first.running = {"a", "b"};
  first.free_blocks = 2;
  first.tables = {{{"a", {{BlockId{1}, BlockId{2}}}}, {"b", {{BlockId{1}, BlockId{3}}}}}};
  first.sampled = {{"a", {21}}, {"b", {22}}};
  RecordedStep second;
  second.step = 1;
  second.scheduled = {scheduled_row("a", 6, 1), scheduled_row("b", 5, 1)};
  second.running = {"a", "b"};
  second.free_blocks = 2;
  second.sampled = {{"a", {23}}, {"b", {24}}};
  RecordedStep third;
  third.step = 2;
  third.finished = {"a", "b"};
  third.free_blocks = 5;
  recording.steps = {first, second, third};
  recording.end.steps = 3;
  return recording;
}

// The only finding, about `request` in `step`, and its sentence holds `what`.
void expect_one(const Recording& recording, std::int64_t step, const std::string& request,
                const std::string& what) {
  const std::vector<AuditFinding> findings = audit(recording);
  ASSERT_FALSE(findings.empty()) << "expected: " << what;
  EXPECT_EQ(findings[0].step, step) << findings[0].what;
  EXPECT_EQ(findings[0].request, request) << findings[0].what;
  EXPECT_NE(findings[0].what.find(what), std::string::npos) << findings[0].what;
}

TEST(Audit, RightDecisionsAreClean) { EXPECT_TRUE(audit(shared_prefix()).empty()); }

TEST(Audit, AHitOnABlockThatHoldsAnotherPrefixIsFound) {
  Recording recording = shared_prefix();
  (*recording.steps[0].scheduled[1].blocks)[0][0] = BlockId{2};
  recording.steps[0].common_prefix_blocks.reset();
  recording.steps[0].tables.reset();
  expect_one(recording, 0, "b",
             "reads token 0 from slot 0 of block 2, which holds token 4 of request a");
}

// "b" shares the four tokens of block 1 with "a", and continues with another one.
TEST(Audit, AHitWhoseNextTokenAnotherRequestDraftedFromIsFoundWhereHashesLookAhead) {
  Recording recording = shared_prefix();
  recording.header.engine.version = "0.33.0";
  EngineConfig& config = recording.header.options.config;
  config.spec_method = SpecMethod::eagle;
  config.num_spec_tokens = 1;
  EXPECT_TRUE(audit(recording).empty());  // it continues as "a" does
  Prompt& prompt = recording.steps[0].before[1].request.prompt;
  prompt = {};
  prompt.append({TokenRun::Kind::seeded, 7, 0, 4});
  prompt.append({TokenRun::Kind::seeded, 8, 0, 1});
  expect_one(recording, 0, "b",
             "ends with token 3 in slot 3 of block 1, which holds token 3 of request a and was "
             "drafted from with another token after it");
  EXPECT_EQ(audit(recording)[0].rule, AuditRule::draft_read);

  Recording embedded =
      recording;  // the next token is the same, one of the others of its digest not
  for (const std::size_t i : {0, 1}) {
    PromptEmbeds& embeds = embedded.steps[0].before[i].request.keys.embeds;
    embeds.digests = {"aa", i == 0 ? "b0" : "b1"};
    embeds.digest_tokens = 4;
  }
  EXPECT_TRUE(audit(embedded).empty());

  config.num_hash_lookahead_tokens = 0;  // stated: such an engine drops a block, or takes the loss
  EXPECT_TRUE(audit(recording).empty());
  config.num_hash_lookahead_tokens = 1;  // of an engine without a profile
  recording.header.engine.version = "9.9.9";
  EXPECT_EQ(audit(recording).size(), 1u);
  recording.header.engine.version = "0.22.1";
  config.num_hash_lookahead_tokens = kEngineHashLookahead;
  EXPECT_TRUE(audit(recording).empty());
}

// Two modules: the row of a hit's last token is made of two tokens behind it. "a" had its prompt
// there, "b" samples the second.
TEST(Audit, AHitWhoseSecondNextTokenDiffersIsFoundWhereHashesCoverTwo) {
  Recording recording = shared_prefix();
  EngineConfig& config = recording.header.options.config;
  config.spec_method = SpecMethod::eagle;
  config.num_spec_tokens = 2;
  config.num_hash_lookahead_tokens = 1;
  config.max_model_len = 8;  // no drafts behind it
  EXPECT_TRUE(audit(recording).empty());
  config.num_hash_lookahead_tokens = 2;
  expect_one(recording, 0, "b",
             "ends with token 3 in slot 3 of block 1, which holds token 3 of request a and was "
             "drafted from with another token after it");
}

TEST(Audit, AHitOnABlockThatWasNeverWrittenIsFound) {
  Recording recording = shared_prefix();
  (*recording.steps[0].scheduled[1].blocks)[0][0] = BlockId{5};
  recording.steps[0].common_prefix_blocks.reset();
  recording.steps[0].tables.reset();
  expect_one(recording, 0, "b", "the block is not one of this group");
}

TEST(Audit, ABlockWithTwoOwnersIsFound) {
  Recording recording = shared_prefix();
  recording.steps[1].scheduled[1].blocks = {{{BlockId{2}}}};
  expect_one(recording, 1, "b", "block 2 becomes entry 2 of the table");
}

TEST(Audit, ATokenWithoutABlockIsFound) {
  Recording recording = shared_prefix();
  recording.steps[1].scheduled[0].computed = 6;
  recording.steps[0].scheduled[0].blocks = {{{BlockId{1}}}};
  recording.steps[0].tables.reset();
  expect_one(recording, 0, "a", "beyond the block table");
}

TEST(Audit, TokensThatNobodyKnowsAreFound) {
  Recording recording = shared_prefix();
  recording.steps[1].scheduled[0].tokens = 2;
  expect_one(recording, 1, "a", "only 7 are known");
}

TEST(Audit, ARequestThatHasLeftIsFound) {
  Recording recording = shared_prefix();
  recording.steps[1].finished = {"a"};
  expect_one(recording, 1, "a", "a finished request is scheduled");
}

TEST(Audit, LostBlocksAreFoundWhereTablesAreShownAndWhereNobodyRuns) {
  Recording recording = shared_prefix();
  recording.steps[0].free_blocks = 1;
  expect_one(recording, 0, "", "3 blocks are held and 1 free");
  recording = shared_prefix();
  recording.steps[2].free_blocks = 4;
  expect_one(recording, 2, "", "no request runs, and 4 of 5 blocks are free");
}

// "a" ends in step 1 and one of its blocks does not come back; "b" continues.
TEST(Audit, ALeakNamesTheBlocksThatCanBeLostAndWhoHadThem) {
  Recording recording = shared_prefix();
  RecordedStep& step = recording.steps[1];
  step.finished = {"a"};
  step.scheduled.erase(step.scheduled.begin());
  step.sampled.erase(step.sampled.begin());
  step.running = {"b"};
  step.tables = {{{"b", {{BlockId{1}, BlockId{3}}}}}};
  step.free_blocks = 3;
  recording.steps[2].finished = {"b"};
  EXPECT_TRUE(audit(recording).empty());
  step.free_blocks = 2;
  recording.steps[2].free_blocks = 4;
  expect_one(recording, 1, "",
             "2 blocks are held and 2 free, with the null block 5 of 6. Lost: block 2, last of "
             "request a since step 0");
  EXPECT_EQ(audit(recording).size(), 1u);
}

TEST(Audit, AFindingIsOneLineWithItsPlaceAndWhoHadTheBlock) {
  Recording recording = shared_prefix();
  recording.steps[1].zero = {BlockId{1}};
  const auto findings = audit(recording);
  ASSERT_EQ(findings.size(), 1u);  // "b" reads the same block
  EXPECT_EQ(line_of(findings[0]),
            "audit.attention_read step 1 request a group 0 token 0 entry 0 block 1: attention of "
            "tokens [6, 7) reads token 0 from slot 0 of block 1, which holds nothing that was "
            "written since step 1 zeroed the block; request a has had the block since step 0");
  EXPECT_EQ(findings[0].holder.request, "a");
  EXPECT_EQ(findings[0].holder.since, 0);
  EXPECT_EQ(findings[0].count, 2);
  EXPECT_EQ(findings[0].last_step, 1);
}

TEST(Audit, ANameCannotEndTheLineOfAFinding) {
  AuditFinding finding;
  finding.request = "a\n::error::b\x1b";
  finding.what = "what\nit is";
  EXPECT_EQ(line_of(finding).find_first_of("\n\x1b"), std::string::npos);
  EXPECT_NE(line_of(finding).find(R"( request a\n::error::b\u001b)"), std::string::npos);
}

TEST(Audit, OneCauseIsToldOnce) {
  Recording recording = shared_prefix();
  recording.steps[0].common_prefix_blocks = recording.steps[1].common_prefix_blocks = {{2}};
  const auto findings = audit(recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].count, 2);
  EXPECT_EQ(findings[0].last_step, 1);
}

TEST(Audit, ATableWithoutRoomForDraftsIsFound) {
  Recording recording = shared_prefix();
  EngineConfig& config = recording.header.options.config;
  config.num_spec_tokens = 2;
  for (const SpecMethod method : {SpecMethod::none, SpecMethod::ngram}) {
    config.spec_method = method;
    EXPECT_TRUE(audit(recording).empty());
  }
  for (const SpecMethod method : {SpecMethod::draft_model, SpecMethod::eagle}) {
    config.spec_method = method;
    expect_one(recording, 1, "a",
               "tokens up to 7 are scheduled, and the draft model writes 2 slots after them; the "
               "table of 2 blocks ends at token 8");
    EXPECT_EQ(audit(recording)[0].rule, AuditRule::draft_slots);
  }
}

TEST(Audit, OutputThatAResetDropsEndsNobody) {
  Recording recording = shared_prefix();
  recording.header.options.config.async_scheduling = true;
  for (RecordedEvent& add : recording.steps[0].before) add.request.max_tokens = 1;
  RecordedEvent reset;
  reset.kind = RecordedEvent::Kind::reset_prefix_cache;
  reset.resets_running = reset.reset_succeeded = true;
  recording.steps[1].before = {reset};
  recording.steps[1].preempted = {"a", "b"};
  const std::vector<std::vector<std::int32_t>> blocks = {{1, 2}, {4, 3}};
  for (std::size_t i = 0; i < 2; ++i) {
    RecordedScheduled& row = recording.steps[1].scheduled[i];
    row = recording.steps[0].scheduled[i];
    row.tokens += row.computed;
    row.computed = 0;
    row.resumed = true;
    for (std::size_t k = 0; k < 2; ++k) (*row.blocks)[0][k] = BlockId{blocks[i][k]};
  }
  recording.steps[1].free_blocks = 1;
  recording.steps[1].output_of_step = 0;
  EXPECT_TRUE(audit(recording).empty()) << line_of(audit(recording)[0]);
}

TEST(Audit, ACommonPrefixThatIsNotCommonIsFound) {
  Recording recording = shared_prefix();
  recording.steps[0].common_prefix_blocks = {{2}};
  expect_one(recording, 0, "b", "2 blocks are reported as common");
}

TEST(Audit, AStateAtTheWrongBoundaryIsFound) {
  Result<Recording> recording = read_recording(
      std::filesystem::directory_iterator(sample("vllm-0.22.1/mamba_align"))->path().string());
  ASSERT_TRUE(recording) << recording.error().message;
  ASSERT_TRUE(audit(*recording).empty());
  // The running state of a request is swapped for a block that holds none of it.
  int num_found = 0;
  for (std::size_t s = 0; s < recording->steps.size() && num_found == 0; ++s) {
    for (std::size_t i = 0; i < recording->steps[s].scheduled.size(); ++i) {
      const RecordedScheduled& row = recording->steps[s].scheduled[i];
      if (!row.is_new || row.computed == 0 || !row.blocks) continue;
      Recording changed = *recording;
      std::vector<BlockId>& table = (*changed.steps[s].scheduled[i].blocks)[1];
      const auto hit = static_cast<std::size_t>((row.computed - 1) /
                                                recording->header.groups[1].spec.block_size);
      table[hit] = (*row.blocks)[0][0];  // a block of attention
      for (const AuditFinding& finding : audit(changed))
        num_found +=
            finding.group == 1 && finding.what.find("the state after") != std::string::npos;
    }
  }
  EXPECT_GT(num_found, 0);
}

// Index of the first step that allocates attention blocks next to states.
std::size_t first_zeroing_step(const Recording& recording) {
  std::size_t s = 0;
  while (s < recording.steps.size() && recording.steps[s].zero.empty()) ++s;
  return s;
}

TEST(Audit, ABlockThatIsNotZeroedBeforeItsUseIsFound) {
  Result<Recording> recording = read_recording(
      std::filesystem::directory_iterator(sample("vllm-0.22.1/mamba_align"))->path().string());
  ASSERT_TRUE(recording) << recording.error().message;
  const std::size_t s = first_zeroing_step(*recording);
  ASSERT_LT(s, recording->steps.size());
  const BlockId block = recording->steps[s].zero.back();
  recording->steps[s].zero.pop_back();
  const auto findings = audit(*recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, AuditRule::zeroing);
  EXPECT_EQ(findings[0].step, recording->steps[s].step);
  EXPECT_EQ(findings[0].block, index_of(block));
}

TEST(Audit, ABlockThatIsZeroedWhileItIsReadIsFound) {
  Recording recording = shared_prefix();
  recording.steps[1].zero = {BlockId{1}};
  expect_one(recording, 1, "a",
             "reads token 0 from slot 0 of block 1, which holds nothing that was written since "
             "step 1 zeroed the block; request a has had the block since step 0");
}

// A block below a hit that is zeroed is no hit: states were hit further than attention.
TEST(Audit, AZeroedBlockBelowAHitHoldsNothing) {
  Recording recording = shared_prefix();
  (*recording.steps[0].scheduled[1].blocks)[0][0] = BlockId{4};
  recording.steps[0].zero = {BlockId{4}};
  recording.steps[0].common_prefix_blocks.reset();
  recording.steps[0].tables.reset();
  expect_one(recording, 0, "b", "which holds nothing that was written since step 0 zeroed");
}

TEST(Audit, ATokenThatNoRowCanHaveSampledIsFound) {
  Recording chunked = shared_prefix();
  chunked.steps[0].scheduled[0].tokens = 5;  // of 6
  expect_one(chunked, 0, "a", "a token is sampled after token 4, and 6 are known");
  EXPECT_EQ(audit(chunked)[0].rule, AuditRule::sampled);

  Recording twice = shared_prefix();
  twice.steps[0].sampled[0].tokens = {21, 22};
  expect_one(twice, 0, "a", "2 tokens are sampled from a row that verifies 0 drafts");

  Recording drafted = shared_prefix();
  drafted.steps[1].scheduled[0].tokens = 2;
  drafted.steps[1].scheduled[0].spec = {30};
  drafted.steps[1].sampled[0].tokens = {30, 23};
  EXPECT_TRUE(audit(drafted).empty());
  drafted.steps[1].sampled[0].tokens = {31, 23};
  expect_one(drafted, 1, "a", "token 31 is accepted as a draft at 7, where the row verifies 30");
  drafted.steps[1].scheduled[0].spec = {-1};  // a draft that only the worker has
  EXPECT_TRUE(audit(drafted).empty());

  Recording of_nobody = shared_prefix();
  of_nobody.steps[2].sampled = {{"a", {25}}};
  expect_one(of_nobody, 2, "a", "no row of it was scheduled");
}

// Without drafts in flight, no engine counts more than the request's previous row.
TEST(Audit, ACountThatSkipsTokensIsFoundWithDraftsInFlight) {
  Recording recording = shared_prefix();
  recording.header.options.config.async_scheduling = true;
  recording.header.options.config.num_spec_tokens = 1;
  recording.steps[1].output_of_step = 0;
  EXPECT_TRUE(audit(recording).empty());
  ++recording.steps[1].scheduled[0].computed;
  expect_one(recording, 1, "a", "tokens [7, 8) are scheduled, but only 7 are known");

  // A rejected draft counts until its output is received.
  recording.steps[1].scheduled = {scheduled_row("a", 6, 2)};
  recording.steps[1].scheduled[0].spec = {-1};
  recording.steps[1].sampled = {{"a", {23}}};
  recording.steps[2] = recording.steps[1];
  RecordedStep& last = recording.steps[2];
  last.step = 2;
  last.scheduled = {scheduled_row("a", 8, 1)};
  last.output_of_step = 1;
  EXPECT_TRUE(audit(recording).empty());
  recording.steps[1].output_of_step = 1;
  last.output_of_step = 2;
  expect_one(recording, 2, "a", "tokens [8, 9) are scheduled, but only 8 are known");
  last.scheduled[0].computed = 7;
  EXPECT_TRUE(audit(recording).empty());
}

TEST(Audit, ARequestThatGoesOnBehindItsEndIsFound) {
  Recording recording = shared_prefix();
  recording.steps[0].before[0].request.max_tokens = 1;
  expect_one(recording, 1, "a", "it may sample 1, and the output of step 0 was the last");
  // With that output still in flight, the end is not known.
  recording.header.options.config.async_scheduling = true;
  recording.steps[1].output_of_step = 0;
  EXPECT_TRUE(audit(recording).empty());
}

TEST(Audit, AnEndByATokenIsNotCheckedWhereTheRecordingListsNoSuchToken) {
  Recording recording = shared_prefix();
  recording.steps[1].stopped = {{"a", "stop"}};
  const std::string line = "ends by a stop token: some requests list no `eos`, `stop_token_ids`";
  for (const bool lists : {false, true, true}) {
    RecordedEvent& added = recording.steps[0].before[0];
    added.has_no_stop_tokens = lists && !added.request.stop_token_ids.empty();
    added.request.stop_token_ids.clear();
    if (lists && !added.has_no_stop_tokens) added.request.stop_token_ids = {100};
    Auditor auditor(recording.header, AuditScope::whole_recording);
    for (const RecordedStep& step : recording.steps) auditor.step(step);
    EXPECT_EQ(std::ranges::count(auditor.not_checked(), line), lists ? 0 : 1);
    const bool is_found =
        std::ranges::any_of(auditor.take_findings(), [](const AuditFinding& finding) {
          return finding.what.find("that it sampled is one") != std::string::npos;
        });
    EXPECT_EQ(is_found, lists);
  }
}

TEST(Audit, AnEndWhoseReasonIsNotSoIsFound) {
  Recording recording = shared_prefix();
  recording.steps[1].stopped = {{"a", "length"}};
  expect_one(recording, 1, "a", "ends for its length with 2 tokens sampled of 4");
  recording.steps[1].stopped = {{"a", "stop"}};
  expect_one(recording, 1, "a", "none of the 2 that it sampled is one");
  recording.steps[0].before[0].request.eos_token = 23;
  EXPECT_TRUE(audit(recording).empty());
  recording.steps[1].stopped = {{"a", "abort"}};
  expect_one(recording, 1, "a", "ends by an abort, and no client has aborted it");
  RecordedEvent abort;
  abort.kind = RecordedEvent::Kind::abort;
  abort.name = "a";
  recording.steps[1].before = {abort};
  EXPECT_TRUE(audit(recording).empty());
}

TEST(Audit, ARequestThatIsInNoQueueIsFoundOnce) {
  Recording recording = shared_prefix();
  recording.steps[0].running = recording.steps[1].running = {"a"};
  expect_one(recording, 0, "b", "is in no queue: nothing runs it again");
  EXPECT_EQ(audit(recording).size(), 1u);
  recording = shared_prefix();
  recording.steps[1].waiting = {"a"};
  expect_one(recording, 1, "a", "in the waiting queue and in another one");
}

TEST(Audit, EveryBundledRecordingOfVllm0Point33IsClean) {
  int num_files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(sample("vllm-0.33.0"))) {
    if (entry.path().extension() != ".jsonl" || entry.path().filename() == "layouts.jsonl" ||
        entry.path().string().find("benchmarks") != std::string::npos)
      continue;
    const Result<AuditFile> file = audit_recording(entry.path().string());
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_TRUE(file->findings.empty()) << file->file << ": " << file->findings[0].what;
    ++num_files;
  }
  EXPECT_GE(num_files, 20);
}

}  // namespace
}  // namespace lockstep
