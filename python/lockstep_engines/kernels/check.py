"""vLLM's own kernels for the cache, one by one, in Triton's interpreter, on generated shapes. Plain
loops compute the same: every byte of every buffer must be equal, and floating-point numbers within
the tolerance of the trial. worker/bounds.py checks every access against the memory of the kernel's
arguments.

run() needs a process that worker/device.py has set up. Seed N gives the same shape on any machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

_POISON = 0xA5


@dataclass
class Trial:
    """A completed launch: its input in words, the expected and the found outputs. Floating-point
    outputs may differ by `tolerance` times the largest expected number, or times 1 if that is
    larger."""

    shape: str
    expected: list[numpy.ndarray]
    found: list[numpy.ndarray]
    tolerance: float = 0.0

    def fault(self) -> str:
        """Empty: there is none."""
        for i, (expected, found) in enumerate(zip(self.expected, self.found, strict=True)):
            if expected.shape != found.shape:
                return f"output {i} has shape {found.shape}; expected {expected.shape}"
            unlike = numpy.argwhere(self._unlike(expected, found))
            if len(unlike):
                at = tuple(int(k) for k in unlike[0])
                return (
                    f"output {i} at {list(at)} is {found[at]}; expected {expected[at]}; "
                    f"{len(unlike)} of {found.size} differ"
                )
        return ""

    def _unlike(self, expected: numpy.ndarray, found: numpy.ndarray) -> numpy.ndarray:
        if not self.tolerance or expected.dtype.kind != "f":
            return expected != found
        room = self.tolerance * max(1.0, float(numpy.abs(expected).max(initial=0.0)))
        return ~(numpy.abs(expected - found.astype(expected.dtype)) <= room)


@dataclass
class Check:
    """`draw` runs the kernel once on shapes of the seed; None: it is not in this release."""

    name: str
    draw: Callable[[random.Random], Trial | None]
    # A finding of docs/findings.md, the first release without it, and the pattern of its faults.
    finding: tuple[int, tuple[int, ...], str] | None = None

    def known(self, release: tuple[int, ...], faults: list[str]) -> int:
        """The number of the finding that explains all of these faults; 0: none."""
        if self.finding is None or not faults or release >= self.finding[1]:
            return 0
        return self.finding[0] if all(re.search(self.finding[2], one) for one in faults) else 0


@dataclass
class Result:
    name: str
    shapes: int = 0
    faults: list[str] = field(default_factory=list)
    finding: int = 0

    def text(self) -> str:
        if not self.shapes and not self.faults:
            return f"  {self.name:<36}not in this release\n"
        verdict = "agreed" if not self.faults else f"{len(self.faults)} differ"
        if self.finding:
            verdict += f" by finding {self.finding} of docs/findings.md"
        lines = "".join(f"      {fault}\n" for fault in self.faults[:3])
        return f"  {self.name:<36}{self.shapes:>4} shapes  {verdict}\n{lines}"


def run(checks: list[Check], num_shapes: int, release: tuple[int, ...]) -> Iterator[Result]:
    for check in checks:
        result = Result(check.name)
        for seed in range(num_shapes):
            try:
                trial = check.draw(random.Random(seed))
            except Exception as error:
                result.shapes += 1
                result.faults.append(f"seed {seed}: {error}")
                continue
            if trial is None:
                break
            result.shapes += 1
            if fault := trial.fault():
                result.faults.append(f"seed {seed}, {trial.shape}: {fault}")
        result.finding = check.known(release, result.faults)
        yield result


# Memory.


def poisoned(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), _POISON, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> numpy.ndarray:
    """The whole memory that the tensor is a view of."""
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(tensor.untyped_storage())
    return whole.numpy().copy()


def drawn_rows(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers that every dtype can represent, fp8 included: powers of two and their negatives."""
    made = [draw.choice((-1, 1)) * 2.0 ** draw.randint(-3, 3) for _ in range(_product(shape))]
    return torch.tensor(made).to(dtype).view(shape)


def _product(shape: tuple[int, ...]) -> int:
    made = 1
    for size in shape:
        made *= size
    return made


def drawn_numbers(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers between -1 and 1, rounded to the dtype."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 31))
    return (2 * torch.rand(shape, generator=generator) - 1).to(dtype)


def doubles(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.to(torch.float64).numpy()


def drawn_slots(draw: random.Random, num_tokens: int, num_slots: int) -> list[int]:
    """Distinct slots; some are padding."""
    slots = draw.sample(range(num_slots), num_tokens)
    return [slot if draw.random() < 0.8 else -1 for slot in slots]


def fitting(make: Callable[..., Any], **options: Any) -> Any:
    """Calls it with the options that it accepts: releases differ."""
    import inspect

    known = inspect.signature(make).parameters
    return make(**{name: value for name, value in options.items() if name in known})
