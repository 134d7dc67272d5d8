// A backend in your own shared library, in plain C. `lockstep replay TRACE --backend FILE.so` runs
// your kernels on your memory and compares every byte, table and slot with the model.
// docs/check_your_kernels.md has an example. sim/protocol/backend.h defines the comparison, by
// rules that this header cites by number.
//
// 1. The library exports lockstep_plugin_open(). The returned table lives as long as the library. A
//    function pointer that is marked optional may be null.
// 2. One thread makes all calls, one after the other. Pointers passed to a call are valid during
//    the call; pointers inside a lockstep_plan are valid until destroy().
// 3. Results are complete when a call returns. A call may leave work on a device that later calls
//    see as done. 0 is success. Any other value ends the run; error_text() may explain it.
// 4. Sizes, offsets and strides are in bytes, positions and block sizes in tokens. Block ids are
//    those of the manager; the plugin derives kernel block ids.
// 5. A new LOCKSTEP_PLUGIN_VERSION may add functions at the end of lockstep_plugin. Existing
//    members do not change.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LOCKSTEP_PLUGIN_VERSION 1

// One KV cache group: layers that share a block table.
typedef struct lockstep_group {
  const char* kind;             // "full", "sliding_window", "mamba", ...
  int32_t block_size;           // of the manager
  int32_t kernel_block_size;    // block_size / blocks_per_kv_block
  int32_t blocks_per_kv_block;  // kernel block id = block_id * blocks_per_kv_block + i
  int32_t table_width;          // entries of a table row, in manager blocks
} lockstep_group;

// One layer. Its row for (kernel block b, token t of it, part p, head h) begins at
//   offset + b * block_stride + t * token_stride + p * part_stride + h * head_stride
// in its tensor. Part 0 is K (or the only part: MLA, hidden states), part 1 is V.
typedef struct lockstep_layer {
  const char* name;
  const char* dtype;  // "bf16", "fp16", "fp32", "fp8" (e4m3), "fp8_e5m2", "int8", "uint8"
  int32_t group;
  int32_t tensor;
  int32_t num_parts;  // 0: keeps no rows (states: see lockstep_state)
  int32_t num_kv_heads;
  int32_t head_size;  // elements of a row
  int32_t row_bytes;
  int64_t offset;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t part_stride;
} lockstep_layer;

// One state tensor of a layer: size_bytes bytes at offset + block_id * page_stride.
typedef struct lockstep_state {
  int32_t layer;
  int32_t index;  // among the states of its layer
  int32_t tensor;
  int64_t offset;
  int64_t page_stride;
  int64_t size_bytes;
} lockstep_state;

// What the layers of a group use in block b: size_bytes bytes at offset + b * block_stride.
typedef struct lockstep_region {
  int32_t group;
  int32_t tensor;
  int64_t offset;
  int64_t block_stride;
  int64_t size_bytes;
} lockstep_region;

typedef struct lockstep_plan {
  int64_t num_blocks;  // of the pool; block 0 is the null block
  int32_t num_rows;    // of every block table: requests that run at once
  int32_t max_tokens_per_step;
  int32_t queries_per_kv;  // query heads per KV head
  int32_t num_tensors;
  int32_t num_groups;
  int32_t num_layers;
  int32_t num_states;
  int32_t num_regions;
  const int64_t* tensor_bytes;  // [num_tensors]
  const lockstep_group* groups;
  const lockstep_layer* layers;
  const lockstep_state* states;
  const lockstep_region* regions;
} lockstep_plan;

// Entries [first, first + count) of a row become block_ids[0 .. count), its length first + count.
typedef struct lockstep_table_update {
  int32_t row;
  int32_t group;
  int32_t first;
  int32_t count;
  const int32_t* block_ids;
} lockstep_table_update;

// One entry of a row becomes another block. The length stays.
typedef struct lockstep_table_edit {
  int32_t row;
  int32_t group;
  int32_t index;
  int32_t block_id;
} lockstep_table_edit;

typedef struct lockstep_backend lockstep_backend;  // the plugin's own, opaque

typedef struct lockstep_plugin {
  uint32_t version;       // LOCKSTEP_PLUGIN_VERSION that the plugin was compiled with
  uint32_t struct_bytes;  // sizeof(lockstep_plugin)
  const char* name;

  // Null refuses the plan, with a message in error (zero-terminated, at most error_bytes).
  lockstep_backend* (*create)(const lockstep_plan* plan, char* error, size_t error_bytes);
  void (*destroy)(lockstep_backend* backend);
  // Optional: why the last call failed; valid until the next call.
  const char* (*error_text)(lockstep_backend* backend);

  // Raw memory of a tensor, for poison (rules 6 to 8) and pages (rule 7).
  int (*write_bytes)(lockstep_backend* backend, int32_t tensor, int64_t offset, const void* bytes,
                     int64_t size_bytes);
  int (*read_bytes)(lockstep_backend* backend, int32_t tensor, int64_t offset, void* bytes,
                    int64_t size_bytes);

  // Zero and copy the bytes that the layers of `group` use in these blocks. Blocks are distinct,
  // and no target of a call is a source of the same call. Only states are copied: copy_blocks may
  // be null if read_state is.
  int (*zero_blocks)(lockstep_backend* backend, int32_t group, const int32_t* block_ids,
                     int32_t count);
  int (*copy_blocks)(lockstep_backend* backend, int32_t group, const int32_t* sources,
                     const int32_t* targets, int32_t count);

  // Rows to clear first (length 0 in every group), then updates, then edits, each in order.
  int (*update_tables)(lockstep_backend* backend, const int32_t* clear_rows, int32_t num_clear_rows,
                       const lockstep_table_update* updates, int32_t num_updates,
                       const lockstep_table_edit* edits, int32_t num_edits);
  // The row's entries on the device; *length of them, at most table_width.
  int (*read_table)(lockstep_backend* backend, int32_t group, int32_t row, int32_t* block_ids,
                    int32_t* length);

  // The slot of each token (block_id * block_size + offset) in every group, looked up in its table.
  // positions and rows: [num_tokens]. slots: [num_groups, num_padded_tokens], -1 past num_tokens;
  // groups of kind "mamba" have none, and their values are ignored.
  int (*map_slots)(lockstep_backend* backend, const int32_t* positions, const int32_t* rows,
                   int32_t num_tokens, int32_t num_padded_tokens, int64_t* slots);
  // Writes K and V of one layer to the slots of the last map_slots(). keys, values: [num_tokens,
  // num_kv_heads, row_bytes]; values is null where num_parts is 1.
  int (*write_rows)(lockstep_backend* backend, int32_t layer, const void* keys, const void* values,
                    int32_t num_tokens);
  // Reads positions [first, last) through the block table of `row`, in the same shape.
  int (*read_rows)(lockstep_backend* backend, int32_t layer, int32_t row, int32_t first,
                   int32_t last, void* keys, void* values);

  // Optional: one query token over positions [first, last) of a row (rule 5). queries, outputs:
  // [num_kv_heads * queries_per_kv, head_size]. Null: outputs are not checked.
  int (*attend)(lockstep_backend* backend, int32_t layer, int32_t row, int32_t first, int32_t last,
                const float* queries, float* outputs);
  // Optional, both or none: one state of one block, size_bytes long. Null: plans with states are
  // refused.
  int (*read_state)(lockstep_backend* backend, int32_t state, int32_t block_id, void* bytes);
  int (*write_state)(lockstep_backend* backend, int32_t state, int32_t block_id, const void* bytes);
  // Optional: rule (3) of whole pages; sums: [count, 2]. Null: pages are read and summed here.
  int (*fingerprint_pages)(lockstep_backend* backend, const int32_t* tensors,
                           const int32_t* block_ids, int32_t count, uint64_t* sums);
} lockstep_plugin;

// What the library exports.
const lockstep_plugin* lockstep_plugin_open(void);

#ifdef __cplusplus
}
#endif
