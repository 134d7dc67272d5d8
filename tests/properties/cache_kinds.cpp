#include "tests/properties/cache_kinds.h"

#include <fmt/core.h>

#include <utility>

#include "reference/memory/model_placement.h"
#include "reference/plan/page_size.h"
#include "sim/step/backend_config.h"
#include "tests/properties/busy_case.h"

namespace lockstep::tests {
namespace {

using enum CacheLayout;

const Orders kAll(kOverlaidLayouts.begin(), kOverlaidLayouts.end());
// A block's page of a layer is one run of bytes.
const Orders kCompact = {LBNHC, LBHNC, BLNHC, BLHNC};
const Orders kBlocksOutermost = {BLNHC, BLHNC};

KVCacheSpec rows(std::int64_t heads = 2, std::int64_t block_size = 4) {
  return rows_of_heads(heads, block_size);
}
KVCacheSpec scaled(KVQuantMode mode, DType dtype, std::int64_t head_size) {
  KVCacheSpec spec = rows();
  spec.kv_quant_mode = mode;
  spec.dtype = dtype;
  spec.head_size = head_size;
  return spec;
}
KVCacheSpec of_kind(CacheKind kind, KVCacheSpec spec) {
  spec.kind = kind;
  if (is_sliding_window(kind)) spec.sliding_window = 7;
  if (kind == CacheKind::chunked_local) spec.attention_chunk_size = 8;
  return spec;
}
KVCacheSpec compressed(std::int64_t tokens_per_row) {
  KVCacheSpec spec = rows(1);
  spec.kind = CacheKind::mla;
  spec.tokens_per_state = {tokens_per_row};
  return spec;
}
KVCacheSpec several(std::int64_t rows_per_token, KVCacheSpec spec) {
  spec.tokens_per_state = {.tokens = 1, .rows = rows_per_token};
  return spec;
}
// Rows in a layout of bytes, in pages that are rounded up.
KVCacheSpec rows_of_bytes(std::int64_t tokens_per_row, std::string model_version) {
  KVCacheSpec spec = compressed(tokens_per_row);
  spec.dtype = DType::uint8;
  spec.head_size = 512;
  spec.cache_dtype_str = "fp8_ds_mla";
  spec.model_version = std::move(model_version);
  spec.alignment = 64;
  return spec;
}
KVCacheSpec in_blocks_of(std::int64_t block_size, KVCacheSpec spec) {
  spec.block_size = block_size;
  return with_alignment_padding(std::move(spec));
}
KVCacheSpec window_of(KVCacheSpec spec) {
  spec.tokens_per_state = {1};
  return with_alignment_padding(of_kind(CacheKind::sliding_window_mla, std::move(spec)));
}
// As DeepSeek-V4: rows for two and four tokens and an indexer's in one group, windows, and windows
// of keys not yet compressed.
std::vector<KVCacheGroupSpec> compressed_by_layer() {
  const std::string v4 = "deepseek_v4";
  KVCacheSpec indexer = compressed(2), state = rows(1);
  indexer.dtype = DType::uint8;
  indexer.head_size = 20;
  state.dtype = DType::fp32;
  KVCacheGroupSpec rows_of_layers = group_of({}, 0, 4);
  rows_of_layers.layer_specs = {in_blocks_of(8, rows_of_bytes(2, v4)), in_blocks_of(8, indexer),
                                in_blocks_of(8, rows_of_bytes(4, v4)),
                                in_blocks_of(8, rows_of_bytes(2, v4))};
  rows_of_layers.spec = rows_of_layers.layer_specs.front();
  return {rows_of_layers, group_of(window_of(rows_of_bytes(2, v4)), 1, 2),
          group_of(window_of(state), 2, 2)};
}
KVCacheSpec computed_again() {
  KVCacheSpec spec = of_kind(CacheKind::sliding_window_mla, rows(1));
  spec.bounded_replay = true;
  return spec;
}
// Of half a chunk's tokens.
KVCacheSpec ring() {
  KVCacheSpec spec = rows(1);
  spec.kind = CacheKind::circular_buffer;
  spec.keys_alone = true;
  return spec;
}
// As indexers with the rows that they select from: their kernels take 64 tokens, half a block.
KVCacheGroupSpec mapped_rows() {
  KVCacheSpec whole = rows(1, 128), indexer = compressed(4);
  whole.kind = CacheKind::mla;
  indexer.block_size = 128;
  indexer.head_size = 12;
  indexer.block_stride_alignment = 16 * 12 * 2;
  KVCacheGroupSpec group = group_of(whole, 0, 3);
  group.layer_specs = {whole, indexer, indexer};
  return group;
}
// Every rank of a context keeps all of it.
KVCacheSpec whole(KVCacheSpec spec) {
  spec.dcp_sharded = false;
  return spec;
}
KVCacheSpec behind_sinks(std::int64_t sink_len) {
  KVCacheSpec spec = rows();
  spec.sink_len = sink_len;
  settle_full_attention(spec);
  return spec;
}
KVCacheSpec reference_window(std::int64_t tokens) {
  KVCacheSpec spec = rows();
  spec.rswa_window = tokens;
  settle_full_attention(spec);
  return spec;
}
// The engine serves these without prefix caching, and schedules a prompt with an encoder in one
// step.
void serve(const KVCacheConfig& plan, SavedCase& saved) {
  const KVCacheSpec& last = plan.groups.back().spec;
  if (last.sink_len > 0) saved.engine.engine += ",without=38";
  if (last.rswa_window > 0 || is_cross_attention(last)) saved.engine.enable_prefix_caching = false;
  if (is_cross_attention(last)) {
    saved.engine.enable_chunked_prefill = false;
    saved.engine.long_prefill_token_threshold = 0;
    saved.trace.header.is_encoder_decoder = true;
  }
  if (!last.dcp_sharded) saved.engine.dcp = saved.cp_kv_cache_interleave_size = 2;
  std::int32_t rows = 3;
  for (TraceRecord& record : saved.trace.records) {
    auto& request = std::get<TraceRequest>(record);
    if (last.rswa_window > 0) request.spec.max_tokens = request.output.length = 13;
    if (is_cross_attention(last))
      request.spec.keys.mm = {
          {.identifier = request.spec.name, .count = rows += 3, .kind = "audio"}};
  }
}
KVCacheSpec states(std::vector<StateTensorSpec> tensors) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.block_size = 4;
  spec.mamba_cache_mode = MambaCacheMode::align;
  spec.states = std::move(tensors);
  return spec;
}

}  // namespace

KVCacheGroupSpec group_of(KVCacheSpec spec, int number, int layers) {
  KVCacheGroupSpec group;
  for (int i = 0; i < layers; ++i) group.layer_names.push_back(fmt::format("g{}.{}", number, i));
  group.spec = std::move(spec);
  return group;
}

KVCacheSpec rows_of_heads(std::int64_t heads, std::int64_t block_size) {
  KVCacheSpec spec;
  spec.block_size = block_size;
  spec.num_kv_heads = heads;
  spec.head_size = 8;
  return spec;
}

std::vector<CacheKindCase> cache_kinds() {
  KVCacheGroupSpec uniform = group_of(rows(), 0, 3);
  uniform.layer_specs = {rows(1), rows(3), rows(1)};
  uniform.spec = uniform.layer_specs.front();
  const KVCacheSpec mamba2 = states({{{3, 4}, DType::bf16}, {{2, 4, 2}, DType::fp32}});
  const KVCacheSpec short_conv = states({{{2, 12}, DType::bf16}});
  const KVCacheSpec gated_delta = states({{{3, 4}, DType::bf16}, {{2, 4, 4}, DType::fp32}});
  const auto mamba2_in = [&](std::int64_t block_size) {
    KVCacheSpec spec = mamba2;
    spec.block_size = block_size;
    return spec;
  };
  const auto with_states = [](const KVCacheSpec& spec) {
    return std::vector{group_of(rows(), 0), group_of(spec, 1, 3), group_of(spec, 2, 3)};
  };
  return {
      {"full attention", {group_of(rows(), 0, 3)}, kAll},
      {"one head", {group_of(rows(1), 0)}, kAll},
      {"fp8 with scales",
       {group_of(scaled(KVQuantMode::fp8_per_token_head, DType::fp8_e4m3, 8), 0)},
       kAll},
      {"int8 with scales",
       {group_of(scaled(KVQuantMode::int8_per_token_head, DType::int8, 8), 0)},
       kAll},
      {"int4 with scales",
       {group_of(scaled(KVQuantMode::int4_per_token_head, DType::uint8, 8), 0)},
       kAll},
      {"rows of no whole words",
       {group_of(scaled(KVQuantMode::none, DType::fp8_e5m2, 5), 0)},
       kAll},
      {"nvfp4", {group_of(scaled(KVQuantMode::nvfp4, DType::uint8, 16), 0)}, kAll},
      {"mla", {group_of(of_kind(CacheKind::mla, rows(1)), 0)}, kAll},
      {"rows of 656 bytes", {group_of(rows_of_bytes(1, ""), 0)}, kAll},
      {"compressed rows", {group_of(compressed(2), 0)}, kAll},
      {"rows of 584 bytes, padded",
       {group_of(in_blocks_of(4, rows_of_bytes(2, "deepseek_v4")), 0)},
       kAll},
      {kWithRing,
       {group_of(compressed(2), 0), group_of(computed_again(), 1), group_of(ring(), 2, 1)},
       kCompact},
      {"windows and chunks",
       {group_of(rows(), 0), group_of(of_kind(CacheKind::sliding_window, rows()), 1),
        group_of(of_kind(CacheKind::chunked_local, rows()), 2, 1)},
       kAll},
      {"windows in longer blocks",
       {group_of(rows(2, 4), 0), group_of(of_kind(CacheKind::sliding_window, rows(1, 8)), 1)},
       kCompact},
      {"mamba2", with_states(mamba2), kCompact},
      {"short convolutions", with_states(short_conv), kCompact},
      {"gated delta", with_states(gated_delta), kCompact},
      {"states alone", {group_of(gated_delta, 0)}, kAll},
      {"hidden states in padded pages",
       {group_of(rows(), 0), group_of(of_kind(CacheKind::hidden_state, rows(1)), 1, 1)},
       kCompact},
      {"layers of two page sizes", {uniform}, kCompact},
      {"split into kernel blocks",
       {group_of(rows(2, 48), 0)},
       {LBNHC, LBHNC},
       AttentionBackend::flashinfer},
      {"one layer, split",
       {group_of(rows(2, 48), 0, 1)},
       {LBNHC, LBHNC, BLNHC, BLHNC},
       AttentionBackend::flashinfer},
      {"two blocks", {group_of(rows(2, 64), 0)}, kAll, AttentionBackend::any_size, 2},
      // FlashAttention takes blocks whole, whatever the states are kept in.
      {"fp32 states, long blocks",
       {group_of(rows(2, 48), 0), group_of(mamba2_in(48), 1, 3)},
       kCompact,
       AttentionBackend::flash_attn},
      {"pages of different sizes",
       {group_of(rows(2), 0), group_of(of_kind(CacheKind::sliding_window, rows(1)), 1, 3)},
       kBlocksOutermost,
       AttentionBackend::any_size,
       41,
       true},
      {"states and pages of different sizes",
       {group_of(rows(2), 0), group_of(of_kind(CacheKind::sliding_window, rows(1)), 1, 3),
        group_of(mamba2, 2, 3)},
       kBlocksOutermost,
       AttentionBackend::any_size,
       41,
       true},
      {"rows compressed by layer", compressed_by_layer(), kBlocksOutermost,
       AttentionBackend::any_size, 41, true},
      {kMapped,
       {mapped_rows(), group_of(ring(), 1, 1)},
       kBlocksOutermost,
       AttentionBackend::triton_mla,
       21,
       true,
       6},
      {"several rows per token",
       {group_of(several(4, rows()), 0),
        group_of(several(4, of_kind(CacheKind::sliding_window, rows())), 1)},
       kAll},
      {kWithEncoder,
       {group_of(rows(), 0), group_of(of_kind(CacheKind::cross_attention, rows()), 1)},
       kAll},
      {kWithSinks, {group_of(behind_sinks(8), 0)}, kAll},
      {kWithWholeCaches,
       {group_of(rows(), 0), group_of(whole(rows()), 1),
        group_of(whole(of_kind(CacheKind::sliding_window, rows())), 2)},
       kAll},
      {"an indexer with a ring on every rank",
       {group_of(of_kind(CacheKind::mla, rows(1)), 0), group_of(compressed(2), 1),
        group_of(whole(ring()), 2, 1)},
       kCompact},
      {kWithReferenceWindow, {group_of(reference_window(3), 0)}, kAll},
      {.name = "a drafter", .groups = {group_of(rows(), 0, 3)}, .orders = kAll, .num_modules = 1},
      {.name = "a drafter of three modules",
       .groups = {group_of(rows(), 0, 4)},
       .orders = kAll,
       .num_modules = 3},
  };
}

SavedCase case_in(const CacheKindCase& kind, CacheLayout order) {
  SavedCase saved = busy_case("");
  saved.backend = "simt";
  saved.check = CheckMode::check;
  saved.attention_backend = kind.backend;
  saved.layout = order;
  saved.queries_per_kv = 2;
  if (!kind.is_packed) saved.cache = *plan_for_groups(kind.groups, kind.num_blocks);
  if (!kind.is_packed && kind.groups.front().is_uniform_type()) {
    saved.cache.tensors.clear();
    KVCacheGroupSpec& group = saved.cache.groups.front();
    for (KVCacheSpec& spec : group.layer_specs) spec.page_size_padded.reset();
    group.spec = group.layer_specs.front();
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      saved.cache.tensors.push_back(
          {group.layer_specs[i].num_kv_heads * 4 * 32 * kind.num_blocks, {group.layer_names[i]}});
  }
  if (kind.is_packed) {
    saved.cache = {.num_blocks = kind.num_blocks, .tensors = {}, .groups = kind.groups};
    saved.cache =
        with_placed_tensors(saved.cache, *placed_layout(saved.cache, kind.backend, BLNHC));
  }
  for (TraceRecord& record : saved.trace.records)
    for (TokenRun& run : std::get<TraceRequest>(record).spec.prompt.runs)
      run.count *= static_cast<std::uint32_t>(kind.times_longer);
  for (std::int32_t* tokens : {&saved.engine.max_model_len, &saved.engine.max_num_batched_tokens,
                               &saved.engine.long_prefill_token_threshold})
    *tokens *= kind.times_longer;
  // A prompt that is there already, once all others have left.
  TraceRequest again;
  again.spec.name = "again";
  again.spec.prompt.append({TokenRun::Kind::seeded, 1, 0, 30});
  again.spec.arrival_ns = std::int64_t{1} << 40;
  again.spec.max_tokens = again.output.length = 6;
  if (kind.groups.back().spec.kind == CacheKind::circular_buffer)
    saved.trace.records.emplace_back(again);
  saved.engine.block_size = static_cast<std::int32_t>(kind.groups.front().spec.block_size);
  saved.engine.mamba_cache_mode = MambaCacheMode::align;
  if (kind.num_modules > 0) {
    saved.engine.spec_method = SpecMethod::eagle;
    saved.engine.num_spec_tokens = 3;
    saved.engine.num_prefill_lookahead_tokens = kind.num_modules;
    saved.draft_acceptance_percent = 0;  // the same steps from every seed
    const auto& names = kind.groups.front().layer_names;
    for (auto name = names.end() - kind.num_modules; name != names.end(); ++name)
      saved.cache.draft_modules.push_back({*name});
  }
  saved.kernel_block_sizes.clear();
  serve(saved.cache, saved);
  return saved;
}

}  // namespace lockstep::tests
