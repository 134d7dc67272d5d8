// Your kernel, which writes rows of K and V to the pages, with the rest of the plain loops of
// <lockstep/plain_plugin.h>. On a GPU it would be a launch.
#define PLAIN_PLUGIN_AS_BASE
#include <lockstep/plain_plugin.h>

namespace {

int my_write(void*, const lockstep_call* call) {
  const lockstep_tensor& cache = call->kv_cache;  // [2, blocks, block size, heads, head size]
#ifdef MY_BUG                                     // the last head is forgotten
  const int64_t num_heads = cache.shape[3] - 1;
#else
  const int64_t num_heads = cache.shape[3];
#endif
  for (int64_t token = 0; token < call->key.shape[0]; ++token) {
    const int64_t slot = integer_at<int64_t>(call->slot_mapping, {token});
    if (slot < 0) continue;  // padding
    const int64_t block = slot / cache.shape[2], offset = slot % cache.shape[2];
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t row_bytes = cache.shape[4] * cache.strides[4];
      std::memcpy(at(cache, {0, block, offset, head}), at(call->key, {token, head}), row_bytes);
      std::memcpy(at(cache, {1, block, offset, head}), at(call->value, {token, head}), row_bytes);
    }
  }
  return 0;
}

const lockstep_plugin kMine = [] {
  lockstep_plugin plugin = kPlugin;
  plugin.name = "my kernels";
  plugin.write = my_write;
  return plugin;
}();

}  // namespace

extern "C" const lockstep_plugin* lockstep_plugin_open() { return &kMine; }
