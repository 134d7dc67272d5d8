// The backend on the SIMT executor, step by step: what a prefilled token, a decoded token, a
// fingerprinted page and a probed position cost in each mode. Sized as the replay of a trace is: 2
// layers, 2 KV heads.
#include <benchmark/benchmark.h>

#include <numeric>

#include "base/check.h"
#include "cuda_backend/backends.h"

namespace lockstep {
namespace {

constexpr std::int32_t kBlockSize = 16, kLayers = 2, kRows = 256;

BackendConfig config_of(CheckMode check, std::int32_t num_blocks, std::int64_t head_size) {
  KVCacheSpec spec;
  spec.block_size = kBlockSize;
  spec.num_kv_heads = 2;
  spec.head_size = head_size;
  BackendConfig config;
  config.attention_backend = AttentionBackend::triton_attn;
  config.plan.num_blocks = num_blocks;
  config.plan.groups.emplace_back().spec = spec;
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    config.plan.groups[0].layer_names.push_back(name);
    config.plan.tensors.push_back({num_blocks * kBlockSize * 2 * 2 * head_size * 2, {name}});
  }
  config.kernel_block_sizes = {kBlockSize};
  config.num_rows = kRows;
  config.max_blocks_per_row = {num_blocks};
  config.max_tokens_per_step = 8192;
  config.check = check;
  return config;
}

std::unique_ptr<Backend> make(const BackendConfig& config) {
  auto backend = make_simt_backend(config);
  LS_CHECK(backend.has_value(), "{}", backend.error().message);
  return std::move(*backend);
}

// `rows` requests, each with `tokens` new tokens after `before` that are there already.
StepProgram step_of(std::int32_t rows, std::int32_t before, std::int32_t tokens) {
  StepProgram program;
  const std::int32_t blocks = (before + tokens + kBlockSize - 1) / kBlockSize;
  for (std::int32_t row = 0; row < rows; ++row) {
    const auto begin = static_cast<std::uint32_t>(program.table_block_ids.size());
    for (std::int32_t i = 0; i < blocks; ++i)
      program.table_block_ids.push_back(BlockId{1 + row * blocks + i});
    program.table_updates.push_back({row, 0, 0, begin, static_cast<std::uint32_t>(blocks)});
    program.rows.push_back({row, before, tokens, row * tokens});
  }
  program.contents.resize(static_cast<std::size_t>(rows) * tokens);
  std::iota(program.contents.begin(), program.contents.end(), 1u);
  program.num_padded_tokens = rows * tokens;
  return program;
}

void run(benchmark::State& state, Backend& backend, const StepProgram& program,
         StepReadback& readback) {
  auto done = backend.execute(program, readback);
  LS_CHECK(done.has_value(), "{}", done.error().message);
  LS_CHECK(readback.reports.empty(), "{}", readback.reports.front().message);
  benchmark::DoNotOptimize(readback.slot_mappings.data());
  (void)state;
}

CheckMode mode_of(const benchmark::State& state) { return static_cast<CheckMode>(state.range(0)); }

// Tokens per second: one request, 8192 tokens per step.
void prefill(benchmark::State& state) {
  const auto backend = make(config_of(mode_of(state), 600, state.range(1)));
  const StepProgram program = step_of(1, 0, 8192);
  StepReadback readback;
  for (auto _ : state) run(state, *backend, program, readback);
  state.SetItemsProcessed(state.iterations() * 8192);
}
BENCHMARK(prefill)->ArgsProduct({{0, 1, 2}, {8, 16, 128}})->Unit(benchmark::kMillisecond);

// Steps of range(1) requests that decode one token each; items are tokens.
void decode(benchmark::State& state) {
  const auto backend = make(config_of(mode_of(state), 2000, 16));
  const auto rows = static_cast<std::int32_t>(state.range(1));
  StepProgram program = step_of(rows, 95, 1);
  StepReadback readback;
  run(state, *backend, program, readback);
  program.table_updates.clear();
  program.table_block_ids.clear();
  for (auto _ : state) run(state, *backend, program, readback);
  state.SetItemsProcessed(state.iterations() * rows);
}
BENCHMARK(decode)->ArgsProduct({{0, 1}, {1, 16, 256}})->Unit(benchmark::kMicrosecond);

// Bytes per second: every page of a pool.
void fingerprint(benchmark::State& state) {
  const BackendConfig config = config_of(mode_of(state), 500, 16);
  const auto backend = make(config);
  std::vector<PageId> pages;
  for (std::int32_t block = 0; block < 500; ++block)
    for (std::int32_t tensor = 0; tensor < kLayers; ++tensor)
      pages.push_back({tensor, BlockId{block}});
  std::vector<Fingerprint> fingerprints(pages.size());
  for (auto _ : state) LS_CHECK(backend->fingerprint_pages(pages, fingerprints).has_value());
  state.SetBytesProcessed(state.iterations() * 2 * config.plan.tensors[0].size_bytes);
}
BENCHMARK(fingerprint)->ArgsProduct({{0, 1}})->Unit(benchmark::kMillisecond);

// Positions a second: digests of one long row.
void digest(benchmark::State& state) {
  const auto backend = make(config_of(mode_of(state), 600, 16));
  StepProgram program = step_of(1, 0, 8192);
  StepReadback readback;
  run(state, *backend, program, readback);
  program = {};
  for (std::int32_t layer = 0; layer < kLayers; ++layer)
    program.probes.push_back({0, layer, 0, 8192});
  for (auto _ : state) run(state, *backend, program, readback);
  state.SetItemsProcessed(state.iterations() * 8192 * kLayers);
}
BENCHMARK(digest)->ArgsProduct({{0, 1}})->Unit(benchmark::kMillisecond);

// Keys a second: softmax attention of 16 queries over 1024 positions.
void attention(benchmark::State& state) {
  const auto backend = make(config_of(mode_of(state), 600, 16));
  StepProgram program = step_of(1, 0, 1024);
  StepReadback readback;
  run(state, *backend, program, readback);
  program = {};
  for (std::uint64_t i = 0; i < 16; ++i) program.queries.push_back({0, 0, 0, 1024, i});
  for (auto _ : state) run(state, *backend, program, readback);
  state.SetItemsProcessed(state.iterations() * 16 * 2 * 1024);
}
BENCHMARK(attention)->ArgsProduct({{0, 1}})->Unit(benchmark::kMillisecond);

// A pool of range(1) blocks, made and poisoned.
void start(benchmark::State& state) {
  const auto num_blocks = static_cast<std::int32_t>(state.range(1));
  for (auto _ : state) benchmark::DoNotOptimize(make(config_of(mode_of(state), num_blocks, 16)));
}
BENCHMARK(start)->ArgsProduct({{0, 1}, {100, 20000}})->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace lockstep
