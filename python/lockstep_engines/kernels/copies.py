"""Kernels that move states between blocks and pages between memories: kernels/check.py. Bytes."""

from __future__ import annotations

import contextlib
import importlib
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from vllm.model_executor.layers.mamba import mamba_utils as copy_rules
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import mamba_utils

from lockstep_engines.kernels.check import Check, Trial, bytes_of, poisoned

_DTYPES = (torch.float32, torch.float16, torch.uint8)


@dataclass
class _State:
    """A state of a layer: a convolution's inputs (`width` rows), or a recurrent state (0)."""

    group: int
    width: int
    view: torch.Tensor  # [blocks, ...]
    memory: torch.Tensor

    def row(self, block: int, i: int, by_channels: bool) -> torch.Tensor:
        return self.view[block][:, i] if by_channels else self.view[block][i]

    def move(self, source: int, target: int, bias: int, by_channels: bool) -> None:
        """Copies it between blocks; a convolution drops its `bias` oldest inputs."""
        if not self.width:
            self.view[target] = self.view[source].clone()
            return
        for i in range(self.width - bias):
            row = self.row(source, i + bias, by_channels).clone()
            self.row(target, i, by_channels).copy_(row)


class _Layers:
    """Layers of one or two groups with a convolution's inputs, a recurrence or both, as
    arguments of vLLM's fused copies; the groups' tables have the blocks of the requests."""

    def __init__(self, draw: random.Random) -> None:
        self.requests, self.columns = draw.randint(1, 4), 8
        self.by_channels = draw.random() < 0.4
        self.block_size, self.drafts = draw.choice((4, 8)), draw.choice((1, 2, 3))
        count = draw.randint(1, 2)
        self.blocks = 1 + self.requests * self.columns
        self.tables: list[torch.Tensor] = []
        self.states: list[Any] = []
        self.layers: dict[str, list[Any]] = {}
        groups = []
        for g in range(count):
            table = draw.sample(range(1, self.blocks), self.blocks - 1)
            self.tables.append(
                torch.tensor(table, dtype=torch.int32).view(self.requests, self.columns)
            )
            names = [f"layers.{g}.{i}" for i in range(draw.randint(1, 2))]
            width, channels = self.drafts + draw.randint(1, 3), draw.choice((3, 8, 40))
            shape = (channels, width) if self.by_channels else (width, channels)
            recurrence = (draw.choice((1, 2)), draw.choice((3, 40)), draw.choice((1, 16)))
            dtypes = draw.choice(_DTYPES), draw.choice(_DTYPES)
            for name in names:
                self.layers[name] = [
                    self._make(draw, g, part, size, dtype)
                    for part, (size, dtype) in enumerate(
                        zip((shape, recurrence), dtypes, strict=True)
                    )
                ]
            spec = MambaSpec(
                block_size=self.block_size,
                shapes=(shape, recurrence),
                dtypes=dtypes,
                mamba_cache_mode="align",
                num_speculative_blocks=self.drafts,
            )
            groups.append(KVCacheGroupSpec(names, spec))
            self.kind = spec.mamba_type
        self.config = type("Config", (), {"kv_cache_groups": groups})

    def _make(
        self, draw: random.Random, group: int, part: int, shape: tuple[int, ...], dtype: Any
    ) -> torch.Tensor:
        size = int(numpy.prod(shape))
        stride = size + draw.choice((0, 8))
        memory = poisoned(self.blocks * stride * dtype.itemsize)
        drawn = [draw.randrange(256) for _ in range(4096)]
        memory[:] = torch.tensor(drawn, dtype=torch.uint8).repeat(-(-len(memory) // 4096))[
            : len(memory)
        ]
        steps = [int(numpy.prod(shape[i + 1 :])) for i in range(len(shape))]
        view = torch.as_strided(memory.view(dtype), (self.blocks, *shape), (stride, *steps))
        width = 0 if part else shape[1 if self.by_channels else 0]
        self.states.append(_State(group, width, view, memory))
        return view

    def context(self) -> Any:
        device, most = torch.device("cpu"), self.requests
        rules = (copy_rules.get_conv_copy_spec, copy_rules.get_temporal_copy_spec)
        made = mamba_utils.MambaSpecDecodeGPUContext.create(
            max_num_reqs=most,
            kv_cache_config=self.config,
            copy_funcs={self.kind: rules},
            device=device,
            make_buffer=lambda n, dtype: CpuGpuBuffer(n, dtype=dtype, device=device),
        )
        layers = {
            name: type("Layer", (), {"kv_cache": states}) for name, states in self.layers.items()
        }
        made.initialize_from_forward_context(self.config, layers, {self.kind: rules}, self.tables)
        return made

    @contextlib.contextmanager
    def order(self) -> Any:
        """vLLM's setting for the layout of a convolution's inputs."""
        asked = mamba_utils.is_conv_state_dim_first
        mamba_utils.is_conv_state_dim_first = lambda: self.by_channels
        try:
            yield
        finally:
            mamba_utils.is_conv_state_dim_first = asked

    def expect(self, moves: list[tuple[int, int, int, int]]) -> list[numpy.ndarray]:
        """The memories after the moves (request, column, column, bias); the originals do not
        change."""
        before = [state.memory.clone() for state in self.states]
        for request, source, target, bias in moves:
            for state in self.states:
                row = self.tables[state.group][request].tolist()
                first = row[source if state.width else source + bias]
                state.move(first, row[target], bias, self.by_channels)
        made = self.memories()
        for state, old in zip(self.states, before, strict=True):
            state.memory.copy_(old)
        return made

    def memories(self) -> list[numpy.ndarray]:
        return [bytes_of(state.memory) for state in self.states]

    def text(self) -> str:
        order = "channels outermost" if self.by_channels else "inputs outermost"
        return f"{len(self.states)} states of {len(self.tables)} groups, {order}"


def _ints(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _move_before_a_step(draw: random.Random) -> Trial | None:
    """Copies running states into the next step's block; new and unmoved states are left alone."""
    if not hasattr(mamba_utils, "precopy_mamba_align_fused_kernel"):
        return None
    layers = _Layers(draw)
    sources = [draw.randint(-1, 3) for _ in range(layers.requests)]
    targets = [max(0, source) + draw.choice((0, 0, 1, 2)) for source in sources]
    biases = [draw.randint(0, layers.drafts) for _ in sources]
    batch = draw.sample(range(layers.requests), draw.randint(1, layers.requests))
    if draw.random() < 0.5:
        batch = [row if draw.random() < 0.8 else -1 for row in batch]  # an unowned row
    mapping = _ints(batch) if draw.random() < 0.6 else None
    if mapping is None:
        batch = list(range(layers.requests))
    moves = [
        (row, sources[row], targets[row], biases[row])
        for row in batch
        if row >= 0 and sources[row] >= 0 and sources[row] != targets[row]
    ]
    expected = layers.expect(moves)
    with layers.order():
        layers.context().run_fused_precopy(
            len(batch), _ints(targets), _ints(sources), _ints(biases), mapping
        )
    text = f"{layers.text()}, rows {batch}, columns {sources} to {targets}, {biases} accepted"
    return Trial(text, expected, layers.memories())


def _keep_behind_a_step(draw: random.Random) -> Trial | None:
    """Keeps a state in its block when accepted tokens have filled the block."""
    if not hasattr(mamba_utils, "precopy_mamba_align_fused_kernel"):
        return None
    layers = _Layers(draw)
    size, count = layers.block_size, layers.requests
    drafted = [draw.randint(0, layers.drafts) for _ in range(count)]
    computed = [draw.randint(0, 3 * size) for _ in range(count)]
    scheduled = [draft + draw.choice((1, 1, size)) for draft in drafted]
    accepted = [draw.randint(1, draft + 1) for draft in drafted]
    running = [-(-(a + b) // size) - 1 for a, b in zip(computed, scheduled, strict=True)]
    kept, moves = list(accepted), []
    for i in range(count):
        first = computed[i] + scheduled[i] - drafted[i]  # tokens in the first of its states
        end = (first + accepted[i] - 1) // size * size
        if end < first:
            continue
        if running[i] == end // size - 1:
            kept[i] = 1
        if running[i] != end // size - 1 or end > first:
            moves.append((i, running[i], end // size - 1, end - first))
    expected = [*layers.expect(moves), numpy.array(kept)]
    with layers.order():
        context = layers.context()
        context.run_fused_postprocess(
            count, *(_ints(one) for one in (accepted, running, scheduled, computed, drafted))
        )
    text = f"{computed} computed, {scheduled} scheduled, {drafted} drafts, {accepted} accepted"
    found = [*layers.memories(), context.num_accepted_tokens_out.numpy()[:count]]
    return Trial(f"{layers.text()}, blocks of {size}, {text}", expected, found)


def _advance_columns(draw: random.Random) -> Trial | None:
    """Copies of running states by runner V2: the columns after the step and before it."""
    kernel = getattr(mamba_utils, "preprocess_mamba_align_fused_kernel", None)
    if kernel is None:
        return None
    count, size = draw.randint(1, 40), draw.choice((4, 16))
    batch = draw.sample(range(count), draw.randint(1, count))
    column = [draw.randint(-1, 3) for _ in range(count)]
    computed = [draw.randint(0, 60) for _ in range(count)]
    accepted = [draw.randint(0, 3) for _ in range(count)]
    tokens = [draw.randint(1, 20) for _ in batch]
    starts = [sum(tokens[:i]) for i in range(len(batch) + 1)]
    given = [_ints(column), _ints(accepted), _ints([77] * count), _ints([77] * count)]
    expected = [one.numpy().copy() for one in given]
    for row, of_row in zip(batch, tokens, strict=True):
        expected[2][row], expected[3][row] = column[row], max(0, accepted[row] - 1)
        expected[0][row] = -(-(computed[row] + of_row) // size) - 1
        if column[row] >= 0 and column[row] != expected[0][row]:
            expected[1][row] = 1
    kernel[(-(-len(batch) // 8),)](
        _ints(batch),
        given[0],
        _ints(computed),
        _ints(starts),
        given[1],
        given[2],
        given[3],
        len(batch),
        BLOCK_SIZE=8,
        MAMBA_BLOCK_SIZE=size,
    )
    text = f"rows {batch} of {count}, blocks of {size}, {tokens} tokens"
    return Trial(text, expected, [one.numpy() for one in given])


def _columns_into_blocks(draw: random.Random) -> Trial | None:
    """The state blocks of every group and row, those of drafts included."""
    kernel = getattr(mamba_utils, "get_aligned_state_indices_multi_group_kernel", None)
    if kernel is None:
        return None
    groups, rows, slots = draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 4)
    size, columns = draw.choice((1, 4, 16)), 12
    tables = [
        _ints([draw.randint(1, 999) for _ in range(rows * columns)]).view(rows, columns)
        for _ in range(groups)
    ]
    lengths = [draw.randint(0, size * (columns - slots)) for _ in range(rows)]
    found = torch.full((groups, rows + 1, slots), -7, dtype=torch.int32)
    kernel[(-(-rows // 32),)](
        torch.tensor([table.data_ptr() for table in tables]),
        _ints(lengths),
        found,
        columns,
        1,
        *found.stride(),
        rows,
        CACHE_BLOCK_SIZE=size,
        NUM_GROUPS=groups,
        BLOCK_GROUPS=1 << (groups - 1).bit_length(),
        NUM_STATE_SLOTS=slots,
        BLOCK_STATE_SLOTS=1 << (slots - 1).bit_length(),
        BLOCK_ROWS=32,
    )
    expected = numpy.full(tuple(found.shape), -7)
    for g, table in enumerate(tables):
        for row, length in enumerate(lengths):
            first = max(0, length - 1) // size
            expected[g, row] = table[row, first : first + slots]
    text = f"{groups} groups, blocks of {size}, {slots} states, lengths {lengths}"
    return Trial(text, [expected], [found.numpy()])


def _gather_and_scatter(draw: random.Random) -> Trial | None:
    """Gathers states from their pages, zeros for new requests, and scatters them back."""
    try:
        place = "vllm.model_executor.layers.mamba.ops"
        gather = importlib.import_module(f"{place}.gather_initial_states")
        scatter = importlib.import_module(f"{place}.scatter_states")
    except ModuleNotFoundError:
        return None
    dtype, blocks, size = draw.choice(_DTYPES[:2]), draw.randint(2, 6), draw.choice((3, 64, 1500))
    stride = size + draw.choice((0, 16))
    memory = poisoned(blocks * stride * dtype.itemsize)
    view = torch.as_strided(memory.view(dtype), (blocks, size), (stride, 1))
    view[:] = torch.arange(blocks * size).view(blocks, size) % 999
    of = draw.sample(range(blocks), draw.randint(1, blocks))
    begun = [draw.random() < 0.6 for _ in of]
    found = torch.full((len(of), size), -7.0).to(dtype)
    width = min(1 << (size - 1).bit_length(), 1024)
    grid = (-(-size // width), len(of))
    sizes = {"row_size": size, "BLOCK_SIZE": width, "launch_pdl": False}
    given = (_ints(of), torch.tensor(begun), found, stride, 1, 1)
    gather._gather_initial_states_kernel[grid](view, *given, **sizes)
    expected = [view[block].clone() * has for block, has in zip(of, begun, strict=True)]
    rows = torch.arange(len(of) * size).view(len(of), size).to(dtype) + 5
    before = memory.clone()
    for block, row in zip(of, rows, strict=True):
        view[block] = row
    written = bytes_of(memory)
    memory.copy_(before)
    scatter._scatter_states_kernel[grid](view, rows, _ints(of), stride, size, 1, **sizes)
    text = f"{dtype}, {size} elements, pages of {stride}, blocks {of}, begun {begun}"
    made = [torch.stack(expected).numpy(), written]
    return Trial(text, made, [found.numpy(), bytes_of(memory)])


def _swap_blocks(draw: random.Random) -> Trial | None:
    """Copies pages of several layers between the cache and host memory, both ways."""
    try:
        offload = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
    except ModuleNotFoundError:
        return None
    blocks, page = draw.randint(2, 9), 8 * draw.choice((1, 3, 64, 200))
    sides = [
        torch.tensor([draw.randrange(256) for _ in range(blocks * page)], dtype=torch.uint8)
        for _ in range(2)
    ]
    source, target = sides if draw.random() < 0.5 else sides[::-1]
    count = draw.randint(1, blocks)
    pairs = list(zip(*(draw.sample(range(blocks), count) for _ in range(2)), strict=True))
    expected = [source.clone(), target.clone()]
    for a, b in pairs:
        expected[1][b * page : (b + 1) * page] = source[a * page : (a + 1) * page]
    offload._swap_blocks_kernel[(draw.randint(1, 4),)](
        torch.tensor([source.data_ptr() + a * page for a, _ in pairs]),
        torch.tensor([target.data_ptr() + b * page for _, b in pairs]),
        torch.tensor([page] * len(pairs)),
        len(pairs),
        BYTES_PER_CHUNK=draw.choice((64, 1024)),
    )
    text = f"{len(pairs)} pages of {page} bytes"
    return Trial(text, [one.numpy() for one in expected], [source.numpy(), target.numpy()])


CHECKS = [
    Check("fused copy of states, before", _move_before_a_step),
    Check("fused copy of states, behind", _keep_behind_a_step),
    Check("columns of states", _advance_columns),
    Check("blocks of states", _columns_into_blocks),
    Check("gather and scatter of states", _gather_and_scatter),
    Check("offload: pages between memories", _swap_blocks),
]
