// A hit between requests whose keys differ is a wrong read, and the finding names the key.
#include <gtest/gtest.h>

#include <string>

#include "properties/audit/prompt_content.h"
#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

struct Keys {
  std::string cache_salt;
  RequestKeys others;
};

// "a" computes six tokens and leaves; "b" has the same tokens and hits its block of four.
Recording hit_of(const Keys& a, const Keys& b) {
  Recording recording;
  recording.header.engine = {"vllm", "0.22.1"};
  recording.header.groups.resize(1);
  recording.header.groups[0].spec.block_size = 4;
  recording.header.num_blocks = 6;
  recording.header.scheduler_block_size = 4;
  recording.header.hash_block_size = 4;
  const auto add_step = [&](const std::string& name, const Keys& keys, BlockId last,
                            std::int32_t computed) {
    RecordedStep step;
    step.step = std::ssize(recording.steps);
    RecordedEvent added;
    added.request.name = name;
    added.request.prompt.append({TokenRun::Kind::seeded, 7, 0, 6});
    added.request.max_tokens = 1;
    added.request.cache_salt = keys.cache_salt;
    added.request.keys = keys.others;
    step.before = {added};
    if (step.step > 0) step.finished = {"a"};
    RecordedScheduled row;
    row.id = name;
    row.tokens = 6 - computed;
    row.is_new = true;
    row.computed = computed;
    row.blocks = {{BlockId{1}, last}};
    step.scheduled = {row};
    step.running = {name};
    step.free_blocks = 3;
    step.sampled = {{name, {9}}};
    step.stopped = {{name, "length"}};
    recording.steps.push_back(step);
  };
  add_step("a", a, BlockId{2}, 0);
  add_step("b", b, BlockId{3}, 4);
  recording.end.steps = 2;
  return recording;
}

const Keys kNone;
const Keys kSalted{.cache_salt = "s", .others = {}};
const Keys kAdapted{.cache_salt = "", .others = {.lora = "sql", .lora_path = "/a"}};
const Keys kMoved{.cache_salt = "", .others = {.lora = "sql", .lora_path = "/b"}};
const Keys kCat{.cache_salt = "", .others = {.multimodal = {{"cat", 1, 2}}}};
const Keys kCatLater{.cache_salt = "", .others = {.multimodal = {{"cat", 2, 2}}}};
const Keys kDog{.cache_salt = "", .others = {.multimodal = {{"cat", 1, 2}, {"dog", 3, 1}}}};
const Keys kEmbedded{.cache_salt = "", .others = {.prompt_embeds = {{"01", 0, 4}}}};
const Keys kEmbeddedElse{.cache_salt = "", .others = {.prompt_embeds = {{"02", 0, 4}}}};

TEST(AuditKeys, a_hit_between_requests_of_equal_keys_is_clean) {
  for (const Keys& keys : {kNone, kSalted, kAdapted, kCat, kDog, kEmbedded})
    EXPECT_TRUE(audit(hit_of(keys, keys)).empty());
}

TEST(AuditKeys, a_hit_between_requests_of_unlike_keys_is_named_by_the_key) {
  struct Case {
    Keys a, b;
    std::string text;
    int token = 0;
  };
  const Case cases[] = {
      {kNone, kSalted, ": the same tokens under another cache salt (none there, s here)"},
      {kAdapted, kNone, ": the same tokens under another adapter (sql there, none here)"},
      {kAdapted, kMoved,
       ": the same tokens under an adapter from another place (/a there, /b here)"},
      {kNone, kCat,
       ": the same tokens with another image at token 1 (none there, cat from token 1 on here)", 1},
      {kCat, kCatLater,
       ": the same tokens with another image at token 1 (cat from token 1 on there, none here)", 1},
      {kCat, kDog,
       ": the same tokens with another image at token 3 (none there, dog from token 3 on here)", 3},
      {kEmbedded, kEmbeddedElse,
       ": the same tokens with other prompt embeddings at token 0 (01 from token 0 on there, 02 "
       "from token 0 on here)"},
  };
  for (const Case& c : cases) {
    const auto findings = audit(hit_of(c.a, c.b));
    ASSERT_EQ(findings.size(), 1u) << c.text;
    EXPECT_EQ(findings[0].rule, AuditRule::attention_read);
    EXPECT_EQ(findings[0].step, 1);
    EXPECT_EQ(findings[0].request, "b");
    EXPECT_EQ(findings[0].token, c.token);
    EXPECT_NE(findings[0].what.find(c.text), std::string::npos) << findings[0].what;
  }
}

// What lies behind the hit is nobody else's business.
TEST(AuditKeys, an_image_behind_the_hit_is_no_difference) {
  const Keys behind{.cache_salt = "", .others = {.multimodal = {{"cat", 4, 2}}}};
  EXPECT_TRUE(audit(hit_of(kNone, behind)).empty());
}

TEST(AuditKeys, no_two_ways_to_be_keyed_are_one_content) {
  const std::vector<std::int32_t> tokens = {1, 2, 3, 4};
  const std::vector<Keys> all = {kNone, kSalted,   kAdapted,      kMoved,
                                 kCat,  kCatLater, kEmbeddedElse, kEmbedded};
  for (const Keys& a : all)
    for (const Keys& b : all) {
      const auto contents = [&](const Keys& keys) {
        return contents_of({"r", keys.cache_salt, keys.others}, tokens).back();
      };
      EXPECT_EQ(contents(a) == contents(b), &a == &b);
    }
}

}  // namespace
}  // namespace lockstep
