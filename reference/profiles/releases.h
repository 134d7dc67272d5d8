// The releases of vLLM that have a profile.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"

namespace lockstep {

// How a release lays out a layer's cache: get_kv_cache_shape of
// v1/attention/backends/flash_attn.py, since 0.29.0 v1/kv_cache_interface.py. Only `overlaid` is
// planned this way; all others are planned as 0.22.1.
enum class PageFormat : std::uint8_t {
  keys_first,  // [2, blocks, ...]: all keys, then all values
  by_block,    // [blocks, 2, ...]: a block's keys, then its values
  together,    // [blocks, heads, tokens, 2 * size]: one content for both
  six_orders,  // [layers, blocks, heads, tokens, content], in one of six orders
  overlaid,    // the same, all groups in one allocation from its first byte on
};

struct Release {
  std::string_view name;    // "vllm-0.22.1"
  std::string_view equals;  // a patch release with the same decisions: "vllm-0.22.0", or empty
  PageFormat page_format;
  // Whether this model knows what follows from the answers and reports of a KV connector.
  // Otherwise one is refused.
  bool models_connectors;
  // That a model with a drafter runs on where nothing else is asked for (config/vllm.py,
  // use_v2_model_runner); unknown: its source was not read for it.
  DraftRunner draft_runner;
  // What the release does and this model of it does not: one line each.
  std::span<const std::string_view> not_modelled;
};

// Oldest first.
std::span<const Release> releases();
// What each of them decides by, in the same order.
std::span<const EngineProfile> engine_profiles();
// By its name, or that of its equal. Null: there is no such release.
const Release* find_release(std::string_view name);
// The releases of a range "vllm-A..vllm-B", oldest first. Errors: not two releases in that order.
Result<std::span<const Release>> releases_in(std::string_view range);
// The newest release not newer than this version of vLLM ("0.33.1.dev7+g1a2b3c"), or the oldest. A
// version that is not a number ("dev") means the newest.
const Release& nearest_release(std::string_view version);
// The oldest release that is modelled with KV connectors.
const EngineProfile& connector_profile();
// "vllm-0.22.1, vllm-0.33.0", for messages; and of those modelled with KV connectors.
std::string release_names();
std::string names_of_connector_releases();

// In words, for lists.
std::string_view name_of(PageFormat format);
// The release whose rules plan the memory of every release before the overlaid plan.
inline constexpr std::string_view kPlannerOfTensors = "vllm-0.22.1";
// What a replay with pages laid out as 0.22.1 plans them leaves out: the release's own layout.
std::string why_pages_differ(const Release& release);
// True if the release plans groups that overlay one allocation (0.33.0 and later).
bool overlays_groups(const Release& release);
bool overlays_groups(std::string_view release_name);
// What is decided as the engine decides it, under every profile: one line each.
std::span<const std::string_view> modelled();

}  // namespace lockstep
