"""The worker's batch as the decisions of a case describe it: which requests it holds, which blocks
each one has in every group, how far each one is computed.

Invariants:
1. Only messages and tokens that Lockstep sent change a request; nothing is read from the worker.
2. `rows` has the requests of the current step.
3. A table lists the blocks that decisions handed to the request, in order. Blocks that a window has
   left stay in it: no decision reports them as free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """`num_prefill`: its tokens when the worker last received them all. `counted`: its computed
    tokens as the scheduler counts them, drafts in flight included."""

    name: str
    tokens: list[int]
    num_prompt: int
    num_prefill: int = 0
    tables: list[list[int]] = field(default_factory=list)
    counted: int = 0
    is_resident: bool = True  # not preempted since its last step


@dataclass
class Row:
    """A request in a step: positions [first, first + num_tokens)."""

    request: Request
    first: int
    num_tokens: int
    num_known: int  # tokens without drafts

    @property
    def end(self) -> int:
        return self.first + self.num_tokens


def in_kernel_blocks(blocks: list[int], parts: int) -> list[int]:
    """The kernel blocks of `blocks`, each of which has `parts` of them."""
    return [block * parts + part for block in blocks for part in range(parts)]


def in_blocks(kernel_blocks: list[int], parts: int) -> list[int]:
    """The block of every first kernel block; the others are compared where they are read."""
    return [kernel_block // parts for kernel_block in kernel_blocks[::parts]]


class Expected:
    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.rows: dict[str, Row] = {}

    def begin(self, message: dict[str, Any], counted: dict[str, int]) -> None:
        """Takes over a decision; the tokens of its requests are known already. `counted`: computed
        tokens by request, as the scheduler counts them."""
        again = {row["id"] for row in message["scheduled"] if "prompt" in row}
        for name in set(message["finished"]) - again:
            self.requests.pop(name, None)
        for name in message["preempted"]:
            if name in self.requests:
                self.requests[name].is_resident = False
        self.rows = {}
        for row in message["scheduled"]:
            request = self.requests[row["id"]]
            if row.get("new") or row.get("resumed"):
                request.tables = [list(blocks) for blocks in row["blocks"]]
                request.num_prefill = len(request.tokens)
            else:
                for table, blocks in zip(request.tables, row["blocks"], strict=True):
                    table += blocks
            request.counted = counted[row["id"]]
            request.is_resident = True
            self.rows[row["id"]] = Row(request, row["computed"], row["tokens"], len(request.tokens))
