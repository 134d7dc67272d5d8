"""Pages that a step of a serving vLLM must not change: a sample of them is read before every step
and again before the next, on the device.

1. A step writes the blocks of the tokens that it schedules, those that it zeroes or copies into,
   and the states of its requests. Everything else must hold before the next step what it held.
2. A block id names the same bytes for all groups, so a block is the step's if any group's is.
3. One kernel a step reads both samples, that of the last step and that of this one; what it found
   is looked at a step later. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import torch
from vllm.triton_utils import tl, triton

_CHUNK = 1024  # words of a run that a program reads at once
# Groups whose rows lie where their tokens' slots say; of all others a step may write every block
# of its requests.
_BY_SLOT = frozenset(
    ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
)


class PageCheckError(Exception):
    """Why pages of this engine cannot be checked."""


@triton.jit
def _sum_runs(addresses, strides, lengths, blocks, sums, CHUNK: tl.constexpr):  # type: ignore
    """Program (i, j): run i of block blocks[j], its words weighted by their places. Every weight is
    odd, so that no change of a single word is lost."""
    run, place = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + place)
    start = tl.load(addresses + run) + block * tl.load(strides + run)
    words = start.to(tl.pointer_type(tl.int32))
    length = tl.load(lengths + run)
    total = tl.zeros([CHUNK], dtype=tl.int64)
    for first in range(0, length, CHUNK):
        at = first + tl.arange(0, CHUNK)
        word = tl.load(words + at, mask=at < length, other=0).to(tl.int64)
        total += word * ((at.to(tl.int64) * -7046029254386353131) | 1)
    tl.store(sums + run * tl.num_programs(1) + place, tl.sum(total, axis=0))


class Run(NamedTuple):
    """Bytes that follow one another in the page of every block."""

    address: int  # of block 0
    stride: int  # bytes to the next block
    size: int  # bytes
    layer: str


def runs_of(layer: str, view: torch.Tensor, num_blocks: int) -> list[Run]:
    """Of a view whose first dimension is blocks, or the parts that a kernel splits each into."""
    if view.shape[0] % num_blocks:
        raise PageCheckError(f"{layer}: {view.shape[0]} blocks of a kernel for {num_blocks}")
    size = view.element_size()
    outer = []
    for stride, extent in sorted(zip(view.stride()[1:], view.shape[1:], strict=True)):
        if stride * view.element_size() == size:
            size *= extent
        elif extent > 1:
            outer.append(range(0, extent * stride, stride))
    parts = view.shape[0] // num_blocks
    outer.append(range(0, parts * view.stride(0), view.stride(0)))
    made = [
        Run(view.data_ptr() + sum(place) * view.element_size(),
            parts * view.stride(0) * view.element_size(), size, layer)
        for place in product(*outer)
    ]  # fmt: skip
    if any(run.address % 4 or run.stride % 4 or run.size % 4 for run in made):
        raise PageCheckError(f"{layer}: rows that are not whole words of four bytes")
    return made


class Pages:
    """Every byte that the layers of this worker keep in a block."""

    def __init__(self, views: Iterable[tuple[str, torch.Tensor]], num_blocks: int) -> None:
        # Layers of several groups overlay each other: what begins at one address is read once.
        unique: dict[tuple[int, int], Run] = {}
        for layer, view in views:
            for run in runs_of(layer, view, num_blocks):
                known = unique.setdefault((run.address, run.stride), run)
                if known.size < run.size:
                    unique[run.address, run.stride] = run
            self.device = view.device
        self.runs = [*unique.values()]
        if not self.runs:
            raise PageCheckError("this worker holds no cache")
        columns = (
            [run.address for run in self.runs],
            [run.stride for run in self.runs],
            [run.size // 4 for run in self.runs],
        )
        self._table = torch.tensor(columns, dtype=torch.int64, device=self.device)

    def sums(self, blocks: list[int]) -> torch.Tensor:
        """[runs, blocks], on the device."""
        named = torch.tensor(blocks, dtype=torch.int64)
        if self.device.type == "cuda":
            named = named.pin_memory()
        named = named.to(self.device, non_blocking=True)
        shape = (len(self.runs), len(blocks))
        sums = torch.empty(shape, dtype=torch.int64, device=self.device)
        _sum_runs[shape](*self._table, named, sums, CHUNK=_CHUNK)
        return sums


class Group(NamedTuple):
    block_size: int  # tokens
    by_slot: bool

    @classmethod
    def of(cls, group: Any) -> Group:
        spec = group.kv_cache_spec
        each = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
        by_slot = all(
            type(one).__name__ in _BY_SLOT
            and getattr(one, "tokens_per_state", 1) == 1
            and not getattr(one, "bounded_replay", False)
            for one in each
        )
        return cls(spec.block_size, by_slot)


class Tables:
    """Which request holds each block, from the scheduler's output."""

    def __init__(self, groups: list[Group], num_drafts: int, ahead: int) -> None:
        self._groups = groups
        self._num_drafts = num_drafts  # rows that a draft model may write after a step's tokens
        self._ahead = ahead  # tokens that the scheduler may count too many: drafts in flight
        self._held: dict[str, list[list[int]]] = {}

    def written_by(self, step: Any) -> set[int]:
        """Blocks that the step may change; takes what it says of its requests."""
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            self._held.pop(name, None)
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self._held[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[i]
            more = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                self._held[name] = [list(ids) for ids in more]
            elif more is not None:
                for held, ids in zip(self._held[name], more, strict=True):
                    held.extend(ids)
        written = {0, *(step.new_block_ids_to_zero or ())}
        written.update(to for _, to in getattr(step, "kv_cache_block_copies", None) or ())
        for name, scheduled in step.num_scheduled_tokens.items():
            first = max(0, computed[name] - self._ahead)
            last = computed[name] + scheduled + self._num_drafts - 1
            for group, held in zip(self._groups, self._held[name], strict=True):
                if group.by_slot:
                    size = group.block_size
                    written.update(held[first // size : last // size + 1])
                else:
                    written.update(held)
        return written

    def holders(self, block: int) -> str:
        names = [name for name, held in self._held.items() if any(block in ids for ids in held)]
        return f"held by {', '.join(names)}" if names else "held by no request"


class _Compared(NamedTuple):
    """On its way from the device."""

    step: int
    blocks: list[int]
    holders: list[str]
    changed: torch.Tensor  # [runs, blocks], of the host
    arrived: Any  # an event, None: it is there


class PageCheck:
    def __init__(
        self, pages: Pages, tables: Tables, num_blocks: int, num_sampled: int,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._pages, self._tables = pages, tables
        self._num_blocks, self._num_sampled = num_blocks, num_sampled
        self._report = report
        self._next = 1
        self._sampled: list[int] = []
        self._sums: Any = None
        self._on_their_way: list[_Compared] = []
        self.steps = self.compared = self.num_found = 0

    def before_step(self, step: Any) -> None:
        """Reads the last step's sample again, and takes that of `step`."""
        self._take(wait=False)
        written = self._tables.written_by(step)
        old, new = self._sampled, self._choose(written)
        if old or new:
            sums = self._pages.sums([*old, *new])
            if old:
                self._compare(sums[:, : len(old)])
            self._sampled, self._sums = new, sums[:, len(old) :]
        self.steps += 1

    def forget(self) -> None:
        """The memory is given away, or comes back with other contents."""
        self._sampled, self._sums = [], None

    def finish(self) -> None:
        """Reads the last sample again, and waits for the device."""
        if self._sampled:
            self._compare(self._pages.sums(self._sampled))
        self.forget()
        self._take(wait=True)

    def _choose(self, written: set[int]) -> list[int]:
        """The next blocks in their order that the step must leave alone."""
        chosen: list[int] = []
        for _ in range(self._num_blocks - 1):
            if len(chosen) == self._num_sampled:
                break
            if self._next not in written:
                chosen.append(self._next)
            self._next = self._next % (self._num_blocks - 1) + 1
        return chosen

    def _compare(self, sums: torch.Tensor) -> None:
        changed, arrived = sums != self._sums, None
        if changed.device.type == "cuda":
            host = torch.empty(changed.shape, dtype=torch.bool, pin_memory=True)
            host.copy_(changed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            changed = host
        holders = [self._tables.holders(block) for block in self._sampled]
        self._on_their_way.append(
            _Compared(self.steps - 1, self._sampled, holders, changed, arrived)
        )

    def _take(self, wait: bool) -> None:
        while self._on_their_way:
            compared = self._on_their_way[0]
            if compared.arrived is not None:
                if wait:
                    compared.arrived.synchronize()
                elif not compared.arrived.query():
                    return
            del self._on_their_way[0]
            self.compared += len(compared.blocks)
            self._tell(compared)

    def _tell(self, compared: _Compared) -> None:
        if not compared.changed.any():
            return
        for j, block in enumerate(compared.blocks):
            runs = compared.changed[:, j].nonzero().flatten().tolist()
            if runs:
                layers = list(dict.fromkeys(self._pages.runs[i].layer for i in runs))
                more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
                self.num_found += 1
                self._report(
                    f"page_changed step {compared.step} block {block} layer {layers[0]}{more}: "
                    f"changed, and no token of the step is there; {compared.holders[j]}"
                )
