// Request traces: written and read back unchanged, whatever a request may be, and strictly.
#include "traces/formats/request_trace.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sstream>

#include "base/output_file.h"
#include "tests/traces/sample_generator.h"
#include "tests/traces/text_files.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/prompt_json.h"
#include "traces/importers/open_trace.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::changed;
using testing_files::read_whole;
using testing_files::refusal;
using testing_files::Refused;
using testing_files::temporary_path;
using testing_files::write_temporary;

Result<Trace> read_trace(const std::string& path) {
  auto reader = open_request_trace(path);
  if (!reader) return tl::unexpected(reader.error());
  return read_all(**reader);
}

const std::string kTraceHeader =
    R"({"lockstep_trace":1,"time":"ns","source":{"kind":"hand","name":"t"},)"
    R"("ids":{"block":512,"tail":"ceil"}})"
    "\n";
const std::string kFirst = R"({"id":"a","t":5,"prompt":[[7,20],[9,3,4]],"output":{"length":2}})"
                           "\n";
const std::string kSecond =
    R"({"id":"b","after":["a"],"delay":3,"prompt":{"ids":[[4,2],[9,1]],"length":1030},)"
    R"("output":{"tokens":[1,2,50000]},"max_tokens":9,"eos":50000,"abort":{"after_tokens":1},)"
    R"("priority":-1,"salt":"s"})"
    "\n";
const std::string kTraceEnd = "{\"end\":true,\"records\":2}\n";
const std::string kTrace = kTraceHeader + kFirst + kSecond + kTraceEnd;

TEST(RequestTrace, EveryFieldIsRead) {
  const auto trace = read_trace(write_temporary(kTrace));
  ASSERT_TRUE(trace) << trace.error().message;
  ASSERT_EQ(trace->records.size(), 2u);
  const auto& a = std::get<TraceRequest>(trace->records[0]);
  EXPECT_EQ(a.spec.arrival_ns, 5);
  EXPECT_EQ(a.spec.max_tokens, 2) << "the output's length unless the file says more";
  ASSERT_EQ(a.spec.prompt.runs.size(), 2u);
  EXPECT_EQ(a.spec.prompt.runs[1], (TokenRun{TokenRun::Kind::seeded, 9, 3, 4}));
  const auto& b = std::get<TraceRequest>(trace->records[1]);
  EXPECT_EQ(b.after, std::vector<std::string>{"a"});
  EXPECT_EQ(b.delay_ns, 3);
  EXPECT_EQ(b.spec.prompt.size(), 1030);
  ASSERT_EQ(b.spec.prompt.runs.size(), 3u);
  EXPECT_EQ(b.spec.prompt.runs[1], (TokenRun{TokenRun::Kind::symbolic, 5, 0, 512}));
  EXPECT_EQ(b.spec.prompt.runs[2], (TokenRun{TokenRun::Kind::symbolic, 9, 0, 6}));
  EXPECT_EQ(b.output.tokens, (std::vector<std::int32_t>{1, 2, 50000}));
  EXPECT_EQ(b.abort->after_tokens, 1);
  EXPECT_EQ(b.spec.priority, -1);
  EXPECT_EQ(b.spec.cache_salt, "s");
  EXPECT_EQ(trace_to_text(*trace), kTrace);
}

// One request of each kind of prompt, output and arrival that the types can hold.
Trace trace_of_everything() {
  Trace trace;
  trace.header.source = {.kind = "hand", .name = "all \"kinds\"", .seed = ~std::uint64_t{0}};
  trace.header.ids = {.block_tokens = 4, .tail = IdTail::floor};
  EngineConfig config;
  config.engine = "vllm-0.33.0";
  config.policy = SchedulingPolicy::priority;
  config.spec_method = SpecMethod::eagle;
  config.mamba_cache_mode = MambaCacheMode::align;
  config.hash_algorithm = HashAlgorithm::sha256_cbor;
  trace.header.engine = {.options = all_engine_options(config), .num_blocks = 77};
  const auto add = [&trace](Prompt prompt) -> TraceRequest& {
    TraceRequest request;
    request.spec.name = fmt::format("r{}", trace.records.size());
    request.spec.prompt = std::move(prompt);
    request.spec.arrival_ns = 100;
    request.spec.max_tokens = 1;
    return std::get<TraceRequest>(trace.records.emplace_back(request));
  };
  using Kind = TokenRun::Kind;
  const auto prompt_of = [](std::vector<TokenRun> runs, std::vector<std::int32_t> tokens = {}) {
    return Prompt{.runs = std::move(runs), .tokens = std::move(tokens)};
  };
  add(prompt_of({{Kind::seeded, 1, 0, 5}, {Kind::seeded, 1, 7, 2}}));
  add(*prompt_of_hash_ids({3, 4, 9}, 12, *trace.header.ids, 1));
  add(*prompt_of_hash_ids({3, 4, 9}, 15, *trace.header.ids, 2));
  add(prompt_of({{Kind::literal, 0, 0, 3}}, {5, 0, 2'000'000'000}));
  add(private_prompt(9, 4));
  add(private_prompt(9, 4)).spec.name = "private tokens of another request";
  add(prompt_of({{Kind::seeded, 8, 0, 2},
                 {Kind::literal, 0, 0, 1},
                 {Kind::symbolic, ~0ull, 1, 2},
                 {Kind::repeated, 9, 0, 3},
                 {Kind::literal, 0, 1, 2}},
                {4, 5, 6}));
  add(prompt_of({{Kind::symbolic, 3, 1, 4}})).output = {.length = 1, .tokens = {}, .fill = 7};
  TraceRequest& stopped = add(private_prompt(9, 8));
  stopped.spec.max_tokens = stopped.output.length + 1;
  stopped.spec.stop_token_ids = {5, 4};
  trace.records.emplace_back(TraceControl{.t_ns = 200});
  trace.records.emplace_back(TraceControl{.t_ns = 200, .preempts_running = true});
  trace.records.emplace_back(TraceControl{
      .kind = TraceControl::Kind::pause_state, .t_ns = 200, .pause_state = PauseState::paused_all});
  TraceRequest& last = add(private_prompt(8, 8));
  last.spec.arrival_ns = 0;
  last.after = {"r0", "r1"};
  last.delay_ns = 12;
  last.spec.max_tokens = 5;
  last.spec.eos_token = 3;
  last.spec.stop_token_ids = {4, 5};
  // A field added to RequestSpec stops this from compiling: it wants a key, and a value here.
  [[maybe_unused]] const auto& [name, prompt, max_tokens, arrival_ns, priority, eos, stop, salt,
                                keys, min_tokens, repetition, skips] = last.spec;
  last.spec.cache_salt = "\xc3\xa9";
  last.spec.keys = {.lora = {"sql", 1, "/a"}, .mm = {{"cat", 0, 2, "image", {{0, 1}}}}};
  last.spec.keys.embeds.digest_tokens = 4;
  last.spec.keys.embeds.digests = {"01", "02"};
  last.spec.min_tokens = 2;
  last.spec.repetition_detection = {4, 1, 3};
  last.spec.skip_reading_prefix_cache = true;
  last.output.length = 4;
  last.abort = AbortPlan{.t_ns = 400, .after_tokens = {}};
  return trace;
}

TEST(RequestTrace, WritingAndReadingIsTheIdentity) {
  const Trace trace = trace_of_everything();
  const std::string path = temporary_path("trace");
  ASSERT_TRUE(write_output(path, trace_to_text(trace)));
  const auto read = read_trace(path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->header, trace.header);
  ASSERT_EQ(read->records.size(), trace.records.size());
  for (std::size_t i = 0; i < trace.records.size(); ++i) {
    EXPECT_EQ(read->records[i], trace.records[i]) << "record " << i;
  }
  EXPECT_EQ(trace_to_text(*read), read_whole(path));
}

TEST(RequestTrace, TheExampleInTheDocumentationIsATrace) {
  const std::string page = read_whole(LOCKSTEP_SOURCE_DIR "/docs/formats.md");
  std::string example;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("    {")) example += line.substr(4) + "\n";
  }
  const auto trace = read_trace(write_temporary(example));
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->records.size(), 2u);
  EXPECT_EQ(trace_to_text(*trace), example);
}

TEST(RequestTrace, PrivateTokensAreNobodyElses) {
  // 2^31 requests and hash ids below 2^31 have token ids of their own as well.
  EXPECT_NE(private_seed(0), private_seed(1));
  EXPECT_EQ(private_seed(0) >> 63, 1u);
  EXPECT_GE(private_seed(0) & 0xffffffff, std::uint64_t{1} << 31);
}

TEST(RequestTrace, ACarriageReturnBeforeTheNewlineIsNoPartOfTheRecord) {
  std::string text;
  for (const char c : kTrace) text += c == '\n' ? "\r\n" : std::string(1, c);
  const auto trace = read_trace(write_temporary(text));
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace_to_text(*trace), kTrace);
}

class RefusedTrace : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedTrace, NamesFileLineAndField) {
  const std::string path = write_temporary(GetParam().text);
  EXPECT_EQ(refusal(read_trace(path), path), GetParam().message) << GetParam().what;
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedTrace,
    ::testing::Values(
        Refused{"another unit of time", changed(kTrace, "\"ns\"", "\"ms\""),
                "FILE:1: field `time`: found \"ms\"; expected \"ns\", the only unit of time here"},
        Refused{"a version of the future", changed(kTrace, "_trace\":1", "_trace\":9"),
                "FILE:1: field `lockstep_trace`: found 9; expected the integer 1"},
        Refused{"an unknown tail", changed(kTrace, "\"ceil\"", "\"padded\""),
                "FILE:1: field `ids.tail`: found \"padded\"; expected one of \"ceil\", \"floor\""},
        Refused{"no end line", kTraceHeader + kFirst + kSecond,
                "FILE:4: found the end of the file; expected a record or "
                "{\"end\":true,\"records\":N}"},
        Refused{"a record lost", changed(kTrace, kFirst, ""),
                "FILE:2: field `after[0]`: found \"a\"; expected an earlier request of this trace"},
        Refused{"wrong number of records", changed(kTrace, "\"records\":2", "\"records\":3"),
                "FILE:4: field `records`: found 3; expected the integer 2"},
        Refused{"a name twice", changed(kTrace, "\"id\":\"b\"", "\"id\":\"a\""),
                "FILE:3: field `id`: found \"a\"; expected a name that no earlier request has"},
        Refused{"an empty name", changed(kTrace, "\"id\":\"a\"", "\"id\":\"\""),
                "FILE:2: field `id`: found \"\"; expected a string that is not empty"},
        Refused{"a negative time", changed(kTrace, "\"t\":5", "\"t\":-5"),
                "FILE:2: field `t`: found -5; expected an integer from 0 to 9223372036854775807"},
        Refused{"a time with a fraction", changed(kTrace, "\"t\":5", "\"t\":5.5"),
                "FILE:2: field `t`: found 5.5; expected an integer from 0 to 9223372036854775807"},
        Refused{"time that goes back",
                kTraceHeader + kFirst +
                    changed(changed(kFirst, "\"a\"", "\"c\""), "\"t\":5", "\"t\":4") + kTraceEnd,
                "FILE:3: field `t`: found 4; expected at least 5, the time of the record before"},
        Refused{"neither t nor after", changed(kTrace, "\"t\":5,", ""),
                "FILE:2: found no key \"t\"; expected it"},
        Refused{"both t and after", changed(kTrace, "\"delay\":3", "\"delay\":3,\"t\":9"),
                "FILE:3: found both \"t\" and \"after\"; expected one of them"},
        Refused{
            "too few ids", changed(kTrace, "[[4,2],[9,1]]", "[[4,2]]"),
            "FILE:3: field `prompt.ids`: found 2 ids for 1030 tokens; expected 3 (blocks of 512, "
            "tail ceil)"},
        Refused{
            "too many ids", changed(kTrace, "[[4,2],[9,1]]", "[[4,2000000000]]"),
            "FILE:3: field `prompt.ids`: found more than 3 ids for 1030 tokens; expected 3 (blocks "
            "of 512, tail ceil)"},
        Refused{
            "ids without a convention",
            changed(kTrace, ",\"ids\":{\"block\":512,\"tail\":\"ceil\"}", ""),
            "FILE:3: field `prompt.ids`: found hash ids; expected none, since the header has no "
            "\"ids\""},
        Refused{"a prompt that is a string", changed(kTrace, "[[7,20],[9,3,4]]", "\"hello\""),
                "FILE:2: field `prompt`: found \"hello\"; expected segments [[seed, n],...] or an "
                "object "
                "with ids, tokens, length or runs"},
        Refused{"a prompt of no tokens", changed(kTrace, "[[7,20],[9,3,4]]", "{\"tokens\":[]}"),
                "FILE:2: field `prompt`: found an object; expected a prompt of at least one token"},
        Refused{"a prompt too long to count",
                changed(kTrace, "[[7,20],[9,3,4]]", "[[7,2147483647],[9,1]]"),
                "FILE:2: field `prompt`: found a prompt of 2147483648 tokens; expected at most "
                "2147483647"},
        Refused{
            "a hash id for each of very many tokens",
            changed(changed(kTrace, "\"block\":512", "\"block\":1"),
                    "[[4,2],[9,1]],\"length\":1030", "[[4,2000000000]],\"length\":2000000000"),
            "FILE:3: field `prompt.ids`: found a prompt of 2000000000 hash ids; expected at most "
            "4194304"},
        Refused{
            "a negative token", changed(kTrace, "[1,2,50000]", "[-1,2,50000]"),
            "FILE:3: field `output.tokens[0]`: found -1; expected an integer from 0 to 2147483647"},
        Refused{"no output", changed(kTrace, "{\"length\":2}", "{\"length\":0}"),
                "FILE:2: field `output.length`: found 0; expected an integer from 1 to 2147483647"},
        Refused{"more output than max_tokens",
                changed(kTrace, "\"max_tokens\":9", "\"max_tokens\":2"),
                "FILE:3: field `output`: found 3 output tokens; expected at most max_tokens, 2"},
        Refused{"less output than min_tokens",
                changed(kTrace, "{\"length\":2}", "{\"length\":2},\"min_tokens\":3"),
                "FILE:2: field `output`: found 2 output tokens; expected at least min_tokens, 3"},
        Refused{"an output that nothing ends",
                changed(kTrace, "{\"length\":2}", "{\"length\":2},\"max_tokens\":3"),
                "FILE:2: field `output`: found 2 output tokens and nothing that ends the request "
                "there; "
                "expected max_tokens 2 or an eos token at the end"},
        Refused{"tokens after the eos token", changed(kTrace, "[1,2,50000]", "[1,50000,50000]"),
                "FILE:3: field `output`: found 50000, a token that ends the request, at output "
                "token 1 of 3; "
                "expected it at the end only"},
        Refused{
            "stop tokens throughout",
            changed(kTrace, "{\"length\":2}", "{\"length\":2,\"fill\":3},\"stop_token_ids\":[3]"),
            "FILE:2: field `output`: found 3, a token that ends the request, at output token 0 of "
            "2; expected it at the end only"},
        Refused{
            "no stop token",
            changed(kTrace, "{\"length\":2}", "{\"length\":2},\"stop_token_ids\":[]"),
            "FILE:2: field `stop_token_ids`: found an array of 0 elements; expected at least one "
            "token, or no such key"},
        Refused{"an abort of two kinds",
                changed(kTrace, "\"after_tokens\":1", "\"after_tokens\":1,\"t\":9"),
                "FILE:3: field `abort`: expected one of \"t\" and \"after_tokens\""},
        Refused{
            "an abort before the arrival",
            changed(kTrace, "{\"length\":2}", "{\"length\":2},\"abort\":{\"t\":4}"),
            "FILE:2: field `abort.t`: found 4; expected an integer from 5 to 9223372036854775807"},
        Refused{"a priority of 65 bits",
                changed(kTrace, "\"priority\":-1", "\"priority\":9223372036854775808"),
                "FILE:3: field `priority`: found 9223372036854775808; expected an integer from "
                "-9223372036854775808 to 9223372036854775807"},
        Refused{"an unknown control",
                kTraceHeader + "{\"control\":\"pause\",\"t\":1}\n" + kTraceEnd,
                "FILE:2: field `control`: found \"pause\"; expected one of "
                "\"reset_prefix_cache\", \"pause_state\""},
        Refused{"a pause without a state",
                kTraceHeader + "{\"control\":\"pause_state\",\"t\":1}\n" + kTraceEnd,
                "FILE:2: found no key \"state\"; expected it"},
        Refused{"a record that is not an object", kTraceHeader + "[]\n" + kTraceEnd,
                "FILE:2: found an array of 0 elements; expected an object"},
        Refused{"an unknown key", changed(kTrace, "\"salt\"", "\"slat\""),
                "FILE:3: field `slat`: found an unknown key; expected a known key, or one that "
                "starts with x_"}));

TEST(SampleTrace, TheBundledFileIsWhatTheGeneratorMakes) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const std::string made = trace_to_text(make_sample_trace({}));
  const std::string path = temporary_path("shared_prefixes.jsonl");
  ASSERT_TRUE(write_output(path, made));
  EXPECT_TRUE(made == read_whole((*samples / "shared_prefixes.jsonl").string()))
      << "the generator makes " << path << " instead; when that is meant, copy it over the sample";
  EXPECT_LT(made.size(), 150'000u);
}

TEST(SampleTrace, ItHoldsWhatItIsForAndIsAValidTrace) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples);
  const auto trace = read_trace((*samples / "shared_prefixes.jsonl").string());
  ASSERT_TRUE(trace) << trace.error().message;
  int requests = 0, controls = 0, ties = 0, tiny = 0, salts = 0, priorities = 0, aborts = 0;
  int closed_loop = 0, explicit_tokens = 0, eos = 0, one_token = 0;
  std::int64_t last_t_ns = -1;
  for (const TraceRecord& record : trace->records) {
    const auto* request = std::get_if<TraceRequest>(&record);
    controls += request == nullptr;
    if (request == nullptr) continue;
    ++requests;
    const RequestSpec& spec = request->spec;
    if (request->after.empty()) {
      ties += spec.arrival_ns == last_t_ns;
      last_t_ns = spec.arrival_ns;
    }
    tiny += spec.prompt.size() <= 3;
    salts += !spec.cache_salt.empty();
    priorities += spec.priority != 0;
    aborts += request->abort.has_value();
    closed_loop += !request->after.empty();
    explicit_tokens += !request->output.tokens.empty();
    eos += spec.eos_token.has_value();
    one_token += request->output.length == 1;
    EXPECT_LE(spec.prompt.size() + spec.max_tokens,
              trace->header.engine->options.config.max_model_len);
  }
  EXPECT_EQ(requests, 320);
  EXPECT_EQ(controls, 1);
  EXPECT_GT(ties, 100);
  for (const int count :
       {tiny, salts, priorities, aborts, closed_loop, explicit_tokens, eos, one_token}) {
    EXPECT_GE(count, 8);
  }
}

TEST(SampleTrace, AnotherSeedMakesAnotherTraceThatIsValidToo) {
  for (std::uint64_t seed = 2; seed < 40; ++seed) {
    const Trace trace = make_sample_trace({.seed = seed, .num_requests = 100});
    const auto read = read_trace(write_temporary(trace_to_text(trace)));
    ASSERT_TRUE(read) << seed << ": " << read.error().message;
    EXPECT_EQ(*read, trace) << seed;
  }
}

}  // namespace
}  // namespace lockstep
