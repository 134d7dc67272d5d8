"""vLLM's Triton kernels in Triton's interpreter, from an installed vLLM of 0.33.0:
lockstep replay TRACE --dtype fp32 --kernels docs/examples/vllm_kernels.py:VllmTriton"""

from lockstep_engines.worker.device import take_the_place_of_cuda

take_the_place_of_cuda("v1")  # on a machine without a GPU, before vLLM is imported

import torch
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.attention.ops.triton_unified_attention import unified_attention


class VllmTriton:
    def write(self, layer, key, value, kv_cache, slot_mapping):
        scales = layer.k_scale, layer.v_scale
        dtype = "fp8" if kv_cache.dtype.itemsize == 1 else "auto"
        triton_reshape_and_cache_flash(key, value, *kv_cache, slot_mapping, dtype, *scales)

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        output, longest = torch.empty_like(query), int(seq_lens.max())
        longest_chunk = int(query_start_loc.diff().max())
        queries, contexts = (query_start_loc, longest_chunk), (seq_lens, longest)
        window = (layer.sliding_window - 1, 0) if layer.sliding_window else (-1, -1)
        how = (layer.scale, True, window, block_table, 0, None, layer.k_scale, layer.v_scale)
        unified_attention(query, *kv_cache, output, *queries, *contexts, *how)
        return output
