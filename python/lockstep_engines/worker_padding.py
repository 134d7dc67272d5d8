"""Batches padded to sizes of captured graphs, without the graphs: vLLM's runner pads its inputs,
slots and tables as for a graph, and then runs eagerly."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def room_for(count: int, most: int) -> int:
    """The next power of two, as sizes of graphs are by default up to 8."""
    return max(count, min(most, 1 << (count - 1).bit_length())) if count else 0


def pad(runner: Any, is_v2: bool) -> None:
    """Every step of the runner from now on. The second runner pads rows as well: of a batch of
    decodes to a power of two, of a mixed one to a row for each token, as far as there is room. The
    first one pads rows where a graph runs alone."""
    dispatcher = runner.cudagraph_manager if is_v2 else runner.cudagraph_dispatcher
    dispatch = dispatcher.dispatch
    signature = inspect.signature(dispatch)

    def padded(made: Any, tokens_each: int | None) -> Any:
        num_tokens, rows = room_for(made.num_tokens, runner.max_num_tokens), made.num_reqs
        if is_v2 and tokens_each:
            rows = room_for(rows, min(runner.max_num_reqs, runner.max_num_tokens // tokens_each))
            num_tokens = rows * tokens_each
        elif is_v2:
            rows = min(num_tokens, runner.max_num_reqs)
        return dataclasses.replace(made, num_tokens=num_tokens, num_reqs=rows)

    def dispatch_padded(*args: Any, **options: Any) -> Any:
        made = dispatch(*args, **options)
        if not is_v2:
            return made[0], padded(made[1], None)
        return padded(made, signature.bind(*args, **options).arguments["uniform_token_count"])

    dispatcher.dispatch = dispatch_padded


def refuse(kinds: set[str], is_v2: bool, pads: bool, idles: bool) -> str:
    """Why a case with layers of these kinds is not run so; empty: it is."""
    if "hidden_state" in kinds and (pads or idles):
        return "hidden states in padded or idle batches: vLLM writes their padding to a block"
    if "mamba" in kinds and is_v2 and pads:
        return "states in padded batches: the second runner pads their rows in graphs alone"
    return ""
