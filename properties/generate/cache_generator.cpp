// Caches of every kind and mixture, the pool that they share, and the caches that a case receives
// later because older cases must not change.
#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "properties/generate/generator_parts.h"
#include "reference/plan/capacity.h"
#include "reference/plan/page_size.h"
#include "reference/profiles/engine_profile.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "sim/session/session.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

std::int64_t count_kind(std::span<const KVCacheGroupSpec> groups, bool (*is)(CacheKind)) {
  return std::ranges::count_if(groups,
                               [&](const KVCacheGroupSpec& group) { return is(group.spec.kind); });
}

constexpr std::size_t kGroupsMax = 4;

void scale_rows(ChoiceSource& choices, bool has_int4, KVCacheSpec& spec) {
  spec.kv_quant_mode =
      choices.one_of({KVQuantMode::int8_per_token_head, KVQuantMode::fp8_per_token_head,
                      KVQuantMode::fp8_per_tensor, KVQuantMode::nvfp4});
  const bool is_packed = spec.kv_quant_mode == KVQuantMode::nvfp4;
  if (is_packed && has_int4 && choices.chance(50))
    spec.kv_quant_mode = KVQuantMode::int4_per_token_head;
  spec.dtype = spec.kv_quant_mode == KVQuantMode::int8_per_token_head ? DType::int8
               : is_packed                                            ? DType::uint8
                                                                      : DType::fp8_e4m3;
  if (is_packed) spec.head_size = 16;
}

KVCacheSpec draw_rows(Draw& draw, const EngineConfig& engine, CacheKind kind,
                      std::int64_t block_size) {
  ChoiceSource& choices = draw.choices;
  KVCacheSpec spec;
  spec.kind = kind;
  spec.block_size = block_size;
  spec.num_kv_heads = choices.between(1, 2);
  spec.head_size = choices.one_of<std::int64_t>({8, 4, 8, 16, 5});
  spec.dtype = choices.one_of(
      {DType::bf16, DType::bf16, DType::fp16, DType::fp32, DType::fp8_e4m3, DType::fp8_e5m2});
  if (draw.options.worker && !draw.options.worker->dtypes.empty()) {
    const std::vector<DType>& dtypes = draw.options.worker->dtypes;
    spec.dtype = dtypes[choices.below(std::ssize(dtypes))];
  }
  if (draw.has(Feature::scaled_rows) && !is_mla(kind))
    scale_rows(choices, engine_profile(engine.engine).release->page_format == PageFormat::overlaid,
               spec);
  if (is_full_of_latents(kind)) spec.num_kv_heads = 1;
  if (draw.options.worker && is_full_of_latents(kind)) {
    const std::vector<std::int64_t>& sizes = draw.options.worker->latent_sizes;
    if (!sizes.empty()) spec.head_size = sizes[choices.below(std::ssize(sizes))];
  }
  // A window of SGLang excludes the attending token itself, so a window of 1 would attend to
  // nothing.
  const std::int64_t least_window = draw.options.one_pool_per_kind ? 2 : 1;
  if (is_sliding_window(kind)) spec.sliding_window = choices.between(least_window, 3 * block_size);
  if (is_chunked(kind)) spec.attention_chunk_size = block_size * choices.between(1, 3);
  return spec;
}

// Generates the spec of a layer with one or two state tensors: a convolution state and an SSM
// state, possibly of different types. In mode none, one block holds the state of a whole request.
KVCacheSpec draw_states(Draw& draw, const EngineConfig& engine, std::int64_t block_size) {
  ChoiceSource& choices = draw.choices;
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.mamba_cache_mode = engine.mamba_cache_mode;
  spec.block_size =
      engine.mamba_cache_mode == MambaCacheMode::none ? engine.max_model_len : block_size;
  spec.states = {{{choices.between(1, 3), 4}, choices.one_of({DType::fp32, DType::bf16})}};
  if (choices.chance(50))
    spec.states.push_back({{choices.between(1, 4), 4}, choices.one_of({DType::fp32, DType::bf16})});
  spec.num_speculative_blocks = engine.num_spec_tokens;
  return spec;
}

std::vector<CacheKind> draw_pools(const Draw& draw) {
  using enum CacheKind;
  const bool is_mla = draw.has(Feature::mla) && !draw.has(Feature::full_attention);
  std::vector<CacheKind> kinds{is_mla ? mla : full_attention};
  if (!draw.has(Feature::several_groups)) return kinds;
  if (draw.has(Feature::states))
    kinds.push_back(mamba);
  else if (draw.has(Feature::sliding_window))
    kinds.push_back(sliding_window);
  return kinds;
}

std::vector<CacheKind> draw_kinds(Draw& draw) {
  using enum CacheKind;
  if (draw.options.one_pool_per_kind) return draw_pools(draw);
  const std::pair<Feature, CacheKind> all[] = {{Feature::full_attention, full_attention},
                                               {Feature::mla, mla},
                                               {Feature::sliding_window, sliding_window},
                                               {Feature::chunked_local, chunked_local},
                                               {Feature::states, mamba}};
  std::vector<CacheKind> on;
  for (const auto& [feature, kind] : all)
    if (draw.has(feature)) on.push_back(kind);
  if (!draw.has(Feature::several_groups) || draw.has(Feature::two_block_pool))
    return {on[draw.choices.below(std::ssize(on))]};
  if (on.size() < kGroupsMax && draw.choices.chance(50))
    on.push_back(on[draw.choices.below(std::ssize(on))]);
  while (on.size() > kGroupsMax) on.erase(on.begin() + draw.choices.below(std::ssize(on)));
  if (draw.has(Feature::hidden_state)) on.push_back(hidden_state);
  return on;
}

MambaCacheMode draw_mamba_mode(Draw& draw, const EngineConfig& engine) {
  if (!engine.enable_prefix_caching) return MambaCacheMode::none;
  const std::vector<MambaCacheMode>& modes = draw.options.state_modes;
  const auto takes = [&](MambaCacheMode mode) {
    return modes.empty() || std::ranges::find(modes, mode) != modes.end();
  };
  if (!takes(MambaCacheMode::align)) return MambaCacheMode::none;
  if (!engine_profile(engine.engine).caches_states_in_mode_all || engine.num_spec_tokens > 0 ||
      !takes(MambaCacheMode::all))
    return MambaCacheMode::align;
  return draw.choices.one_of({MambaCacheMode::align, MambaCacheMode::align, MambaCacheMode::all});
}

// Returns the number of attention blocks that a state block spans, for an engine's own worker. Five
// public reports concern a worker's columns of states, and hits then end inside the state blocks.
// Only with the model's decisions and without drafts: vLLM's scheduler ends chunks at multiples of
// the smallest block, and its planner makes no state block longer than that.
std::int64_t draw_state_blocks(Draw& draw, EngineConfig& engine) {
  if (!draw.options.worker || draw.options.any_release_connects || engine.num_spec_tokens > 0 ||
      !draw.has(Feature::different_block_sizes) || engine.mamba_cache_mode != MambaCacheMode::align)
    return 1;
  const std::int64_t spanned = draw.choices.one_of<std::int64_t>({2, 4, 1});
  if (spanned > 1 && engine_profile(engine.engine).hits_parts_of_blocks)
    engine.prefix_match_unit = engine.block_size;
  return spanned;
}

KVCacheConfig lay_out_uniform_type(std::vector<KVCacheGroupSpec> groups) {
  KVCacheConfig plan;
  const KVCacheGroupSpec& group = groups.front();
  for (std::size_t i = 0; i < group.layer_names.size(); ++i)
    plan.tensors.push_back({page_size_bytes(group.layer_specs[i]), {group.layer_names[i]}});
  plan.groups = std::move(groups);
  return plan;
}

void draw_uniform_type(Draw& draw, std::vector<KVCacheGroupSpec>& groups) {
  KVCacheGroupSpec& group = groups.front();
  if (!draw.has(Feature::uniform_type) || groups.size() > 1 || group.layers_per_page > 1 ||
      !is_full_of_pairs(group.spec.kind))
    return;
  while (group.layer_names.size() < 2)
    group.layer_names.push_back(fmt::format("g0.{}", group.layer_names.size()));
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    KVCacheSpec& spec = group.layer_specs.emplace_back(group.spec);
    if (i > 0) spec.num_kv_heads = draw.choices.between(1, 4);
  }
}

// Plans pages of one size for all groups: one tensor per index in the group, shared by the layers
// with that index in every group. `extra_bytes` pads the common page further, so that even the
// largest has padding.
KVCacheConfig lay_out(std::vector<KVCacheGroupSpec> groups, std::int64_t extra_bytes) {
  if (groups.front().is_uniform_type()) return lay_out_uniform_type(std::move(groups));
  std::int64_t page = 0;
  std::size_t places = 0;
  for (const KVCacheGroupSpec& group : groups) {
    page = std::max(page, pool_page_size_bytes(group));
    places = std::max(places, static_cast<std::size_t>(
                                  cdiv(std::ssize(group.layer_names), group.layers_per_page)));
  }
  page += extra_bytes;
  KVCacheConfig plan;
  plan.tensors.resize(places);
  for (KVCacheGroupSpec& group : groups) {
    if (group.layers_per_page == 1 && page_size_bytes(group.spec) != page)
      group.spec.page_size_padded = page;
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      plan.tensors[i / static_cast<std::size_t>(group.layers_per_page)].shared_by.push_back(
          group.layer_names[i]);
  }
  for (KVCacheTensor& tensor : plan.tensors) tensor.size_bytes = page;
  plan.groups = std::move(groups);
  return plan;
}

// Packs two or three layers per page in the first group, if that group can have the largest page.
// Otherwise its layers stay one per page: no other group may need more than the packed page.
void draw_packing(Draw& draw, std::vector<KVCacheGroupSpec>& groups) {
  KVCacheGroupSpec& first = groups.front();
  if (!draw.has(Feature::packed_pages) || !is_full_of_pairs(first.spec.kind)) return;
  if (draw.runs_kernels() && first.spec.block_size != 16) return;
  first.layers_per_page = draw.choices.between(2, 3);
  while (std::ssize(first.layer_names) < first.layers_per_page)
    first.layer_names.push_back(fmt::format("g0.{}", first.layer_names.size()));
  for (const KVCacheGroupSpec& group : groups)
    if (pool_page_size_bytes(group) > pool_page_size_bytes(first)) first.layers_per_page = 1;
}

std::vector<std::int64_t> kernel_blocks_of(const SavedCase& saved) {
  if (saved.backend != "none")
    if (auto sizes = kernel_block_sizes(saved.cache, saved.attention_backend)) return *sizes;
  std::vector<std::int64_t> sizes;
  for (const KVCacheGroupSpec& group : saved.cache.groups) sizes.push_back(group.spec.block_size);
  return sizes;
}

}  // namespace

std::vector<KVCacheGroupSpec> draw_groups(Draw& draw, EngineConfig& engine) {
  ChoiceSource& choices = draw.choices;
  const std::vector<CacheKind> kinds = draw_kinds(draw);
  const bool has_states = std::ranges::any_of(kinds, is_state_kind);
  if (has_states) engine.mamba_cache_mode = draw_mamba_mode(draw, engine);
  std::int64_t base = engine.block_size;
  if (draw.has(Feature::kernel_blocks) && draw.runs_kernels() && !draw.has(Feature::two_block_pool))
    base *= choices.one_of({3, 2, 5});
  if (draw.options.one_pool_per_kind && has_states) {
    base = 1;
    engine.async_scheduling = false;
  }
  if (has_states) base = std::max<std::int64_t>(base, engine.num_spec_tokens + 1);
  engine.block_size = static_cast<std::int32_t>(base);
  const std::int64_t of_states = base * draw_state_blocks(draw, engine);
  std::vector<KVCacheGroupSpec> groups;
  for (const CacheKind kind : kinds) {
    const bool other = !groups.empty() && draw.has(Feature::different_block_sizes) &&
                       !draw.options.one_pool_per_kind;
    // A multiple of the base, as vLLM requires: the scheduler's block is the lcm of all.
    const std::int64_t block_size = other ? base * choices.one_of({1, 2, 1, 4}) : base;
    const auto like = std::ranges::find(
        groups, kind, [](const KVCacheGroupSpec& group) { return group.spec.kind; });
    KVCacheGroupSpec group;
    if (!is_state_kind(kind))
      group.spec = draw_rows(draw, engine, kind, block_size);
    else  // a worker keeps one slot per request for all states, so their specs are equal
      group.spec = like != groups.end() ? like->spec : draw_states(draw, engine, of_states);
    const std::int64_t layers = is_hidden_state(kind) ? 1 : choices.between(1, 2);
    for (std::int64_t i = 0; i < layers; ++i)
      group.layer_names.push_back(fmt::format("g{}.{}", groups.size(), i));
    groups.push_back(std::move(group));
  }
  if (draw.options.worker && draw.options.worker->one_dtype) {
    const auto first = std::ranges::find_if(
        groups, [](const KVCacheGroupSpec& group) { return !is_state_kind(group.spec.kind); });
    for (KVCacheGroupSpec& group : groups)
      if (!is_state_kind(group.spec.kind)) group.spec.dtype = first->spec.dtype;
  }
  draw_packing(draw, groups);
  draw_uniform_type(draw, groups);
  // Engines identify a layer by the one integer in its name: vLLM 0.33.0,
  // model_executor/models/utils.py, extract_layer_index().
  if (draw.options.worker) {
    int number = 0;
    for (KVCacheGroupSpec& group : groups)
      for (std::string& name : group.layer_names) name = fmt::format("layers.{}", number++);
  }
  return groups;
}

// Sizes the pool: the null block, the blocks of one request of max_model_len, and a spare. A tight
// pool has at most as many spare blocks as one request needs, which causes preemptions.
void draw_pool(Draw& draw, std::vector<KVCacheGroupSpec> groups, SavedCase& saved) {
  ChoiceSource& choices = draw.choices;
  saved.attention_backend = choices.one_of(
      {AttentionBackend::triton_attn, AttentionBackend::flash_attn, AttentionBackend::flashinfer});
  saved.layout = choices.one_of({CacheLayout::NHD, CacheLayout::HND});
  std::int64_t need = planned_blocks_of_request(saved.engine, groups);
  // SGLang keeps up to two pages free (max_new_tokens_for_memory()) and divides the pool among the
  // kinds. Each part must hold one request, and each request needs up to four states.
  if (draw.options.one_pool_per_kind && groups.size() == 1) need += 2;
  if (draw.options.one_pool_per_kind && groups.size() > 1)
    need = 2 * need + (count_kind(groups, is_state_kind) > 0 ? 4 * saved.engine.max_num_seqs : 0);
  const bool packed = groups.front().layers_per_page > 1;
  // With HND the heads of a packed layer are apart, and the backend cannot address them.
  if (packed) saved.layout = CacheLayout::NHD;
  const bool pads = draw.has(Feature::padded_pages) && !packed;
  const std::int64_t extra_bytes =
      pads && !groups.front().is_uniform_type() ? 16 * choices.between(1, 4) : 0;
  saved.cache = lay_out(std::move(groups), extra_bytes);
  std::int64_t spare = 0;
  if (!draw.has(Feature::two_block_pool))
    spare = draw.has(Feature::tight_pool) ? choices.below(need + 1) : need * choices.between(1, 4);
  if (saved.engine.prefix_match_unit != 0)  // docs/findings.md, 18: engines plan too few blocks
    spare += 2 * std::ssize(saved.cache.groups) + 1;
  saved.cache.num_blocks = 1 + need + spare;
  for (KVCacheTensor& tensor : saved.cache.tensors) tensor.size_bytes *= saved.cache.num_blocks;
  if (draw.options.worker) {
    saved.attention_backend = worker_attention_backend(saved.cache);
    saved.layout = CacheLayout::NHD;
  }
  saved.kernel_block_sizes = kernel_blocks_of(saved);
  saved.queries_per_kv = static_cast<std::int32_t>(choices.between(1, 2));
  saved.draft_acceptance_percent = choices.one_of({60, 0, 30, 90, 100});
}

bool has_pages_of_its_own(const KVCacheGroupSpec& group) {
  return group.layers_per_page > 1 || group.is_uniform_type() ||
         group.spec.kv_quant_mode != KVQuantMode::none;
}

namespace {

// Turns all windows into one window that is recomputed after a hit and never cached. It cannot be
// combined with states, chunks or cached windows, and some other group must have hits. False: the
// groups do not qualify; they may have been changed.
bool replay_windows(std::vector<KVCacheGroupSpec>& groups) {
  if (count_kind(groups, is_state_kind) > 0) return false;
  std::erase_if(groups, [](const KVCacheGroupSpec& group) { return is_chunked(group.spec.kind); });
  const auto windows = count_kind(groups, is_sliding_window);
  if (windows == 0 || windows == std::ssize(groups)) return false;
  const auto is_window = [](const KVCacheGroupSpec& group) {
    return is_sliding_window(group.spec.kind);
  };
  std::int64_t window = std::ranges::find_if(groups, is_window)->spec.sliding_window;
  // docs/findings.md, 25: the window of the token after a hit must not start at the first token of
  // a block. Earlier blocks are freed, and the first recomputed token would belong to such a block.
  while (std::ranges::any_of(groups, [&](const KVCacheGroupSpec& group) {
    return is_window(group) && window % group.spec.block_size == 1;
  }))
    ++window;
  for (KVCacheGroupSpec& group : groups) {
    if (!is_window(group)) continue;
    KVCacheSpec& spec = group.spec;
    spec.sliding_window = window;
    spec.num_kv_heads = 1;
    spec.kind = CacheKind::sliding_window_mla;
    spec.bounded_replay = true;
  }
  return true;
}

// Adds a ring of one block per request. It must hold the drafts of a step and the tokens that the
// next step reads before them: vLLM 0.33.0, v1/kv_cache_interface.py, CircularBufferSpec.
bool add_ring(Draw& draw, const EngineConfig& engine, std::vector<KVCacheGroupSpec>& groups) {
  KVCacheGroupSpec& ring = groups.emplace_back();
  ring.layer_names = {"ring.0"};
  ring.spec.kind = CacheKind::circular_buffer;
  ring.spec.block_size = draw.choices.one_of<std::int64_t>({8, 8, 16});
  while (ring.spec.block_size < engine.num_spec_tokens + 2) ring.spec.block_size *= 2;
  ring.spec.head_size = draw.choices.one_of<std::int64_t>({4, 8});
  ring.spec.dtype = draw.choices.one_of({DType::fp32, DType::bf16});
  ring.spec.keys_alone = true;
  return true;
}

}  // namespace

bool lay_out_again(const SavedCase& saved, std::vector<KVCacheGroupSpec> groups,
                   const EngineConfig& before, SavedCase& next) {
  // More blocks only if the new groups need them: a pool never shrinks, so tight pools stay tight.
  const std::int64_t more = planned_blocks_of_request(saved.engine, groups) -
                            planned_blocks_of_request(before, saved.cache.groups);
  for (KVCacheGroupSpec& group : groups) group.spec.page_size_padded.reset();
  auto plan =
      plan_for_groups(std::move(groups), saved.cache.num_blocks + std::max<std::int64_t>(0, more));
  if (!plan) return false;
  next = saved;
  next.cache = std::move(*plan);
  next.kernel_block_sizes = kernel_blocks_of(next);
  if (is_accepted(next)) return true;
  next.layout = CacheLayout::NHD;
  return is_accepted(next);
}

constexpr std::int64_t kKernelBlock = 64;

static void align_to_kernel_blocks(KVCacheSpec& spec) {
  if (shares_rows(spec.tokens_per_state) && spec.block_size >= kKernelBlock)
    spec.block_stride_alignment = unpadded_page_size_bytes(spec) / (spec.block_size / kKernelBlock);
}

// Returns true if the case can have caches that were added late: one rank, no connector, no worker,
// no real numbers, and pages that follow from the specs.
static bool takes_further_caches(const Draw& draw, const SavedCase& saved) {
  const bool one_rank = saved.tensor_parallel_size * saved.pipeline_parallel_size == 1 &&
                        saved.engine.dcp * saved.engine.pcp == 1;
  return one_rank && !draw.options.worker && saved.connector.parts.empty() &&
         saved.numbers == Numbers::words && !draw.has(Feature::two_block_pool) &&
         std::ranges::none_of(saved.cache.groups, has_pages_of_its_own);
}

void draw_further_caches(Draw& draw, SavedCase& saved) {
  if (!takes_further_caches(draw, saved)) return;
  const auto with = [&](auto change) {
    std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
    SavedCase next;
    if (change(groups) && lay_out_again(saved, std::move(groups), saved.engine, next))
      saved = std::move(next);
  };
  if (draw.has(Feature::bounded_replay) &&
      release_takes(saved.engine, {RunTrait::recomputed_windows}))
    with(replay_windows);
  if (draw.has(Feature::rings) && release_takes(saved.engine, {RunTrait::rings}))
    with([&](auto& groups) { return add_ring(draw, saved.engine, groups); });
  const std::int64_t ratio = draw.choices.one_of<std::int64_t>({4, 2, 8, 16});
  if (draw.has(Feature::compressed_rows))
    with([&](auto& groups) {
      for (KVCacheGroupSpec& group : groups)
        // A compressed row covers `ratio` tokens, so a block must be a multiple of it.
        if (is_full_of_latents(group.spec.kind) && group.spec.block_size % ratio == 0) {
          group.spec.tokens_per_state = {ratio};
          align_to_kernel_blocks(group.spec);
        }
      return count_kind(groups, is_full_of_latents) > 0;
    });
}

void split_blocks(Draw& draw, SavedCase& saved) {
  if (!draw.options.worker || !draw.has(Feature::kernel_blocks)) return;
  std::int64_t common = 0;  // gcd of the blocks that split: pages without padding
  std::set<std::int64_t> taken;
  for (const KVCacheGroupSpec& group : saved.cache.groups) {
    if (is_state_kind(group.spec.kind) || is_hidden_state(group.spec.kind)) continue;
    if (group.spec.page_size_padded)
      taken.insert(group.spec.block_size);
    else
      common = std::gcd(common, group.spec.block_size);
  }
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1; size < common; ++size)
    if (common % size == 0) sizes.push_back(size);
  if (sizes.empty()) return;
  taken.insert(sizes[static_cast<std::size_t>(draw.choices.below(std::ssize(sizes)))]);
  for (std::size_t g = 0; g < saved.cache.groups.size(); ++g) {
    const KVCacheSpec& spec = saved.cache.groups[g].spec;
    if (is_state_kind(spec.kind) || is_hidden_state(spec.kind)) continue;
    saved.kernel_block_sizes[g] =
        *std::ranges::find_if(taken.rbegin(), taken.rend(),
                              [&](std::int64_t size) { return spec.block_size % size == 0; });
  }
}

void map_tables(SavedCase& saved) {
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  const auto compressed = std::ranges::find_if(groups, [](const KVCacheGroupSpec& group) {
    return shares_rows(group.spec.tokens_per_state);
  });
  if (compressed == groups.end() || count_kind(groups, is_ring) == 0) return;
  const std::int64_t longer =
      std::lcm(2 * kKernelBlock, compressed->spec.block_size) / compressed->spec.block_size;
  for (KVCacheGroupSpec& group : groups) {
    KVCacheSpec& spec = group.spec;
    if (is_ring(spec)) continue;
    spec.block_size *= longer;
    spec.attention_chunk_size = cdiv(spec.attention_chunk_size, spec.block_size) * spec.block_size;
    if (shares_rows(spec.tokens_per_state) && spec.block_size < kKernelBlock)
      return;  // another compressed group is still shorter than a kernel block
    align_to_kernel_blocks(spec);
  }
  SavedCase in_long_blocks = saved, next;
  in_long_blocks.engine.block_size *= static_cast<std::int32_t>(longer);
  if (lay_out_again(in_long_blocks, std::move(groups), in_long_blocks.engine, next))
    saved = std::move(next);
}

namespace {

void add_items(ChoiceSource& choices, SavedCase& saved) {
  saved.trace.header.is_encoder_decoder = true;
  saved.engine.encoder_compute_budget = static_cast<std::int32_t>(choices.between(8, 48));
  saved.engine.encoder_cache_size = saved.engine.encoder_compute_budget;
  for (TraceRecord& record : saved.trace.records) {
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr || choices.chance(10)) continue;
    std::int64_t left = saved.engine.encoder_compute_budget;
    for (std::int64_t items = choices.between(1, 2); items > 0 && left > 0; --items) {
      PromptItem& item = request->spec.keys.mm.emplace_back();
      item.identifier = fmt::format("{}.{}", request->spec.name, items);
      item.kind = "audio";
      item.count = static_cast<std::int32_t>(choices.between(1, left));
      left -= item.count;
    }
  }
}

// Lengthens outputs at random up to max_model_len. A reference window excludes generated tokens
// only, so short outputs would never exclude any. Outputs with a stop token keep their length.
void lengthen_outputs(ChoiceSource& choices, SavedCase& saved) {
  for (TraceRecord& record : saved.trace.records) {
    auto* request = std::get_if<TraceRequest>(&record);
    if (request == nullptr || request->spec.eos_token) continue;
    const std::int64_t room = saved.engine.max_model_len - request->spec.prompt.size();
    if (room <= request->output.length) continue;
    request->output.length =
        static_cast<std::int32_t>(choices.between(request->output.length, room));
    request->spec.max_tokens = request->output.length;
  }
}

// Adds a group of cross attention and the items that it attends to. vLLM 0.33.0 disables chunked
// prefill and prefix caching for encoder-decoder models (config/scheduler.py). False: the case has
// states.
bool serve_encoder(Draw& draw, std::vector<KVCacheGroupSpec>& groups, SavedCase& saved) {
  if (count_kind(groups, is_state_kind) > 0) return false;
  saved.engine.enable_prefix_caching = saved.engine.enable_chunked_prefill = false;
  saved.engine.max_num_batched_tokens = std::max(
      saved.engine.max_num_batched_tokens, saved.engine.max_model_len + saved.engine.max_num_seqs);
  KVCacheGroupSpec& cross = groups.emplace_back(groups.front());
  cross.spec = draw_rows(draw, saved.engine, CacheKind::cross_attention, saved.engine.block_size);
  for (std::string& name : cross.layer_names) name = "cross." + name;
  add_items(draw.choices, saved);
  return true;
}

}  // namespace

void draw_encoders_and_sinks(Draw& draw, SavedCase& saved) {
  const EngineProfile& profile = engine_profile(saved.engine.engine);
  if (!takes_further_caches(draw, saved)) return;
  SavedCase changed = saved;
  EngineConfig with_sinks = saved.engine;
  if (!profile.starts_with_sinks) with_sinks.engine = profile_without(profile.name, 38);
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  const auto full = std::ranges::find_if(
      groups, [](const auto& group) { return is_full_of_pairs(group.spec.kind); });
  const std::int64_t times = draw.choices.between(1, 2);
  bool is_drawn = false;
  if (draw.has(Feature::cross_attention) &&
      release_takes(saved.engine, {RunTrait::cross_attention})) {
    is_drawn = serve_encoder(draw, groups, changed);
  } else if (full == groups.end()) {
    return;
  } else if (draw.has(Feature::sinks) && release_takes(with_sinks, {RunTrait::sinks})) {
    full->spec.sink_len = times * full->spec.block_size;
    settle_full_attention(full->spec);
    changed.engine = with_sinks;
    is_drawn = true;
  } else if (draw.has(Feature::reference_windows) &&
             release_takes(saved.engine, {RunTrait::reference_windows}) &&
             count_kind(groups, is_state_kind) == 0) {
    full->spec.rswa_window = draw.choices.between(1, times * full->spec.block_size);
    settle_full_attention(full->spec);
    changed.engine.enable_prefix_caching = false;
    lengthen_outputs(draw.choices, changed);
    is_drawn = true;
  }
  SavedCase next;
  if (is_drawn && lay_out_again(changed, std::move(groups), saved.engine, next))
    saved = std::move(next);
}

// Adds draft-model layers to a group: one module per draft, or one for all. With several modules a
// chunk must not end within the tokens that the modules read ahead, and windows retain the tokens
// that are run again: vLLM 0.33.0, config/vllm.py, num_prefill_lookahead_tokens.
void draw_drafter_cache(Draw& draw, SavedCase& saved) {
  const bool has_slots = num_lookahead_tokens(saved.engine) > 0;
  const DraftRunner runner = engine_profile(saved.engine.engine).release->draft_runner;
  if (!has_slots || runner == DraftRunner::unknown || !draw.has(Feature::drafter_cache) ||
      !draw.runs_kernels() || num_ranks(config_of(saved).backend) > 1 ||
      saved.data_parallel_size > 1 || !saved.connector.parts.empty() ||
      std::ranges::any_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
        return has_pages_of_its_own(group) || group.spec.block_stride_alignment > 1 ||
               reads_beside_tokens(group.spec);
      }))
    return;
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  const auto takes_drafter = [](const KVCacheGroupSpec& group) {
    const CacheKind kind = group.spec.kind;
    return has_row_per_token(group) && !group.spec.bounded_replay &&
           (attends_to_all(kind) || is_sliding_window(kind));
  };
  const auto group = std::ranges::find_if(groups, takes_drafter);
  if (group == groups.end()) return;
  SavedCase with_drafter = saved;
  EngineConfig& engine = with_drafter.engine;
  const bool is_eagle = engine.spec_method == SpecMethod::eagle;
  const std::int64_t modules =
      is_eagle && !engine.async_scheduling && draw.choices.chance(50) ? engine.num_spec_tokens : 1;
  std::vector<std::vector<std::string>> names;
  for (std::int64_t module = 0; module < modules; ++module) {
    names.push_back({fmt::format("draft.{}", module)});
    group->layer_names.push_back(names.back().front());
  }
  if (modules > 1 && runner == DraftRunner::second) {
    engine.num_prefill_lookahead_tokens = engine.num_spec_tokens;
    // A chunk must be longer than the tokens that the modules read ahead, or the request would make
    // no progress.
    if (engine.long_prefill_token_threshold > 0)
      engine.long_prefill_token_threshold =
          std::max(engine.long_prefill_token_threshold, 2 * engine.num_spec_tokens + 1);
    for (KVCacheGroupSpec& one : groups)
      if (is_sliding_window(one.spec.kind) && !one.spec.bounded_replay)
        one.spec.extra_retained_tokens = engine.num_spec_tokens - 1;
  }
  SavedCase next;
  if (!lay_out_again(with_drafter, std::move(groups), saved.engine, next)) return;
  next.cache.draft_modules = std::move(names);
  saved = std::move(next);
}

}  // namespace lockstep
