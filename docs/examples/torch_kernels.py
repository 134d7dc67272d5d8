"""Cache writes and attention in PyTorch:
lockstep replay TRACE --kernels docs/examples/torch_kernels.py:Sdpa"""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Sdpa:
    def declines(self, layer):
        return layer.kv_quant_mode not in ("none", "fp8_per_tensor")

    def write(self, layer, key, value, kv_cache, slot_mapping):
        is_token = slot_mapping >= 0  # the slot of a padded token is -1
        slots, block_size = slot_mapping[is_token], kv_cache.shape[2]
        for cache, rows in zip(kv_cache, (key, value), strict=True):
            if rows.dtype != cache.dtype:  # fp8 saturates; torch's cast would give NaN or infinity
                rows = (rows / layer.k_scale).clamp(-(top := torch.finfo(cache.dtype).max), top)
            cache[slots // block_size, slots % block_size] = rows[is_token].to(cache.dtype)

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        output, block_size = torch.empty_like(query), kv_cache.shape[2]
        for i, length in enumerate(seq_lens.tolist()):
            begin, end = query_start_loc[i : i + 2].tolist()
            seen = torch.arange(length - (end - begin), length)[:, None] + 1  # tokens up to each
            first = layer.first_position(seen)  # of its window or chunk
            position = torch.arange(int(first[0]), length)
            mask = (position >= first) & (position < seen)
            blocks = block_table[i, position // block_size]
            rows = kv_cache[:, blocks, position % block_size].float() * layer.k_scale
            q, k, v = (one.transpose(0, 1) for one in (query[begin:end], *rows.to(query.dtype)))
            out = scaled_dot_product_attention(q, k, v, mask, scale=layer.scale, enable_gqa=True)
            output[begin:end] = out.transpose(0, 1)
        return output
