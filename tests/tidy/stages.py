"""Shares of the stages of a generated case, compared with tests/tidy/stage_shares.txt.

    python3 tests/tidy/stages.py build/release/lockstep_benchmarks

A stage whose share of the total grew beyond its limit fails: the feature that made it slower says
so in its commit, with the new share. CPU times, the least of several runs: a busy machine changes
them, hardly their ratios. Where a busy moment covers all runs of a stage, more runs find its least
time. A limit is the share of a stage that takes a quarter more time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LIMITS = Path(__file__).with_name("stage_shares.txt")
STAGES = ("generate", "run", "audit", "invariants")  # each includes those before it
RUNS = 5
ROUNDS = 4  # of RUNS, as long as a stage is above its limit


def take_times(benchmarks: str, least: dict[str, float]) -> None:
    """Lowers the cumulative times in `least` to those of further runs."""
    for _ in range(RUNS):  # in turns: a busy moment slows all stages
        out = subprocess.run(
            [
                benchmarks,
                "--benchmark_filter=^stage/",
                "--benchmark_format=json",
                "--benchmark_min_time=0.05",
            ],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for row in json.loads(out)["benchmarks"]:
            stage = row["name"].split("/")[1]
            least[stage] = min(row["cpu_time"], least.get(stage, row["cpu_time"]))


def shares_of(times: dict[str, float]) -> dict[str, float]:
    """Percent of the last stage's time, which includes all, per stage."""
    shares, before = {}, 0.0
    for stage in STAGES:
        shares[stage] = 100 * (times[stage] - before) / times[STAGES[-1]]
        before = times[stage]
    return shares


def limits() -> dict[str, float]:
    lines = [line.split() for line in LIMITS.read_text().splitlines() if not line.startswith("#")]
    return {stage: float(limit) for stage, limit in lines}


def main(arguments: list[str]) -> int:
    least: dict[str, float] = {}
    allowed = limits()
    for _ in range(ROUNDS):
        take_times(arguments[0], least)
        shares = shares_of(least)
        grown = [stage for stage in STAGES if shares[stage] > allowed[stage]]
        if not grown:
            break
    for stage in STAGES:
        print(f"{stage:12} {shares[stage]:5.1f} %  limit {allowed[stage]:5.1f} %")
    if grown:
        print(f"Slower than {LIMITS.name} allows: {', '.join(grown)}")
        print("Make the stage faster, or raise its limit and give the reason in the same commit.")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
