"""A campaign: what failed before, a canary, then shards of new seeds until the end.

The report covers the consecutive seeds before a task that no worker finishes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_campaign.executors import Executor
from lockstep_campaign.fuzz_run import REPORT, FuzzRun, classes_reached, report_of
from lockstep_campaign.loop import Loop, Refused, last_line, say
from lockstep_campaign.tasks import Done, Task

_PROGRESS_SECONDS = 10.0
_SHRUNK = 20  # buckets
CANARY = "canary"


@dataclass
class Point:
    """The work done until then."""

    seconds: float
    cases: int
    steps: int
    classes: int
    failures: int
    workers: int


@dataclass
class Found:
    """What the workers found."""

    points: list[Point] = field(default_factory=list)
    canary: str = "none"  # "found", "missed", "none"
    still_fail: dict[str, bool] = field(default_factory=dict)  # by case


class Campaign(Loop):
    def __init__(self, run: FuzzRun, executor: Executor, folder: Path) -> None:
        super().__init__(executor)
        self._run, self._folder = run, folder
        self._tally: dict[str, int] = {}
        self._buckets: dict[str, int] = {}
        self._parts: dict[int, tuple[int, Path]] = {}  # cases and report, by first seed
        self._said = self.started
        self._totals = [0, 0, 0]  # cases, steps, failures
        self.found = Found()

    def plant_canary(self, words: list[str]) -> None:
        task = self._run.task(CANARY, *words, "--seed", "1", "--runs", "60", "--failures", "1")
        self.add(task, self._judge_canary)

    def _judge_canary(self, done: Done) -> None:
        if done.status == 2:
            raise Refused(f"the canary cannot run: {last_line(done.err)}")
        self.found.canary = "found" if done.status else "missed"

    def replay(self, case: Path) -> None:
        def judge(done: Done) -> None:
            if done.status == 2:
                say(f"{case.name} cannot be replayed: {last_line(done.err)}")
            else:
                self.found.still_fail[case.name] = done.status in (1, 3)

        self.add(self._run.replay(case), judge)

    def more(self) -> Task | None:
        task = self._run.next_shard()
        if task is not None:
            self.handlers[task.name] = self._take_shard
        return task

    def _take_shard(self, done: Done) -> None:
        report = report_of(done)
        path = self._folder / f"{report['first_seed']}.json"
        path.write_bytes(done.files[REPORT])
        self._parts[report["first_seed"]] = report["cases"], path
        self._run.took(report["cases"], done.seconds)
        for name, count in report["tally"].items():
            self._tally[name] = self._tally.get(name, 0) + count
        for at, count in enumerate((report["cases"], report["steps"], len(report["failures"]))):
            self._totals[at] += count
        self._say_buckets(report)
        now = time.monotonic()
        cases, steps, failures = self._totals
        self.found.points.append(
            Point(round(now - self.started, 2), cases, steps, classes_reached(self._tally),
                  failures, self.executor.size()))  # fmt: skip
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            rate = cases / (now - self.started)
            say(f"{cases:,} cases, {rate:,.0f} per second, workers: {self.executor.size()}, "
                f"failures: {failures:,}, buckets: {len(self._buckets)}")  # fmt: skip

    def _say_buckets(self, report: dict[str, Any]) -> None:
        by_seed = {one["seed"]: one for one in report["failures"]}
        for bucket in report["buckets"]:
            name = bucket["bucket"]
            if name not in self._buckets:
                one = by_seed[bucket["smallest_seed"]]
                say(f"new bucket: {one['check']}: {one['what']}\n"
                    f"  {report.get('again', '')} --seed {one['seed']}")  # fmt: skip
            self._buckets[name] = self._buckets.get(name, 0) + bucket["cases"]

    def parts(self) -> list[Path]:
        """The reports of consecutive seeds, from the first on."""
        found = []
        seed = self._run.first_seed
        while seed in self._parts:
            cases, path = self._parts[seed]
            found.append(path)
            seed += cases
        return found

    def shrink(self, seeds: list[int], found: Path) -> None:
        """Saves and shrinks the cases of these seeds, into `found`."""

        def keep(done: Done) -> None:
            for name, content in done.files.items():
                if name != REPORT:
                    found.mkdir(parents=True, exist_ok=True)
                    (found / name).write_bytes(content)

        for seed in seeds[:_SHRUNK]:
            self.add(self._run.shrinking(seed), keep)
        self.stops = True
        self.work()
