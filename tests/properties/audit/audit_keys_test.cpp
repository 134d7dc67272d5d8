// A hit between requests whose keys differ is a wrong read, and the finding names the key.
#include <gtest/gtest.h>

#include <string>

#include "properties/audit/audit_requests.h"
#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

struct Keys {
  std::string cache_salt;
  RequestKeys others;
};

// "a" computes six tokens and leaves; "b" has the same tokens and hits its block of four.
Recording hit_of(const Keys& a, const Keys& b) {
  Recording recording = recording_of_one_group("0.22.1", 4, 6);
  const auto add_step = [&](const std::string& name, const Keys& keys, BlockId last,
                            std::int32_t computed) {
    RecordedStep step;
    step.step = std::ssize(recording.steps);
    RecordedEvent added = added_request(name, 6, 1);
    added.request.cache_salt = keys.cache_salt;
    added.request.keys = keys.others;
    step.before = {added};
    if (step.step > 0) step.finished = {"a"};
    step.scheduled = {scheduled_row(name, computed, 6 - computed, {{{BlockId{1}, last}}})};
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
const Keys kAdapted{.cache_salt = "", .others = {.lora = {"sql", 1, "/a"}}};
const Keys kMoved{.cache_salt = "", .others = {.lora = {"sql", 1, "/b"}}};
const Keys kCat{.cache_salt = "", .others = {.mm = {{"cat", 1, 2, "image"}}}};
const Keys kCatLater{.cache_salt = "", .others = {.mm = {{"cat", 2, 2, "image"}}}};
const Keys kDog{.cache_salt = "",
                .others = {.mm = {{"cat", 1, 2, "image"}, {"dog", 3, 1, "image"}}}};

Keys embedded(std::uint64_t seed) {
  PromptEmbeds embeds;
  embeds.width = 2;
  embeds.rows = {{.seed = seed, .count = 4}};
  embeds.places = {{0, 4}};
  return {.cache_salt = "", .others = {.embeds = embeds}};
}

Keys digested(const std::string& digest) {
  PromptEmbeds embeds;
  embeds.digests = {digest, "ff"};
  embeds.digest_tokens = 4;
  return {.cache_salt = "", .others = {.embeds = embeds}};
}
const Keys kEmbedded = embedded(1);
const Keys kEmbeddedElse = embedded(2);

TEST(AuditKeys, AHitBetweenRequestsOfEqualKeysIsClean) {
  for (const Keys& keys : {kNone, kSalted, kAdapted, kCat, kDog, kEmbedded})
    EXPECT_TRUE(audit(hit_of(keys, keys)).empty());
}

TEST(AuditKeys, AHitBetweenRequestsOfUnlikeKeysIsNamedByTheKey) {
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
       ": the same tokens with other prompt embeddings at token 0 (row 0 of seed 1 with 2 "
       "columns there, row 0 of seed 2 with 2 columns here)"},
      {digested("01"), digested("02"),
       ": the same tokens with other prompt embeddings at token 0 (01 there, 02 here)"},
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

// Inputs after the hit do not matter.
TEST(AuditKeys, AnImageBehindTheHitIsNoDifference) {
  const Keys behind{.cache_salt = "", .others = {.mm = {{"cat", 4, 2, "image"}}}};
  EXPECT_TRUE(audit(hit_of(kNone, behind)).empty());
}

TEST(AuditKeys, NoTwoWaysToBeKeyedAreOneContent) {
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
