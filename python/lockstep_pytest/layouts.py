"""Memory layouts generated from seeds, as options of `lockstep replay`, for kernels to address. The
same seed gives the same layout with every Python."""

from __future__ import annotations

from collections.abc import Iterator

_MASK = (1 << 64) - 1

# Each option with its values; blocks of 96 and 784 tokens are split for the kernel by FlashInfer.
_CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("--block-size", ("16", "32", "48", "96", "128")),
    ("--kv-heads", ("1", "2", "3", "8")),
    ("--head-size", ("64", "128", "80", "256")),
    ("--dtype", ("bf16", "fp16", "fp32", "fp8_e4m3")),
    ("--layout", ("NHD", "HND")),
    ("--attention-backend", ("flash_attn", "flashinfer")),
    ("--layers", ("1", "2", "3")),
)


def _numbers(seed: int) -> Iterator[int]:
    """SplitMix64 (Steele et al., 2014)."""
    state = seed & _MASK
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        value = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        yield value ^ (value >> 31)


def layout_of(seed: int) -> list[str]:
    """["--block-size", "96", ...]"""
    numbers = _numbers(seed)
    words = []
    for option, values in _CHOICES:
        words += [option, values[next(numbers) % len(values)]]
    return words


def name_of(layout: list[str]) -> str:
    """ "96-3-64-bf16-NHD-flashinfer-2", in the order of the options."""
    return "-".join(layout[1::2])
