"""Kernels that run all programs of a launch at once (worker/programs.py) write what they write in
Triton's own interpreter, which runs the programs one by one, in a separate process. Exit status 77:
torch or Triton is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

SKIPPED = 77
os.environ["TRITON_INTERPRET"] = "1"
if not importlib.util.find_spec("torch") or not importlib.util.find_spec("triton"):
    print("SKIPPED: no torch or no triton here")
    sys.exit(SKIPPED)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
import triton.language as tl

COUNT = 7  # programs along the first axis
WIDTH = 8
VALUES = [3, -1, 4, 0, -5, 9, 2]
TILES = torch.arange(COUNT * WIDTH, dtype=torch.int64).reshape(COUNT, WIDTH) * 37 % 23 - 5


@triton.jit
def returns_early(values, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    value = tl.load(values + i)
    if value < 0:
        return
    tl.store(out + i * WIDTH + tl.arange(0, WIDTH), value * 100 + tl.arange(0, WIDTH))


@triton.jit
def reads_what_it_wrote_before_it_diverges(values, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    value = tl.load(values + i)
    tl.store(values + i, value + 1)
    before = tl.atomic_add(out + i * WIDTH, 5)
    if value > 1:
        again = tl.load(values + i)
        tl.store(out + i * WIDTH + 1, again * 10 + before)
    elif value == -5:
        tl.store(out + i * WIDTH + 2, tl.load(values + i))


@triton.jit
def loops_between_its_own_bounds(values, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    total = 0
    for at in range(i, i + tl.load(values + i), 2):
        total = total * 3 + at
    for _ in range(tl.load(values + i)):
        total += 1
    tl.store(out + i * WIDTH, total)
    left, right = 0, WIDTH
    while left < right:
        middle = (left + right) // 2
        if middle * 2 <= tl.load(values + i):
            left = middle + 1
        else:
            right = middle
    tl.store(out + i * WIDTH + 1, left)


@triton.jit
def takes_tickets(values, out, WIDTH: tl.constexpr):
    """In order of programs, also where only some of them draw one."""
    i = tl.program_id(0)
    if tl.load(values + i) % 2 == 0:
        ticket = tl.atomic_add(out, 1)
        tl.store(out + WIDTH + i, ticket * 0 + 1)
    old = tl.atomic_cas(out + 2 * WIDTH + i, 0, i + 1)
    tl.store(out + 3 * WIDTH + i, old)


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def weighted(a, n, b, m):
    return a * m + b, n * m


@triton.jit
def reduces(tiles, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    tile = tl.load(tiles + i * WIDTH + tl.arange(0, WIDTH))
    square = tl.reshape(tile, (2, 4))
    at = out + i * WIDTH
    tl.store(at, tl.sum(tile, axis=0))
    tl.store(at + 1, tl.argmax(tile, axis=0))
    tl.store(at + 2, tl.reduce(tile, 0, larger) + tl.sum(tl.sum(square, axis=-1) * 10, axis=-1))
    tl.store(at + 3, tl.max(square))
    tl.store(at + 4 + tl.arange(0, 4), tl.sum(square, axis=0) + tl.min(square, axis=0))


@triton.jit
def scans(tiles, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    tile = tl.load(tiles + i * WIDTH + tl.arange(0, WIDTH))
    square = tl.reshape(tile, (4, 2))
    sums = tl.reshape(tl.cumsum(square, axis=0), (WIDTH,))
    sums += tl.reshape(tl.cumsum(square, axis=-1), (WIDTH,)) * 30
    most = tl.associative_scan(tile, 0, larger, reverse=True)
    a, _ = tl.associative_scan((tile, tile * 0 + 2), 0, weighted)
    tl.store(out + i * WIDTH + tl.arange(0, WIDTH), sums + most * 1000 + a * 100000)


@triton.jit
def moves(tiles, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    tile = tl.load(tiles + i * WIDTH + tl.arange(0, WIDTH))
    square = tl.trans(tl.reshape(tile, (2, 4)))
    left, right = tl.split(square)
    both = tl.reshape(tl.join(right, left), (WIDTH,))
    same = tl.cat(tl.arange(0, 4).to(tl.int64), left, can_reorder=True)
    turned = tl.gather(tile, (tl.arange(0, WIDTH) + i) % WIDTH, axis=0)
    row = left[:, None] * right[None, :]
    dot = tl.dot(row.to(tl.float32), row.T.to(tl.float32)).to(tl.int64)
    tl.store(out + i * WIDTH + tl.arange(0, WIDTH), both + same * 100 + turned * 10000)
    tl.store(out + i * WIDTH, tl.sum(dot * (tl.arange(0, 4)[:, None] + 1)))


@triton.jit
def describes(tiles, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    tile = tl.make_tensor_descriptor(tiles + i * WIDTH, [WIDTH], [1], [4])
    to = tl.make_tensor_descriptor(out, [7, WIDTH], [WIDTH, 1], [1, 4])
    to.store([i, 4], tl.reshape(tile.load([i % 2 * 4]), (1, 4)))


@triton.jit
def prints(values, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    tl.device_print("value", tl.load(values + i))
    tl.device_print("all", tl.arange(0, 2), hex=True)


@triton.jit
def of_a_grid_of_three_axes(values, out, WIDTH: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    if z == 1 and x > 0:
        at += 12
    tl.store(out + at, x * 100 + y * 10 + z + tl.load(values + x))


@triton.jit
def reads_outside(values, out, WIDTH: tl.constexpr):
    i = tl.program_id(0)
    tl.store(out + i, tl.load(values + i * 2))


@triton.jit
def counts(values, out, WIDTH: tl.constexpr):
    tl.store(out + tl.arange(0, WIDTH), tl.histogram(tl.arange(0, WIDTH), WIDTH))


OF_VALUES = (returns_early, reads_what_it_wrote_before_it_diverges, loops_between_its_own_bounds,
             takes_tickets, of_a_grid_of_three_axes)  # fmt: skip
OF_TILES = (reduces, scans, moves, describes)


def launch(kernel: Any) -> list[int]:
    """What it leaves in its output and in its input."""
    given = TILES.clone() if kernel in OF_TILES else torch.tensor(VALUES)
    out = torch.zeros(COUNT * WIDTH, dtype=torch.int64)
    grid = (3, 2, 2) if kernel is of_a_grid_of_three_axes else (COUNT,)
    kernel[grid](given, out, WIDTH)
    return [*out.tolist(), *given.reshape(-1).tolist()]


class ProgramsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        command = [sys.executable, __file__, "one by one"]
        cls.expected = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        from lockstep_engines.worker import interpreter, programs

        interpreter.fix()
        cls.programs = programs

    def test_kernels_write_what_they_write_program_by_program(self) -> None:
        for kernel in (*OF_VALUES, *OF_TILES):
            for most in (512, 3, 1):
                with self.subTest(kernel.__name__, most=most):
                    self.programs._MOST_PROGRAMS = most
                    self.assertEqual(launch(kernel), self.expected[kernel.__name__])

    def test_programs_that_do_not_diverge_run_once(self) -> None:
        self.programs._MOST_PROGRAMS = 512
        counts = []

        def access(make: Any) -> Any:
            counts.append(self.programs.count())
            return self.programs._run_access(make)

        with mock.patch.multiple(
            self.programs, _run_access=self.programs.access, access=access, create=True
        ):
            launch(returns_early)
        # The load of all; of the group that stores, with its store; of the group that returns.
        self.assertEqual(counts, [7, 5, 5, 2])

    def test_values_are_printed_with_their_programs(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            launch(prints)
        lines = said.getvalue().splitlines()
        self.assertEqual(lines[:2], ["(0, 0, 0) value: 3", "(1, 0, 0) value: -1"])
        self.assertEqual(lines[7:], [f"({i}, 0, 0) all: ['0x0', '0x1']" for i in range(COUNT)])

    def test_an_access_outside_is_named(self) -> None:
        with self.assertRaisesRegex(Exception, "reads_outside reads 8 bytes 8 bytes past the end"):
            launch(reads_outside)

    def test_an_unsupported_operation_is_refused_by_name(self) -> None:
        with self.assertRaisesRegex(Exception, "create_histogram for all programs of a launch"):
            launch(counts)


if __name__ == "__main__":
    if sys.argv[1:] == ["one by one"]:
        print(json.dumps({one.__name__: launch(one) for one in (*OF_VALUES, *OF_TILES)}))
    else:
        unittest.main()
