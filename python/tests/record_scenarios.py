"""Lets vLLM serve scenarios of this package and records them.

    python record_scenarios.py OUT_FOLDER [--seeds FIRST:LAST] [--families NAME ...] [--requests N]
                               [--served]

Writes OUT_FOLDER/FAMILY/SEED.jsonl, for `lockstep conform` and `lockstep audit`. With --served the
families are models as a server of vLLM 0.33.0 serves them, with all its defaults.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import scenarios


def record(family: str, seed: int, path: Path, requests: int = 24, served: bool = False) -> int:
    """Records one scenario to `path`; `served`: the family is a model. Returns its turns."""
    import served_engine

    from lockstep_recorder.scheduler import RecordingScheduler

    os.environ["LOCKSTEP_RECORDING"] = str(path)
    os.environ["LOCKSTEP_RECORDING_TABLES"] = "8"  # often: scenarios are short
    groups = None
    if served:
        import served_models

        header, groups = served_models.make_scenario(family, seed)
        workload: scenarios.Workload = served_models.ServedWorkload(header, requests)
    else:
        header = scenarios.make_header(family, seed)
        workload = scenarios.Workload(header, requests)
    engine = served_engine.ServedEngine(header, RecordingScheduler, workload, groups)
    turns = engine.run()
    engine.scheduler.recorder.finish()
    if not path.exists():
        raise RuntimeError(f"{path}: the recorder gave up")
    return turns


def families_of(version: str) -> list[str]:
    """The families that this release serves."""
    return [name for name in scenarios.FAMILIES if name not in scenarios.REFUSED.get(version, ())]


def parser_of(documentation: str, families: Iterable[str]) -> argparse.ArgumentParser:
    """The options of every script that records families of scenarios."""
    parser = argparse.ArgumentParser(description=documentation.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0:4", help="FIRST:LAST, LAST not included")
    parser.add_argument("--families", nargs="*", default=families)
    parser.add_argument("--requests", type=int, default=24)
    keeps_going = "leave out what the release refuses, one line per family"
    parser.add_argument("--keep-going", action="store_true", help=keeps_going)
    return parser


def record_families(arguments: argparse.Namespace, record_one: Callable[..., int]) -> None:
    """`record_one`: takes a family, a seed and a path; returns the turns of the engine's loop."""
    first, last = (int(text) for text in arguments.seeds.split(":"))
    for family in arguments.families:
        folder = arguments.out / family
        folder.mkdir(parents=True, exist_ok=True)
        turns, reasons = 0, []
        for seed in range(first, last):
            path = folder / f"{seed:04}.jsonl"
            try:
                turns += record_one(family, seed, path)
            except Exception as error:
                if not arguments.keep_going:
                    raise
                path.unlink(missing_ok=True)
                reasons.append(f"seed {seed}: {' '.join(str(error).split())[:200]}")
        recorded = last - first - len(reasons)
        if reasons:
            count = f"{len(reasons)} of " if recorded else ""
            print(f"{family}: {count}{last - first} not recorded: {reasons[0]}", flush=True)
        if recorded:
            print(f"{family}: {recorded} recordings, {turns} turns", flush=True)
        else:
            shutil.rmtree(folder)


def main() -> None:
    from lockstep_engines.vllm import engine as vllm_engine

    parser = parser_of(__doc__, families_of(vllm_engine.VERSION))
    parser.add_argument("--served", action="store_true")
    arguments = parser.parse_args()
    if arguments.served:
        import served_models

        if vllm_engine.VERSION != served_models.VERSION:
            parser.error(
                f"--served: found vLLM {vllm_engine.VERSION}, wants {served_models.VERSION}"
            )
        if arguments.families == parser.get_default("families"):
            arguments.families = list(served_models.MODELS)
    options = {"requests": arguments.requests, "served": arguments.served}
    record_families(arguments, functools.partial(record, **options))


if __name__ == "__main__":
    main()
