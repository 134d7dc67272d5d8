#include "properties/audit/audit_setup.h"

#include <fmt/core.h>

namespace lockstep {
namespace {

std::int32_t hash_lookahead_of(const RecordingHeader& header, const EngineProfile* profile) {
  const EngineConfig& config = header.options.config;
  if (header.connector) return 0;
  if (config.num_hash_lookahead_tokens != kEngineHashLookahead)
    return config.num_hash_lookahead_tokens;
  return profile == nullptr ? 0 : lockstep::hash_lookahead_of(config, *profile);
}

// A hit may end inside a block where hashes are finer than the blocks of states and all other
// groups are full attention (v1/core/kv_cache_utils.py, partial_hash_hits_enabled).
std::int64_t hit_alignment_of(const RecordingHeader& header) {
  bool has_parts = false;
  for (const KVCacheGroupSpec& group : header.groups) {
    const KVCacheSpec& spec = group.spec;
    if (spec.bounded_replay || is_ring(spec)) continue;
    if (is_state_kind(spec.kind))
      has_parts |= spec.mamba_cache_mode == MambaCacheMode::align &&
                   spec.block_size > header.hash_block_size;
    else if (is_windowed(spec.kind) && spec.block_size != header.hash_block_size)
      return header.scheduler_block_size;
  }
  return has_parts ? header.hash_block_size : header.scheduler_block_size;
}

std::int32_t draft_slots_of(const EngineConfig& config) {
  const bool has_model =
      config.spec_method == SpecMethod::draft_model || config.spec_method == SpecMethod::eagle;
  return has_model ? config.num_spec_tokens : 0;
}

}  // namespace

bool is_given(const RecordingHeader& header, std::string_view option) {
  return std::ranges::find(header.options.given, option) != header.options.given.end();
}

AuditSetup::AuditSetup(const RecordingHeader& header, AuditScope scope_of, AuditedRules rules_of)
    : config(header.options.config),
      groups(header.groups),
      profile(find_engine_profile(header.engine.profile())),
      scope(scope_of),
      rules(rules_of),
      has_connector(header.connector.has_value()),
      hash_lookahead(hash_lookahead_of(header, profile)),
      drops_last_block(config.spec_method == SpecMethod::eagle && hash_lookahead == 0),
      hash_block_size(static_cast<std::int32_t>(std::max<std::int64_t>(1, header.hash_block_size))),
      scheduler_block_size(header.scheduler_block_size),
      hit_alignment(static_cast<std::int32_t>(std::max<std::int64_t>(1, hit_alignment_of(header)))),
      draft_slots(draft_slots_of(config)) {
  for (const KVCacheGroupSpec& group : groups) {
    // Ranks of a context shard the tokens of sharded attention and replicate states. No
    // release shards several groups over ranks of prefill context parallelism.
    const bool is_sharded = groups.size() > 1 && keeps_tokens(group.spec) && group.spec.dcp_sharded;
    block_sizes.push_back(static_cast<std::int32_t>(group.spec.block_size) *
                          (is_sharded ? config.dcp : 1));
    if (group.spec.bounded_replay)
      num_replayed = static_cast<std::int32_t>(group.spec.sliding_window);
  }
  // With a single group the engine states the tokens of a block over all ranks: releases shard it
  // over different ranks.
  if (groups.size() == 1 && !is_state(groups[0].spec))
    block_sizes[0] = static_cast<std::int32_t>(header.scheduler_block_size);
  LS_CHECK(block_sizes.size() == groups.size(), "{} block sizes of {} groups", block_sizes.size(),
           groups.size());
}

std::int32_t AuditSetup::first_read(std::size_t group, std::int32_t position) const {
  const KVCacheSpec& spec = groups[group].spec;
  if (is_sliding_window(spec.kind))
    return std::max(0, position - static_cast<std::int32_t>(spec.sliding_window) + 1);
  if (is_chunked(spec.kind)) {
    const auto chunk = static_cast<std::int32_t>(spec.attention_chunk_size);
    return position / chunk * chunk;
  }
  return 0;
}

// A wrong block spoils all that reads or writes it.
static bool spoils_the_rest(AuditRule rule) {
  return rule == AuditRule::attention_read || rule == AuditRule::state_read ||
         rule == AuditRule::handed_out || rule == AuditRule::token_write;
}

void FindingList::add(AuditFinding finding, std::string cause) {
  if (setup_.rules == AuditedRules::memory && group_of(finding.rule) == RuleGroup::policy) return;
  finding.last_step = finding.step;
  const auto [number, is_first] = numbers_.try_emplace(std::move(cause), next_number());
  if (is_first) {
    findings_.push_back(std::move(finding));
  } else if (number->second >= num_taken_) {
    LS_CHECK(number->second - num_taken_ < findings_.size(), "finding {} of {}", number->second,
             next_number());
    AuditFinding& first = findings_[number->second - num_taken_];
    ++first.count;
    first.last_step = finding.step;
  }
}

std::string FindingList::cause_of(AuditRule rule, const std::string& request,
                                  std::string_view detail) const {
  const AuditRequest* live = requests_.find(request);
  return fmt::format("{} {} {} {}", static_cast<int>(rule), request,
                     live == nullptr ? -1 : live->index, detail);
}

void FindingList::name_holders(AuditFinding& finding) const {
  if (finding.block <= 0 || finding.block >= pool_.num_blocks()) return;
  const auto& [last, before] = pool_.holders(BlockId{finding.block});
  if (last.request < 0) return;
  finding.holder = {requests_.name_at(last.request), last.since};
  finding.what += fmt::format("; request {} has had the block since step {}",
                              finding.holder.request, last.since);
  if (before.request < 0) return;
  finding.holder_before = {requests_.name_at(before.request), before.since};
  finding.what += fmt::format(", request {} before it, since step {}",
                              finding.holder_before.request, before.since);
}

void FindingList::report(AuditRule rule, const AuditRequest& request, std::size_t group,
                         std::int64_t token, BlockId block, std::string what) {
  LS_CHECK(group < setup_.groups.size(), "group {} of {}", group, setup_.groups.size());
  if (is_wrong(request, group)) return;
  const bool spoils = spoils_the_rest(rule);
  wrong_[request][group] = spoils;
  AuditFinding finding{.rule = rule,
                       .step = step_,
                       .request = request.name,
                       .group = static_cast<std::int32_t>(group),
                       .token = token,
                       .block = index_of(block),
                       .what = std::move(what)};
  // The state after n tokens is in the entry of the last of them.
  const std::int64_t position = rule == AuditRule::state_read ? token - 1 : token;
  if (position >= 0)
    finding.entry = static_cast<std::int32_t>(position / setup_.block_sizes[group]);
  name_holders(finding);
  std::string detail = fmt::format("group {}", group);
  const bool is_of_block = spoils && finding.holder.since >= 0;
  if (is_of_block) detail += fmt::format(" block {} {}", finding.block, finding.holder.since);
  add(std::move(finding), cause_of(rule, is_of_block ? std::string() : request.name, detail));
}

void FindingList::report(AuditRule rule, const std::string& request, std::string what,
                         std::string_view cause) {
  AuditFinding finding{.rule = rule, .step = step_, .request = request, .what = std::move(what)};
  // The token after the known ones.
  const bool is_of_tokens = rule == AuditRule::sampled || rule == AuditRule::scheduled_tokens;
  if (const AuditRequest* live = requests_.find(request); is_of_tokens && live != nullptr)
    finding.token = std::ssize(live->tokens);
  add(std::move(finding), cause_of(rule, request, cause));
}

void FindingList::replace_text(std::size_t number, std::string what) {
  LS_CHECK(number < next_number(), "finding {} of {}", number, next_number());
  if (number >= num_taken_) findings_[number - num_taken_].what = std::move(what);
}

std::vector<AuditFinding> FindingList::take() {
  num_taken_ += findings_.size();
  return std::exchange(findings_, {});
}

}  // namespace lockstep
