// The plans of toy_engine.h: small, and each with something that has gone wrong in a real engine.
#include "tests/cuda_backend/toy_engine.h"

namespace lockstep {
namespace {

KVCacheSpec attention(std::int64_t block_size, std::int64_t heads, std::int64_t head_size,
                      DType dtype = DType::bf16) {
  KVCacheSpec spec;
  spec.block_size = block_size;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.dtype = dtype;
  return spec;
}

// `tensors` tensors of pages of page_bytes; layer i of every group lies in tensor i.
ToyPlan plan_of(std::string name, std::vector<KVCacheSpec> specs, int tensors,
                std::int64_t page_bytes, int num_blocks, AttentionBackend backend) {
  ToyPlan plan;
  plan.name = std::move(name);
  BackendConfig& config = plan.config;
  config.attention_backend = backend;
  config.plan.num_blocks = num_blocks;
  config.plan.tensors.resize(tensors);
  for (KVCacheTensor& tensor : config.plan.tensors) tensor.size_bytes = page_bytes * num_blocks;
  for (std::size_t g = 0; g < specs.size(); ++g) {
    KVCacheGroupSpec& group = config.plan.groups.emplace_back();
    group.spec = specs[g];
    for (int t = 0; t < tensors; ++t) {
      // A group of hidden states has one layer.
      if (specs[g].kind == CacheKind::hidden_state && t > 0) break;
      group.layer_names.push_back("group." + std::to_string(g) + ".layer." + std::to_string(t));
      config.plan.tensors[t].shared_by.push_back(group.layer_names.back());
    }
    config.kernel_block_sizes.push_back(specs[g].block_size);
    config.max_blocks_per_row.push_back(
        static_cast<std::int32_t>(64 / std::min<std::int64_t>(specs[g].block_size, 64) + 1));
  }
  plan.state_offsets.resize(specs.size());
  config.num_rows = 5;
  config.max_tokens_per_step = 64;
  return plan;
}

// Attention with blocks of 96 tokens in kernel blocks of 32, with padded states, as a hybrid is
// planned.
ToyPlan hybrid(std::string name, AttentionBackend backend, CacheLayout layout, int num_blocks) {
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  states.block_size = 64;
  states.states = {{{3, 40}, DType::bf16}, {{7, 5, 9}, DType::fp32}};
  states.page_size_padded = 96 * 2 * 2 * 16 * 2;
  ToyPlan plan = plan_of(std::move(name), {states, attention(96, 2, 16), states}, 2,
                         *states.page_size_padded, num_blocks, backend);
  plan.config.layout = layout;
  plan.config.kernel_block_sizes[1] = backend == AttentionBackend::triton_attn ? 96 : 32;
  plan.state_offsets = {{0, 240}, {}, {0, 240}};
  return plan;
}

// A second layer next to each layer, in the same page.
ToyPlan packed(ToyPlan plan) {
  KVCacheGroupSpec& group = plan.config.plan.groups.front();
  plan.pack = 2;
  group.layers_per_page = 2;
  group.layer_names.clear();
  for (std::size_t t = 0; t < plan.config.plan.tensors.size(); ++t) {
    std::vector<std::string>& shared_by = plan.config.plan.tensors[t].shared_by;
    shared_by = {"layer." + std::to_string(2 * t), "layer." + std::to_string(2 * t + 1)};
    group.layer_names.insert(group.layer_names.end(), shared_by.begin(), shared_by.end());
  }
  return plan;
}

}  // namespace

std::vector<ToyPlan> toy_plans() {
  using enum AttentionBackend;
  std::vector<ToyPlan> plans;
  plans.push_back(plan_of("pairs in pages, NHD", {attention(16, 2, 16)}, 2, 2048, 30, triton_attn));
  plans.back().config.queries_per_kv = 2;
  plans.push_back(plan_of("pairs in pages, HND", {attention(16, 2, 16)}, 2, 2048, 30, flashinfer));
  plans.back().config.layout = CacheLayout::HND;
  plans.push_back(plan_of("pairs apart, NHD", {attention(16, 2, 16)}, 2, 2048, 30, flash_attn));
  plans.back().pair_apart = true;
  plans.push_back(
      plan_of("pairs apart, HND, rows of 12 bytes", {attention(16, 2, 6)}, 1, 768, 30, flash_attn));
  plans.back().pair_apart = true;
  plans.back().config.layout = CacheLayout::HND;
  plans.push_back(
      plan_of("fp8, one head", {attention(16, 1, 32, DType::fp8_e4m3)}, 1, 1024, 30, triton_attn));

  KVCacheSpec mla = attention(16, 1, 576);
  mla.kind = CacheKind::mla;
  plans.push_back(plan_of("MLA", {mla}, 1, 16 * 576 * 2, 25, triton_mla));
  plans.back().config.queries_per_kv = 3;
  plans.back().requests = 2;
  plans.back().length = 40;

  KVCacheSpec window = attention(16, 2, 16);
  window.kind = CacheKind::sliding_window;
  window.sliding_window = 20;
  plans.push_back(plan_of("full attention and two windows share tensors",
                          {attention(16, 2, 16), window, window}, 2, 2048, 60, triton_attn));

  KVCacheSpec hidden = attention(10, 3, 32);
  hidden.kind = CacheKind::hidden_state;
  hidden.page_size_padded = 2048;
  plans.push_back(plan_of("hidden states in padded pages", {attention(16, 2, 16), hidden}, 2, 2048,
                          60, flash_attn));

  plans.push_back(
      hybrid("hybrid, FlashAttention, kernel blocks of 32", flash_attn, CacheLayout::NHD, 24));
  plans.push_back(hybrid("hybrid, FlashInfer, HND", flashinfer, CacheLayout::HND, 24));
  plans.push_back(hybrid("hybrid, Triton, blocks whole", triton_attn, CacheLayout::NHD, 24));

  plans.push_back(plan_of("equal pages, other block sizes",
                          {attention(16, 2, 16), attention(32, 1, 16)}, 2, 2048, 60, triton_attn));
  plans.push_back(packed(
      plan_of("packed by two, FlashAttention", {attention(16, 2, 16)}, 2, 4096, 30, flash_attn)));
  plans.push_back(packed(
      plan_of("packed by two, FlashInfer", {attention(32, 2, 16)}, 1, 8192, 30, flashinfer)));
  plans.push_back(plan_of("two blocks", {attention(64, 2, 16)}, 1, 8192, 2, triton_attn));
  plans.back().requests = 1;
  plans.push_back(
      plan_of("two blocks, pairs apart", {attention(64, 2, 16)}, 1, 8192, 2, flash_attn));
  plans.back().requests = 1;
  plans.back().pair_apart = true;
  return plans;
}

}  // namespace lockstep
