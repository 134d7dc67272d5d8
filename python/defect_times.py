#!/usr/bin/env python3
"""How long `lockstep fuzz` takes to find each defect planted in vLLM's worker: a table.

    LOCKSTEP=build/release/lockstep python3 python/defect_times.py vllm:DIR [NAME...]

Defects of single kernels, which `--kernels` finds, are left out. A row has the check that found
most, the step of the first find, and the medians of cases and seconds over the seeds; a seed that
found nothing within the limit counts as the limit and is named. $LOCKSTEP_PYTHON is the engine's
interpreter; $LOCKSTEP_WARM_ENGINES makes starts short (docs/engines.md). Rows are also appended to
FILE of --json, one per line, and defects that FILE has are not searched again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep_engines.kernels.plants import PLANTS_OF_KERNELS
from lockstep_engines.worker.plant import WorkerPlant
from lockstep_engines.worker.plants import PLANTS


@dataclass
class Search:
    """The seeds of one defect: cases and seconds of each, and what the finds were."""

    defect: str
    runner: str
    cases: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def row(self) -> str:
        number = len(self.cases)
        found = len(self.checks)
        checks = Counter(self.checks).most_common(1)
        check = f"`{checks[0][0]}`" if checks else "not found"
        step = str(self.steps[0]) if self.steps else ""
        cells = [f"`{self.defect}`", self.runner.upper(), check, step]
        cells += [f"{statistics.median(self.cases):.0f}", f"{statistics.median(self.seconds):.0f}"]
        cells += ["" if found == number else f"{found} of {number}"]
        return "| " + " | ".join(cells) + " |"


def search(
    engine: str, plant: WorkerPlant, seeds: list[int], limit: int, more: list[str]
) -> Search:
    runner = "v1" if plant.runner == "both" else plant.runner
    made = Search(plant.name, runner)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            words = ["fuzz", "--backend", engine, "--runner", runner, "--plant", plant.name]
            words += ["--seed", str(seed), "--seconds", str(limit), "--failures", "1"]
            start = time.monotonic()
            done = subprocess.run(
                [os.environ.get("LOCKSTEP", "lockstep"), *words, *more, "--json", str(report)],
                capture_output=True,
                text=True,
            )
            seconds = time.monotonic() - start
            if done.returncode not in (0, 1):
                sys.exit(f"{plant.name}: {done.stdout[-500:]}{done.stderr[-1500:]}")
            counts = json.loads(report.read_text())
        made.cases.append(counts["cases"])
        made.seconds.append(round(seconds, 1))
        for failure in counts["failures"][:1]:
            made.checks.append(failure["check"])
            made.steps.append(failure["step"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", help="vllm:DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects (all of the worker)")
    parser.add_argument("--seeds", default="1,1001,2001", help="first case of each search")
    parser.add_argument("--seconds", type=int, default=60, help="limit of one search (60)")
    parser.add_argument("--json", type=Path, help="file of rows, which is continued")
    parser.add_argument("--time", type=int, default=0, help="begin no defect after N seconds")
    parser.add_argument("--fuzz", default="", metavar="OPTIONS", help="further options of fuzz")
    arguments = parser.parse_args()
    of_kernels = {plant.name for plant in PLANTS_OF_KERNELS}
    plants = [plant for plant in PLANTS if plant.name not in of_kernels]
    if arguments.names:
        plants = [plant for plant in plants if plant.name in arguments.names]
    known: dict[str, Search] = {}
    if arguments.json and arguments.json.exists():
        rows = map(json.loads, arguments.json.read_text().splitlines())
        known = {row["defect"]: Search(**row) for row in rows}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    print("| defect | runner | check | step | cases | seconds | found |")
    print("|---" * 7 + "|")
    start = time.monotonic()
    for plant in plants:
        made = known.get(plant.name)
        if made is None:
            if arguments.time and time.monotonic() - start > arguments.time:
                continue
            more = arguments.fuzz.split()
            made = search(arguments.engine, plant, seeds, arguments.seconds, more)
            if arguments.json:
                with arguments.json.open("a") as file:
                    print(json.dumps(asdict(made)), file=file)
        print(made.row(), flush=True)


if __name__ == "__main__":
    main()
