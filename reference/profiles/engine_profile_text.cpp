#include "reference/profiles/engine_profile_text.h"

#include <array>

namespace lockstep {
namespace {

constexpr std::array kModelled = std::to_array<std::string_view>({
    "full attention, MLA, sliding window, chunked local attention, states (Mamba, linear "
    "attention), "
    "hidden states, and hybrids of them with one or several block sizes",
    "prefix caching with cache salts; block hashes bit for bit (sha256_cbor, xxhash_cbor)",
    "chunked prefill, long-prefill threshold, full-length reservation, preemption by recomputation",
    "fcfs and priority scheduling, synchronous and with one step in flight",
    "drafts: n-gram, draft model, EAGLE and single-module MTP",
    "decode and prefill context parallelism; which blocks are zeroed; aborts, resets of the cache",
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
      {"holders_come_first", yes_or_no(p.holders_come_first)},
      {"loads_leave_room", yes_or_no(p.loads_leave_room)},
      {"takes_hits_of_all_groups_first", yes_or_no(p.takes_hits_of_all_groups_first)},
  };
}

std::span<const std::string_view> modelled() { return kModelled; }

}  // namespace lockstep
