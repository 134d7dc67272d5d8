"""Trials of both runners' block tables, slots and inputs: kernels/check.py."""

from __future__ import annotations

import inspect
import random
from itertools import accumulate
from typing import Any

import numpy
import torch
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.block_table import BlockTables

from lockstep_engines.kernels.check import Check, Trial, fitting

_DEVICE = torch.device("cpu")


class _Batch:
    """A generated batch: each request's computed and scheduled tokens."""

    def __init__(self, draw: random.Random, max_num_reqs: int, max_len: int) -> None:
        count = draw.randint(1, max_num_reqs)
        self.rows = draw.sample(range(max_num_reqs), count)  # of its state, by place
        self.computed = [draw.randrange(max_len) for _ in self.rows]
        self.tokens = [draw.randint(1, max_len - first) for first in self.computed]
        self.starts = [0, *accumulate(self.tokens)]

    def positions(self) -> list[int]:
        return [
            first + i
            for first, count in zip(self.computed, self.tokens, strict=True)
            for i in range(count)
        ]

    def text(self) -> str:
        return f"rows {self.rows}, {self.tokens} tokens after {self.computed}"


def _blocks_for(draw: random.Random, num_tokens: int, block_size: int) -> list[int]:
    return [draw.randint(1, 99) for _ in range(-(-num_tokens // block_size))]


def _table_of_first_runner(draw: random.Random) -> Trial:
    """Rows are appended to, moved, swapped and cleared; then slots are computed."""
    rows, block_size, max_len = draw.randint(1, 5), draw.choice((1, 2, 5, 16)), 40
    split = draw.choice((1, 2)) if "kernel_block_size" in _parameters(BlockTable) else 1
    most, room = -(-max_len // (block_size * split)), rows * max_len + draw.randint(0, 9)
    table = fitting(
        BlockTable,
        block_size=block_size * split,
        max_num_reqs=rows,
        max_num_blocks_per_req=most,
        max_num_batched_tokens=room,
        pin_memory=False,
        device=_DEVICE,
        kernel_block_size=block_size,
        cp_kv_cache_interleave_size=1,
    )
    known: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(draw.randint(0, 12)):
        row, other = draw.randrange(rows), draw.randrange(rows)
        what = draw.choice(("add", "append", "append", "swap", "clear"))
        blocks = [draw.randint(1, 99) for _ in range(draw.randint(1, most))]
        if what == "add":
            known[row] = blocks
            table.add_row(blocks, row)
        elif what == "append" and len(known[row]) + len(blocks) <= most:
            known[row] = known[row] + blocks
            table.append_row(blocks, row)
        elif what == "swap":
            known[row], known[other] = known[other], known[row]
            table.swap_row(row, other)
        elif what == "clear" and hasattr(table, "clear_row"):
            known[row] = []
            table.clear_row(row)
    expected, found = [], []
    for row, blocks in enumerate(known):
        expected.append(_in_kernel_blocks(blocks, split))
        found.append(table.block_table.np[row, : len(expected[-1])].copy())
    tokens = [draw.randint(1, max_len) for _ in range(rows)]
    for row in range(rows):
        known[row] = _blocks_for(draw, tokens[row], block_size * split)
        table.add_row(known[row], row)
    if rows > 1:  # the last one goes into a gap
        gap = draw.randrange(rows - 1)
        known[gap], tokens[gap] = known.pop(), tokens.pop()
        table.move_row(rows - 1, gap)
    computed = [draw.randrange(count) for count in tokens]
    counts = [end - first for first, end in zip(computed, tokens, strict=True)]
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    starts = [0, *accumulate(counts)]
    positions = [p for first, end in zip(computed, tokens, strict=True) for p in range(first, end)]
    tables = [_in_kernel_blocks(blocks, split) for blocks in known]
    table.slot_mapping.gpu.fill_(77)
    table.commit_block_table(len(known))
    table.compute_slot_mapping(
        len(known), torch.tensor(starts, dtype=torch.int32), torch.tensor(positions)
    )
    slots = numpy.full(room, -1)
    for i, (row, p) in enumerate(zip(owners, positions, strict=True)):
        slots[i] = tables[row][p // block_size] * block_size + p % block_size
    expected += [slots, *tables]
    found.append(table.slot_mapping.gpu.numpy())
    found += [table.block_table.gpu[row, : len(of)].numpy() for row, of in enumerate(tables)]
    return Trial(f"blocks of {split} times {block_size}, tokens {tokens}", expected, found)


def _in_kernel_blocks(blocks: list[int], split: int) -> numpy.ndarray:
    return numpy.array([block * split + k for block in blocks for k in range(split)], dtype=int)


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


class _SecondTables:
    """Tables of runner V2 and their expected entries."""

    def __init__(self, draw: random.Random, cp_size: int = 1) -> None:
        self.max_reqs, self.max_len = draw.randint(1, 5), 40
        self.block_sizes = [draw.choice((1, 2, 5, 16)) for _ in range(draw.choice((1, 2, 2, 3)))]
        # A block of a rank holds its share of what the ranks hold together.
        most = [-(-self.max_len // (size * cp_size)) for size in self.block_sizes]
        self.room = self.max_reqs * self.max_len
        self.cp_size = cp_size
        self.cp_rank = draw.randrange(cp_size)
        is_even = all(size % 2 == 0 for size in self.block_sizes)
        self.interleave = draw.choice((1, 2)) if is_even else 1
        self.tables = fitting(
            BlockTables,
            block_sizes=self.block_sizes,
            kernel_block_sizes=self.block_sizes,
            max_num_reqs=self.max_reqs,
            max_num_batched_tokens=self.room,
            max_num_blocks_per_group=most,
            device=_DEVICE,
            cp_size=cp_size,
            cp_rank=self.cp_rank,
            cp_interleave=self.interleave,
        )
        self.known: dict[int, list[list[int]]] = {}

    def fill(self, draw: random.Random, batch: _Batch) -> None:
        """Overwrites entries, then appends; a step writes each row at most once."""
        steps: list[list[tuple[int, tuple[list[int], ...], bool]]] = [[], [], []]
        for row, first, count in zip(batch.rows, batch.computed, batch.tokens, strict=True):
            whole = [
                _blocks_for(draw, first + count, size * self.cp_size) for size in self.block_sizes
            ]
            cut = [draw.randint(0, len(blocks)) for blocks in whole]
            old = tuple([7] * draw.randint(0, len(blocks)) for blocks in whole)
            begun = tuple(blocks[:at] for blocks, at in zip(whole, cut, strict=True))
            rest = tuple(blocks[at:] for blocks, at in zip(whole, cut, strict=True))
            for step, blocks, overwrite in zip(
                steps, (old, begun, rest), (True, True, False), strict=True
            ):
                step.append((row, blocks, overwrite))
            self.known[row] = whole
        for step in steps:
            for write in step:
                self.tables.append_block_ids(*write)
            self.tables.apply_staged_writes()


def _tables_of_second_runner(draw: random.Random) -> Trial:
    """Tables appended to and gathered in batch order; the rows after the batch are zeros."""
    tables = _SecondTables(draw)
    batch = _Batch(draw, tables.max_reqs, tables.max_len)
    tables.fill(draw, batch)
    padded = draw.choice((len(batch.rows), tables.max_reqs, tables.max_reqs))
    for given in tables.tables.input_block_tables:
        given.fill_(55)
    if hasattr(tables.tables, "_num_dirty_rows"):  # what a batch before has left
        tables.tables._num_dirty_rows = tables.max_reqs
    mapping = torch.tensor(batch.rows, dtype=torch.int32)
    given = tables.tables.gather_block_tables(mapping, padded)
    expected, found = [], []
    for g, table in enumerate(given):
        for place in range(padded):
            blocks = tables.known[batch.rows[place]][g] if place < len(batch.rows) else None
            row = table[place].numpy()
            if blocks is None:
                expected.append(numpy.zeros_like(row))
                found.append(row)
            else:
                expected.append(numpy.array(blocks))
                found.append(row[: len(blocks)])
    return Trial(f"blocks of {tables.block_sizes}, {batch.text()}, {padded} rows", expected, found)


def _slots_of_second_runner(draw: random.Random) -> Trial:
    """Slots, also of one rank of a sharded cache: tokens of other ranks are padding."""
    tables = _SecondTables(draw, cp_size=draw.choice((1, 1, 2, 4)))
    batch = _Batch(draw, tables.max_reqs, tables.max_len)
    tables.fill(draw, batch)
    tables.tables.slot_mappings.fill_(77)
    positions = batch.positions()
    found = tables.tables.compute_slot_mappings(
        torch.tensor(batch.rows, dtype=torch.int32),
        torch.tensor(batch.starts, dtype=torch.int32),
        torch.tensor(positions),
        tables.room,
    )
    counted = zip(batch.rows, batch.tokens, strict=True)
    owners = [row for row, count in counted for _ in range(count)]
    expected = numpy.full((len(tables.block_sizes), tables.room), -1)
    ranks, together = tables.cp_size, tables.interleave
    for g, size in enumerate(tables.block_sizes):
        for i, (row, p) in enumerate(zip(owners, positions, strict=True)):
            # Stretches of `together` tokens go round the ranks.
            stretch, within = divmod(p % (size * ranks), together)
            if stretch % ranks == tables.cp_rank:
                block = tables.known[row][g][p // (size * ranks)]
                expected[g, i] = block * size + stretch // ranks * together + within
    shape = f"blocks of {tables.block_sizes}, rank {tables.cp_rank} of {ranks}, {batch.text()}"
    return Trial(shape, [expected], [found.numpy()])


def _positions_of_second_runner(draw: random.Random) -> Trial:
    rows, max_len = draw.randint(1, 6), 50
    batch = _Batch(draw, rows, max_len)
    computed = torch.full((rows,), 1000, dtype=torch.int32)
    computed[batch.rows] = torch.tensor(batch.computed, dtype=torch.int32)
    positions = torch.full((rows * max_len,), 77)
    lengths = torch.full((rows,), 77, dtype=torch.int32)
    input_batch.prepare_pos_seq_lens(
        torch.tensor(batch.rows, dtype=torch.int32),
        torch.tensor(batch.starts, dtype=torch.int32),
        computed,
        positions,
        lengths,
    )
    expected = numpy.full(rows * max_len, 77)
    expected[: batch.starts[-1]] = batch.positions()
    ends = numpy.zeros(rows)
    ends[: len(batch.rows)] = numpy.add(batch.computed, batch.tokens)
    return Trial(batch.text(), [expected, ends], [positions.numpy(), lengths.numpy()])


def _inputs_of_second_runner(draw: random.Random) -> Trial:
    """Tokens of prompts, then the last sampled token and drafts; the rows of requested logits."""
    rows, max_len, drafts = draw.randint(1, 6), 50, draw.randint(0, 3)
    batch = _Batch(draw, rows, max_len)
    tokens = torch.tensor([[draw.randint(100, 999) for _ in range(max_len)] for _ in range(rows)])
    tokens = tokens.to(torch.int32)
    last = torch.tensor([[draw.randint(1000, 1999)] for _ in range(rows)])
    drafted = torch.tensor([[draw.randint(2000, 2999) for _ in range(drafts)] for _ in range(rows)])
    drafted = drafted.view(rows, drafts).to(torch.int64)
    prompts, computed = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    logits = []
    for i, row in enumerate(batch.rows):
        first, end = batch.computed[i], batch.computed[i] + batch.tokens[i]
        if draw.random() < 0.5 or first == 0:  # a chunk of the prompt, or its last one
            prompts[row] = draw.randint(end, max_len)
            logits.append(1)
        else:  # after it: one token and its drafts
            batch.tokens[i] = 1 + draw.randint(0, min(drafts, max_len - first - 1))
            prompts[row] = draw.randint(1, first)
            logits.append(batch.tokens[i])
        computed[row] = first
    starts = [0, *accumulate(batch.tokens)]
    of_logits = [0, *accumulate(logits)]
    inputs = torch.full((starts[-1] + 5,), 77, dtype=torch.int32)
    mapping = torch.tensor(batch.rows, dtype=torch.int32)
    of_starts = torch.tensor(starts, dtype=torch.int32)
    ahead = torch.full((1, rows), 77, dtype=torch.int32)
    strided = "num_lookahead" in inspect.getsource(input_batch.prepare_prefill_inputs)
    input_batch.prepare_prefill_inputs(
        inputs, ahead if strided else ahead[0], mapping, of_starts, tokens, prompts, computed
    )
    ends = torch.tensor([c + t for c, t in zip(batch.computed, batch.tokens, strict=True)])
    indices = input_batch.combine_sampled_and_draft_tokens(
        inputs,
        mapping,
        last,
        of_starts,
        ends.to(torch.int32),
        prompts,
        drafted,
        torch.tensor(of_logits, dtype=torch.int32),
        of_logits[-1],
    )
    expected = numpy.full(starts[-1] + 5, 77)
    expected_indices: list[int] = []
    expected_ahead = ahead.numpy().copy()  # releases differ in the token after a prompt
    for i, row in enumerate(batch.rows):
        first, count = batch.computed[i], batch.tokens[i]
        expected_indices += range(starts[i + 1] - logits[i], starts[i + 1])
        if first < int(prompts[row]):
            expected[starts[i] : starts[i + 1]] = tokens[row, first : first + count]
            if first + count < int(prompts[row]):
                expected_ahead[0, row] = tokens[row, first + count]
        else:
            expected[starts[i]] = last[row]
            expected[starts[i] + 1 : starts[i + 1]] = drafted[row, : count - 1]
    found = [inputs.numpy(), ahead.numpy(), indices.numpy()]
    made = [expected, expected_ahead, numpy.array(expected_indices)]
    return Trial(f"{batch.text()}, prompts {prompts.tolist()}", made, found)


CHECKS = [
    Check("runner V1: tables and slots", _table_of_first_runner),
    Check(
        "runner V2: tables gathered",
        _tables_of_second_runner,
        (27, (0, 23), "past the end|expected 0;"),
    ),
    Check("runner V2: slots", _slots_of_second_runner),
    Check("runner V2: positions", _positions_of_second_runner),
    Check("runner V2: inputs and drafts", _inputs_of_second_runner),
]
