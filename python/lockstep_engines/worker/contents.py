"""What the model without weights writes into the cache: rules (1) and (2) of
sim/protocol/backend.h, by numpy."""

from __future__ import annotations

import numpy

# No content: of padding, and of tokens that were not scheduled.
NO_CONTENT = 0xBAD0BAD0BAD0BAD0
_STEP = numpy.uint64(0x9E3779B97F4A7C15)
_STATE_FACTOR = numpy.uint64(0xD1342543DE82EF95)
# Of one element: bits that stay, bits that are set.
_MASKS = {
    "bf16": (2, 0x807F, 0x3F00),
    "fp16": (2, 0x83FF, 0x3800),
    "fp32": (4, 0x807FFFFF, 0x3F000000),
    "fp8": (1, 0x87, 0x30),
    "fp8_e4m3": (1, 0x87, 0x30),
    "fp8_e5m2": (1, 0x83, 0x38),
    "int8": (1, 0xFF, 0),
    "uint8": (1, 0xFF, 0),
}


def mix(words: numpy.ndarray) -> numpy.ndarray:
    """splitmix64 of each word."""
    with numpy.errstate(over="ignore"):
        x = words.astype(numpy.uint64) + _STEP
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return x ^ (x >> numpy.uint64(31))


def _coordinates(layer: int, part: int, num_heads: int) -> numpy.ndarray:
    heads = numpy.arange(num_heads, dtype=numpy.uint64)
    return mix(heads | numpy.uint64(layer << 32 | part << 16))


def rows(
    contents: numpy.ndarray, layer: int, part: int, num_heads: int, row_bytes: int, dtype: str
) -> numpy.ndarray:
    """[tokens, heads, row_bytes] bytes: the rows of tokens with these 64-bit contents."""
    num_words = (row_bytes + 7) // 8
    with numpy.errstate(over="ignore"):
        keys = mix(contents[:, None] ^ _coordinates(layer, part, num_heads)[None, :])
        steps = numpy.arange(1, num_words + 1, dtype=numpy.uint64) * _STEP
        words = mix(keys[:, :, None] + steps)
    itemsize, kept, given = _MASKS[dtype]
    bits = 8 * itemsize
    repeat = sum(1 << bits * i for i in range(8 // itemsize))
    words = words & numpy.uint64(kept * repeat) | numpy.uint64(given * repeat)
    made = words.view(numpy.uint8).reshape(len(contents), num_heads, num_words * 8)
    return made[:, :, :row_bytes]


def next_state(words: numpy.ndarray, content: int, layer: int, state: int) -> numpy.ndarray:
    """The words of a state tensor after one more token: rule (2)."""
    with numpy.errstate(over="ignore"):
        coordinate = mix(numpy.array([layer << 32 | (16 + state) << 16], dtype=numpy.uint64))
        places = numpy.arange(len(words), dtype=numpy.uint64)
        return words * _STATE_FACTOR + mix(numpy.uint64(content) ^ coordinate ^ places)
