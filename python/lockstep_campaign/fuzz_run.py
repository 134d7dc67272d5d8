"""The fuzz run of a campaign: shards of consecutive seeds, and one report of them.

A shard's report depends only on its seeds, and `lockstep fuzz --merge` makes one process's report
of consecutive ones, whatever their number, sizes, order and workers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep_campaign.loop import Refused, last_line
from lockstep_campaign.tasks import FOLDER, Done, Task

REPORT = "report.json"
_SHARD_SECONDS = 10.0
_FIRST_CASES = 50
_CASES_MAX = 100_000
_MERGED_AT_ONCE = 500
_SEEDS_PER_DAY = 10**8
_REFUSED = ("--shard", "--merge", "--seconds", "--failures", "--jobs", "--save", "--save-findings")
_PLANT = "preempted-is-lost"  # in vLLM's scheduler; six seconds, the engine's start included
# What `replay` needs of them to judge a saved case.
_JUDGES = ("--decisions", "--decisions-timeout", "--backend", "--runner", "--engine-python",
           "--kernels", "--check")  # fmt: skip


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a number of at least 0")
    return int(text)


def seed_of_today() -> int:
    """The same for all campaigns of a day: 2026112600000000."""
    return int(f"{datetime.date.today():%Y%m%d}") * _SEEDS_PER_DAY


def without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words less these options and their values."""
    kept: list[str] = []
    skips = False
    for word in words:
        if word.startswith("--"):
            skips = word.partition("=")[0] in names
        if not skips:
            kept.append(word)
    return kept


def options_of(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def report_of(done: Done) -> dict[str, Any]:
    if REPORT not in done.files:
        raise Refused(f"{done.task.name}: {last_line(done.err)}")
    report: dict[str, Any] = json.loads(done.files[REPORT])
    return report


class FuzzRun:
    def __init__(self, words: Sequence[str], budget: float | None, cases: int | None) -> None:
        """`budget`: in seconds; `cases`: of a shard, by default as many as take ten seconds."""
        parser = Parser("fuzz", add_help=False, allow_abbrev=False)
        parser.add_argument("--seed", type=_seed)
        parser.add_argument("--runs", type=count)
        parser.add_argument("--json")
        parser.add_argument("--known", type=Path)
        parser.add_argument("--corpus", type=Path)
        parser.add_argument("--junit")
        parser.add_argument("--summary")
        parser.add_argument("--annotations", choices=["github"])
        parser.add_argument("--coverage", action="store_true")
        parser.add_argument("--no-shrink", action="store_true")
        parser.add_argument("--shrink-seconds", default="60")
        own, self.words = parser.parse_known_args(words)
        if (budget is None) == (own.runs is None):
            raise Refused("give either --budget TIME or --runs N after fuzz")
        for name in options_of(self.words):
            if name in _REFUSED:
                raise Refused(f"{name} does not suit a campaign, which shards and saves")
        self.outputs = {f"--{name}": getattr(own, name) for name in ("json", "junit", "summary")}
        self._shrinking = ["--no-shrink"] if own.no_shrink else [
            "--shrink-seconds", own.shrink_seconds]  # fmt: skip
        self.of_report = ["--coverage"] if own.coverage else []
        for output in ("junit", "annotations", "summary"):
            if getattr(own, output):
                self.of_report += [f"--{output}", getattr(own, output)]
        self.files: dict[str, bytes] = {}
        for option, path in (("--known", own.known), ("--corpus", own.corpus)):
            if path is None:
                continue
            self.words += [option, f"{FOLDER}/{path.name}"]
            if option == "--known" or path.exists():
                self.files[path.name] = path.read_bytes()
        # Shards begin with the corpus of earlier campaigns; the report holds what they add.
        self.of_report += ["--corpus", str(own.corpus.absolute())] if own.corpus else []
        default = 1 if budget is None else seed_of_today()
        self.first_seed = self.next_seed = default if own.seed is None else own.seed
        self._end_seed = math.inf if own.runs is None else self.first_seed + own.runs
        self._ends = math.inf if budget is None else time.monotonic() + budget
        self._cases, self._cases_next = cases, _FIRST_CASES

    def next_shard(self) -> Task | None:
        left = self._ends - time.monotonic()
        if self.next_seed >= self._end_seed or left <= 0:
            return None
        cases = self._cases or math.ceil(self._cases_next * min(1, left / _SHARD_SECONDS))
        begin, end = self.next_seed, int(min(self.next_seed + cases, self._end_seed))
        self.next_seed = end
        name = f"seeds {begin} to {end - 1}"
        return self.task(name, "--seed", str(begin), "--runs", str(end - begin))

    def took(self, cases: int, seconds: float) -> None:
        """A shard's time: the next ones take about ten seconds, and grow at most fourfold."""
        fitting = math.ceil(cases * _SHARD_SECONDS / max(seconds, 0.01))
        self._cases_next = min(fitting, 4 * cases, _CASES_MAX)

    def task(self, name: str, *more: str) -> Task:
        """A run of fuzz; `more` replaces the options that it names."""
        words = ("fuzz", *without(self.words, options_of(more)), *more)
        return Task(name, (*words, "--json", f"{FOLDER}/{REPORT}"), self.files)

    def shrinking(self, seed: int) -> Task:
        """The case of a seed, saved and shrunk."""
        return self.task(f"shrinking seed {seed}", "--seed", str(seed), "--save", FOLDER,
                         *self._shrinking)  # fmt: skip

    def replay(self, case: Path) -> Task:
        judges = without(self.words, [w for w in options_of(self.words) if w not in _JUDGES])
        if "--backend" not in options_of(judges):
            judges += ["--backend", "none" if "--decisions" in options_of(judges) else "simt"]
        words = ("replay", f"{FOLDER}/{case.name}", *judges)
        return Task(f"replay of {case.name}", words, {case.name: case.read_bytes()})

    def merge(self, parts: list[Path], run: Callable[[Task], Done], stopped: list[int]) -> Done:
        """The report of all shards, as one process of `fuzz` prints it. `stopped`: by signals."""
        words = ("fuzz", "--json", f"{FOLDER}/{REPORT}")
        while len(parts) > _MERGED_AT_ONCE:
            first, parts = parts[:_MERGED_AT_ONCE], parts[_MERGED_AT_ONCE:]
            done = run(Task("a part of the report", (*words, "--merge", *map(str, first))))
            report_of(done)
            # A full disk must not cut off the file that it replaces.
            partial = first[0].with_suffix(".partial")
            partial.write_bytes(done.files[REPORT])
            partial.rename(first[0])
            for part in first[1:]:
                part.unlink()
            parts.append(first[0])
        interrupted = ["--interrupted-by", str(stopped[0])] if stopped else []
        rest = (*self.of_report, *interrupted, "--merge", *map(str, parts))
        return run(Task("the report", (*words, *rest)))

    def canary(self) -> list[str]:
        """Words that plant a defect in what the run judges; empty: none is known."""
        value = dict(zip(self.words, self.words[1:], strict=False))
        if "--mutant" in value or "--plant" in value:
            return []
        backend = value.get("--backend", "none" if "--decisions" in value else "simt")
        if backend.partition(":")[0] == "vllm":
            return ["--plant", "slot-off-by-one"]
        if "--decisions" in value:
            engine, _, folder = value["--decisions"].partition(":")
            python = value.get("--engine-python", sys.executable)
            adapter = [python, "-m", "lockstep_engines", engine, folder, "--plant", _PLANT]
            planted = shlex.join(word for word in adapter if word)
            return ["--decisions", planted] if engine == "vllm" else []
        return ["--mutant", "hash-stale" if backend == "none" else "drop-slot"]


def classes_reached(tally: Mapping[str, Any]) -> int:
    return sum(1 for count in tally.values() if count)
