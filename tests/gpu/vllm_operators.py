"""vLLM's own cache operators, timed in the shapes of `lockstep_gpu_benchmarks`.

    python vllm_operators.py [--ours build/gpu/bandwidth.json] [--json FILE]

The interpreter needs vLLM and its PyTorch, and a GPU. Each operator is captured in a CUDA graph, so
that what Python takes to call it is not timed, and replayed between two events; the median of 21
counts, after 3 that do not. Rows bear the names that the same work has in lockstep_gpu_benchmarks;
with its JSON (--ours) the last column is vLLM's time over Lockstep's. Exit status: 0; 2
where it cannot run here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bandwidth_gate import rows_of

BLOCK_SIZE, HEADS, HEAD_SIZE = 16, 8, 128  # those of tests/benchmarks/engine_workloads.cpp
LATENT, ROPE = 512, 64
SIZES = {"": 8192, "_of_1_GiB": 1 << 18, "_of_1": 64, "_of_16": 1024}  # tokens of one write


class Operator(NamedTuple):
    name: str
    bytes_per_token: int  # read and written
    call: Callable[[], Any]


def operators(torch: Any, ops: Any, device: str, tokens: int) -> Iterator[Operator]:
    """The writes of `tokens` tokens into slots in no order. `ops`: torch.ops._C_cache_ops."""
    blocks = tokens // BLOCK_SIZE + 1
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))
    slots = slots[:tokens].to(device)
    one = torch.ones(1, dtype=torch.float32, device=device)

    def zeros(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.zeros(*shape, dtype=dtype, device=device)

    rows = [zeros(tokens, HEADS, HEAD_SIZE) for _ in "kv"]
    row_bytes = 2 * HEADS * HEAD_SIZE  # of K or V in bf16

    def write(dtype: Any, name: str) -> Callable[[], Any]:
        cache = zeros(blocks, 2, BLOCK_SIZE, HEADS, HEAD_SIZE, dtype=dtype)
        key_cache, value_cache = cache.unbind(1)
        return lambda: ops.reshape_and_cache_flash(
            *rows, key_cache, value_cache, slots, name, one, one
        )

    yield Operator("write_bf16_nhd", 4 * row_bytes + 8, write(torch.bfloat16, "auto"))
    yield Operator("write_e4m3_per_tensor", 3 * row_bytes + 8, write(torch.uint8, "fp8"))
    split_keys = zeros(blocks, HEADS, HEAD_SIZE // 8, BLOCK_SIZE, 8)
    split_values = zeros(blocks, HEADS, HEAD_SIZE, BLOCK_SIZE)
    yield Operator(
        "write_bf16_x_split",
        4 * row_bytes + 8,
        lambda: ops.reshape_and_cache(*rows, split_keys, split_values, slots, "auto", one, one),
    )
    latent, rope = zeros(tokens, LATENT), zeros(tokens, ROPE)
    cache = zeros(blocks, BLOCK_SIZE, LATENT + ROPE)
    yield Operator(
        "write_bf16_mla",
        4 * (LATENT + ROPE) + 8,
        lambda: ops.concat_and_cache_mla(latent, rope, cache, slots, "auto", one),
    )


def microseconds(torch: Any, call: Callable[[], Any]) -> float:
    call()  # what is loaded at the first call is not captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(24):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def cannot(why: str) -> SystemExit:
    print(f"vllm_operators: {why}", file=sys.stderr)
    return SystemExit(2)


def loaded() -> tuple[Any, Any, str]:
    """PyTorch, vLLM's cache operators, vLLM's version."""
    try:
        import torch
        import vllm
        import vllm._custom_ops  # registers them
    except ImportError as error:
        raise cannot(f"vLLM is not there ({error}); use the interpreter that serves it") from error
    if not torch.cuda.is_available():
        raise cannot("PyTorch finds no GPU")
    return torch, torch.ops._C_cache_ops, vllm.__version__


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM's cache operators, timed")
    parser.add_argument("--ours", type=Path, help="what lockstep_gpu_benchmarks wrote")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    try:
        rows_of_ours = rows_of(arguments.ours) if arguments.ours else {}
        ours = {name: row["real_time"] for name, row in rows_of_ours.items()}
    except (OSError, ValueError, KeyError) as error:
        raise cannot(f"{arguments.ours}: {error!r}; wants the file of --benchmark_out") from error
    torch, ops, version = loaded()
    print(f"vLLM {version} on {torch.cuda.get_device_name()}")
    print(f"{'operator':<36}{'microseconds':>14}{'GB/s':>10}{'of Lockstep':>14}")
    rows = []
    for suffix, tokens in SIZES.items():
        for operator in operators(torch, ops, "cuda", tokens):
            name = operator.name + suffix
            time = microseconds(torch, operator.call)
            rate = tokens * operator.bytes_per_token / time / 1e3
            ratio = f"{time / ours[name]:.2f}" if name in ours else "-"
            print(f"{name:<36}{time:>14.1f}{rate:>10.0f}{ratio:>14}")
            rows.append({"name": name, "microseconds": time, "ours": ours.get(name)})
    if arguments.json:
        arguments.json.write_text(json.dumps({"vllm": version, "operators": rows}, indent=1))


if __name__ == "__main__":
    main()
