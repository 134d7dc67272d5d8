// Engine profiles in words, for `lockstep engines` and the documentation's test.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reference/profiles/engine_profile.h"

namespace lockstep {

// One policy of a profile: the name of its field, and what the profile says.
struct PolicyText {
  std::string_view name;
  std::string value;
};
// In the order of the fields.
std::vector<PolicyText> policies_of(const EngineProfile& profile);

// What is decided as the engine decides it, under every profile: one line each.
std::span<const std::string_view> modelled();

}  // namespace lockstep
