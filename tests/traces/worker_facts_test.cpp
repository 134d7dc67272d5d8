// Facts of a worker in a recording: read in full, written back byte for byte, and nothing goes
// through that is not as documented.
#include "traces/formats/worker_facts.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "tests/traces/text_files.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

using testing_files::changed;
using testing_files::refusal;
using testing_files::write_temporary;

const std::string kDigest = "\"0123456789abcdef0123456789abcdef\"";
const std::string kFactsHeader =
    R"({"schedule_recording":1,"engine":{"name":"vllm","version":"0.33.0"},"family":"f","seed":0,)"
    R"("config":{"max_num_seqs":4,"block_size":4},"groups":[{"layers":["l0"],)"
    R"("spec":{"type":"full",)"
    R"("block_size":4,"num_kv_heads":2,"head_size":64,"dtype":"bf16"}}],"num_blocks":9,)"
    R"("scheduler_block_size":4,"hash_block_size":4,"worker_facts":{"version":1,)"
    R"("worked_by":{"engine":{"name":"vllm","version":"0.33.0"},"runner":"v2"}}})"
    "\n";
const std::string kFacts =
    R"({"rows":[["r0",5]],"positions":[0,5],"groups":[{"tables":[[2,1]],)"
    R"("slots":[8,4,4,1]}],"zeroed":[1],"changed":[{"tensor":0,"block":1,"digest":)" +
    kDigest + R"(,"slots":[0],"beside":true}]})";
const std::string kWithFacts =
    kFactsHeader +
    R"({"step":0,"scheduled":[{"id":"r0","tokens":5,"new":true,"computed":0,"blocks":[[2,1]]}],)"
    R"("running":["r0"],"waiting":[],"free_blocks":6,"sampled":{},"facts":)" +
    kFacts + "}\n" + "{\"end\":true,\"steps\":1,\"unfinished\":[\"r0\"]}\n";

TEST(WorkerFacts, AreReadAndWrittenBackByteForByte) {
  const auto recording = read_recording(write_temporary(kWithFacts));
  ASSERT_TRUE(recording) << recording.error().message;
  ASSERT_TRUE(recording->header.worker_facts);
  EXPECT_EQ(recording->header.worker_facts->text(), "vllm-0.33.0, runner v2");
  const WorkerStepFacts& facts = recording->steps[0].facts.value();
  EXPECT_EQ(facts.rows, (std::vector<FactRow>{{"r0", 5}}));
  EXPECT_EQ(facts.positions, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(facts.groups[0].slots, (std::vector<Slot>{8, 9, 10, 11, 4}));
  EXPECT_EQ(facts.changed[0].slots, (std::vector<std::int32_t>{0}));
  EXPECT_TRUE(facts.changed[0].beside);
  EXPECT_EQ(recording_header_line(recording->header) + recording_step_line(recording->steps[0]) +
                recording_end_line(recording->end),
            kWithFacts);
}

struct Malformed {
  std::string what, from, to, message;
};
void PrintTo(const Malformed& one, std::ostream* out) { *out << one.what; }

class MalformedFacts : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedFacts, AreRefusedWithOneMessage) {
  const std::string path = write_temporary(changed(kWithFacts, GetParam().from, GetParam().to));
  const std::string message = refusal(read_recording(path), path);
  EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    All, MalformedFacts,
    testing::Values(
        Malformed{"of_no_worker",
                  R"(,"worker_facts":{"version":1,)"
                  R"("worked_by":{"engine":{"name":"vllm","version":"0.33.0"},"runner":"v2"}}})",
                  "}", "the header has no \"worker_facts\""},
        Malformed{"of_another_version", "\"worker_facts\":{\"version\":1",
                  "\"worker_facts\":{\"version\":2", "worker_facts.version"},
        Malformed{"a_request_twice", "[[\"r0\",5]]", "[[\"r0\",3],[\"r0\",2]]",
                  "each request once"},
        Malformed{"a_row_of_no_tokens", "[\"r0\",5]", "[\"r0\",0]", "facts.rows"},
        Malformed{"too_few_positions", "\"positions\":[0,5]", "\"positions\":[0,4]",
                  "5 numbers in all"},
        Malformed{"half_a_pair", "[8,4,4,1]", "[8,4,4]", "pairs of a first number and a count"},
        Malformed{"more_slots_than_tokens", "[8,4,4,1]", "[8,4,4,2]", "slots"},
        Malformed{"a_count_without_end", "[8,4,4,1]", "[8,281474976710656]", "slots"},
        Malformed{"a_table_too_many", "[[2,1]],\"slots\"", "[[2,1],[]],\"slots\"",
                  "one table for each of the 1 rows"},
        Malformed{"no_slots", ",\"slots\":[8,4,4,1]", "", "the slots of all tokens"},
        Malformed{"no_groups", R"("groups":[{"tables":[[2,1]],"slots":[8,4,4,1]}],"zeroed")",
                  R"("groups":[],"zeroed")", "facts of each of the 1 groups"},
        Malformed{"a_block_outside_of_the_pool", "\"zeroed\":[1]", "\"zeroed\":[9]", "zeroed"},
        Malformed{"a_short_digest", kDigest, "\"abc\"", "32 hexadecimal digits"},
        Malformed{"slots_out_of_order", "\"slots\":[0]", "\"slots\":[1,0]", "changed"},
        Malformed{"a_slot_outside_of_a_block", "\"slots\":[0]", "\"slots\":[4]", "changed"},
        Malformed{"an_unknown_key", "\"zeroed\":[1]", "\"zeroes\":[1]", "zeroes"}),
    [](const auto& one) { return one.param.what; });

}  // namespace
}  // namespace lockstep
