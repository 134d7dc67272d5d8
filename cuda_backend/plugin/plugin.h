// Your kernels in a shared library, in plain C. `lockstep replay TRACE --backend FILE.so` allocates
// the pool, keeps block tables and slots, calls your functions on its own pages, and compares every
// page, digest and output with the model. docs/check_your_kernels.md has examples.
//
// 1. The library exports lockstep_plugin_open(). The returned table lives as long as the library.
//    A function that is null is done by Lockstep's own kernel, and the report lists it.
// 2. One thread makes all calls. Pointers in a call are valid during the call, those of begin_step
//    during the step.
// 3. A function may return before its work is done if the work is ordered in the call's stream.
// 4. Sizes count elements, strides bytes. Blocks are those of the kernel: a block of the manager is
//    one or several. Slot: block * block_size + offset.
// 5. 0 is success. Any other value ends the run as a finding; error_text() may explain it. A C++
//    exception also ends it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LOCKSTEP_PLUGIN_VERSION 2

typedef struct lockstep_layer {
  const char* name;
  const char* kind;  // "full", "sliding_window", "mla", "mamba", ...
  int32_t index;
  int32_t group;                 // layers that share a block table
  int32_t sliding_window;        // tokens, the query's own included; 0: none
  int32_t attention_chunk_size;  // tokens of a local chunk; 0: none
  int32_t num_kv_heads, head_size;
  const char* kv_quant_mode;  // of write: "none", "fp8_per_tensor", "nvfp4", ...
} lockstep_layer;

typedef struct lockstep_tensor {
  void* data;  // null: this call has no such tensor
  const char*
      dtype;  // "bf16", "fp16", "fp32", "fp8" (e4m3), "fp8_e5m2", "int8", "uint8", "int32", ...
  int32_t num_dims;
  int64_t shape[5];
  int64_t strides[5];
} lockstep_tensor;

// Integers in device memory, and the same ones on the host.
typedef struct lockstep_list {
  const int32_t* data;
  const int32_t* host;
  int32_t size;
} lockstep_list;

typedef struct lockstep_call {
  const lockstep_layer* layer;  // null: a whole group is meant
  int32_t group;                // -1: a layer is meant
  double scale;                 // of scores (attend), of outputs (delta)
  void* stream;                 // cudaStream_t; null on a CPU

  // write, attend. A quantised cache has a scale (fp32, one element: value = stored * scale), or
  // scales per row: [num_blocks, block_size, num_kv_heads], nvfp4 one more dimension.
  lockstep_tensor key, value;  // [num_tokens, num_kv_heads, head_size]
  lockstep_tensor kv_cache;    // [2, num_blocks, block_size, num_kv_heads, head_size]; latent rows:
                               // [num_blocks, block_size, num_kv_heads * head_size]
  lockstep_tensor slot_mapping;   // int64 [num_tokens]; -1: a padded token
  lockstep_tensor query, output;  // [num_tokens, num_query_heads, head_size]; output is fp32
  lockstep_tensor block_table;    // int32 [num_seqs, width]; begin_step: [num_rows, width]
  lockstep_tensor scale_of_cache, k_scale_cache, v_scale_cache;
  lockstep_list seq_lens;         // [num_seqs]: tokens up to the sequence's last query
  lockstep_list query_start_loc;  // [num_seqs + 1]: a sequence's queries are its last tokens

  // begin_step, map_slots
  lockstep_tensor positions, batch_indices;  // int32 [num_tokens]: in its request; row of its table
  lockstep_list block_size;                  // [1]

  // conv, ssm, delta: docs/check_your_kernels.md has the shapes.
  lockstep_tensor x, weight, conv_state;
  lockstep_tensor dt, A, B, C, D, dt_bias;
  lockstep_tensor q, k, v, g, beta;
  lockstep_tensor ssm_state;
  lockstep_list initial_indices, has_initial_state, cache_indices;  // [num_seqs]

  // zero_blocks, copy_blocks: what each layer of the group uses in a block,
  // uint8 [largest id of the call + 1, bytes]. Block ids are those of the manager.
  const lockstep_tensor* pages;
  int32_t num_pages;
  lockstep_list block_ids, sources, targets;
} lockstep_call;

typedef int (*lockstep_function)(void* self, const lockstep_call* call);

typedef struct lockstep_plugin {
  uint32_t version;       // LOCKSTEP_PLUGIN_VERSION that the plugin was compiled with
  uint32_t struct_bytes;  // sizeof(lockstep_plugin)
  const char* name;
  int32_t on_gpu;           // 1: pages, lists and pointers are in the first GPU's memory
  const char* query_dtype;  // "bf16" or "fp16"; null: "fp32"

  // Optional, of a run: `self` of its calls; null refuses the layers, with a message in error
  // (zero-terminated, at most error_bytes).
  void* (*open)(const lockstep_layer* layers, int32_t num_layers, char* error, size_t error_bytes);
  void (*close)(void* self);
  const char* (*error_text)(void* self);  // why the last call failed

  // Optional: why this layer is left to Lockstep's own kernels; may be empty. Null: the functions
  // take it.
  const char* (*declines)(void* self, const lockstep_layer* layer);

  lockstep_function write, write_latent;
  lockstep_function attend, attend_latent;
  lockstep_function begin_step, map_slots;
  lockstep_function conv, ssm, delta;
  lockstep_function zero_blocks, copy_blocks;
} lockstep_plugin;

// What the library exports.
const lockstep_plugin* lockstep_plugin_open(void);

#ifdef __cplusplus
}
#endif
