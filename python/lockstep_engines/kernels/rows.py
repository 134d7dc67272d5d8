"""Kernels that write rows, zero and copy blocks: kernels/check.py."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from vllm.model_executor.models import extract_hidden_states as hidden
from vllm.platforms import current_platform
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as writes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
from vllm.v1.worker import mamba_utils
from vllm.v1.worker import utils as worker_utils

from lockstep_engines.kernels.check import (
    Check,
    Trial,
    bytes_of,
    drawn_rows,
    drawn_slots,
    fitting,
    poisoned,
)

_ROWS = (torch.float32, torch.float16, torch.bfloat16)


class _Cache:
    """K and V of a layer in poisoned memory: K and V within a block or back to back,
    tokens or heads outermost within a part, padding after a block."""

    def __init__(self, draw: random.Random, size_v: int = 0, itemsize: int = 2) -> None:
        self.blocks, self.tokens = draw.randint(1, 5), draw.choice((1, 2, 3, 8, 16))
        self.heads, self.size = draw.randint(1, 3), draw.choice((4, 8, 20, 64, 72))
        self.size_v = size_v or self.size
        self.apart, self.by_heads = draw.random() < 0.3, draw.random() < 0.4
        part = self.tokens * self.heads * self.size
        padding = draw.choice((0, 0, 16))
        self.block_stride = (part if self.apart else 2 * part) + padding
        self.part_stride = self.blocks * self.block_stride if self.apart else part
        total = self.blocks * self.block_stride * (2 if self.apart else 1)
        self.memory = poisoned(total * itemsize)

    def part(self, part: int, dtype: torch.dtype) -> torch.Tensor:
        """[blocks, tokens, heads, elements]."""
        token = self.size if self.by_heads else self.heads * self.size
        head = self.tokens * self.size if self.by_heads else self.size
        return torch.as_strided(
            self.memory.view(dtype),
            (self.blocks, self.tokens, self.heads, self.size),
            (self.block_stride, token, head, 1),
            part * self.part_stride,
        )

    def text(self) -> str:
        places = "parts apart" if self.apart else "parts together"
        order = "heads outermost" if self.by_heads else "tokens outermost"
        return (
            f"{self.blocks} blocks of {self.tokens} tokens, {self.heads} heads of {self.size}, "
            f"{places}, {order}, stride {self.block_stride}"
        )


def _rows(
    draw: random.Random, cache: _Cache, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Keys and values as slices of one buffer, as projections write them; slots."""
    num_tokens = draw.randint(1, cache.blocks * cache.tokens)
    slots = drawn_slots(draw, num_tokens, cache.blocks * cache.tokens)
    both = drawn_rows(draw, (num_tokens, 3, cache.heads, cache.size), dtype)
    return both[:, 1], both[:, 2], slots


def _written(
    cache: _Cache, dtype: torch.dtype, rows: tuple[Any, Any], slots: list[int], scale: float = 1.0
) -> numpy.ndarray:
    """The expected memory."""
    before = cache.memory.clone()
    for part, made in enumerate(rows):
        view = cache.part(part, dtype)
        for i, slot in enumerate(slots):
            if slot >= 0:
                row = made[i] if scale == 1.0 else made[i].to(torch.float32) / scale
                view[slot // cache.tokens, slot % cache.tokens] = row.to(dtype)
    made = bytes_of(cache.memory)
    cache.memory.copy_(before)
    return made


def _write_rows(draw: random.Random) -> Trial:
    dtype = draw.choice(_ROWS)
    cache = _Cache(draw, itemsize=dtype.itemsize)
    key, value, slots = _rows(draw, cache, dtype)
    expected = _written(cache, dtype, (key, value), slots)
    one = torch.ones(1)
    parts = cache.part(0, dtype), cache.part(1, dtype)
    writes.triton_reshape_and_cache_flash(key, value, *parts, torch.tensor(slots), "auto", one, one)
    return Trial(f"{dtype}, {cache.text()}", [expected], [bytes_of(cache.memory)])


def _write_fp8_rows(draw: random.Random) -> Trial:
    """Numbers that are exact in fp8, divided by a power of two: the interpreter rounds others
    wrongly."""
    cache = _Cache(draw, itemsize=1)
    dtype, given = torch.float8_e4m3fn, draw.choice((torch.float32, torch.float16))
    key, value, slots = _rows(draw, cache, given)
    scale = draw.choice((0.5, 1.0, 2.0))
    expected = _written(cache, dtype, (key, value), slots, scale)
    platform, of_scale = type(current_platform), torch.full((1,), scale)
    capability = platform.has_device_capability
    platform.has_device_capability = classmethod(lambda *_, **__: True)  # one that has fp8
    try:
        writes.triton_reshape_and_cache_flash(
            key,
            value,
            cache.part(0, torch.uint8),
            cache.part(1, torch.uint8),
            torch.tensor(slots),
            "fp8",
            of_scale,
            of_scale,
        )
    finally:
        platform.has_device_capability = capability
    return Trial(f"{given} / {scale}, {cache.text()}", [expected], [bytes_of(cache.memory)])


def _write_scaled_rows(draw: random.Random) -> Trial:
    """One scale per token and head. The stored number is within one step of the exact one: releases
    round or truncate integers. fp8 inputs are powers of two: scaled, they are next to 448, 224,
    ..., which the interpreter rounds either way."""
    cache = _Cache(draw, itemsize=1)
    is_int = draw.random() < 0.6
    dtype, most = (torch.int8, 127) if is_int else (torch.float8_e4m3fn, 448)
    key, value, slots = _rows(draw, cache, torch.float32)
    scales = [torch.full((cache.blocks, cache.tokens, cache.heads), -1.0) for _ in range(2)]
    parts = [cache.part(part, dtype) for part in range(2)]
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD if is_int else KVQuantMode.FP8_PER_TOKEN_HEAD
    fitting(
        writes.triton_reshape_and_cache_flash_per_token_head_quant,
        key=key,
        value=value,
        key_cache=parts[0],
        value_cache=parts[1],
        k_scale_cache=scales[0],
        v_scale_cache=scales[1],
        slot_mapping=torch.tensor(slots),
        kv_quant_mode=mode,
    )
    of_scales = [made.numpy().copy() for made in scales]
    expected_scales = [numpy.full_like(made, -1.0) for made in of_scales]
    for part, rows in enumerate((key, value)):
        for i, slot in enumerate(slots):
            at = slot // cache.tokens, slot % cache.tokens
            if slot < 0:
                continue
            step = rows[i].abs().amax(dim=-1) / most
            expected_scales[part][at] = step.numpy()
            off = (parts[part][at].to(torch.float32) * step[:, None] - rows[i]).abs()
            if off.gt(1.001 * step[:, None] if is_int else rows[i].abs() / 8).any():
                of_scales[part][at] = numpy.nan  # tells the place
            parts[part][at] = torch.zeros(()).to(dtype)
    rest = _written(cache, dtype, (torch.zeros_like(key), torch.zeros_like(value)), slots)
    found = [bytes_of(cache.memory), *of_scales]
    return Trial(f"{mode.name}, {cache.text()}", [rest, *expected_scales], found)


def _write_unlike_rows(draw: random.Random) -> Trial:
    """K and V of different sizes in one row."""
    dtype = draw.choice(_ROWS)
    blocks, tokens, heads = draw.randint(1, 4), draw.choice((1, 2, 8, 16)), draw.randint(1, 3)
    size, size_v = draw.choice((8, 24, 64)), draw.choice((4, 16, 40))
    padding = draw.choice((0, 16))
    stride = tokens * heads * (size + size_v) + padding
    memory = poisoned(blocks * stride * dtype.itemsize)
    cache = torch.as_strided(
        memory.view(dtype),
        (blocks, tokens, heads, size + size_v),
        (stride, heads * (size + size_v), size + size_v, 1),
    )
    num_tokens = draw.randint(1, blocks * tokens)
    slots = drawn_slots(draw, num_tokens, blocks * tokens)
    key = drawn_rows(draw, (num_tokens, heads, size), dtype)
    value = drawn_rows(draw, (num_tokens, heads, size_v), dtype)
    for i, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // tokens, slot % tokens] = torch.cat((key[i], value[i]), dim=-1)
    expected = bytes_of(memory)
    memory.fill_(0xA5)
    one = torch.ones(1)
    writes.triton_reshape_and_cache_flash_diffkv(
        key, value, cache, torch.tensor(slots), "auto", one, one
    )
    shape = f"{dtype}, {blocks} blocks of {tokens} tokens, {heads} heads of {size} and {size_v}"
    return Trial(shape, [expected], [bytes_of(memory)])


def _write_hidden_rows(draw: random.Random) -> Trial:
    """Rows of tokens and of padding, which may go only to the null block."""
    blocks, tokens, heads = draw.randint(3, 6), draw.choice((1, 2, 8)), draw.randint(1, 3)
    cache = torch.zeros(blocks, tokens, heads, draw.choice((4, 8)))
    slots = drawn_slots(draw, draw.randint(2, tokens * (blocks - 1)), tokens * (blocks - 1))
    slots = [slot + tokens if slot >= 0 else slot for slot in slots]
    rows = drawn_rows(draw, (len(slots), heads, cache.shape[3]), torch.float32)
    expected = cache.numpy().copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            expected[slot // tokens, slot % tokens] = row
    has_tokens_outside = "get_kv_cache_shape" in vars(hidden.CacheOnlyAttentionBackend)
    given = cache if has_tokens_outside else cache.transpose(1, 2)
    hidden.basic_cache(rows, given, torch.tensor(slots))
    shape = f"{blocks} blocks of {tokens} tokens, slots {slots}"
    return Trial(shape, [expected[1:]], [cache.numpy()[1:]])


class _Backend:
    @staticmethod
    def get_kv_cache_block_dim(*_: Any, **__: Any) -> int:
        return 0


class _Layer:
    def __init__(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


class _Group:
    backend = _Backend
    kv_cache_group_id = 0
    kernel_block_stride = 0

    def __init__(self, spec: Any, layer_names: list[str]) -> None:
        self.kv_cache_spec, self.layer_names = spec, layer_names


def _zero_blocks(draw: random.Random) -> Trial:
    """Zeroes blocks of several layers, split into kernel blocks or not."""
    dtype = draw.choice(_ROWS)
    blocks, split = draw.randint(2, 6), draw.choice((1, 1, 2, 3))
    tokens, heads, size = draw.choice((1, 2, 8, 16)), draw.randint(1, 3), draw.choice((8, 40, 64))
    names = [f"layers.{i}" for i in range(draw.randint(1, 3))]
    page = 2 * tokens * heads * size * dtype.itemsize
    memories = {name: poisoned(blocks * split * page) for name in names}
    views = {
        name: memory.view(dtype).view(blocks * split, 2, tokens, heads, size)
        for name, memory in memories.items()
    }
    chosen = draw.sample(range(blocks), draw.randint(1, blocks))
    expected = []
    for memory in memories.values():
        made = bytes_of(memory).reshape(blocks, -1)
        made[chosen] = 0
        expected.append(made.reshape(-1))
    spec = FullAttentionSpec(
        block_size=tokens * split, num_kv_heads=heads, head_size=size, dtype=dtype
    )
    told = {
        "attn_groups_iter": [_Group(spec, names)],
        "kernel_block_sizes": [tokens],
        "cache_dtype": "auto",
        "runner_only_attn_layers": set(),
        "static_forward_context": {name: _Layer(view) for name, view in views.items()},
        "num_blocks": blocks,
    }
    zeroer = fitting(
        worker_utils.KVBlockZeroer, device=torch.device("cpu"), pin_memory=False, **told
    )
    if hasattr(zeroer, "init_meta"):
        fitting(zeroer.init_meta, **told)
    zeroer.zero_block_ids(chosen)
    shape = f"{dtype}, {len(names)} layers, {blocks} blocks of {split} times {tokens} tokens"
    return Trial(shape, expected, [bytes_of(memory) for memory in memories.values()])


def _copy_blocks(draw: random.Random) -> Trial | None:
    """Copies blocks of one view of a buffer, and of layers that share a buffer."""
    copy = getattr(worker_utils, "copy_kv_cache_blocks_inplace", None)
    if copy is None:
        return None
    blocks, layers, split = draw.randint(4, 8), draw.randint(1, 3), draw.choice((1, 2))
    row = draw.choice((8, 24))
    memory = torch.arange(blocks * layers * split * row, dtype=torch.int32)
    whole = memory.view(layers, blocks * split, row) if draw.random() < 0.5 else None
    if whole is None:
        whole = memory.view(blocks, layers, split * row).transpose(0, 1)
        split = 1
    places = draw.sample(range(blocks), 4)
    copies = [(places[0], places[1]), (places[2], places[3])]
    expected = whole.clone().reshape(layers, blocks, -1)
    for source, target in copies:
        expected[:, target] = expected[:, source]
    copy(list(whole), blocks, copies)
    found = whole.reshape(layers, blocks, -1)
    shape = f"{layers} layers, {blocks} blocks, {split} kernel blocks in each"
    return Trial(shape, [expected.numpy()], [found.numpy()])


def _copy_states(draw: random.Random) -> Trial:
    """Copies pieces of any length; the same launch shifts a state by a few rows within itself."""
    size = draw.choice((1, 7, 64, 1024, 1500))
    memory = torch.tensor([draw.randrange(256) for _ in range(8 * size)], dtype=torch.uint8)
    expected = memory.clone()
    base, moves = memory.data_ptr(), []
    for i in range(draw.randint(1, 2)):
        length = draw.randint(1, size)
        source = 4 * i * size + draw.randint(0, size - length)
        target = source + 2 * size + draw.randint(0, size - 1)
        moves.append((source, target, length))
        expected[target : target + length] = memory[source : source + length]
    addresses = [torch.tensor([base + move[k] for move in moves]) for k in (0, 1)]
    sizes = torch.tensor([move[2] for move in moves], dtype=torch.int32)
    mamba_utils.batch_memcpy(*addresses, sizes)
    return Trial(f"{len(moves)} pieces of up to {size} bytes", [expected.numpy()], [memory.numpy()])


CHECKS = [
    Check("reshape_and_cache", _write_rows),
    Check("reshape_and_cache, fp8", _write_fp8_rows),
    Check("reshape_and_cache, scale per head", _write_scaled_rows),
    Check("reshape_and_cache, unlike K and V", _write_unlike_rows),
    Check("hidden states", _write_hidden_rows, (28, (0, 25), "-1")),
    Check("zero blocks", _zero_blocks),
    Check("copy blocks", _copy_blocks),
    Check("copy states", _copy_states),
]
