"""Cache writes and attention in PyTorch:
lockstep replay TRACE --kernels docs/examples/torch_kernels.py:Sdpa"""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Sdpa:
    def write(self, layer, key, value, kv_cache, slot_mapping):
        is_token = slot_mapping >= 0  # the slot of a padded token is -1
        slots, block_size = slot_mapping[is_token], kv_cache.shape[2]
        for cache, rows in zip(kv_cache, (key, value), strict=True):
            if rows.dtype != cache.dtype:  # a quantised cache
                rows = (rows / layer.k_scale).to(cache.dtype)
            cache[slots // block_size, slots % block_size] = rows[is_token]

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        outputs = []
        for i, length in enumerate(seq_lens.tolist()):
            q = query[query_start_loc[i] : query_start_loc[i + 1]]  # the last token's
            first = layer.first_position(length)  # of its window or chunk
            blocks = block_table[i, : -(-length // kv_cache.shape[2])]
            rows = kv_cache[:, blocks].flatten(1, 2)[:, first:length].float() * layer.k_scale
            q, k, v = (one.transpose(0, 1) for one in (q, *rows.to(q.dtype)))
            output = scaled_dot_product_attention(q, k, v, scale=layer.scale, enable_gqa=True)
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)
