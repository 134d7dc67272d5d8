"""Trials of attention kernels that read through block tables, and of their helpers:
kernels/check.py. The loops are those of kernels/loops_of_attention.py.

Memory that a kernel must not read (free blocks, the null block, the last block after a request's
end) holds a large number, which shows in the output at any weight.
"""

from __future__ import annotations

import inspect
import random
from itertools import accumulate
from typing import Any

import numpy
import torch
from vllm.v1.attention.ops import common, triton_decode_attention, triton_merge_attn_states
from vllm.v1.attention.ops import triton_unified_attention as unified
from vllm.v1.kv_cache_interface import KVQuantMode

from lockstep_engines.kernels import loops_of_attention as loops
from lockstep_engines.kernels.check import (
    Check,
    Trial,
    bytes_of,
    doubles,
    drawn_numbers,
    fitting,
)

# Relative to an output's largest number: fp32 sums in another order; fp16 also rounds weights.
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}
_DTYPES = (torch.float32, torch.float16)
_UNREADABLE = 3e4


class _Requests:
    """A generated batch: each request's computed tokens, its queries, and the blocks of its
    rows."""

    def __init__(self, draw: random.Random, block_size: int, most: int, queries: int) -> None:
        count = draw.randint(1, 4)
        self.queries = [draw.randint(1, queries) for _ in range(count)]
        self.computed = [draw.choice((0, draw.randrange(most))) for _ in range(count)]
        if queries == 1:
            self.computed = [max(1, first) for first in self.computed]
        self.lengths = [a + b for a, b in zip(self.queries, self.computed, strict=True)]
        self.starts = [0, *accumulate(self.queries)]
        need = [-(-length // block_size) for length in self.lengths]
        self.num_blocks = 1 + sum(need) + draw.randint(0, 3)
        free = draw.sample(range(1, self.num_blocks), sum(need))
        self.blocks = [[free.pop() for _ in range(size)] for size in need]
        # A tile of keys reads table entries after the last one, but no row through them.
        self.table = torch.zeros(count, max(need) + 64 // min(block_size, 64), dtype=torch.int32)
        for row, blocks in enumerate(self.blocks):
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.block_size = block_size

    def places(self) -> list[list[tuple[int, int]]]:
        """The block of every position, and the offset in it."""
        return [
            [(blocks[p // self.block_size], p % self.block_size) for p in range(length)]
            for blocks, length in zip(self.blocks, self.lengths, strict=True)
        ]

    def text(self) -> str:
        return f"blocks of {self.block_size}, {self.queries} queries after {self.computed} computed"


def _fill(cache: torch.Tensor, requests: _Requests, rows: list[torch.Tensor]) -> None:
    """cache: [blocks, tokens, heads, elements]; rows: [positions, heads, elements]."""
    for made, places in zip(rows, requests.places(), strict=True):
        for row, place in zip(made, places, strict=True):
            cache[place] = row


def _cache(
    draw: random.Random, requests: _Requests, heads: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """Keys and values as views of one memory, in one of vLLM's orders, and that memory."""
    shape = (requests.num_blocks, requests.block_size, heads, size)
    one = requests.num_blocks * requests.block_size * heads * size
    unreadable = 100.0 if dtype.itemsize == 1 else _UNREADABLE
    memory = torch.full((2 * one,), unreadable).to(dtype)
    order = draw.choice(("parts within blocks", "parts apart", "heads outside of tokens"))
    if order == "parts apart":
        key, value = memory.view(2, *shape).unbind(0)
    elif order == "parts within blocks":
        key, value = memory.view(shape[0], 2, *shape[1:]).unbind(1)
    else:
        both = memory.view(shape[0], heads, requests.block_size, 2 * size).transpose(1, 2)
        key, value = both[..., :size], both[..., size:]
    return key, value, memory, order


def _segments(draw: random.Random, num_tokens: int, heads: int, size: int) -> dict[str, Any]:
    """Settings with and without a split over the keys."""
    if draw.random() < 0.5:
        return {}
    count, padded = draw.choice((2, 4, 16)), 1 << (size - 1).bit_length()
    return {
        "seq_threshold_3D": 64,
        "num_par_softmax_segments": count,
        "softmax_segm_output": torch.full((num_tokens, heads, count, padded), numpy.nan),
        "softmax_segm_max": torch.full((num_tokens, heads, count), numpy.nan),
        "softmax_segm_expsum": torch.full((num_tokens, heads, count), numpy.nan),
    }


class _Attention:
    """A launch of unified attention over generated requests, and the outputs of the loops."""

    def __init__(self, draw: random.Random, queries: int, dtype: torch.dtype) -> None:
        self.draw, self.dtype = draw, dtype
        self.requests = _Requests(draw, draw.choice((16, 16, 32, 48)), 70, queries)
        self.kv_heads, self.size = draw.randint(1, 2), draw.choice((16, 32, 72))
        self.heads = self.kv_heads * draw.choice((1, 2, 3, 4))
        self.scores: dict[str, Any] = {"scale": self.size**-0.5}
        self.options: dict[str, Any] = {}
        self.sees = [lambda p, j: j <= p for _ in self.requests.lengths]
        self.words: list[str] = []

    def run(self, rows: Any = None) -> Trial:
        """`rows`: keys and values as the loops read them, their cache, and the memory of the
        cache."""
        requests, draw = self.requests, self.draw
        num_tokens = requests.starts[-1]
        fused = drawn_numbers(draw, (num_tokens, self.heads + 1, self.size), self.dtype)
        query = fused[:, : self.heads]
        keys, values, key, value, memory = rows or self._rows()
        out = torch.full((num_tokens + 2, self.heads, self.size), -7.0).to(self.dtype)
        expected = doubles(out)
        scores = loops.Scores(**self.scores)
        for i, first in enumerate(requests.computed):
            some = slice(requests.starts[i], requests.starts[i + 1])
            made = keys[i], values[i], first, scores, self.sees[i]
            expected[some], _ = loops.attend(doubles(query[some]), *made)
        before = bytes_of(memory)
        self._launch(query, key, value, out)
        words = [str(self.dtype), f"{self.heads} heads over {self.kv_heads} of {self.size}"]
        shape = ", ".join([*words, *self.words, requests.text()])
        return Trial(
            shape,
            [expected, before],
            [doubles(out), bytes_of(memory)],
            _TOLERANCES[self.dtype],
        )

    def _rows(self) -> Any:
        draw, requests = self.draw, self.requests
        shapes = [(length, self.kv_heads, self.size) for length in requests.lengths]
        made = [[drawn_numbers(draw, shape, self.dtype) for shape in shapes] for _ in range(2)]
        key, value, memory, order = _cache(draw, requests, self.kv_heads, self.size, self.dtype)
        _fill(key, requests, made[0])
        _fill(value, requests, made[1])
        self.words.append(order)
        return *([doubles(one) for one in part] for part in made), key, value, memory

    def _launch(self, query: Any, key: Any, value: Any, out: Any) -> None:
        requests, one = self.requests, torch.ones(1)
        told = {"window_size": (-1, -1), "softcap": 0, "causal": True, "k_descale": one}
        told |= {"v_descale": one} | self.options
        segments = _segments(self.draw, requests.starts[-1], self.heads, self.size)
        if segments:
            self.words.append(f"{segments['num_par_softmax_segments']} parts of keys")
        unified.unified_attention(
            q=query,
            k=key,
            v=value,
            out=out[: requests.starts[-1]],
            cu_seqlens_q=torch.tensor(requests.starts, dtype=torch.int32),
            max_seqlen_q=max(requests.queries),
            seqused_k=torch.tensor(requests.lengths, dtype=torch.int32),
            max_seqlen_k=max(requests.lengths),
            softmax_scale=self.scores["scale"],
            block_table=requests.table,
            q_descale=None,
            **told,
            **segments,
        )


def _knows(option: str) -> bool:
    return option in inspect.signature(unified.unified_attention).parameters


def _attend_fully(draw: random.Random) -> Trial:
    """Decodes, chunks of prompts, drafts; scores capped, with a sink, or with a slope."""
    made = _Attention(draw, draw.choice((1, 4, 40)), draw.choice(_DTYPES))
    if draw.random() < 0.3:
        made.scores["softcap"] = made.options["softcap"] = draw.choice((0.5, 5.0))
        made.words.append("capped")
    if draw.random() < 0.3:
        sinks = drawn_numbers(draw, (made.heads,), torch.float32)
        made.options["sinks"], made.scores["sinks"] = sinks, doubles(sinks)
        made.words.append("sinks")
    if draw.random() < 0.3:
        slopes, of_root = drawn_numbers(draw, (made.heads,), torch.float32) / 8, draw.random() < 0.5
        made.options |= {"alibi_slopes": slopes, "use_alibi_sqrt": of_root}
        made.scores |= {"slopes": doubles(slopes), "root_of_distance": of_root}
        made.words.append("slopes")
    return made.run()


_ALL = 1 << 30  # a window of every token


def _window_or_range(window: int, a: int, b: int) -> loops.Sees:
    """The last `window` keys; keys a to b attend to each other."""
    return lambda p, j: j <= p < j + window or (a < b and a <= p <= b and a <= j <= b)


def _causal_or_all(is_causal: bool) -> loops.Sees:
    return lambda p, j: not is_causal or j <= p


def _prefix_or_window(prefix: int, window: int) -> loops.Sees:
    return lambda p, j: j <= p and (j < prefix or p - j < window)


def _attend_in_windows(draw: random.Random) -> Trial:
    """The last tokens, or those of a chunk and of some before it."""
    made = _Attention(draw, draw.choice((1, 4, 40)), draw.choice(_DTYPES))
    if draw.random() < 0.6:
        window = draw.choice((1, 5, 16, 33))
        made.options["window_size"] = (window - 1, 0)

        def sees(p: int, j: int) -> bool:
            return j <= p and p - j < window

        made.words.append(f"a window of {window}")
    else:
        back, chunk = draw.choice((0, 1, 2)), draw.choice((4, 16, 24))
        made.options |= {"window_size": (chunk * (back + 1) - 1, 0), "chunk_lookback": back}

        def sees(p: int, j: int) -> bool:
            return j <= p and p // chunk - j // chunk <= back

        made.words.append(f"chunks of {chunk}, {back} back")
    made.sees = [sees] * len(made.sees)
    if draw.random() < 0.3:
        sinks = drawn_numbers(draw, (made.heads,), torch.float32)
        made.options["sinks"], made.scores["sinks"] = sinks, doubles(sinks)
        made.words.append("sinks")
    return made.run()


def _attend_ahead(draw: random.Random) -> Trial | None:
    """Some requests attend to all their keys, or the keys of a range attend to each other."""
    made = _Attention(draw, draw.choice((4, 40)), draw.choice(_DTYPES))
    lengths = made.requests.lengths
    if draw.random() < 0.5 or not _knows("rswa_window"):
        ranges = []
        for length in lengths:
            first = draw.randrange(length)
            ranges.append((first, draw.randint(first, length - 1)))
        made.options["mm_prefix_range"] = torch.tensor(ranges, dtype=torch.int32)[:, None]
        made.sees = [_window_or_range(_ALL, a, b) for a, b in ranges]
        made.words.append(f"ranges {ranges}")
        return made.run()
    is_causal = [draw.random() < 0.5 for _ in lengths]
    made.options["causal"] = torch.tensor(is_causal, dtype=torch.int32)
    made.sees = [_causal_or_all(one) for one in is_causal]
    made.words.append(f"causal {is_causal}")
    return made.run()


def _attend_ahead_in_windows(draw: random.Random) -> Trial | None:
    """A window with a range that overrides it, or a window on both sides: finding 37."""
    made = _Attention(draw, draw.choice((4, 40)), draw.choice(_DTYPES))
    window = draw.choice((1, 4, 9))
    if draw.random() < 0.5 or not _knows("rswa_window"):
        ranges = []
        for length in made.requests.lengths:
            first = draw.randrange(length)
            ranges.append((first, draw.randint(first, length - 1)))
        made.options["mm_prefix_range"] = torch.tensor(ranges, dtype=torch.int32)[:, None]
        made.options["window_size"] = (window - 1, 0)
        made.sees = [_window_or_range(window, a, b) for a, b in ranges]
        made.words.append(f"a window of {window}, ranges {ranges}")
    else:
        made.options |= {"causal": False, "window_size": (window - 1, window - 1)}
        made.sees = [lambda p, j: abs(p - j) < window] * len(made.sees)
        made.words.append(f"a window of {window} to both sides")
    return made.run()


def _attend_behind_prefixes(draw: random.Random) -> Trial | None:
    """R-SWA: a prefix that every query sees, and a window."""
    if not _knows("rswa_window"):
        return None
    made = _Attention(draw, draw.choice((1, 40)), draw.choice(_DTYPES))
    prefixes = [draw.randint(0, length) for length in made.requests.lengths]
    window = draw.choice((1, 5, 20))
    made.options |= {"rswa_prefix_lens": torch.tensor(prefixes, dtype=torch.int32)}
    made.options |= {"rswa_window": window}
    made.sees = [_prefix_or_window(prefix, window) for prefix in prefixes]
    made.words.append(f"prefixes {prefixes}, a window of {window}")
    return made.run()


def _attend_to_scaled(draw: random.Random) -> Trial:
    """int8 with a scale per token and head; fp8 with one scale."""
    made = _Attention(draw, draw.choice((1, 4, 20)), draw.choice(_DTYPES))
    requests, is_int = made.requests, draw.random() < 0.5
    dtype = torch.int8 if is_int else torch.float8_e4m3fn
    key, value, memory, order = _cache(draw, requests, made.kv_heads, made.size, dtype)
    places, seen = requests.places(), []
    for name, cache in (("k", key), ("v", value)):
        if is_int:
            shape = (requests.num_blocks, requests.block_size, made.kv_heads)
            scales = drawn_numbers(draw, shape, torch.float32).abs() / 60
            made.options[f"{name}_scale_cache"] = scales
            most = 100
        else:
            of_all = draw.choice((0.5, 1.0, 0.1))
            made.options[f"{name}_descale"] = torch.full((1,), of_all)
            most = 1
        rows = []
        for of_request in places:
            size = (len(of_request), made.kv_heads, made.size)
            stored = (most * drawn_numbers(draw, size, torch.float32)).to(dtype)
            for row, place in zip(stored, of_request, strict=True):
                cache[place] = row
            number = doubles(stored)
            if is_int:
                at = torch.tensor(of_request)
                rows.append(number * doubles(scales[at[:, 0], at[:, 1]])[:, :, None])
            else:
                rows.append(number * of_all)
        seen.append(rows)
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if is_int else KVQuantMode.FP8_PER_TENSOR
    made.options["kv_quant_mode"] = mode
    made.words += [order, mode.name]
    if not is_int:
        key, value = key.view(torch.float8_e4m3fn), value.view(torch.float8_e4m3fn)
    return made.run((*seen, key, value, memory))


def _decode(draw: random.Random) -> Trial:
    """The last token of each request: MLA rows, whose first part is also the value, or keys and
    values. `lse` is an output."""
    dtype, is_mla = draw.choice(_DTYPES), draw.random() < 0.6
    requests = _Requests(draw, draw.choice((1, 16, 16, 64)), 150, 1)
    heads, kv_heads = draw.choice(((4, 1), (16, 1), (6, 2), (3, 3)))
    if is_mla:
        heads, kv_heads = draw.choice((2, 16, 20)), 1
        size, size_v = draw.choice(((320, 256), (576, 512)))
    else:
        size = size_v = draw.choice((16, 40, 64))
    shape = (requests.num_blocks, requests.block_size, kv_heads, size)
    key = torch.full(shape, _UNREADABLE).to(dtype)
    value = key[..., :size_v] if is_mla else torch.full(shape, _UNREADABLE).to(dtype)
    rows = [drawn_numbers(draw, (length, kv_heads, size), dtype) for length in requests.lengths]
    _fill(key, requests, rows)
    values = [row[..., :size_v] for row in rows]
    if not is_mla:
        values = [drawn_numbers(draw, tuple(row.shape), dtype) for row in rows]
        _fill(value, requests, values)
    count, splits = len(rows), draw.choice((1, 2, 5))
    query = drawn_numbers(draw, (count, heads, size), dtype)
    out = torch.full((count, heads, size_v), numpy.nan).to(dtype)
    sums = torch.full((count, heads), numpy.nan)
    scratch = torch.full((count, heads, splits, size_v + 1), numpy.nan)
    cap = draw.choice((0.0, 0.0, 2.0))
    before = bytes_of(key)
    fitting(
        triton_decode_attention.decode_attention_fwd,
        q=query,
        k_buffer=key,
        v_buffer=value,
        o=out,
        lse=sums,
        req_to_token=requests.table,
        b_seq_len=torch.tensor(requests.lengths, dtype=torch.int32),
        attn_logits=scratch,
        num_kv_splits=splits,
        sm_scale=size**-0.5,
        page_size=requests.block_size,
        logit_cap=cap,
        is_mla=is_mla,
    )
    scores = loops.Scores(size**-0.5, cap)
    expected = [numpy.zeros((count, heads, size_v)), numpy.zeros((count, heads))]
    for i, (row, of_value) in enumerate(zip(rows, values, strict=True)):
        given = doubles(query[i : i + 1]), doubles(row), doubles(of_value)
        made = loops.attend(*given, requests.computed[i], scores, lambda p, j: j <= p)
        expected[0][i], expected[1][i] = made[0][0], made[1][0]
    kind = "MLA" if is_mla else f"{kv_heads} heads of keys"
    text = f"{dtype}, {heads} heads, {kind}, {size} and {size_v}, {splits} parts, {requests.text()}"
    found = [doubles(out), doubles(sums), bytes_of(key)]
    return Trial(text, [*expected, before], found, _TOLERANCES[dtype])


def _merge(draw: random.Random) -> Trial:
    """Merges attention over two parts of the keys; if one part is empty, the result is the
    other."""
    tokens, heads, size = draw.randint(1, 6), draw.randint(1, 4), draw.choice((8, 40, 64))
    dtype = draw.choice(_DTYPES)
    outputs = [drawn_numbers(draw, (tokens, heads, size), dtype) for _ in range(2)]
    sums = [5 * drawn_numbers(draw, (heads, tokens), torch.float32) for _ in range(2)]
    for t in range(tokens):
        if draw.random() < 0.3:
            sums[draw.randrange(2)][:, t] = draw.choice((-numpy.inf, numpy.inf))  # no keys
    out = torch.full((tokens, heads, size), numpy.nan).to(dtype)
    together = torch.full((heads, tokens), numpy.nan)
    triton_merge_attn_states.merge_attn_states(
        out, outputs[0], sums[0], outputs[1], sums[1], together
    )
    given = [numpy.where(numpy.isinf(one), -numpy.inf, one).T for one in map(doubles, sums)]
    expected, of_sums = loops.merged([doubles(one) for one in outputs], given)
    return Trial(
        f"{dtype}, {tokens} tokens, {heads} heads of {size}",
        [expected, of_sums.T],
        [doubles(out), doubles(together)],
        _TOLERANCES[dtype],
    )


def _pack(draw: random.Random) -> Trial:
    """Packs tokens of requests of different lengths into rows of one length, and back."""
    lengths = [draw.randint(1, 80) for _ in range(draw.randint(1, 5))]
    rest = draw.choice(((5,), (3, 40), (130,)))
    rows = drawn_numbers(draw, (sum(lengths), *rest), torch.float32)
    of_lengths = torch.tensor(lengths, dtype=torch.int32)
    packed = common.pack_seq_triton(rows, of_lengths, pad_value=-5.0)
    expected = numpy.full((len(lengths), max(lengths), *rest), -5.0, dtype=numpy.float32)
    first = 0
    for i, length in enumerate(lengths):
        expected[i, :length] = rows[first : first + length]
        first += length
    back = common.unpack_seq_triton(packed, of_lengths)
    shape = f"lengths {lengths}, rows of {list(rest)}"
    return Trial(shape, [expected, rows.numpy()], [packed.numpy(), back.numpy()])


CHECKS = [
    Check("attention, full", _attend_fully),
    Check("attention, windows and chunks", _attend_in_windows),
    Check("attention, ranges, not causal", _attend_ahead),
    Check("attention, ahead in windows", _attend_ahead_in_windows, (37, (1 << 30,), "")),
    Check("attention, prefix and window", _attend_behind_prefixes),
    Check("attention, int8 and fp8", _attend_to_scaled),
    Check("decode attention, MLA", _decode),
    Check("merge of attention states", _merge),
    Check("pack and unpack of requests", _pack),
]
