#include "sim/step/backend_config.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/block_sizes.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"

namespace lockstep {

BackendConfig make_backend_config(const EngineConfig& engine, KVCacheConfig plan,
                                  AttentionBackend attention_backend) {
  BackendConfig config{.attention_backend = attention_backend,
                       .num_rows = engine.max_num_seqs,
                       .max_tokens_per_step = engine.max_num_batched_tokens};
  // Groups may be replicated, so the ranks are those of the most sharded group.
  for (const KVCacheGroupSpec& group : plan.groups)
    config.context.num_ranks =
        std::max(config.context.num_ranks, num_context_ranks(engine, group.spec));
  if (config.context.num_ranks > 1) config.parallel.dcp_size = engine.dcp;
  const bool fp32_states = has_fp32_states(plan);
  const auto with_rows = with_page_rows(plan);
  const KVCacheConfig& rows = with_rows ? *with_rows : plan;
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const KVCacheSpec& spec = plan.groups[g].spec;
    // A size that the attention backend cannot take is refused later, where it is needed.
    const auto kernel = kernel_block_size(rows.groups[g], attention_backend, fp32_states, g);
    config.kernel_block_sizes.push_back(kernel ? *kernel : spec.block_size);
    // Caches whose block count does not grow with the request.
    if (is_ring(spec) || spec.blocks_per_request > 0) {
      config.max_blocks_per_row.push_back(
          static_cast<std::int32_t>(std::max<std::int64_t>(spec.blocks_per_request, 1)));
      continue;
    }
    const std::int64_t tokens = is_cross_attention(spec)
                                    ? max_encoder_rows(engine)
                                    : engine.max_model_len + engine.num_spec_tokens;
    // Tables are as wide as the longest request with its drafts. A rank of context parallelism
    // holds only its share of the tokens. Example: max_model_len 4096, 4 drafts, block_size 16: 257
    // entries.
    config.max_blocks_per_row.push_back(
        static_cast<std::int32_t>(cdiv(tokens, spec.block_size * num_context_ranks(engine, spec)) +
                                  spec.num_speculative_blocks));
  }
  config.plan = std::move(plan);
  return config;
}

namespace {

// Returns the tensor parallel ranks of a stage; without any, those of decode context parallelism.
std::int32_t ranks_side_by_side(const BackendConfig& config) {
  return std::max(config.parallel.tp_size, config.parallel.dcp_size);
}
std::int32_t num_pcp_ranks(const BackendConfig& config) {
  return config.context.num_ranks / config.parallel.dcp_size;
}

}  // namespace

std::int32_t num_ranks(const BackendConfig& config) {
  return config.parallel.pp_size * num_pcp_ranks(config) * ranks_side_by_side(config);
}

// Ranks are numbered as in num_ranks(), tensor parallel ranks fastest. Adjacent tensor parallel
// ranks form a decode context group: with tp 4 and dcp 2, ranks 0 and 1 share the tokens.
BackendConfig config_of_rank(const BackendConfig& config, std::int32_t rank) {
  LS_CHECK(rank >= 0 && rank < num_ranks(config), "rank {} of {}", rank, num_ranks(config));
  BackendConfig own = config;
  const std::int32_t side_by_side = ranks_side_by_side(config);
  const std::int32_t dcp_size = config.parallel.dcp_size;
  const std::int32_t place = rank % side_by_side;
  const std::int32_t in_stage = rank / side_by_side;
  const std::int32_t pcp_rank = in_stage % num_pcp_ranks(config);
  own.context.rank = pcp_rank * dcp_size + place % dcp_size;
  // Sequence parallelism pads each step to a multiple of tp.
  own.max_tokens_per_step =
      static_cast<std::int32_t>(round_up(config.max_tokens_per_step, config.parallel.tp_size));
  own.parallel.tp_rank = config.parallel.tp_size > 1 ? place : 0;
  own.parallel.pp_rank = in_stage / num_pcp_ranks(config);
  return own;
}

namespace {

// Checks the interleave of context parallelism. A rank must hold complete interleaved runs of each
// block, and complete compressed rows, since a row covers several tokens.
Result<void> check_shares(const BackendConfig& config, const KVCacheGroupSpec& group) {
  const std::int32_t interleave = config.context.interleave;
  const bool is_shared = config.context.num_ranks > 1 && is_dealt_out(group.spec);
  if (interleave < 1 || (is_shared && group.spec.block_size % interleave != 0))
    return fail("cp_kv_cache_interleave_size {}: it must divide the block size {}", interleave,
                group.spec.block_size);
  for (std::size_t i = 0; is_shared && i < std::max<std::size_t>(group.layer_specs.size(), 1); ++i)
    if (const TokensPerState& tokens = group.layer_spec(i).tokens_per_state;
        !fills_rows(tokens, interleave))
      return fail(
          "cp_kv_cache_interleave_size {}: an entry of {} tokens is on one rank; use a multiple of "
          "it",
          interleave, text_of(tokens));
  return {};
}

}  // namespace

RunFacts facts_of(const EngineConfig& engine, const BackendConfig& config) {
  using enum RunTrait;
  RunFacts facts = facts_of(engine, config.plan.groups);
  if (facts.traits.has(context_ranks) && facts.engine != nullptr) {
    const auto sizes = resolve_block_sizes(engine, config.plan.groups);
    facts.traits.add_if(sizes && sizes->hits_parts_of_blocks, hits_inside_blocks);
  }
  facts.traits.add_if(num_ranks(config) > 1, several_ranks);
  facts.traits.add_if(!config.parallel.is_whole(), divided_model);
  facts.traits.add_if(config.max_cudagraph_capture_size > 0, captured_graphs);
  facts.traits.add_if(config.numbers == Numbers::real, real_numbers);
  return facts;
}

// Derives each rank's plan, so that a degree that does not suit a rank is an error before the run.
Result<void> check_ranks(const BackendConfig& config) {
  const ParallelRank& of = config.parallel;
  constexpr std::int32_t kDegreeMax = 64;
  for (const auto& [name, degree] :
       {std::pair{"tensor_parallel_size", of.tp_size}, {"pipeline_parallel_size", of.pp_size}})
    if (degree < 1 || degree > kDegreeMax)
      return fail("{} {}: expected 1 to {}", name, degree, kDegreeMax);
  for (const KVCacheGroupSpec& group : config.plan.groups)
    LS_RETURN_IF_ERROR(check_shares(config, group));
  if (of.tp_size > 1 && of.tp_size % of.dcp_size != 0)
    return fail(
        "decode_context_parallel_size {}: it shards tokens over the ranks of tensor_parallel_size "
        "{} and must divide it",
        of.dcp_size, of.tp_size);
  for (std::int32_t rank = 0; rank < num_ranks(config) && !of.is_whole(); ++rank)
    LS_RETURN_IF_ERROR(
        rank_plan(config.plan, config_of_rank(config, rank).parallel, config.queries_per_kv));
  return {};
}

AttentionBackend attention_backend_for(const KVCacheConfig& plan) {
  return kernel_block_sizes(plan, AttentionBackend::flash_attn) ? AttentionBackend::flash_attn
                                                                : AttentionBackend::any_size;
}

// A path or a library name. The prefixes of classes and workers come first: their arguments may
// also contain paths.
bool is_plugin(std::string_view backend) {
  return !is_kernel_class(backend) && !is_engine_worker(backend) &&
         (backend.find('/') != backend.npos || backend.ends_with(".so"));
}

bool is_kernel_class(std::string_view backend) {
  return backend.starts_with("kernels:") || backend.starts_with("cuda_kernels:");
}

bool is_user_kernels(std::string_view backend) {
  return is_kernel_class(backend) || is_plugin(backend);
}

bool is_engine_worker(std::string_view backend) {
  return backend == "vllm" || backend.starts_with("vllm:") || backend.starts_with("worker:");
}

AttentionBackend worker_attention_backend(const KVCacheConfig& plan) {
  return kernel_block_sizes(plan, AttentionBackend::triton_attn) ? AttentionBackend::triton_attn
                                                                 : AttentionBackend::any_size;
}

// The tensor is as large as the largest group's pages, so that sizes derived from it are positive.
KVCacheConfig unplaced_plan(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks) {
  KVCacheConfig plan{.num_blocks = num_blocks, .tensors = {{}}, .groups = std::move(groups)};
  KVCacheTensor& tensor = plan.tensors.front();
  LS_CHECK(num_blocks > 0 && !plan.groups.empty(), "{} blocks for {} groups", num_blocks,
           plan.groups.size());
  for (const KVCacheGroupSpec& group : plan.groups) {
    tensor.size_bytes = std::max(tensor.size_bytes, page_size_bytes(group.spec) * num_blocks);
    tensor.shared_by.insert(tensor.shared_by.end(), group.layer_names.begin(),
                            group.layer_names.end());
  }
  return plan;
}

// Layer i of every group uses tensor i. All tensors have pages of the same size, so num_blocks is
// the same in each; smaller pages are padded.
Result<KVCacheConfig> plan_for_groups(std::vector<KVCacheGroupSpec> groups,
                                      std::int64_t num_blocks) {
  KVCacheConfig plan;
  plan.num_blocks = num_blocks;
  std::int64_t page = 0;
  std::size_t places = 0;
  for (const KVCacheGroupSpec& group : groups) {
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      page = std::max(page, page_size_bytes(group.layer_spec(i)));
    if (group.layers_per_page != 1)
      return fail("a group of {} layers a page: its plan must be given", group.layers_per_page);
    places = std::max(places, group.layer_names.size());
  }
  const auto pad = [&](KVCacheSpec& spec) {
    if (page_size_bytes(spec) != page) spec.page_size_padded = page;
  };
  for (KVCacheGroupSpec& group : groups) {
    pad(group.spec);
    for (KVCacheSpec& spec : group.layer_specs) pad(spec);
  }
  for (std::size_t place = 0; place < places; ++place) {
    KVCacheTensor& tensor = plan.tensors.emplace_back();
    tensor.size_bytes = page * num_blocks;
    for (const KVCacheGroupSpec& group : groups)
      if (place < group.layer_names.size()) tensor.shared_by.push_back(group.layer_names[place]);
  }
  plan.groups = std::move(groups);
  return plan;
}

// Divides the plan first: tensors and pages follow from the rank's own heads and layers.
Result<RankModel> rank_model(const BackendConfig& config, std::int32_t rank) {
  BackendConfig own = config_of_rank(config, rank);
  LS_ASSIGN_OR_RETURN(RankPlan plan, rank_plan(config.plan, own.parallel, config.queries_per_kv));
  LS_ASSIGN_OR_RETURN(own.plan,
                      with_own_tensors(std::move(plan.plan), own.attention_backend, own.layout));
  LS_ASSIGN_OR_RETURN(
      auto model, MemoryModel::create(own.plan, own.attention_backend, own.layout, own.layout_rule,
                                      own.num_host_blocks, own.numbers, plan.layers));
  return RankModel{std::move(own), std::move(model)};
}

namespace {

// Rounds up to the next captured size, without the upper limit.
std::int64_t on_the_grid(std::int64_t num_tokens) {
  if (num_tokens <= 2) return num_tokens;
  if (num_tokens <= 4) return 4;
  const std::int64_t step = num_tokens <= 256 ? 8 : 16;
  return (num_tokens + step - 1) / step * step;
}

}  // namespace

std::int64_t captured_batch(std::int64_t num_tokens, std::int64_t max_capture_size,
                            std::int64_t max_tokens_per_step) {
  LS_CHECK(num_tokens >= 0, "{} tokens", num_tokens);
  const bool takes_the_largest_step = max_tokens_per_step <= max_capture_size;
  const std::int64_t limit = takes_the_largest_step ? max_tokens_per_step : max_capture_size;
  const std::int64_t size = on_the_grid(num_tokens);
  if (size <= limit) return size;
  return takes_the_largest_step && num_tokens <= limit ? limit : 0;
}

}  // namespace lockstep
