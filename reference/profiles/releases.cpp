#include "reference/profiles/releases.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/check.h"
#include "reference/profiles/policies.h"

namespace lockstep {

// Releases without and with the options of 0.33.0 share these lists.
constexpr std::array kNotModelled22 = std::to_array<std::string_view>({
    "KV connectors with state layers; the connectors themselves",
    "encoder inputs among a prompt's tokens; encoder-decoder models and sinks in other releases "
    "than 0.22.1 and 0.33.0; pooling, diffusion",
    "LoRA, images and prompt embeddings in block hashes",
    "structured output, streaming sessions, pipeline parallelism",
    "parallel drafting, DFlash; only some groups marked as EAGLE's",
    "a user-defined max_num_scheduled_tokens",
});

constexpr std::array kNotModelled33 = std::to_array<std::string_view>({
    "KV connectors with rings, bounded replay and checkpoints of states; the connectors "
    "themselves; HiSparse host pages",
    "encoder inputs among a prompt's tokens; encoder-decoder models and sinks in other releases "
    "than 0.22.1 and 0.33.0; pooling, diffusion",
    "LoRA, images and prompt embeddings in block hashes",
    "structured output, streaming sessions, pipeline parallelism",
    "pages with rings, bounded replay and rows for several tokens: decisions only",
    "enable_mamba_shared_prefix_checkpoint",
    "parallel drafting, DFlash, DSpark, drafts per batch size; disable_eagle_block_drop, "
    "disable_lookahead_block_hashes",
    "watermark, max_num_active_seqs, prefill_schedule_interval, adaptive long-prefill threshold, a "
    "user-defined max_num_scheduled_tokens",
});

// Oldest first. 0.33.0's options (rings, bounded replay, checkpoints) have recordings of that
// release only.
constexpr std::array kReleases = std::to_array<Release>({
    {"vllm-0.20.2", "", PageFormat::keys_first, false, DraftRunner::unknown, kNotModelled22},
    {"vllm-0.21.0", "", PageFormat::keys_first, false, DraftRunner::unknown, kNotModelled22},
    {"vllm-0.22.1", "vllm-0.22.0", PageFormat::keys_first, true, DraftRunner::first,
     kNotModelled22},
    {"vllm-0.23.0", "", PageFormat::by_block, false, DraftRunner::unknown, kNotModelled22},
    {"vllm-0.24.0", "", PageFormat::by_block, false, DraftRunner::unknown, kNotModelled22},
    {"vllm-0.25.1", "vllm-0.25.0", PageFormat::by_block, false, DraftRunner::unknown,
     kNotModelled22},
    {"vllm-0.26.0", "", PageFormat::together, false, DraftRunner::unknown, kNotModelled33},
    {"vllm-0.27.1", "vllm-0.27.0", PageFormat::together, false, DraftRunner::unknown,
     kNotModelled33},
    {"vllm-0.28.0", "", PageFormat::together, false, DraftRunner::unknown, kNotModelled33},
    {"vllm-0.29.0", "", PageFormat::six_orders, false, DraftRunner::unknown, kNotModelled33},
    {"vllm-0.30.0", "", PageFormat::six_orders, false, DraftRunner::unknown, kNotModelled33},
    {"vllm-0.31.0", "", PageFormat::six_orders, false, DraftRunner::unknown, kNotModelled33},
    {"vllm-0.32.0", "", PageFormat::six_orders, false, DraftRunner::unknown, kNotModelled33},
    {"vllm-0.33.0", "", PageFormat::overlaid, true, DraftRunner::second, kNotModelled33},
});

// Major, minor and patch number of "vllm-0.33.1.dev7+g1a2b3c", or of its version only. Missing
// parts are 0, so a name without a number gives {0, 0, 0}.
static std::array<int, 3> numbers_of(std::string_view version) {
  if (const auto dash = version.find('-'); dash != std::string_view::npos)
    version.remove_prefix(dash + 1);
  std::array<int, 3> numbers{};
  for (int& number : numbers) {
    const auto [end, error] =
        std::from_chars(version.data(), version.data() + version.size(), number);
    if (error != std::errc()) break;
    version.remove_prefix(static_cast<std::size_t>(end - version.data()));
    if (version.empty() || version.front() != '.') break;
    version.remove_prefix(1);
  }
  return numbers;
}

// Each release starts from the previous one and applies its own changes, so a row of policies.cpp
// lists only changes.
static std::vector<EngineProfile> make_profiles() {
  std::vector<EngineProfile> profiles;
  for (const Release& release : kReleases) {
    EngineProfile profile = profiles.empty() ? EngineProfile{} : profiles.back();
    profile.name = release.name;
    profile.release = &release;
    for (const Policy& policy : policies())
      for (const PolicyChange& change : policy.history)
        if (change.release == release.name) policy.set(profile, change.value);
    profiles.push_back(std::move(profile));
  }
  return profiles;
}

std::span<const Release> releases() { return kReleases; }

std::span<const EngineProfile> engine_profiles() {
  static const std::vector<EngineProfile> kProfiles = make_profiles();
  return kProfiles;
}

const Release* find_release(std::string_view name) {
  const auto found = std::ranges::find_if(kReleases, [&](const Release& release) {
    return release.name == name || (release.equals == name && !name.empty());
  });
  return found == kReleases.end() ? nullptr : &*found;
}

Result<std::span<const Release>> releases_in(std::string_view range) {
  const std::size_t dots = range.find("..");
  const Release* first = find_release(range.substr(0, dots));
  const Release* last =
      dots == std::string_view::npos ? nullptr : find_release(range.substr(dots + 2));
  if (first == nullptr || last == nullptr || first > last)
    return fail("{}: expected two of these, the older first: {}", range, release_names());
  return std::span(first, last + 1);
}

const Release& nearest_release(std::string_view version) {
  const std::array<int, 3> wanted = numbers_of(version);
  // "dev" has no number: the newest.
  if (wanted == std::array<int, 3>{}) return kReleases.back();
  const Release* nearest = &kReleases.front();
  for (const Release& release : kReleases)
    if (numbers_of(release.name) <= wanted) nearest = &release;
  return *nearest;
}

// Fails only if kReleases has no such release: a programmer's error.
const EngineProfile& connector_profile() {
  const auto oldest = std::ranges::find_if(engine_profiles(), [](const EngineProfile& profile) {
    return profile.release->models_connectors;
  });
  LS_CHECK(oldest != engine_profiles().end(), "no release of {} models connectors",
           kReleases.size());
  return *oldest;
}

std::string release_names() {
  std::string names;
  for (const Release& release : kReleases) {
    if (!names.empty()) names += ", ";
    names += release.name;
  }
  return names;
}

std::string names_of_connector_releases() {
  std::string names;
  for (const Release& release : kReleases)
    if (release.models_connectors)
      names += fmt::format("{}{}", names.empty() ? "" : " and ", release.name);
  return names;
}

std::string_view name_of(PageFormat format) {
  switch (format) {
    case PageFormat::keys_first:
      return "all keys before all values";
    case PageFormat::by_block:
      return "keys before values in each block";
    case PageFormat::together:
      return "keys and values as one content";
    case PageFormat::six_orders:
      return "one of six layouts";
    case PageFormat::overlaid:
      return "one of six layouts, groups overlaid";
  }
  return {};
}

// 0.22.1's own format is the planner's: nothing differs.
std::string why_pages_differ(const Release& release) {
  if (release.page_format == PageFormat::keys_first) return {};
  return fmt::format("pages as {} lays them out ({}): they are planned as 0.22.1 plans them",
                     release.name, name_of(release.page_format));
}

constexpr std::array kModelled = std::to_array<std::string_view>({
    "full attention, MLA, sliding window, chunked local attention, states (Mamba, linear "
    "attention), hidden states, and hybrids of them with one or several block sizes",
    "prefix caching with cache salts; block hashes bit for bit (sha256_cbor, xxhash_cbor)",
    "chunked prefill, long-prefill threshold, full-length reservation, preemption by recomputation",
    "fcfs and priority scheduling, synchronous and with one step in flight",
    "drafts: n-gram, draft model, EAGLE and MTP",
    "decode and prefill context parallelism; which blocks are zeroed; aborts, resets of the cache",
    "pauses, min_tokens, repetition detection, requests that skip the prefix cache",
});

std::span<const std::string_view> modelled() { return kModelled; }

bool overlays_groups(const Release& release) { return release.page_format == PageFormat::overlaid; }

bool overlays_groups(std::string_view release_name) {
  const Release* release = find_release(release_name);
  return release != nullptr && overlays_groups(*release);
}

}  // namespace lockstep
