"""Batches padded to sizes of captured graphs, without the graphs: vLLM's runner pads its inputs,
slots and tables as for a graph, and then runs eagerly."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def room_for(count: int, most: int) -> int:
    """The next power of two, as sizes of graphs are by default up to 8."""
    return max(count, min(most, 1 << (count - 1).bit_length())) if count else 0


def pad(runner: Any, is_v2: bool, is_idle: Callable[[], bool]) -> None:
    """Pads every later step of the runner. Rows are also padded: those of a batch of decodes to a
    power of two; with runner V2 those of a mixed batch to one row per token, up to the maximum.
    `is_idle`: True if the batch is an idle rank's."""
    if is_v2:
        _pad_second(runner)
    else:
        _pad_first(runner, is_idle)


def _pad_first(runner: Any, is_idle: Callable[[], bool]) -> None:
    """Reports a graph of the whole batch for a batch of decodes, so that the runner pads rows. A
    batch without requests reads the first rows of the tables, which an idle rank has cleared: with
    requests in the tables it is not padded."""
    from vllm.config import CUDAGraphMode

    dispatcher = runner.cudagraph_dispatcher
    dispatch, most = dispatcher.dispatch, runner.max_num_tokens
    signature = inspect.signature(dispatch)

    def dispatch_padded(*args: Any, **options: Any) -> Any:
        mode, made = dispatch(*args, **options)
        each = runner.uniform_decode_query_len
        if is_idle() and runner.input_batch.num_reqs:
            return mode, made
        if not signature.bind(*args, **options).arguments.get("uniform_decode"):
            return mode, dataclasses.replace(made, num_tokens=room_for(made.num_tokens, most))
        rows = room_for(made.num_tokens // each, min(runner.max_num_reqs, most // each))
        made = dataclasses.replace(made, num_tokens=rows * each, num_reqs=rows, uniform=True)
        return CUDAGraphMode.FULL, made

    dispatcher.dispatch = dispatch_padded


def _pad_second(runner: Any) -> None:
    manager = runner.cudagraph_manager
    dispatch = manager.dispatch
    signature = inspect.signature(dispatch)

    def dispatch_padded(*args: Any, **options: Any) -> Any:
        made = dispatch(*args, **options)
        each = signature.bind(*args, **options).arguments["uniform_token_count"]
        num_tokens, rows = room_for(made.num_tokens, runner.max_num_tokens), made.num_reqs
        if each:
            rows = room_for(rows, min(runner.max_num_reqs, runner.max_num_tokens // each))
            num_tokens = rows * each
        else:
            rows = min(num_tokens, runner.max_num_reqs)
        return dataclasses.replace(made, num_tokens=num_tokens, num_reqs=rows)

    manager.dispatch = dispatch_padded


def refuse(kinds: set[str], is_v2: bool, pads: bool) -> str:
    """Why a case with layers of these kinds cannot be padded; empty: it can."""
    if "mamba" in kinds and is_v2 and pads:
        return "states in padded batches: runner V2 pads their rows in graphs alone"
    return ""
