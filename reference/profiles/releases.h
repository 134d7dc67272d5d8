// The releases of vLLM that have a profile, with what the model covers of each. A release is here
// once its decisions were recorded and agree with the model's (docs/engines.md).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"

namespace lockstep {

// A release's layout of a layer's cache: get_kv_cache_shape of v1/attention/backends/flash_attn.py,
// since 0.29.0 v1/kv_cache_interface.py. The planner follows only `overlaid`; all other releases
// are planned as 0.22.1, and why_pages_differ() reports the difference.
enum class PageFormat : std::uint8_t {
  keys_first,  // [2, blocks, ...]: all keys, then all values
  by_block,    // [blocks, 2, ...]: a block's keys, then its values
  together,    // [blocks, heads, tokens, 2 * size]: one content for both
  six_orders,  // [layers, blocks, heads, tokens, content] in one of six orders
  overlaid,    // the same, with all groups in one allocation from its first byte
};

// One release. Patch releases with the same decisions share a profile.
struct Release {
  std::string_view name;    // "vllm-0.22.1"
  std::string_view equals;  // a patch release with the same decisions, or empty
  PageFormat page_format;
  // True if the model covers the decisions that follow from a KV connector's answers and reports.
  // Otherwise a run with a connector is refused.
  bool models_connectors;
  // The model runner of a model with a draft model, by default (config/vllm.py,
  // use_v2_model_runner); unknown: this release's source was not read for it.
  DraftRunner draft_runner;
  // What the release does and the model does not: one line each.
  std::span<const std::string_view> not_modelled;
};

// Oldest first.
std::span<const Release> releases();
// The profile of each release, in the same order.
std::span<const EngineProfile> engine_profiles();
// By name, or by the name of a patch release with the same decisions. Null: no such release.
const Release* find_release(std::string_view name);
// The releases of a range "vllm-A..vllm-B", oldest first. Errors: not two releases in that order.
Result<std::span<const Release>> releases_in(std::string_view range);
// The newest release that is not newer than this version of vLLM ("0.33.1.dev7+g1a2b3c"); the
// oldest if all are newer. A version that is not a number ("dev") means the newest.
const Release& nearest_release(std::string_view version);
// The oldest release that is modelled with KV connectors.
const EngineProfile& connector_profile();
// Names for messages: "vllm-0.22.1, vllm-0.33.0"; the second lists releases modelled with
// connectors.
std::string release_names();
std::string names_of_connector_releases();

// The text for lists.
std::string_view name_of(PageFormat format);
// The release whose rules plan the memory of every release before the overlaid plan.
inline constexpr std::string_view kPlannerOfTensors = "vllm-0.22.1";
// The difference that a replay with 0.22.1's pages leaves out: the release's own layout. Empty:
// none.
std::string why_pages_differ(const Release& release);
// True if the release plans groups that overlay one allocation (0.33.0 and later).
bool overlays_groups(const Release& release);
bool overlays_groups(std::string_view release_name);
// What the model decides as the engine does, under every profile: one line each.
std::span<const std::string_view> modelled();

}  // namespace lockstep
