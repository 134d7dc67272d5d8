#include "traces/formats/engine_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/line_reader.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"

namespace lockstep {
namespace {

constexpr std::size_t kEngineFileMax = 1 << 20;

}  // namespace

std::string read_policies(JsonValue value) {
  std::string description;
  JsonObject object = value.object();
  for (JsonEntry& entry : object.entries()) {
    const Policy* policy = find_policy(entry.key);
    if (policy == nullptr) {
      entry.value.refuse("a policy that `lockstep engines` lists");
      break;
    }
    const std::string_view word = entry.value.nonempty_string();
    if (std::ranges::find(policy->values, word, &PolicyValue::word) == policy->values.end()) {
      entry.value.refuse("a value that `lockstep engines` lists for this policy");
      break;
    }
    description += fmt::format(",{}={}", policy->name, word);
  }
  return description;
}

void write_policies(JsonWriter& out, const EngineProfile& profile) {
  out.begin_object();
  for (const Policy* policy : differences(profile, engine_profile(profile.release->name)))
    out.string(policy->name, policy->word(policy->get(profile)));
  out.end_object();
}

Result<const EngineProfile*> read_engine_file(const std::string& path) {
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kEngineFileMax));
  JsonReader reader(path);
  if (!reader.parse(text)) return reader.failure();
  JsonObject object = reader.root().object();
  object.required("engine_file").integer(1, 1);
  std::string description(object.required("base").nonempty_string());
  if (auto policies = object.optional("policies")) description += read_policies(policies);
  object.finish();
  if (!reader.ok()) return reader.failure();
  auto profile = parse_engine(description);
  if (!profile) return fail(fmt::format("{}: base: {}", path, profile.error().message));
  return profile;
}

std::string engine_file_text(const EngineProfile& profile) {
  JsonWriter out;
  out.begin_object().key("engine_file").integer(1).string("base", profile.release->name);
  out.key("policies");
  write_policies(out, profile);
  out.end_object();
  return out.take_line();
}

Result<std::string> engine_named(std::string_view where, const std::string& text) {
  const auto profile = text.ends_with(".json") ? read_engine_file(text) : parse_engine(text);
  if (!profile) return fail(fmt::format("{}: {}", where, profile.error().message));
  return (*profile)->name;
}

}  // namespace lockstep
