"""FlashInfer's functions on a paged cache in PyTorch, with its signatures, for machines without a
GPU. On a GPU the names come from `flashinfer` and `flashinfer.page`."""

import torch


def pages_as_nhd(paged_kv_cache, kv_layout):
    """K and V as [num_pages, page_size, num_kv_heads, head_dim]"""
    return [one.transpose(1, 2) if kv_layout == "HND" else one for one in paged_kv_cache]


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
    kv_last_page_len, kv_layout="NHD",
):  # fmt: skip
    for cache, rows in zip(
        pages_as_nhd(paged_kv_cache, kv_layout), (append_key, append_value), strict=True
    ):
        page_size = cache.shape[1]
        page = kv_indices[kv_indptr[batch_indices] + positions // page_size]
        cache[page, positions % page_size] = rows


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, kv_layout="NHD"):
        self._kv_layout = kv_layout

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *, causal,
        sm_scale, window_left=-1,
    ):  # fmt: skip
        self._queries, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices, paged_kv_last_page_len.tolist()
        self._causal, self._scale, self._window_left = causal, sm_scale, window_left

    def run(self, q, paged_kv_cache, k_scale=1.0, v_scale=1.0):
        keys, values = pages_as_nhd(paged_kv_cache, self._kv_layout)
        out = torch.empty_like(q)
        for i, last in enumerate(self._last):
            begin, end = self._queries[i : i + 2]
            pages = self._indices[self._pages[i] : self._pages[i + 1]]
            length = (len(pages) - 1) * keys.shape[1] + last
            at = torch.arange(length - (end - begin), length)[:, None]  # of each query
            first = (at - self._window_left).clamp(min=0) if self._window_left >= 0 else 0 * at
            position = torch.arange(int(first[0]), length)
            k, v = (
                (one[pages].flatten(0, 1)[position].float() * scale).to(q.dtype).transpose(0, 1)
                for one, scale in ((keys, k_scale), (values, v_scale))
            )
            out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1), k, v, (position >= first) & (position <= at),
                scale=self._scale, enable_gqa=True,
            ).transpose(0, 1)  # fmt: skip
        return out
