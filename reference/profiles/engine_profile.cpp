#include "reference/profiles/engine_profile.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace lockstep {

namespace {

constexpr std::array kNotModelled22 = std::to_array<std::string_view>({
    "KV connectors with state layers; the connectors themselves",
    "encoder inputs, encoder-decoder models, pooling, diffusion",
    "LoRA, images and prompt embeddings in block hashes",
    "structured output, streaming sessions, pipeline parallelism",
    "parallel drafting, DFlash; only some groups marked as EAGLE's",
    "max_num_scheduled_tokens of the user's own",
    "resets of the prefix cache that preempt running requests",
});

constexpr std::array kNotModelled33 = std::to_array<std::string_view>({
    "KV connectors (requests that hold blocks come first, loads reserve what they will need), "
    "offloading, deferred frees for them, HiSparse host pages",
    "encoder inputs, encoder-decoder models, pooling, diffusion",
    "LoRA, images and prompt embeddings in block hashes",
    "structured output, streaming sessions, pipeline and data parallelism",
    "pages with rings, bounded replay and rows for several tokens: decisions alone",
    "enable_mamba_shared_prefix_checkpoint",
    "parallel drafting, DFlash, DSpark, drafts per batch size; disable_eagle_block_drop, "
    "disable_lookahead_block_hashes",
    "watermark, max_num_active_seqs, prefill_schedule_interval, adaptive long-prefill threshold, "
    "max_num_scheduled_tokens of the user's own",
    "reference windows (R-SWA), attention sinks",
    "resets of the prefix cache that preempt running requests",
});

constexpr std::array kProfiles{
    EngineProfile{
        .name = "vllm-0.22.1",
        .freed_blocks = FreedBlocks::append,
        .retire_basis = RetireBasis::scheduled,
        .zeroed_blocks = ZeroedBlocks::full_attention,
        .retires_beyond_null_gaps = false,
        .admission_counts_batches_in_flight = false,
        .eagle_hits = EagleHits::drop_last_block,
        .cuts_every_full_group = false,
        .joins_hashes_of_long_blocks = true,
        .tags_extra_keys = false,
        .masks_windows_at_block_alignment = false,
        .state_hashing = StateHashing::of_equal_blocks,
        .hits_parts_of_blocks = false,
        .caches_prompt_tails = false,
        .retains_sparsely = false,
        .caches_states_in_mode_all = true,
        .group_blocks_divide_scheduler_block = false,
        .hybrids_of_one_spec = false,
        .shards_by_pcp = true,
        .context_parallel_hybrids = false,
        .state_chunks = StateChunks::whole_blocks,
        .in_flight_accounting = InFlightAccounting::placeholders,
        .draft_slots = DraftSlots::of_max_num_seqs,
        .lookahead_in_first_step = false,
        .long_prefill_only_in_company = false,
        .pads_new_decodes = false,
        .scan_follows_every_victim = false,
        .scan_survives_self_preemption = false,
        .reports_common_prefix_blocks = true,
        .serves_checkpoints = false,
        .min_tokens_hold_every_end = true,
        .holders_come_first = false,
        .loads_leave_room = false,
        .takes_hits_of_all_groups_first = false,
        .state_hits_drop_a_block = false,
        .withdraws_what_is_undone = false,
        .publishes_loads_late = false,
        .caps_windows_where_they_begin = false,
        .keeps_window_of_last_token = false,
        .restarts_behind_windows = false,
        .dp_sync_rows = 4,
        .models_connectors = true,
        .not_modelled = kNotModelled22,
    },
    EngineProfile{
        .name = "vllm-0.33.0",
        .freed_blocks = FreedBlocks::unhashed_first,
        .retire_basis = RetireBasis::processed,
        .zeroed_blocks = ZeroedBlocks::attention,
        .retires_beyond_null_gaps = true,
        .admission_counts_batches_in_flight = true,
        .eagle_hits = EagleHits::lookahead_hash,
        .cuts_every_full_group = true,
        .joins_hashes_of_long_blocks = false,
        .tags_extra_keys = true,
        .masks_windows_at_block_alignment = true,
        .state_hashing = StateHashing::of_aligned_mode,
        .hits_parts_of_blocks = true,
        .caches_prompt_tails = true,
        .retains_sparsely = true,
        .caches_states_in_mode_all = false,
        .group_blocks_divide_scheduler_block = true,
        .hybrids_of_one_spec = true,
        .shards_by_pcp = false,
        .context_parallel_hybrids = true,
        .state_chunks = StateChunks::block_boundary,
        .in_flight_accounting = InFlightAccounting::tokens,
        .draft_slots = DraftSlots::of_scheduled_requests,
        .lookahead_in_first_step = true,
        .long_prefill_only_in_company = true,
        .pads_new_decodes = true,
        .scan_follows_every_victim = true,
        .scan_survives_self_preemption = true,
        .reports_common_prefix_blocks = false,
        .serves_checkpoints = true,
        .min_tokens_hold_every_end = false,
        .holders_come_first = true,
        .loads_leave_room = true,
        .takes_hits_of_all_groups_first = true,
        .state_hits_drop_a_block = false,
        .withdraws_what_is_undone = false,
        .publishes_loads_late = false,
        .caps_windows_where_they_begin = false,
        .keeps_window_of_last_token = false,
        .restarts_behind_windows = false,
        .dp_sync_rows = 7,
        .models_connectors = false,
        .not_modelled = kNotModelled33,
    },
};

struct RepairedProfile {
  std::string_view release;
  int finding = 0;
  EngineProfile profile;
};

template <class Repair>
constexpr RepairedProfile repaired(const EngineProfile& release, int finding, std::string_view name,
                                   Repair repair) {
  RepairedProfile made{release.name, finding, release};
  made.profile.name = name;
  repair(made.profile);
  return made;
}

constexpr std::array kRepaired{
    repaired(kProfiles[0], 0, "vllm-0.22.1-repaired",
             [](EngineProfile& p) {
               p.state_hits_drop_a_block = p.cuts_every_full_group = true;
               p.withdraws_what_is_undone = p.publishes_loads_late = true;
               p.retire_basis = RetireBasis::processed;
               p.holders_come_first = p.loads_leave_room = true;
               p.caps_windows_where_they_begin = true;
               p.takes_hits_of_all_groups_first = true;
               p.keeps_window_of_last_token = p.restarts_behind_windows = true;
             }),
    repaired(kProfiles[0], 1, "vllm-0.22.1-without-1",
             [](EngineProfile& p) { p.state_hits_drop_a_block = true; }),
    repaired(kProfiles[0], 2, "vllm-0.22.1-without-2",
             [](EngineProfile& p) { p.cuts_every_full_group = true; }),
    repaired(kProfiles[0], 3, "vllm-0.22.1-without-3",
             [](EngineProfile& p) { p.withdraws_what_is_undone = true; }),
    repaired(kProfiles[0], 4, "vllm-0.22.1-without-4",
             [](EngineProfile& p) { p.retire_basis = RetireBasis::processed; }),
    repaired(kProfiles[0], 7, "vllm-0.22.1-without-7",
             [](EngineProfile& p) { p.holders_come_first = true; }),
    repaired(kProfiles[0], 8, "vllm-0.22.1-without-8",
             [](EngineProfile& p) { p.loads_leave_room = p.caps_windows_where_they_begin = true; }),
    repaired(kProfiles[0], 9, "vllm-0.22.1-without-9",
             [](EngineProfile& p) { p.publishes_loads_late = true; }),
    repaired(kProfiles[0], 12, "vllm-0.22.1-without-12",
             [](EngineProfile& p) { p.takes_hits_of_all_groups_first = true; }),
    repaired(kProfiles[0], 13, "vllm-0.22.1-without-13",
             [](EngineProfile& p) { p.keeps_window_of_last_token = true; }),
    repaired(kProfiles[0], 14, "vllm-0.22.1-without-14",
             [](EngineProfile& p) { p.restarts_behind_windows = true; }),
    repaired(kProfiles[1], 3, "vllm-0.33.0-without-3",
             [](EngineProfile& p) { p.withdraws_what_is_undone = true; }),
};

}  // namespace

const EngineProfile* find_engine_profile(std::string_view name) {
  for (const EngineProfile& profile : kProfiles)
    if (profile.name == name) return &profile;
  for (const RepairedProfile& each : kRepaired)
    if (each.profile.name == name) return &each.profile;
  return nullptr;
}

std::string_view profile_without(std::string_view name, int finding) {
  for (const RepairedProfile& each : kRepaired)
    if (each.release == name && each.finding == finding) return each.profile.name;
  return {};
}

const EngineProfile& engine_profile(std::string_view name) {
  const EngineProfile* profile = find_engine_profile(name);
  LS_CHECK(profile != nullptr, "no engine profile {}; known: {}", name, engine_profile_names());
  return *profile;
}

std::span<const EngineProfile> engine_profiles() { return kProfiles; }

const EngineProfile& connector_profile() {
  const auto newest =
      std::find_if(kProfiles.rbegin(), kProfiles.rend(),
                   [](const EngineProfile& profile) { return profile.models_connectors; });
  LS_CHECK(newest != kProfiles.rend(), "no profile of {} models connectors", kProfiles.size());
  return *newest;
}

std::int32_t hash_lookahead_of(const EngineConfig& config, const EngineProfile& profile) {
  if (config.num_hash_lookahead_tokens != kEngineHashLookahead)
    return config.num_hash_lookahead_tokens;
  return profile.eagle_hits == EagleHits::lookahead_hash &&
                 config.spec_method == SpecMethod::eagle && config.enable_prefix_caching
             ? config.num_prefill_lookahead_tokens
             : 0;
}

std::string engine_profile_names() {
  std::string names;
  for (const EngineProfile& profile : kProfiles) {
    if (!names.empty()) names += ", ";
    names += profile.name;
  }
  return names;
}

namespace {

constexpr std::array kModelled = std::to_array<std::string_view>({
    "full attention, MLA, sliding window, chunked local attention, states (Mamba, linear "
    "attention), "
    "hidden states, and hybrids of them with one or several block sizes",
    "prefix caching with cache salts; block hashes bit for bit (sha256_cbor, xxhash_cbor)",
    "chunked prefill, long-prefill threshold, full-length reservation, preemption by recomputation",
    "fcfs and priority scheduling, synchronous and with one step in flight",
    "drafts: n-gram, draft model, EAGLE and MTP",
    "decode and prefill context parallelism; which blocks are zeroed; aborts, resets of the cache",
    "pauses, min_tokens, repetition detection, requests that skip the prefix cache",
});

std::string yes_or_no(bool value) { return value ? "yes" : "no"; }

std::string word(FreedBlocks value) {
  return value == FreedBlocks::append ? "append" : "unhashed first";
}
std::string word(EagleHits value) {
  return value == EagleHits::drop_last_block ? "drop last block" : "lookahead hash";
}
std::string word(RetireBasis value) {
  return value == RetireBasis::scheduled ? "scheduled" : "processed";
}
std::string word(ZeroedBlocks value) {
  return value == ZeroedBlocks::full_attention ? "full attention" : "attention";
}
std::string word(StateChunks value) {
  return value == StateChunks::whole_blocks ? "whole blocks" : "block boundary";
}
std::string word(InFlightAccounting value) {
  return value == InFlightAccounting::placeholders ? "placeholders" : "tokens";
}
std::string word(DraftSlots value) {
  return value == DraftSlots::of_max_num_seqs ? "of max_num_seqs" : "of scheduled requests";
}
std::string word(StateHashing value) {
  return value == StateHashing::of_equal_blocks ? "of equal blocks" : "of aligned mode";
}

}  // namespace

std::vector<PolicyText> policies_of(const EngineProfile& p) {
  return {
      {"freed_blocks", word(p.freed_blocks)},
      {"retire_basis", word(p.retire_basis)},
      {"zeroed_blocks", word(p.zeroed_blocks)},
      {"retires_beyond_null_gaps", yes_or_no(p.retires_beyond_null_gaps)},
      {"admission_counts_batches_in_flight", yes_or_no(p.admission_counts_batches_in_flight)},
      {"eagle_hits", word(p.eagle_hits)},
      {"cuts_every_full_group", yes_or_no(p.cuts_every_full_group)},
      {"joins_hashes_of_long_blocks", yes_or_no(p.joins_hashes_of_long_blocks)},
      {"tags_extra_keys", yes_or_no(p.tags_extra_keys)},
      {"masks_windows_at_block_alignment", yes_or_no(p.masks_windows_at_block_alignment)},
      {"state_hashing", word(p.state_hashing)},
      {"hits_parts_of_blocks", yes_or_no(p.hits_parts_of_blocks)},
      {"caches_prompt_tails", yes_or_no(p.caches_prompt_tails)},
      {"retains_sparsely", yes_or_no(p.retains_sparsely)},
      {"caches_states_in_mode_all", yes_or_no(p.caches_states_in_mode_all)},
      {"group_blocks_divide_scheduler_block", yes_or_no(p.group_blocks_divide_scheduler_block)},
      {"hybrids_of_one_spec", yes_or_no(p.hybrids_of_one_spec)},
      {"shards_by_pcp", yes_or_no(p.shards_by_pcp)},
      {"context_parallel_hybrids", yes_or_no(p.context_parallel_hybrids)},
      {"state_chunks", word(p.state_chunks)},
      {"in_flight_accounting", word(p.in_flight_accounting)},
      {"draft_slots", word(p.draft_slots)},
      {"lookahead_in_first_step", yes_or_no(p.lookahead_in_first_step)},
      {"long_prefill_only_in_company", yes_or_no(p.long_prefill_only_in_company)},
      {"pads_new_decodes", yes_or_no(p.pads_new_decodes)},
      {"scan_follows_every_victim", yes_or_no(p.scan_follows_every_victim)},
      {"scan_survives_self_preemption", yes_or_no(p.scan_survives_self_preemption)},
      {"reports_common_prefix_blocks", yes_or_no(p.reports_common_prefix_blocks)},
      {"serves_checkpoints", yes_or_no(p.serves_checkpoints)},
      {"min_tokens_hold_every_end", yes_or_no(p.min_tokens_hold_every_end)},
      {"holders_come_first", yes_or_no(p.holders_come_first)},
      {"loads_leave_room", yes_or_no(p.loads_leave_room)},
      {"takes_hits_of_all_groups_first", yes_or_no(p.takes_hits_of_all_groups_first)},
  };
}

std::span<const std::string_view> modelled() { return kModelled; }

}  // namespace lockstep
