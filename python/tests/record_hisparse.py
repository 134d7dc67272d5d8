"""Lets vLLM 0.33.0 serve seeded scenarios with HiSparse's groups, and records them.

    python record_hisparse.py OUT_FOLDER [--seeds FIRST:LAST] [--requests N] [--steps N]

Writes OUT_FOLDER/FAMILY/SEED.jsonl, for `lockstep conform`. Host pool, resident pages and hot
regions are vLLM's own scheduler's; workers and peers are generated (hisparse_connector.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import record_connectors
import scenarios

FAMILIES = ("hisparse", "hisparse_async", "hisparse_drafts", "hisparse_async_drafts")


def groups_of(rng: random.Random, block_size: int) -> list[dict[str, Any]]:
    """Groups in vLLM's order: source, indexer, resident, hot, then others."""
    rows = {"num_kv_heads": 1, "head_size": 576, "dtype": "bf16"}
    source = {"type": "mla", "block_size": block_size} | rows
    indexer = source | {"head_size": 132, "dtype": rng.choice(("bf16", "uint8"))}
    page = {"block_size": block_size, "page_size": block_size * 576 * 2}
    num_resident = rng.choice((1, 1, 2))
    specs = [source, indexer]
    specs += [{"type": "hisparse_resident"} | page] * num_resident
    hot = {"blocks_per_request": rng.choice((1, 2, 3))}
    specs += [{"type": "hisparse_hot"} | page | hot] * num_resident
    if rng.random() < 0.2:
        specs.append(scenarios.sliding(block_size, rng.choice((8, 20))))
    sources = [f"layers.{i}" for i in range(num_resident)]
    names = [sources, [f"{name}.indexer" for name in sources]]
    for suffix in ("hisparse_resident", "hisparse_hot"):  # as vLLM names them
        names += [[f"{name}.{suffix}"] for name in sources]
    names.append([f"layers.{num_resident}"])
    groups = [{"layers": of, "spec": spec} for of, spec in zip(names, specs, strict=False)]
    groups[0]["role"] = "hisparse_source"
    groups[1]["role"] = "hisparse_indexer"
    return groups


def make_header(family: str, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{family} {seed}")
    block_size = rng.choice((4, 8, 16))
    groups = groups_of(rng, block_size)
    config = {
        "max_num_seqs": rng.choice((2, 4, 8)),
        "max_num_batched_tokens": rng.choice((16, 32, 64)),
        "max_model_len": rng.choice((64, 96, 160)),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.9,
        "scheduler_reserve_full_isl": True,  # vLLM wants it with these groups
        "policy": rng.choice(("fcfs", "fcfs", "priority")),
    }
    if "async" in family:
        config["async_scheduling"] = True
    if "drafts" in family:
        method = rng.choice(("eagle", "draft_model") if "async" in family else ("ngram", "eagle"))
        config |= {"num_spec_tokens": rng.choice((1, 3)), "spec_method": method}
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], 64)
    pages = -(-config["max_model_len"] // block_size) + 2
    hot = sum(group["spec"].get("blocks_per_request", 0) for group in groups)
    # From a pool that just holds one request to one that rarely runs out.
    need = (len(groups) - 1) * pages + hot
    return {
        "family": family,
        "seed": seed,
        "config": config,
        "groups": groups,
        "num_blocks": 2 + int(need * rng.choice((0.8, 1.0, 1.5, 3.0))),
        "hisparse_host_num_blocks": 2 + int(pages * rng.choice((1.0, 1.5, 3.0, 8.0))),
        "connector": {
            "kv_load_failure_policy": rng.choice(("recompute", "recompute", "fail")),
            "supports_hybrid_groups": True,
            "parts": 2,
        },
    }


def record(family: str, seed: int, path: Path, requests: int, steps: int) -> int:
    """Records one scenario to `path`. Returns the turns of the engine's loop."""
    connector = "hisparse_connector.HiSparseDrawnConnector"
    header = make_header(family, seed)
    return record_connectors.record_header(header, path, requests, steps, connector)


if __name__ == "__main__":
    record_connectors.main(__doc__, FAMILIES, record)
