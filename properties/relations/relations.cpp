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

// Doubles the step budget, plus 7 so that chunks do not end at the same boundaries again.
Changed longer_chunks(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.engine.max_num_batched_tokens = other.engine.max_num_batched_tokens * 2 + 7;
    other.engine.long_prefill_token_threshold = 0;
  });
}

// Cuts prompts into chunks of at most three tokens, or, with states, of two tokens more than a
// block: shorter ones could not reach a block boundary in mode align.
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

// Keeps every second record. The relation compares only the requests that both runs have.
Changed without_batch_mates(const SavedCase& saved) {
  if (num_records(saved) < 2) return std::nullopt;
  std::vector<bool> keep(num_records(saved));
  for (std::size_t i = 0; i < keep.size(); i += 2) keep[i] = true;
  return with_records(saved, keep);
}

// Triples the pool, which removes preemptions and most evictions.
Changed larger_pool(const SavedCase& saved) {
  return changed(saved,
                 [](SavedCase& other) { set_num_blocks(other, other.cache.num_blocks * 3 + 1); });
}

Changed without_prefix_caching(const SavedCase& saved) {
  // The mode of states would change with it, and a host tier finds blocks by their hashes.
  if (has_states(saved.cache.groups) || saved.connector.has(ConnectorKind::host))
    return std::nullopt;
  return changed(saved, [](SavedCase& other) { other.engine.enable_prefix_caching = false; });
}

// Removes drafts, with the state blocks that groups keep for them and the hash lookahead of EAGLE.
Changed without_drafts(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.engine.num_spec_tokens = 0;
    other.engine.spec_method = SpecMethod::none;
    other.engine.num_hash_lookahead_tokens = kEngineHashLookahead;
    for (std::size_t g = 0; g < other.cache.groups.size(); ++g)
      change_specs(other, g, [](KVCacheSpec& spec) { spec.num_speculative_blocks = 0; });
  });
}

// Accepts every draft: as many tokens per step as possible, and no rejected one.
Changed with_right_drafts(const SavedCase& saved) {
  if (saved.engine.num_spec_tokens == 0) return std::nullopt;
  return changed(saved, [](SavedCase& other) { other.draft_acceptance_percent = 100; });
}

Changed synchronous(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.engine.async_scheduling = false; });
}

// Doubles all blocks. Packed pages and states are excluded: their pages would no longer fit the
// plan. A retention interval is a multiple of the block and doubles with it.
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

// Toggles whether a request is admitted only if its whole prompt fits.
Changed other_admission(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.engine.scheduler_reserve_full_isl = !other.engine.scheduler_reserve_full_isl;
  });
}

// Shards the tokens over two context parallel ranks. With several groups, all except the first are
// replicated, which only releases with replicated caches can do. The interleave must be a multiple
// of a compressed row and divide the block.
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

// Removes the connector: a prefix is then computed instead of loaded.
Changed without_connector(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.connector.parts.clear(); });
}

// Changes the size, the delays and the losses of a host tier. Lost blocks are computed again,
// except with a step in flight (docs/findings.md, 15).
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

// `says` is a phrase for messages; a row may continue the phrase of the previous row.
constexpr std::array kRelations = std::to_array<Relation>({
    {"longer chunks", "outputs do not depend on the number of tokens per step", longer_chunks},
    {"shorter chunks", "outputs do not depend on how a prompt is chunked", shorter_chunks},
    {"batch mates", "outputs do not depend on the other requests", without_batch_mates},
    {"larger pool", "outputs do not depend on the pool size or on preemptions", larger_pool},
    {"no prefix caching", "a prefix hit finds what would be computed", without_prefix_caching},
    {"no drafts", "drafts make outputs earlier, not different", without_drafts},
    {"right drafts", "accepted drafts make outputs earlier, not different", with_right_drafts},
    {"synchronous", "outputs do not depend on when a step is scheduled", synchronous},
    {"longer blocks", "outputs do not depend on the block size", longer_blocks},
    {"other admission", "outputs do not depend on when a request is admitted", other_admission},
    {"no connector", "outputs do not depend on where a prefix is loaded from", without_connector,
     false, true},
    {"other host tier", "outputs do not depend on the size, delay and losses of the host tier",
     other_host_tier, false, true},
    {"context ranks", "outputs do not depend on the ranks that shard tokens", over_ranks},
});

}  // namespace

std::span<const Relation> relations() { return kRelations; }

// Only tokens up to max_tokens count: a speculative step may sample more, which the engine drops.
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

// Both runs use the same decision source; an engine's failure in either is an error and not a
// breach.
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

// Backends that generated cases use; the first one that suits the case is taken.
constexpr std::array kBackends = {AttentionBackend::flash_attn, AttentionBackend::flashinfer,
                                  AttentionBackend::triton_attn};

// Returns the case under another attention backend. Nothing: that backend does not take these
// blocks, or is already the case's.
Changed under(const SavedCase& saved, AttentionBackend backend) {
  const auto sizes = kernel_block_sizes(saved.cache, backend);
  if (!sizes || backend == saved.attention_backend) return std::nullopt;
  SavedCase other = saved;
  other.attention_backend = backend;
  other.kernel_block_sizes = *sizes;
  return other;
}

// Selects the layout that differs in the order of heads and tokens, and, for overlaid releases,
// also in that of layers and blocks. Indexed by CacheLayout.
Changed other_layout(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    using enum CacheLayout;
    constexpr std::array kOthers = {HND, NHD, BLHNC, BLNHC, BHLNC, LBHNC, LBNHC, LHBNC};
    other.layout = kOthers[static_cast<std::size_t>(other.layout)];
  });
}

// Selects another backend with the same kernel blocks: only the shape of pages differs.
Changed other_backend(const SavedCase& saved) {
  for (const AttentionBackend backend : kBackends)
    if (Changed other = under(saved, backend);
        other && other->kernel_block_sizes == saved.kernel_block_sizes)
      return other;
  return std::nullopt;
}

// Selects another backend with different kernel blocks.
Changed other_kernel_blocks(const SavedCase& saved) {
  for (const AttentionBackend backend : kBackends)
    if (Changed other = under(saved, backend);
        other && other->kernel_block_sizes != saved.kernel_block_sizes)
      return other;
  return std::nullopt;
}

// Plans the pages without the padding that the case adds.
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

// Runs copies and kernels on four streams with random delays, which the results must not depend on.
Changed over_streams(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) {
    other.num_streams = 4;
    other.delay_streams = true;
  });
}

Changed shuffled_blocks(const SavedCase& saved) {
  return changed(saved, [](SavedCase& other) { other.block_order = 1; });
}

// Each row names a mutant of the backend that breaks it, which the tests plant.
constexpr std::array kPlaceRelations = std::to_array<Relation>({
    {"other layout", "outputs do not depend on the order of heads and tokens in a block",
     other_layout, false, false, "layout-two-heads"},
    {"other backend", "outputs do not depend on the attention backend's page layout", other_backend,
     false, false, "wrong-stride"},
    {"other kernel blocks", "a block split into other kernel blocks holds the same tokens",
     other_kernel_blocks, false, false, "kernel-block-unsplit"},
    {"no padding", "the padding of a page holds nothing", without_padding, false, false,
     "wrong-stride"},
    {"no packing", "layers that share a page do not overlap in it", unpacked, false, false,
     "pack-offset"},
    {"shuffled blocks", "block ids are names: the position of a block means nothing",
     shuffled_blocks, false, false, "wrong-stride"},
    {"several streams", "events alone order the operations of several streams", over_streams, true,
     false, "copy-unordered"},
});

}  // namespace

std::span<const Relation> place_relations() { return kPlaceRelations; }

namespace {

// Runs a case without a backend and returns its steps as a recorder writes them.
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

using Names = std::vector<BlockId>;  // [block id in one run] = id in the other

void rename(std::vector<BlockId>& blocks, const Names& names) {
  for (BlockId& block : blocks) block = names[index_of(block)];
}

// Renames every block in a step. Fields without block ids stay as they are.
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

// The null block keeps its id, so names start with it. After that, name i is the block at position
// i of the shuffled free queue; in the first run that is block i.
Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved) {
  SavedCase other = saved;
  other.block_order = 1;
  LS_ASSIGN_OR_RETURN(auto one, decided(saved));
  LS_ASSIGN_OR_RETURN(auto two, decided(other));
  Names names = {kNullBlock};
  const Names order = free_order_of(other);
  names.insert(names.end(), order.begin(), order.end());
  // A run that is longer than the other differs in its first additional step.
  for (std::size_t i = 0; i < std::max(one.size(), two.size()); ++i) {
    if (i < one.size() && i < two.size()) {
      RecordedStep expected = renamed(one[i], names);
      RecordedStep found = two[i];
      // The zero list is a set in vllm-0.33.0; its order is sorted away.
      std::ranges::sort(expected.zero);
      std::ranges::sort(found.zero);
      if (expected == found) continue;
    }
    return Breach{.request = "",
                  .index = static_cast<std::int64_t>(i),
                  .what = fmt::format("step {} is decided differently when blocks have other ids "
                                      "(shuffled blocks: block ids are names)",
                                      i)};
  }
  return std::optional<Breach>();
}

}  // namespace lockstep
