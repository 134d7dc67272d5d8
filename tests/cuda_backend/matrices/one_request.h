// One request's attention over whole blocks, with queries in fp32: the parameters of a launch
// except its keys and values.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda {

struct OneRequest {
  std::vector<std::int32_t> table, positions;  // blocks in their order; a query at each
  int block_size = 0, num_query_heads = 0, head_size = 0, split_keys = 0;
  float scale = 1;
};

// `params` has key and value; query_number(token, head, e): an element of a query.
// Returns [positions, num_query_heads, head_size].
template <class QueryNumber>
std::vector<float> attended(KernelDevice& device, const OneRequest& request,
                            SplitAttentionParams params, QueryNumber query_number) {
  const auto num_tokens = request.positions.size(), num_blocks = request.table.size();
  std::vector<float> queries;
  for (std::size_t token = 0; token < num_tokens; ++token)
    for (int head = 0; head < request.num_query_heads; ++head)
      for (int e = 0; e < request.head_size; ++e) queries.push_back(query_number(token, head, e));
  params.queries = reinterpret_cast<std::byte*>(device.put(queries, "queries"));
  params.block_table = device.put(request.table, "block_table");
  params.token_rows = device.put(std::vector<std::int32_t>(num_tokens, 0), "rows");
  params.positions = device.put(request.positions, "positions");
  params.table_width = static_cast<std::int32_t>(num_blocks);
  params.scale = request.scale;
  params.query_dtype = DType::fp32;
  params.causal = true;
  params.num_tokens = static_cast<std::int32_t>(num_tokens);
  params.num_query_heads = request.num_query_heads;
  params.split_keys = request.split_keys;
  const auto num_keys = static_cast<int>(params.table_width * request.block_size);
  params.num_splits = (num_keys + request.split_keys - 1) / request.split_keys;
  const std::int64_t rows = std::int64_t{params.num_tokens} * request.num_query_heads;
  params.partials =
      device.room<float>(rows * params.num_splits * (2 + request.head_size), "partials");
  params.outputs = device.put(std::vector<float>(rows * request.head_size, -77.0f), "outputs");
  device->launch(device.engine().split_attention, params);
  return device.get(params.outputs, rows * request.head_size);
}

}  // namespace lockstep::cuda
