"""The tokens of a prompt (docs/formats.md, Prompts)."""

from __future__ import annotations

from typing import Any

_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def expand(prompt: Any) -> list[int]:
    """The tokens of [[seed, n], ...], [[seed, first, n], ...] or {"tokens": [...]}."""
    if isinstance(prompt, dict):
        return list(prompt["tokens"])
    tokens: list[int] = []
    for segment in prompt:
        seed, first, count = segment if len(segment) == 3 else (segment[0], 0, segment[1])
        tokens += [_splitmix64((seed << 32) + i) % 50000 for i in range(first, first + count)]
    return tokens
