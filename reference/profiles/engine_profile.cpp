#include "reference/profiles/engine_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <ranges>

#include "base/check.h"
#include "base/memo.h"
#include "base/number_text.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"

namespace lockstep {

namespace {

// Removes and returns the text before `end`, which is also removed; all of it if `end` is missing.
std::string_view take_word(std::string_view& text, char end) {
  const std::size_t at = std::min(text.find(end), text.size());
  const std::string_view word = text.substr(0, at);
  text.remove_prefix(std::min(at + 1, text.size()));
  return word;
}

// Errors: an unknown policy, or a word that is not one of its values.
Result<void> set_policy(EngineProfile& profile, std::string_view name, std::string_view word) {
  const Policy* policy = find_policy(name);
  if (policy == nullptr) return fail("unknown policy {}; `lockstep engines` lists them", name);
  const auto value = std::ranges::find(policy->values, word, &PolicyValue::word);
  if (value == policy->values.end())
    return fail("{}={}: expected {}", name, word, joined(policy->values, &PolicyValue::word));
  policy->set(profile, value->value);
  return {};
}

// Sets the policies that repair a finding, or all findings. Does nothing if the profile does not
// show the finding. A repair may expose another finding, so `all` repeats until none is left.
Result<void> repair(EngineProfile& profile, std::string_view which) {
  int number = 0;
  const auto [end, error] = std::from_chars(which.data(), which.data() + which.size(), number);
  const bool is_number = error == std::errc() && end == which.data() + which.size();
  const bool is_all = which == "all";
  const auto is_meant = [&](const FindingPolicies& finding) {
    return !finding.repairs.empty() && (is_all || (is_number && finding.finding == number));
  };
  if (std::ranges::none_of(finding_policies(), is_meant))
    return fail(
        "without={}: expected `all`, or the number of a finding of docs/findings.md that a policy "
        "repairs",
        which);
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (const FindingPolicies& finding : finding_policies()) {
      if (!is_meant(finding) || !can_show(profile, finding)) continue;
      for (const PolicyIs& is : finding.repairs)
        LS_RETURN_IF_ERROR(set_policy(profile, is.policy, is.word));
      goes_on = is_all;
    }
  }
  return {};
}

// The release, then what differs from it, in the table's order: equal profiles have equal names,
// however they were described.
std::string canonical_name(const EngineProfile& profile, const EngineProfile& release) {
  std::string name(release.name);
  for (const Policy* policy : differences(profile, release))
    name += fmt::format(",{}={}", policy->name, policy->word(policy->get(profile)));
  return name;
}

// A release without differences, also under the name of an equal patch release.
const EngineProfile* find_plain(std::string_view name) {
  // The newest is looked up most.
  for (const EngineProfile& profile : std::views::reverse(engine_profiles()))
    if (profile.name == name) return &profile;
  const Release* release = find_release(name);
  return release == nullptr ? nullptr : find_plain(release->name);
}

// Applies the parts of a description from left to right, so a later one wins.
Result<EngineProfile> made_of(std::string_view description) {
  std::string_view rest = description;
  const std::string_view name = take_word(rest, ',');
  const EngineProfile* release = find_plain(name);
  if (release == nullptr)
    return fail("{} has no profile; known: {}", name.empty() ? "an engine without a name" : name,
                release_names());
  EngineProfile profile = *release;
  while (!rest.empty()) {
    std::string_view word = take_word(rest, ',');
    const std::string_view policy = take_word(word, '=');
    const auto done =
        policy == "without" ? repair(profile, word) : set_policy(profile, policy, word);
    if (!done) return fail("{}: {}", description, done.error().message);
  }
  profile.name = canonical_name(profile, *release);
  return profile;
}

}  // namespace

// Releases are static. Other profiles are kept by description, since callers store pointers to
// them.
Result<const EngineProfile*> parse_engine(std::string_view description) {
  static thread_local const EngineProfile* last = nullptr;  // most callers ask for it again
  if (last != nullptr && last->name == description) return last;
  if (const EngineProfile* release = find_plain(description)) return last = release;
  static Memo<EngineProfile> made;
  if (const EngineProfile* known = made.find(description)) return known;
  LS_ASSIGN_OR_RETURN(EngineProfile profile, made_of(description));
  return &made.keep(description, std::move(profile));
}

const EngineProfile* find_engine_profile(std::string_view description) {
  const auto profile = parse_engine(description);
  return profile ? *profile : nullptr;
}

const EngineProfile& engine_profile(std::string_view description) {
  const auto profile = parse_engine(description);
  LS_CHECK(profile.has_value(), "{}", profile.error().message);
  return **profile;
}

// One token per MTP module, and only with prefix caching: without it no block is hashed.
std::int32_t hash_lookahead_of(const EngineConfig& config, const EngineProfile& profile) {
  if (config.num_hash_lookahead_tokens != kEngineHashLookahead)
    return config.num_hash_lookahead_tokens;
  return profile.eagle_hits == EagleHits::lookahead_hash &&
                 config.spec_method == SpecMethod::eagle && config.enable_prefix_caching
             ? config.num_prefill_lookahead_tokens
             : 0;
}

// 0, not kEngineHashLookahead: a stated value, which hash_lookahead_of() returns.
EngineConfig beside_connector(EngineConfig config) {
  if (config.spec_method == SpecMethod::eagle) config.num_hash_lookahead_tokens = 0;
  return config;
}

}  // namespace lockstep
