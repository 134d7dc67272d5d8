// A plugin of plain loops: the smallest thing that `lockstep replay --backend` takes.
// docs/check_your_kernels.md explains it. Build it as a shared library:
//   c++ -std=c++20 -shared -fPIC -I LOCKSTEP docs/examples/plain_plugin.cpp -o plain_plugin.so
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "cuda_backend/plugin/plugin.h"

#ifndef PLAIN_PLUGIN_BUG
#define PLAIN_PLUGIN_BUG 0  // 1: slots of blocks of 16 tokens, whatever the cache's size
#endif

namespace {

// The bytes at an index, whose last dimensions may be left out.
unsigned char* at(const lockstep_tensor& tensor, std::initializer_list<int64_t> index) {
  auto* bytes = static_cast<unsigned char*>(tensor.data);
  const int64_t* stride = tensor.strides;
  for (const int64_t i : index) bytes += i * *stride++;
  return bytes;
}
template <class Integer>
Integer& integer_at(const lockstep_tensor& tensor, std::initializer_list<int64_t> index) {
  return *reinterpret_cast<Integer*>(at(tensor, index));
}

const char* declines(void*, const lockstep_layer* layer) {
  return std::string_view(layer->kv_quant_mode) == "none" ? nullptr : "rows to quantise";
}

int write(void*, const lockstep_call* call) {
  const lockstep_tensor& cache = call->kv_cache;
  const lockstep_tensor rows[] = {call->key, call->value};
  for (int64_t token = 0; token < call->key.shape[0]; ++token) {
    const int64_t slot = integer_at<int64_t>(call->slot_mapping, {token});
    if (slot < 0) continue;  // padding
    for (int64_t part = 0; part < 2; ++part)
      for (int64_t head = 0; head < cache.shape[3]; ++head)
        std::memcpy(at(cache, {part, slot / cache.shape[2], slot % cache.shape[2], head}),
                    at(rows[part], {token, head}), cache.shape[4] * cache.strides[4]);
  }
  return 0;
}

// From the bytes of an element to its value.
using number_of = double (*)(const unsigned char*);
template <class Number, class Bits>
double value_of(Bits bits) {
  Number number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
number_of numbers(std::string_view dtype) {
  using bytes = const unsigned char*;
  if (dtype == "fp32")
    return [](bytes p) { return value_of<float>(p[0] | p[1] << 8 | p[2] << 16 | p[3] << 24); };
  if (dtype == "bf16") return [](bytes p) { return value_of<float>((p[0] | p[1] << 8) << 16); };
  if (dtype == "fp16") return [](bytes p) { return value_of<_Float16>(p[0] | p[1] << 8); };
  if (dtype == "fp8_e5m2") return [](bytes p) { return value_of<_Float16>(p[0] << 8); };
  return [](bytes p) {  // fp8, e4m3: an fp16 / 256
    return 256 * value_of<_Float16>((p[0] & 0x80) << 8 | (p[0] & 0x7F) << 7);
  };
}

// One query of one head over positions [first, last) of a sequence.
void attend_row(const lockstep_call* call, int64_t sequence, int64_t token, int64_t head,
                int64_t first, int64_t last) {
  const lockstep_tensor& cache = call->kv_cache;
  const int64_t kv_head = head / (call->query.shape[1] / cache.shape[3]), size = cache.shape[4];
  const auto row = [&](int64_t part, int64_t position) {
    const int32_t block =
        integer_at<int32_t>(call->block_table, {sequence, position / cache.shape[2]});
    return at(cache, {part, block, position % cache.shape[2], kv_head});
  };
  const number_of query_at = numbers(call->query.dtype), cache_at = numbers(cache.dtype);
  std::vector<double> sums(size);
  double total = 0, highest = -INFINITY;
  for (int64_t position = first; position < last; ++position) {
    double score = 0;
    for (int64_t i = 0; i < size; ++i)
      score += query_at(at(call->query, {token, head, i})) *
               cache_at(row(0, position) + i * cache.strides[4]);
    // The largest score so far is subtracted, so that no weight overflows.
    const double before = highest;
    highest = std::max(before, score * call->scale);
    const double kept = std::exp(before - highest);
    const double weight = std::exp(score * call->scale - highest);
    total = total * kept + weight;
    for (int64_t i = 0; i < size; ++i)
      sums[i] = sums[i] * kept + weight * cache_at(row(1, position) + i * cache.strides[4]);
  }
  for (int64_t i = 0; i < size; ++i)
    *reinterpret_cast<float*>(at(call->output, {token, head, i})) =
        static_cast<float>(sums[i] / total);
}

int attend(void*, const lockstep_call* call) {
  const int64_t window = call->layer->sliding_window, chunk = call->layer->attention_chunk_size;
  for (int32_t s = 0; s < call->seq_lens.size; ++s) {
    const int64_t begin = call->query_start_loc.host[s], end = call->query_start_loc.host[s + 1];
    for (int64_t token = begin; token < end; ++token) {
      const int64_t last = call->seq_lens.host[s] - (end - token) + 1;  // causal
      int64_t first = window > 0 ? std::max<int64_t>(0, last - window) : 0;
      if (chunk > 0) first = (last - 1) / chunk * chunk;
      for (int64_t head = 0; head < call->query.shape[1]; ++head)
        attend_row(call, s, token, head, first, last);
    }
  }
  return 0;
}

int map_slots(void*, const lockstep_call* call) {
  const int64_t block_size = PLAIN_PLUGIN_BUG ? 16 : call->block_size.host[0];
  for (int64_t token = 0; token < call->slot_mapping.shape[0]; ++token) {
    int64_t& slot = integer_at<int64_t>(call->slot_mapping, {token});
    slot = -1;  // padding
    if (token >= call->positions.shape[0]) continue;
    const int32_t position = integer_at<int32_t>(call->positions, {token});
    const int32_t row = integer_at<int32_t>(call->batch_indices, {token});
    const int64_t block = integer_at<int32_t>(call->block_table, {row, position / block_size});
    slot = block * block_size + position % block_size;
  }
  return 0;
}

const lockstep_plugin kPlugin = [] {
  lockstep_plugin plugin{};
  plugin.version = LOCKSTEP_PLUGIN_VERSION;
  plugin.struct_bytes = sizeof plugin;
  plugin.name = "plain loops";
  plugin.declines = declines;
  plugin.write = write;
  plugin.attend = attend;
  plugin.map_slots = map_slots;
  return plugin;
}();

}  // namespace

#ifndef PLAIN_PLUGIN_AS_BASE  // other examples start from these loops
extern "C" const lockstep_plugin* lockstep_plugin_open() { return &kPlugin; }
#endif
