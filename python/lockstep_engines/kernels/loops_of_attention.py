"""Attention as plain loops in double precision, for kernels/attention.py: a query, the keys that
it sees, a softmax. It contains no vLLM code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy

Sees = Callable[[int, int], bool]  # the token at a position, a key's position


@dataclass(frozen=True)
class Scores:
    """From the product of a query and a key to its score. `sinks`: a score per head that takes part
    in the softmax without a value. `slopes`: ALiBi's, times the key's distance from the step's
    first token, or times the root of its distance to the query (`root_of_distance`)."""

    scale: float
    softcap: float = 0.0
    sinks: numpy.ndarray | None = None
    slopes: numpy.ndarray | None = None
    root_of_distance: bool = False

    def of(self, product: float, head: int, distance: int, from_first: int) -> float:
        """`distance`: from key to query; `from_first`: from the step's first token to the key."""
        score = product * self.scale
        if self.softcap:
            score = self.softcap * float(numpy.tanh(score / self.softcap))
        if self.slopes is not None:
            bias = -float(numpy.sqrt(max(distance, 0))) if self.root_of_distance else from_first
            score += float(self.slopes[head]) * bias
        return score


def attend(
    queries: numpy.ndarray,
    keys: numpy.ndarray,
    values: numpy.ndarray,
    first: int,
    scores: Scores,
    sees: Sees,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Outputs [tokens, heads, elements per value] and log sums [tokens, heads] of one request.
    queries: [tokens, heads, elements], the first at position `first`; keys and values: [positions,
    heads that several queries share, elements]. A query that sees nothing gets zeros."""
    num_tokens, num_heads, _ = queries.shape
    shared = num_heads // keys.shape[1]
    outputs = numpy.zeros((num_tokens, num_heads, values.shape[2]))
    sums = numpy.full((num_tokens, num_heads), -numpy.inf)
    for i in range(num_tokens):
        seen = [j for j in range(len(keys)) if sees(first + i, j)]
        for head in range(num_heads):
            of = head // shared
            made = [
                scores.of(float(queries[i, head] @ keys[j, of]), head, first + i - j, j - first)
                for j in seen
            ]
            with_sink = made if scores.sinks is None else [*made, float(scores.sinks[head])]
            if not with_sink:
                continue
            largest = max(with_sink)
            total = sum(numpy.exp(score - largest) for score in with_sink)
            sums[i, head] = largest + numpy.log(total)
            for score, j in zip(made, seen, strict=True):
                outputs[i, head] += numpy.exp(score - largest) / total * values[j, of]
    return outputs, sums


def merged(
    outputs: list[numpy.ndarray], sums: list[numpy.ndarray]
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Merges attention over two parts of the keys."""
    together = numpy.logaddexp(*sums)
    parts = [
        numpy.where(numpy.isinf(one), 0.0, numpy.exp(one - together))[..., None] * output
        for one, output in zip(sums, outputs, strict=True)
    ]
    return parts[0] + parts[1], together
