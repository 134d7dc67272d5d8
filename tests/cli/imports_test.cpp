// `lockstep replay` of traces that other tools wrote: what it skips, assumes and reports.
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

Outcome replayed(std::vector<std::string> files, const std::string& import = {}) {
  files.insert(files.begin(), "replay");
  files.insert(files.end(), {"--backend", "none"});
  if (!import.empty()) files.insert(files.end(), {"--import", import});
  return run_lockstep(files);
}

std::string file_of(const std::string& name, const std::string& text) {
  const std::string path = fresh_path(name);
  write_text(path, text);
  return path;
}

// A row of dynamo.request.trace.v1 at second `at`, with a further key of `request`.
std::string dynamo_row(const std::string& id, int at, const std::string& key = {}) {
  return R"({"schema": "dynamo.request.trace.v1", "event_type": "request_end", )"
         R"("event_time_unix_ms": 1777312809000, "request": {"request_id": ")" +
         id + R"(", "request_received_ms": 17773128)" + std::to_string(10 + at) +
         R"(000, "output_tokens": 3, "replay": {"trace_block_size": 64, "input_length": 128, )"
         R"("input_sequence_hashes": [11, 12]})" +
         (key.empty() ? "" : ", " + key) + "}}\n";
}

std::string mooncake_row(double at, int length, const std::string& ids) {
  return "{\"timestamp\": " + std::to_string(at) + ", \"input_length\": " + std::to_string(length) +
         ", \"output_length\": 5, \"hash_ids\": [" + ids + "]}\n";
}

std::string state_hash(const Outcome& outcome) {
  const auto at = outcome.out.find("state hash");
  return at == std::string::npos ? "none: " + outcome.err : outcome.out.substr(at, 50);
}

bool says(const Outcome& outcome, const std::string& text) {
  return (outcome.out + outcome.err).find(text) != std::string::npos;
}

// NVIDIA/srt-slurm#416: every disaggregated Dynamo writes this key.
TEST(Imports, AMeasuredKeyIsSkippedAndCountedOnce) {
  const std::string plain = dynamo_row("q1", 0) + dynamo_row("q2", 1);
  const std::string key = R"("kv_transfer_estimated_latency_ms": 1.25)";
  const std::string measured = dynamo_row("q1", 0, key) + dynamo_row("q2", 1, key);
  const Outcome read = replayed({file_of("kv_transfer.jsonl", measured)});
  EXPECT_EQ(read.status, 0) << read.err;
  EXPECT_TRUE(says(read, "chosen  unknown key kv_transfer_estimated_latency_ms skipped, 2 times\n"))
      << read.out;
  EXPECT_EQ(state_hash(read), state_hash(replayed({file_of("by_end.jsonl", plain)})));
}

TEST(Imports, AnUnknownKeyThatCarriesALengthATimeOrIdsIsRefused) {
  for (const std::string name : {"decode_tokens", "inputLength", "arrival", "block_hashes"}) {
    const Outcome outcome =
        replayed({file_of("unknown.jsonl", dynamo_row("q1", 0, "\"" + name + "\": 1"))});
    EXPECT_EQ(outcome.status, 2) << name;
    EXPECT_TRUE(says(
        outcome, "field `request." + name +
                     "`: found an unknown key; expected a known key, or one that starts with x_"))
        << outcome.err;
  }
}

TEST(Imports, AMisspelledKeyIsRefusedWithTheOneThatIsMeant) {
  const Outcome outcome =
      replayed({file_of("misspelled.jsonl", dynamo_row("q1", 0, "\"cahced_tokens\": 1"))});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(says(outcome, "expected \"cached_tokens\"")) << outcome.err;
  const Outcome model =
      replayed({file_of("misspelled.jsonl", dynamo_row("q1", 0, "\"modle\": 1"))});
  EXPECT_TRUE(says(model, "expected \"model\"")) << model.err;
}

TEST(Imports, ALinkAfterRowsWithoutLinksIsRefused) {
  std::string linked = mooncake_row(1, 20, "0");
  linked.insert(1, "\"session_id\": \"s\", ");
  const Outcome outcome = replayed({file_of("late.jsonl", mooncake_row(0, 20, "0") + linked)});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(says(outcome, ":2: field `session_id`: found a link to other rows")) << outcome.err;
}

// vllm-project/guidellm#948: ids that do not fit 512 tokens made seconds of a Mooncake file's
// times.
TEST(Imports, AGuessAboutIdsAndTimesIsSaid) {
  const std::string path =
      file_of("short_blocks.jsonl", mooncake_row(0, 10, "0") + mooncake_row(0.2, 20, "0, 1") +
                                        mooncake_row(0.4, 15, "2"));
  const std::string json = fresh_path("guess.json");
  const Outcome guessed = run_lockstep({"replay", path, "--backend", "none", "--json", json});
  EXPECT_EQ(guessed.status, 0) << guessed.err;
  const std::string guess =
      "ids of 16 tokens, times in seconds, as vLLM's timed traces: line 2 has 2 ids for 20 tokens "
      "(--import block=N,time=ms|s)";
  EXPECT_TRUE(says(guessed, "  chosen  " + guess + "\n")) << guessed.out;
  const Json chosen = Json::parse(read_text(json)).at("chosen");
  EXPECT_NE(std::ranges::find(chosen, Json(guess)), chosen.end()) << chosen;
  const Outcome given = replayed({path}, "block=16,time=s");
  EXPECT_EQ(given.status, 0) << given.err;
  EXPECT_FALSE(says(given, "ids of 16 tokens")) << given.out;
  const Outcome wrong = replayed({path}, "block=512");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_TRUE(says(wrong, "found 2 ids for 20 tokens; expected 1, one per 512 tokens"));
}

TEST(Imports, EachKindOfTraceSaysWhatItsReaderAssumed) {
  for (const auto& [name, assumed] :
       {std::pair{"mooncake.jsonl", "ids of 512 tokens, times in ms, as Mooncake's: line "},
        std::pair{"burstgpt.csv", "no ids in this format: no two prompts share a prefix"},
        std::pair{"bailian.jsonl", "ids of 16 tokens, as Bailian's"},
        std::pair{"weka.json", "times in a sub-agent count from the start of its "}})
    EXPECT_TRUE(says(replayed({sample_path(std::string("foreign/") + name)}), assumed)) << name;
}

TEST(Imports, ShardsAreReadAsOneFile) {
  const std::string first = dynamo_row("q1", 0) + dynamo_row("q2", 1);
  const std::string second = dynamo_row("q3", 2);
  const Outcome whole = replayed({file_of("whole.jsonl", first + second)});
  const std::vector<std::string> shards = {file_of("a.jsonl", first), file_of("b.jsonl", second)};
  EXPECT_EQ(state_hash(replayed(shards)), state_hash(whole));
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens,Region\n";
  const std::string early = "2023-11-16 18:17:03.9,480,10,eu\n";
  const std::string late = "2023-11-16 18:17:04.9,48,1,us";
  const Outcome csv = replayed({file_of("a.csv", header + early), file_of("b.csv", header + late)});
  EXPECT_EQ(state_hash(csv), state_hash(replayed({file_of("c.csv", header + early + late)})));
  EXPECT_TRUE(says(csv, "unknown key Region skipped")) << csv.out << csv.err;
}

TEST(Imports, AnErrorInAShardNamesItsFileAndLine) {
  const std::string bad = file_of("bad.jsonl", dynamo_row("q3", 2) + "{\"schema\": 5}\n");
  const Outcome outcome = replayed({file_of("good.jsonl", dynamo_row("q1", 0)), bad});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(says(outcome, bad + ":2: field `schema`")) << outcome.err;
}

TEST(Imports, FilesOfTwoKindsAreNoShards) {
  const Outcome outcome = replayed(
      {file_of("a.jsonl", dynamo_row("q1", 0)), file_of("b.jsonl", mooncake_row(0, 20, "0"))});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_TRUE(says(outcome, "several files must be shards of one trace")) << outcome.err;
  const Outcome own = replayed({kSample, kSample});
  EXPECT_EQ(own.status, 2);
  EXPECT_TRUE(says(own, "several must be shards of one trace of another tool")) << own.err;
}

TEST(Imports, AGzipFileIsReadAsItsContentAndATornOneIsRefused) {
  const std::string text = dynamo_row("q1", 0) + dynamo_row("q2", 1);
  const std::string packed = fresh_path("trace.jsonl.gz");
  gzFile file = gzopen(packed.c_str(), "wb");
  gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
  gzclose(file);
  EXPECT_EQ(state_hash(replayed({packed})), state_hash(replayed({file_of("plain.jsonl", text)})));
  const std::string bytes = read_text(packed);
  const Outcome torn = replayed({file_of("torn.gz", bytes.substr(0, bytes.size() / 2))});
  EXPECT_EQ(torn.status, 2);
  EXPECT_TRUE(says(torn, "torn.gz: the gzip data ends early; expected a whole file")) << torn.err;
}

TEST(Imports, BytesAfterAGzipFileAreZerosOrAnotherMember) {
  std::vector<std::string> members;
  for (const char* name : {"q1", "q2"}) {
    const std::string packed = fresh_path("member.gz"), row = dynamo_row(name, 0);
    gzFile file = gzopen(packed.c_str(), "wb");
    gzwrite(file, row.data(), static_cast<unsigned>(row.size()));
    gzclose(file);
    members.push_back(read_text(packed));
  }
  const std::string whole =
      state_hash(replayed({file_of("plain.jsonl", dynamo_row("q1", 0) + dynamo_row("q2", 0))}));
  const std::string padding(70, '\0');
  EXPECT_EQ(state_hash(replayed({file_of("two.gz", members[0] + members[1])})), whole);
  EXPECT_EQ(state_hash(replayed({file_of("pad.gz", members[0] + members[1] + padding)})), whole);
  std::string damaged = members[1];
  damaged[1] = 'x';
  for (const std::string& rest : {std::string("garbage"), "x" + members[1], damaged}) {
    const Outcome refused = replayed({file_of("rest.gz", members[0] + rest)});
    EXPECT_EQ(refused.status, 2);
    const bool is_damaged = rest == damaged;
    EXPECT_TRUE(says(refused, is_damaged ? "rest.gz: the gzip data is damaged"
                                         : "rest.gz: found other bytes after the gzip data; "))
        << refused.err;
  }
}

TEST(Imports, ATableWithoutRowsOrLineEndsIsRefused) {
  const std::string header = "Timestamp,Request tokens,Response tokens,Model";
  const Outcome empty = replayed({file_of("empty.csv", header + "\n")});
  EXPECT_EQ(empty.status, 2);
  EXPECT_TRUE(says(empty, "empty.csv: found no request; expected at least one")) << empty.err;
  const Outcome mac = replayed({file_of("mac.csv", header + "\r1,20,5,m\r2,20,5,m\r")});
  EXPECT_EQ(mac.status, 2);
  EXPECT_TRUE(says(mac, "mac.csv:1: field `row`: found \"" + header)) << mac.err;
  EXPECT_TRUE(says(mac, "expected no CR within a line: tr")) << mac.err;
}

TEST(Imports, ATornLastRowIsLeftOutOnRequest) {
  const std::string first = dynamo_row("q1", 0);
  const std::string torn = file_of("torn.jsonl", first + dynamo_row("q2", 1).substr(0, 90));
  EXPECT_EQ(replayed({torn}).status, 2);
  const Outcome skipped = replayed({torn}, "torn=skip");
  EXPECT_EQ(skipped.status, 0) << skipped.err;
  EXPECT_TRUE(says(skipped, "chosen  the torn last row of " + torn + ", line 2, is left out\n"))
      << skipped.out;
  EXPECT_EQ(state_hash(skipped), state_hash(replayed({file_of("first.jsonl", first)})));
  const Outcome whole =
      replayed({file_of("whole.jsonl", first.substr(0, first.size() - 1))}, "torn=skip");
  EXPECT_EQ(state_hash(whole), state_hash(skipped)) << "a whole row without a newline stays";
  EXPECT_FALSE(says(whole, "left out")) << whole.out;
}

TEST(Imports, RequestsWithoutATimeArriveAtOnceOnRequest) {
  const std::string untimed = R"({"input_length": 20, "output_length": 5, "hash_ids": [1, 2]})";
  const std::string path = file_of("untimed.jsonl", untimed + "\n" + untimed + "\n");
  const Outcome refused = replayed({path}, "block=16");
  EXPECT_EQ(refused.status, 2);
  EXPECT_TRUE(says(refused, "--import arrival=closed")) << refused.err;
  const Outcome closed = replayed({path}, "block=16,arrival=closed");
  const std::string at_zero = mooncake_row(0, 20, "1, 2");
  EXPECT_EQ(state_hash(closed),
            state_hash(replayed({file_of("zero.jsonl", at_zero + at_zero)}, "block=16")));
}

TEST(Imports, AnOptionThatTheFormatDoesNotReadIsRefused) {
  for (const auto& [file, import, name] : {
           std::tuple{"foreign/weka.json", "zero=skip,block=512", "block has no effect on a file"},
           std::tuple{"foreign/burstgpt.csv", "turns=added", "turns has no effect on a file"},
           std::tuple{"foreign/dynamo.jsonl", "time=s", "Dynamo request trace; expected zero, "},
           std::tuple{"shared_prefixes.jsonl", "torn=skip", "request trace; expected no --import"},
           std::tuple{"recordings/vllm-0.22.1/preemption/0002.jsonl", "zero=skip",
                      "engine recording; expected no --import"},
       }) {
    const Outcome refused = replayed({sample_path(file)}, import);
    EXPECT_EQ(refused.status, 2) << file;
    EXPECT_TRUE(says(refused, name)) << refused.err;
  }
}

TEST(Imports, IdsUseAll64Bits) {
  const auto rows = [](const std::string& a, const std::string& b, const std::string& c) {
    return mooncake_row(0, 32, a + ", " + b) + mooncake_row(1, 32, a + ", " + c) +
           mooncake_row(2, 32, c + ", " + b);
  };
  const std::string largest = "18446744073709551615";
  const Outcome wide = replayed(
      {file_of("wide.jsonl", rows(largest, "18446744073709551614", "4611686018427387903"))},
      "block=16");
  const Outcome small = replayed({file_of("small.jsonl", rows("1", "2", "3"))}, "block=16");
  ASSERT_EQ(wide.status, 0) << wide.err;
  const auto hits = [](const Outcome& outcome) {
    return outcome.out.substr(outcome.out.find("prefix hits"), 80);
  };
  EXPECT_EQ(hits(wide), hits(small));
}

}  // namespace
}  // namespace lockstep::tests
