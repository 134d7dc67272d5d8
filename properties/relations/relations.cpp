#include "properties/relations/relations.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "reference/plan/page_size.h"
#include "reference/profiles/engine_profile.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"

namespace lockstep {
namespace {

Changed longer_chunks(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.engine.max_num_batched_tokens = other.engine.max_num_batched_tokens * 2 + 7;
    other.engine.long_prefill_token_threshold = 0;
  });
}

Changed shorter_chunks(const SavedCase& saved) {
  if (!saved.engine.enable_chunked_prefill) return std::nullopt;
  return changed(saved, [](SavedCase& other) {
    std::int64_t least = 1;
    for (const KVCacheGroupSpec& group : other.cache.groups)
      if (is_state_kind(group.spec.kind)) least = std::max(least, group.spec.block_size);
    other.engine.long_prefill_token_threshold =
        static_cast<std::int32_t>(std::min<std::int64_t>(least + 2, other.engine.max_model_len));
  });
}

Changed without_batch_mates(const SavedCase& saved) {
  if (num_records(saved) < 2) return std::nullopt;
  std::vector<bool> keep(num_records(saved));
  for (std::size_t i = 0; i < keep.size(); i += 2) keep[i] = true;
  return with_records(saved, keep);
}

Changed larger_pool(const SavedCase& saved) {
  return changed(saved,
                 [](SavedCase& other) { set_num_blocks(other, other.cache.num_blocks * 3 + 1); });
}

Changed without_prefix_caching(const SavedCase& saved) {
  // The mode of states would change with it, and a host tier finds blocks by their hashes.
  if (has_states(saved) || saved.connector.has(ConnectorKind::host)) return std::nullopt;
  return changed(saved, [](SavedCase& other) { other.engine.enable_prefix_caching = false; });
}

Changed without_drafts(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.engine.num_spec_tokens = 0;
    other.engine.spec_method = SpecMethod::none;
    other.engine.num_hash_lookahead_tokens = kEngineHashLookahead;
    for (std::size_t g = 0; g < other.cache.groups.size(); ++g)
      change_specs(other, g, [](KVCacheSpec& spec) { spec.num_speculative_blocks = 0; });
  });
}

Changed with_right_drafts(const SavedCase& saved) {
  if (saved.engine.num_spec_tokens == 0) return std::nullopt;
  return changed(saved, [](SavedCase& other) { other.draft_acceptance_percent = 100; });
}

Changed synchronous(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.engine.async_scheduling = false; });
}

Changed longer_blocks(const SavedCase& saved) {
  const bool plain = std::ranges::all_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
    return !is_state_kind(group.spec.kind) && group.layers_per_page == 1;
  });
  if (!plain) return std::nullopt;
  return changed(saved, [](SavedCase& other) {
    other.engine.block_size *= 2;
    if (other.engine.prefix_cache_retention_interval > 0)
      other.engine.prefix_cache_retention_interval *= 2;
    for (std::size_t g = 0; g < other.cache.groups.size(); ++g) {
      change_specs(other, g, [](KVCacheSpec& spec) { spec.block_size *= 2; });
      other.kernel_block_sizes[g] *= 2;
    }
    plan_again(other);
  });
}

Changed other_admission(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.engine.scheduler_reserve_full_isl = !other.engine.scheduler_reserve_full_isl;
  });
}

// vLLM shards the tokens of a model with one group, and counts drafts once with it. With several
// groups every rank replicates all except the first.
Changed over_ranks(const SavedCase& saved) {
  const auto is_dealt_out = [](const KVCacheGroupSpec& group) {
    return attends_to_all(group.spec.kind);
  };
  const auto may_be_whole = [&](const KVCacheGroupSpec& group) {
    return is_dealt_out(group) || is_sliding_window(group.spec.kind);
  };
  const std::vector<KVCacheGroupSpec>& groups = saved.cache.groups;
  if (saved.engine.dcp * saved.engine.pcp != 1 || !is_dealt_out(groups.front()))
    return std::nullopt;
  if (groups.size() > 1 && (saved.engine.prefix_cache_retention_interval > 0 ||  // of blocks
                            !engine_profile(saved.engine.engine).has_replicated_caches ||
                            !std::ranges::all_of(groups, may_be_whole)))
    return std::nullopt;
  return changed(saved, [](SavedCase& other) {
    other.engine.dcp = 2;
    const KVCacheSpec& first = other.cache.groups.front().spec;
    const auto row = static_cast<std::int32_t>(first.tokens_per_state.tokens);
    other.cp_kv_cache_interleave_size =
        first.block_size % std::max(row, 4) == 0 ? std::max(row, 4) : row;
    for (KVCacheGroupSpec& group : std::span(other.cache.groups).subspan(1)) {
      group.spec.dcp_sharded = false;
      for (KVCacheSpec& spec : group.layer_specs) spec.dcp_sharded = false;
    }
  });
}

Changed without_connector(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.connector.parts.clear(); });
}

// A connector that differs only in positions and times of its transfers. What is lost is computed
// again, except for finding 15.
Changed other_host_tier(const SavedCase& saved) {
  const ConnectorSpec& tier = saved.connector;
  if (!tier.has(ConnectorKind::host)) return std::nullopt;
  return changed(saved, [&](SavedCase& other) {
    other.connector.num_host_blocks = tier.num_host_blocks / 2 + 3;
    other.connector.delay_steps_max = tier.delay_steps_max == 0 ? 5 : 0;
    if (other.cache.groups.size() == 1 && !other.engine.async_scheduling)
      other.connector.load_failed_percent = tier.load_failed_percent.value_or(0) == 0 ? 40 : 0;
  });
}

constexpr std::array kRelations = std::to_array<Relation>({
    {"longer chunks", "an answer does not depend on the tokens of a step", longer_chunks},
    {"shorter chunks", "how a prompt is cut is none of its request's business", shorter_chunks},
    {"batch mates", "nor on the other requests", without_batch_mates},
    {"larger pool", "nor on the size of the pool, or on preemptions", larger_pool},
    {"no prefix caching", "a hit finds what would have been computed", without_prefix_caching},
    {"no drafts", "drafts make answers sooner, not different", without_drafts},
    {"right drafts", "so does their being right", with_right_drafts},
    {"synchronous", "when a step is decided is none of a request's business", synchronous},
    {"longer blocks", "how tokens are parcelled into blocks is none of a request's business",
     longer_blocks},
    {"other admission", "when a request is admitted is none of its business", other_admission},
    {"no connector", "where a prefix is loaded from is none of a request's business",
     without_connector, false, true},
    {"other host tier", "nor how much the host keeps, how late it comes, and what of it is lost",
     other_host_tier, false, true},
    {"context ranks", "nor on the ranks that shard its tokens", over_ranks},
});

}  // namespace

std::span<const Relation> relations() { return kRelations; }

std::optional<Breach> first_breach(const SavedCase& saved, const Answers& one,
                                   const Answers& other) {
  for (const RequestSpec* request : requests_of(saved)) {
    const auto a = one.tokens.find(request->name);
    const auto b = other.tokens.find(request->name);
    if (a == one.tokens.end() || b == other.tokens.end()) continue;
    const std::size_t count = std::min(
        {a->second.size(), b->second.size(), static_cast<std::size_t>(request->max_tokens)});
    for (std::size_t i = 0; i < count; ++i) {
      if (a->second[i] == b->second[i]) continue;
      return Breach{
          .request = request->name,
          .index = static_cast<std::int64_t>(i),
          .what = fmt::format("output token {} of {} is {} in one run and {} in the other", i,
                              request->name, a->second[i], b->second[i])};
    }
  }
  return std::nullopt;
}

Result<std::optional<Breach>> check_relation(const SavedCase& saved, const Relation& relation,
                                             const DecisionsFactory& decisions) {
  const Changed other = relation.change(saved);
  if (!other || !why_not_answered(*other).empty()) return std::optional<Breach>();
  LS_ASSIGN_OR_RETURN(const auto one, answers_of(saved, decisions));
  LS_ASSIGN_OR_RETURN(const auto two, answers_of(*other, decisions));
  std::optional<Breach> breach = first_breach(saved, one, two);
  if (breach) breach->what += fmt::format(" ({}: {})", relation.name, relation.says);
  return breach;
}

// Relations about positions in memory: changes that an engine's decisions do not depend on, and
// changes that move every block.

namespace {

constexpr std::array kBackends = {AttentionBackend::flash_attn, AttentionBackend::flashinfer,
                                  AttentionBackend::triton_attn};

// The case under another attention backend; nothing: it takes other blocks than these.
Changed under(const SavedCase& saved, AttentionBackend backend) {
  const auto sizes = kernel_block_sizes(saved.cache, backend);
  if (!sizes || backend == saved.attention_backend) return std::nullopt;
  SavedCase other = saved;
  other.attention_backend = backend;
  other.kernel_block_sizes = *sizes;
  return other;
}

Changed other_layout(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    using enum CacheLayout;
    constexpr std::array kOthers = {HND, NHD, BLHNC, BLNHC, BHLNC, LBHNC, LBNHC, LHBNC};
    other.layout = kOthers[static_cast<std::size_t>(other.layout)];
  });
}

Changed other_backend(const SavedCase& saved) {
  for (const AttentionBackend backend : kBackends)
    if (Changed other = under(saved, backend);
        other && other->kernel_block_sizes == saved.kernel_block_sizes)
      return other;
  return std::nullopt;
}

Changed other_kernel_blocks(const SavedCase& saved) {
  for (const AttentionBackend backend : kBackends)
    if (Changed other = under(saved, backend);
        other && other->kernel_block_sizes != saved.kernel_block_sizes)
      return other;
  return std::nullopt;
}

Changed without_padding(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { plan_again(other); });
}

Changed unpacked(const SavedCase& saved) {
  const bool packed = std::ranges::any_of(
      saved.cache.groups, [](const KVCacheGroupSpec& group) { return group.layers_per_page > 1; });
  if (!packed) return std::nullopt;
  return changed(saved, [](SavedCase& other) {
    for (KVCacheGroupSpec& group : other.cache.groups) group.layers_per_page = 1;
    plan_again(other);
  });
}

Changed over_streams(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.num_streams = 4;
    other.delay_streams = true;
  });
}

Changed shuffled_blocks(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.block_order = 1; });
}

constexpr std::array kPlaceRelations = std::to_array<Relation>({
    {"other layout", "whether heads or tokens come first in a block is the device's business",
     other_layout, false, false, "layout-two-heads"},
    {"other backend", "and so is which attention backend's rules a page follows", other_backend,
     false, false, "wrong-stride"},
    {"other kernel blocks", "a block cut into other kernel blocks holds the same tokens",
     other_kernel_blocks, false, false, "kernel-block-unsplit"},
    {"no padding", "nothing lies in the padding of a page", without_padding, false, false,
     "wrong-stride"},
    {"no packing", "layers that share a page do not meet in it", unpacked, false, false,
     "pack-offset"},
    {"shuffled blocks", "block ids are names: where a block lies says nothing", shuffled_blocks,
     false, false, "wrong-stride"},
    {"several streams", "what is ordered by what it needs needs no other order", over_streams, true,
     false, "copy-unordered"},
});

}  // namespace

std::span<const Relation> place_relations() { return kPlaceRelations; }

namespace {

Result<std::vector<RecordedStep>> decided(const SavedCase& saved) {
  std::vector<RecordedStep> steps;
  std::optional<RunRecorder> recorder;
  const auto attach = [&](std::int32_t, Workload* workload) {
    recorder.emplace(*workload, [&](const RecordedStep& step) { steps.push_back(step); });
    return Onlooker{.workload = &*recorder, .observer = &*recorder};
  };
  LS_ASSIGN_OR_RETURN(const auto session, open_undisturbed(saved, config_of(saved), {}, attach));
  LS_RETURN_IF_ERROR(session->run());
  return steps;
}

using Names = std::vector<BlockId>;  // [block id of the one run] = of the other

void rename(std::vector<BlockId>& blocks, const Names& names) {
  for (BlockId& block : blocks) block = names[index_of(block)];
}

RecordedStep renamed(RecordedStep step, const Names& names) {
  for (RecordedScheduled& scheduled : step.scheduled)
    if (scheduled.blocks)
      for (std::vector<BlockId>& blocks : *scheduled.blocks) rename(blocks, names);
  for (auto* tables : {&step.tables, &step.loading})
    if (*tables)
      for (RecordedTable& table : **tables)
        for (std::vector<BlockId>& blocks : table.blocks) rename(blocks, names);
  if (step.worker) rename(step.worker->invalid_blocks, names);
  rename(step.zero, names);
  for (KVCacheBlockCopy& copy : step.copies)
    copy = {.from = names[index_of(copy.from)], .to = names[index_of(copy.to)]};
  return step;
}

}  // namespace

Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved) {
  SavedCase other = saved;
  other.block_order = 1;
  LS_ASSIGN_OR_RETURN(auto one, decided(saved));
  LS_ASSIGN_OR_RETURN(auto two, decided(other));
  Names names = {kNullBlock};
  const Names order = free_order_of(other);
  names.insert(names.end(), order.begin(), order.end());
  for (std::size_t i = 0; i < std::max(one.size(), two.size()); ++i) {
    if (i < one.size() && i < two.size()) {
      RecordedStep expected = renamed(one[i], names);
      RecordedStep found = two[i];
      std::ranges::sort(expected.zero);
      std::ranges::sort(found.zero);
      if (expected == found) continue;
    }
    return Breach{.request = "",
                  .index = static_cast<std::int64_t>(i),
                  .what = fmt::format("step {} is decided otherwise when blocks have other ids "
                                      "(shuffled blocks: block ids are names)",
                                      i)};
  }
  return std::optional<Breach>();
}

}  // namespace lockstep
