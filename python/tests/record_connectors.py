"""Lets vLLM serve seeded scenarios with a KV connector, and records them.

    python record_connectors.py OUT_FOLDER [--seeds FIRST:LAST] [--requests N] [--steps N]

Writes OUT_FOLDER/FAMILY/SEED.jsonl, for `lockstep conform`. Recordings of serving have no
connector: what is written down of one here comes from a connector that is part of the scenario.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import record_scenarios
import scenarios

FAMILIES = ("connector_served", "connector_served_async")


def make_header(family: str, seed: int) -> dict[str, Any]:
    """The configuration of one scenario: one group whose loads may fail, or several."""
    rng = random.Random(f"{family} {seed}")
    block_size = rng.choice((4, 16))
    full, window = scenarios.full(block_size), scenarios.sliding(block_size, rng.choice((8, 20)))
    specs = rng.choice(([full], [full], [full], [window], [full, window]))
    num_spec = rng.choice((0, 0, 0, 1, 3))
    config = {
        "max_num_seqs": rng.choice((2, 4, 8)),
        "max_num_batched_tokens": rng.choice((16, 32, 64, 256)),
        "max_model_len": rng.choice((32, 64, 128)),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.9,
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "policy": rng.choice(("fcfs", "fcfs", "priority")),
    }
    if family.endswith("async"):
        config["async_scheduling"] = True
    if num_spec:
        method = rng.choice(("eagle", "draft_model") if family.endswith("async") else ("ngram",))
        config |= {"num_spec_tokens": num_spec, "spec_method": method}
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], 64)
    need = -(-config["max_model_len"] // block_size) + 4
    return {
        "family": family,
        "seed": seed,
        "config": config,
        "groups": [{"layers": [f"layers.{i}"], "spec": spec} for i, spec in enumerate(specs)],
        "num_blocks": 2 + int(len(specs) * need * rng.choice((1.0, 1.3, 2.0, 6.0))),
        "connector": {
            "kv_load_failure_policy": rng.choice(("recompute", "recompute", "fail")),
            "supports_hybrid_groups": True,
        },
    }


def record_header(
    header: dict[str, Any], path: Path, requests: int, steps: int, connector: str
) -> int:
    """Records one scenario to `path`. Returns the turns of the engine's loop."""
    import connector_recording
    import served_engine

    workload = scenarios.Workload(header, requests)
    scheduler_cls = connector_recording.scheduler_class(path, header)
    engine = served_engine.ServedEngine(header, scheduler_cls, workload, connector=connector)
    turns = engine.run(steps)
    engine.scheduler.log.finish()
    return turns


def record(family: str, seed: int, path: Path, requests: int, steps: int) -> int:
    header = make_header(family, seed)
    return record_header(header, path, requests, steps, "drawn_connector.DrawnConnector")


def main(description: str, families: Iterable[str], record: Callable[..., int]) -> None:
    """`record`: takes a family, a seed, a path, `requests` and `steps`; returns the turns."""
    if sys.flags.hash_randomization:  # vLLM takes blocks in the order of sets of names
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    parser = record_scenarios.parser_of(description, families)
    parser.add_argument("--steps", type=int, default=200, help="at most; a deadlock never ends")
    arguments = parser.parse_args()
    record_one = functools.partial(record, requests=arguments.requests, steps=arguments.steps)
    record_scenarios.record_families(arguments, record_one)


if __name__ == "__main__":
    main(__doc__, FAMILIES, record)
