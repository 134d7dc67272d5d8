// A benchmark file: a workload whose totals an engine has measured. First line: configuration,
// groups, pool and totals; then the requests, all added before the first step in this order. Every
// sampled token is `sampled_token` and only lengths end a request. docs/formats.md, "Benchmark
// file".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "traces/formats/recording.h"

namespace lockstep {

struct BenchmarkTotals {
  std::int64_t steps = 0;
  std::int64_t scheduled_tokens = 0;
  std::int64_t request_steps = 0;
  bool operator==(const BenchmarkTotals&) const = default;
};

struct BenchmarkFile {
  std::string name;
  RecordedEngine engine;
  EngineOptions options;
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks = 0;
  std::int32_t sampled_token = 0;
  BenchmarkTotals totals;
  std::vector<RequestSpec> requests;
};

Result<BenchmarkFile> read_benchmark_file(const std::string& path);

}  // namespace lockstep
