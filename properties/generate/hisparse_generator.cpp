// HiSparse's groups, which replace the generated cache. The rows of sparse attention are in a host
// pool, and pages of them are copied to the device: resident pages stay, hot regions are exchanged
// as the indexer selects.
#include <fmt/core.h>

#include "properties/generate/generator_parts.h"
#include "reference/plan/capacity.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/policies.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

// Generates one MLA row spec. Source and indexer rows differ in size.
KVCacheSpec rows_of(ChoiceSource& choices, std::int64_t block_size) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mla;
  spec.block_size = block_size;
  spec.num_kv_heads = 1;
  spec.head_size = choices.one_of<std::int64_t>({8, 4, 16});
  spec.dtype = choices.one_of({DType::bf16, DType::fp16, DType::fp32});
  return spec;
}

// Generates the groups in vLLM's order: source, indexer, resident pages, hot regions. The layers of
// the last two may be split into two groups each.
std::vector<KVCacheGroupSpec> draw_pages(ChoiceSource& choices, std::int64_t block_size) {
  std::vector<KVCacheGroupSpec> groups(2);
  groups[0] = {.layer_names = {}, .spec = rows_of(choices, block_size)};
  groups[0].role = kPageSourceRole;
  groups[1] = {.layer_names = {}, .spec = rows_of(choices, block_size)};
  groups[1].role = kPageIndexerRole;
  const std::int64_t layers = choices.between(1, 3);
  for (std::int64_t i = 0; i < layers; ++i) {
    groups[0].layer_names.push_back(fmt::format("model.layers.{}.attn", i));
    groups[1].layer_names.push_back(fmt::format("model.layers.{}.indexer.k_cache", i));
  }
  const std::int64_t first_cut = choices.between(1, layers);  // equal to `layers`: one group
  for (const CacheKind kind : {CacheKind::hisparse_resident, CacheKind::hisparse_hot}) {
    const bool is_hot = is_hot_pages(kind);
    KVCacheGroupSpec pages;
    pages.spec.kind = kind;
    pages.spec.block_size = block_size;
    // A page copy moves a whole source page; this is its size in bytes.
    pages.spec.page_copy_bytes = page_size_bytes(groups[0].spec);
    // Hot regions have a fixed number of blocks per request; resident pages grow with it.
    if (is_hot) pages.spec.blocks_per_request = choices.between(1, 3);
    for (std::int64_t i = 0; i < layers; ++i) {
      if (i == first_cut) {
        groups.push_back(pages);
        pages.layer_names.clear();
      }
      pages.layer_names.push_back(groups[0].layer_names[static_cast<std::size_t>(i)] +
                                  std::string(is_hot ? kHotSuffix : kResidentSuffix));
    }
    groups.push_back(pages);
  }
  return groups;
}

// Returns the engine without the options that HiSparse's groups exclude. Checkpoints and ranks do
// not apply. Drafts in flight exist only in the worker. vLLM does not start without capacity for
// whole prompts, hence scheduler_reserve_full_isl.
EngineConfig engine_beside(const EngineConfig& drawn) {
  EngineConfig engine = drawn;
  engine.dcp = engine.pcp = 1;
  engine.mamba_block_size = 0;
  engine.mamba_cache_mode = MambaCacheMode::none;
  engine.num_prefill_lookahead_tokens = 1;
  engine.prefix_match_unit = 0;
  engine.hash_algorithm = HashAlgorithm::content;
  engine.scheduler_reserve_full_isl = true;
  engine.prefix_cache_retention_interval = kDenseRetention;  // of states and windows
  engine.encoder_compute_budget = engine.encoder_cache_size = 0;
  if (engine.num_spec_tokens > 0) engine.async_scheduling = false;
  return engine;
}

// Removes the encoder's items that another feature added: HiSparse has no cross attention.
void without_encoder(Trace& trace) {
  trace.header.is_encoder_decoder = false;
  for (TraceRecord& record : trace.records)
    if (auto* request = std::get_if<TraceRequest>(&record)) request->spec.keys.mm.clear();
}

}  // namespace

void draw_host_pages(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::hisparse) || draw.options.worker || draw.options.any_release_connects)
    return;
  // Requiring another feature means the generated cache, which must then stay.
  const FeatureSet& wanted = draw.options.always;
  if (!(wanted == FeatureSet()) && !wanted.has(Feature::hisparse)) return;
  if (!release_takes(saved.engine, {RunTrait::hisparse, RunTrait::connector})) return;
  ChoiceSource& choices = draw.choices;
  SavedCase next = saved;
  EngineConfig& engine = next.engine = engine_beside(saved.engine);
  without_encoder(next.trace);
  std::vector<KVCacheGroupSpec> groups = draw_pages(choices, engine.block_size);
  // vLLM 0.33.0 requires two host blocks more than one request of max_model_len has pages:
  // v1/hisparse/layout.py, create_hisparse_layout(). The factor makes the host pool tight or wide.
  const std::int64_t pages = cdiv(engine.max_model_len, engine.block_size) + 2;
  engine.host_pool_num_blocks = pages * choices.one_of<std::int64_t>({1, 1, 2, 3, 8});
  const std::int64_t need = planned_blocks_of_request(engine, groups);
  const std::int64_t num_blocks =
      1 + need + choices.one_of<std::int64_t>({0, choices.below(need + 1), need, 3 * need});
  auto plan = plan_for_groups(std::move(groups), num_blocks);
  if (!plan) return;
  next.cache = std::move(*plan);
  next.kernel_block_sizes.clear();
  for (const KVCacheGroupSpec& group : next.cache.groups)
    next.kernel_block_sizes.push_back(group.spec.block_size);
  next.layout = CacheLayout::NHD;
  next.tensor_parallel_size = next.pipeline_parallel_size = next.data_parallel_size = 1;
  next.enforce_eager = false;
  next.numbers = Numbers::words;
  next.connector = {};
  next.connector.parts = {ConnectorKind::page_workers};
  next.connector.delay_steps_max = choices.one_of({3, 0, 1, 8});
  next.connector.load_failure_policy = saved.connector.load_failure_policy;
  if (draw.has(Feature::connector_peers)) {
    next.connector.parts.insert(next.connector.parts.begin() + choices.below(2),
                                ConnectorKind::peers);
    // docs/findings.md, 46: every load within a step shows it, so 9 of 10 cases use the profile in
    // which it is repaired.
    const std::string without = profile_without(engine.engine, 46);
    if (!choices.chance(10) && !without.empty()) engine.engine = without;
  }
  // Faults are generated again, because their size follows the pool.
  draw_fault_plan(draw, next);
  if (next.connector.has(ConnectorKind::peers)) draw_aborted_load(draw, next);
  if (is_accepted(next)) saved = std::move(next);
}

}  // namespace lockstep
