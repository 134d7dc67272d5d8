// A plugin of plain loops over plain memory: the smallest thing that `lockstep replay --backend`
// takes. docs/check_your_kernels.md explains it piece by piece. Build it as a shared library:
//   c++ -std=c++20 -shared -fPIC -I LOCKSTEP docs/examples/plain_plugin.cpp -o plain_plugin.so
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda_backend/plugin/plugin.h"

#ifndef PLAIN_PLUGIN_BUG
#define PLAIN_PLUGIN_BUG 0  // 1: slots are computed with the block size of the kernel
#endif
#ifndef PLAIN_PLUGIN_ALLOCATOR
#define PLAIN_PLUGIN_ALLOCATOR std::allocator  // of memory that your kernels can address
#endif
using tensor_bytes = std::vector<unsigned char, PLAIN_PLUGIN_ALLOCATOR<unsigned char>>;

struct lockstep_backend {
  const lockstep_plan* plan;
  std::vector<tensor_bytes> tensors;
  std::vector<std::vector<std::vector<int32_t>>> tables;  // group, row, entry: manager block ids
  std::vector<std::vector<int64_t>> slots;                // group, token: of the last map_slots()
};

namespace {

lockstep_backend* create(const lockstep_plan* plan, char*, size_t) {
  auto* b = new lockstep_backend{plan, {}, {}, {}};
  for (int32_t t = 0; t < plan->num_tensors; ++t)
    b->tensors.emplace_back(static_cast<size_t>(plan->tensor_bytes[t]));
  b->tables.assign(plan->num_groups, std::vector<std::vector<int32_t>>(plan->num_rows));
  b->slots.resize(plan->num_groups);
  return b;
}

void destroy(lockstep_backend* b) { delete b; }

int write_bytes(lockstep_backend* b, int32_t tensor, int64_t offset, const void* bytes,
                int64_t size_bytes) {
  std::memcpy(&b->tensors[tensor][offset], bytes, size_bytes);
  return 0;
}

int read_bytes(lockstep_backend* b, int32_t tensor, int64_t offset, void* bytes,
               int64_t size_bytes) {
  std::memcpy(bytes, &b->tensors[tensor][offset], size_bytes);
  return 0;
}

// A region is what one layer of a group uses of a block.
int zero_blocks(lockstep_backend* b, int32_t group, const int32_t* block_ids, int32_t count) {
  for (int32_t r = 0; r < b->plan->num_regions; ++r) {
    const lockstep_region& region = b->plan->regions[r];
    for (int32_t i = 0; i < count && region.group == group; ++i)
      std::memset(&b->tensors[region.tensor][region.offset + block_ids[i] * region.block_stride], 0,
                  region.size_bytes);
  }
  return 0;
}

int update_tables(lockstep_backend* b, const int32_t* clear_rows, int32_t num_clear_rows,
                  const lockstep_table_update* updates, int32_t num_updates,
                  const lockstep_table_edit* edits, int32_t num_edits) {
  for (int32_t i = 0; i < num_clear_rows; ++i)
    for (auto& rows : b->tables) rows[clear_rows[i]].clear();
  for (int32_t i = 0; i < num_updates; ++i) {
    const lockstep_table_update& update = updates[i];
    std::vector<int32_t>& table = b->tables[update.group][update.row];
    table.resize(update.first);
    table.insert(table.end(), update.block_ids, update.block_ids + update.count);
  }
  for (int32_t i = 0; i < num_edits; ++i)
    b->tables[edits[i].group][edits[i].row][edits[i].index] = edits[i].block_id;
  return 0;
}

int read_table(lockstep_backend* b, int32_t group, int32_t row, int32_t* block_ids,
               int32_t* length) {
  const std::vector<int32_t>& table = b->tables[group][row];
  std::copy(table.begin(), table.end(), block_ids);
  *length = static_cast<int32_t>(table.size());
  return 0;
}

int64_t slot_of(const lockstep_backend* b, int32_t group, int32_t row, int32_t position) {
  const lockstep_group& g = b->plan->groups[group];
  const int64_t block_size = PLAIN_PLUGIN_BUG ? g.kernel_block_size : g.block_size;
  return b->tables[group][row][position / g.block_size] * block_size + position % g.block_size;
}

int map_slots(lockstep_backend* b, const int32_t* positions, const int32_t* rows,
              int32_t num_tokens, int32_t num_padded_tokens, int64_t* slots) {
  for (int32_t g = 0; g < b->plan->num_groups; ++g, slots += num_padded_tokens) {
    b->slots[g].assign(num_padded_tokens, -1);
    for (int32_t i = 0; i < num_tokens; ++i) b->slots[g][i] = slot_of(b, g, rows[i], positions[i]);
    std::copy(b->slots[g].begin(), b->slots[g].end(), slots);
  }
  return 0;
}

unsigned char* row_at(lockstep_backend* b, const lockstep_layer& layer, int64_t slot, int32_t part,
                      int32_t head) {
  const int64_t size = b->plan->groups[layer.group].kernel_block_size;
  return &b->tensors[layer.tensor][layer.offset + slot / size * layer.block_stride +
                                   slot % size * layer.token_stride + part * layer.part_stride +
                                   head * layer.head_stride];
}

int write_rows(lockstep_backend* b, int32_t layer_index, const void* keys, const void* values,
               int32_t num_tokens) {
  const lockstep_layer& layer = b->plan->layers[layer_index];
  const void* inputs[] = {keys, values};
  for (int32_t part = 0; part < layer.num_parts; ++part) {
    auto* row = static_cast<const unsigned char*>(inputs[part]);
    for (int32_t i = 0; i < num_tokens; ++i)
      for (int32_t head = 0; head < layer.num_kv_heads; ++head, row += layer.row_bytes)
        std::memcpy(row_at(b, layer, b->slots[layer.group][i], part, head), row, layer.row_bytes);
  }
  return 0;
}

int read_rows(lockstep_backend* b, int32_t layer_index, int32_t row, int32_t first, int32_t last,
              void* keys, void* values) {
  const lockstep_layer& layer = b->plan->layers[layer_index];
  void* outputs[] = {keys, values};
  for (int32_t part = 0; part < layer.num_parts; ++part) {
    auto* out = static_cast<unsigned char*>(outputs[part]);
    for (int32_t position = first; position < last; ++position) {
      const int64_t slot = slot_of(b, layer.group, row, position);
      for (int32_t head = 0; head < layer.num_kv_heads; ++head, out += layer.row_bytes)
        std::memcpy(out, row_at(b, layer, slot, part, head), layer.row_bytes);
    }
  }
  return 0;
}

const lockstep_plugin kPlugin = {
    .version = LOCKSTEP_PLUGIN_VERSION,
    .struct_bytes = sizeof(lockstep_plugin),
    .name = "plain loops",
    .create = create,
    .destroy = destroy,
    .error_text = nullptr,  // nothing here can fail
    .write_bytes = write_bytes,
    .read_bytes = read_bytes,
    .zero_blocks = zero_blocks,
    .copy_blocks = nullptr,  // only states are copied, and plans with states are refused
    .update_tables = update_tables,
    .read_table = read_table,
    .map_slots = map_slots,
    .write_rows = write_rows,
    .read_rows = read_rows,
    .attend = nullptr,  // attention outputs are not checked
    .read_state = nullptr,
    .write_state = nullptr,
    .fingerprint_pages = nullptr,  // pages are read and summed by lockstep
};

}  // namespace

#ifndef PLAIN_PLUGIN_AS_BASE  // flashinfer_plugin.cpp starts from these loops
extern "C" const lockstep_plugin* lockstep_plugin_open() { return &kPlugin; }
#endif
