"""A campaign: what failed before, a canary, then shards of new seeds until the end.

A task whose worker dies runs again on another. A task that no worker finishes ends the campaign,
and the report covers the consecutive seeds before it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_campaign.executors import Executor, Lost
from lockstep_campaign.fuzz_run import REPORT, FuzzRun, Refused, classes_reached
from lockstep_campaign.tasks import Done, Task

_TRIES = 5
_TRIES_OF_A_CRASH = 2
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
class Ended:
    """What the workers did."""

    points: list[Point] = field(default_factory=list)
    canary: str = "none"  # "found", "missed", "none"
    still_fail: dict[str, bool] = field(default_factory=dict)  # by case
    lost: list[str] = field(default_factory=list)  # why tasks ran again
    given_up: str = ""  # the task that no worker finished, and why
    workers: set[str] = field(default_factory=set)
    seconds: float = 0


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


class Campaign:
    def __init__(self, run: FuzzRun, executor: Executor, folder: Path) -> None:
        self._run, self._executor, self._folder = run, executor, folder
        self._queue: deque[Task] = deque()
        self._tries: dict[str, int] = {}
        self._handlers: dict[str, Callable[[Done], None]] = {}
        self._tally: dict[str, int] = {}
        self._buckets: dict[str, int] = {}
        self._parts: dict[int, tuple[int, Path]] = {}  # cases and report, by first seed
        self._started = self._said = time.monotonic()
        self._totals = [0, 0, 0]  # cases, steps, failures
        self.ended = Ended()
        self.stops = False  # start no more shards

    def add(self, task: Task, handler: Callable[[Done], None]) -> None:
        self._queue.append(task)
        self._handlers[task.name] = handler

    def plant_canary(self, words: list[str]) -> None:
        task = self._run.task(CANARY, *words, "--seed", "1", "--runs", "60", "--failures", "1")
        self.add(task, self._judge_canary)

    def _judge_canary(self, done: Done) -> None:
        if done.status == 2:
            raise Refused(f"the canary cannot run: {_last_line(done.err)}")
        self.ended.canary = "found" if done.status else "missed"

    def replay(self, case: Path) -> None:
        def judge(done: Done) -> None:
            if done.status == 2:
                say(f"{case.name} cannot be replayed: {_last_line(done.err)}")
            else:
                self.ended.still_fail[case.name] = done.status in (1, 3)

        self.add(self._run.replay(case), judge)

    def work(self) -> None:
        """Runs all tasks that were added, then shards while there are any."""
        running = 0
        while True:
            while running < self._executor.size() and (task := self._next_task()) is not None:
                self._executor.start(task)
                running += 1
            if running == 0:
                break
            ended = self._executor.wait(1.0)
            if ended is None:
                continue
            running -= 1
            if isinstance(ended, Done) and ended.status >= 0:
                self.ended.workers.add(ended.worker)
                self._handlers.pop(ended.task.name)(ended)
            else:
                self._again(ended)
        self.ended.seconds = self.ended.seconds or time.monotonic() - self._started

    def _next_task(self) -> Task | None:
        if self._queue:
            return self._queue.popleft()
        task = None if self.stops else self._run.next_shard()
        if task is not None:
            self._handlers[task.name] = self._take_shard
        return task

    def _again(self, ended: Done | Lost) -> None:
        why = ended.why if isinstance(ended, Lost) else (
            f"ended by signal {-ended.status}: {_last_line(ended.err)}")  # fmt: skip
        task = ended.task
        # SIGKILL is the machine's; any other signal is the program's own, and comes again.
        is_own = isinstance(ended, Done) and ended.status != -signal.SIGKILL
        tries = self._tries[task.name] = self._tries.get(task.name, 0) + 1
        if tries == (_TRIES_OF_A_CRASH if is_own else _TRIES):
            self.ended.given_up = f"{task.name}, given up after {tries} tries: {why}"
            self.stops = True
            return
        say(f"{task.name} runs again: {why}")
        self.ended.lost.append(f"{task.name}: {why}")
        self._queue.appendleft(task)

    def _take_shard(self, done: Done) -> None:
        if REPORT not in done.files:
            raise Refused(f"{done.task.name}: {_last_line(done.err)}")
        report: dict[str, Any] = json.loads(done.files[REPORT])
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
        self.ended.points.append(
            Point(round(now - self._started, 2), cases, steps, classes_reached(self._tally),
                  failures, self._executor.size()))  # fmt: skip
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            rate = cases / (now - self._started)
            say(f"{cases:,} cases, {rate:,.0f} per second, {failures:,} failures in "
                f"{len(self._buckets)} buckets, {self._executor.size()} workers")  # fmt: skip

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


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith("Run with --help")]
    return lines[-1] if lines else "no message"
