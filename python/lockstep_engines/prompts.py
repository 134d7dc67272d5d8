"""The tokens of a prompt (docs/formats.md, Prompts)."""

from __future__ import annotations

from typing import Any

import numpy

_MASK = (1 << 64) - 1
_VOCABULARY = 50000


def _splitmix64(x: numpy.ndarray) -> numpy.ndarray:
    x = x + numpy.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def expand(prompt: Any) -> list[int]:
    """The tokens of [[seed, n], ...], [[seed, first, n], ...] or {"tokens": [...]}."""
    if isinstance(prompt, dict):
        return list(prompt["tokens"])
    tokens: list[int] = []
    for segment in prompt:
        seed, first, count = segment if len(segment) == 3 else (segment[0], 0, segment[1])
        begin = numpy.uint64((seed << 32) + first & _MASK)
        x = numpy.arange(count, dtype=numpy.uint64) + begin
        tokens += (_splitmix64(x) % numpy.uint64(_VOCABULARY)).tolist()
    return tokens
