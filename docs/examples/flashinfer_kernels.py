"""A paged cache as FlashInfer describes it, the pages of all requests in one list:
lockstep replay TRACE --kernels docs/examples/flashinfer_kernels.py:FlashInfer
On a GPU, append_paged_kv_cache and the wrapper are FlashInfer's."""

import torch
from paged_kv import BatchPrefillWithPagedKVCacheWrapper, append_paged_kv_cache


class FlashInfer:
    plans = {}

    def declines(self, layer):
        return layer.attention_chunk_size > 0 or layer.kv_quant_mode != "none"

    def pages(self, block_table, seq_lens, page_size):
        counts, last = (seq_lens + page_size - 1) // page_size, (seq_lens - 1) % page_size + 1
        kv_indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        return kv_indptr, block_table[torch.arange(block_table.shape[1]) < counts[:, None]], last

    def begin_step(self, group, positions, batch_indices, block_table, block_size):
        seq_lens = torch.zeros(len(block_table), dtype=torch.int32)
        seq_lens.scatter_reduce_(0, batch_indices.long(), positions + 1, "amax")
        self.plans[group] = batch_indices, positions, self.pages(block_table, seq_lens, block_size)

    def write(self, layer, key, value, kv_cache, slot_mapping):
        cache = tuple(kv_cache.transpose(2, 3) if layer.kv_layout == "HND" else kv_cache)
        rows, positions, (indptr, indices, last) = self.plans[layer.group]
        key, value, layout = key[: len(positions)], value[: len(positions)], layer.kv_layout
        append_paged_kv_cache(key, value, rows, positions, cache, indices, indptr, last, layout)

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        cache = tuple(kv_cache.transpose(2, 3) if layer.kv_layout == "HND" else kv_cache)
        how = {"causal": True, "sm_scale": layer.scale, "window_left": layer.sliding_window - 1}
        wrapper = BatchPrefillWithPagedKVCacheWrapper(layer.kv_layout)
        wrapper.plan(query_start_loc, *self.pages(block_table, seq_lens, kv_cache.shape[2]), **how)
        return wrapper.run(query, cache)
