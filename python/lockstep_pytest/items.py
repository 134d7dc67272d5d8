"""The tests that the command line and the ini file ask for, each a run of `lockstep`."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep_pytest import command, layouts
from lockstep_pytest.known import Known

SEEDS_AT_A_TIME = 50
SHRINK_SECONDS = "20"
LAYOUT_RECORDS = "16"  # of the trace that a layout is tried with


@dataclass
class Failure:
    """What a test found."""

    check: str
    line: str  # the same every time
    again: str  # the command that repeats it
    details: str = ""  # of the smallest case
    bucket: str = ""  # equal for failures of one bug; empty: that of check and line

    def __post_init__(self) -> None:
        self.bucket = self.bucket or bucket_of(self.check, self.line)


class LockstepFailed(Exception):
    """Raised in a test that fails; pytest shows the failure instead of a traceback."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(text_of(failure))
        self.failure = failure


@dataclass
class Settings:
    """What was asked for, with everything that all tests share."""

    backend: str = ""
    decisions: str = ""
    engine: str = ""
    trace: str = "shared_prefixes.jsonl"
    save: Path = Path(".lockstep")
    known: list[Known] = field(default_factory=list)
    one_at_a_time: bool = False  # several processes share the tests
    # Bucket of a failure as found -> bucket of its smallest case; of each the first is shrunk.
    buckets: dict[str, str] = field(default_factory=dict)

    def checks(self, backend: str) -> str:
        """Names the checks of a case. Invariants read the model: no other engine has them."""
        checks = "the audit" if self.decisions else "audit and invariants"
        return checks if backend in ("", "none") else f"pages on {backend}, {checks}"

    def judging(self, backend: bool = True) -> list[str]:
        """Options that select what is judged."""
        words = ["--backend", self.backend] if backend and self.backend else []
        return words + (["--decisions", self.decisions] if self.decisions else [])

    def is_new(self, bucket: str) -> bool:
        """True for the first failure of a bucket in this process."""
        is_new = bucket not in self.buckets
        self.buckets.setdefault(bucket, bucket)
        return is_new

    def planted(self, case: Path | None = None) -> str:
        """Names the defects that the options and a saved case plant; empty: none."""
        names = re.findall(r"--plant[ =](\S+)", f"{self.decisions} {self.backend}")
        if case is not None:
            names += first_object(case).get("mutants", [])
        return f"planted: {', '.join(names)}\n" if names else ""

    @property
    def decided_by(self) -> str:
        return self.decisions or "the model"


def bucket_of(check: str, line: str) -> str:
    """The line without numbers, the request's name and the items of a list after its first."""
    head, colon, sentence = line.partition(": ")
    request = re.search(r" request (\S+)", head)
    text = sentence if colon else head
    if request:
        text = re.sub(rf"(?<!\w){re.escape(request[1])}(?!\w)", "R", text)
    text = re.sub(r"\w*\d\w*", "N", text)
    clauses = re.split(r"(?<=[;:.]) ", text)
    seen = dict.fromkeys(clause.rstrip(";:.") for clause in clauses)
    return f"{check}: " + "; ".join(seen)


def judged(count: int, what: str, by: str, checks: str) -> dict[str, Any]:
    """For the summary: how many were decided by an engine, and the checks that judged them."""
    return {"count": count, "what": what, "by": by, "checks": checks}


def text_of(failure: Failure) -> str:
    parts = [failure.line, failure.details.rstrip(), f"Again: {failure.again}"]
    return "\n\n".join(part for part in parts if part)


def first_object(path: Path) -> dict[str, Any]:
    """The first line of a file, plain or gzip; empty: not a JSON object, or not readable."""
    try:
        with (command.folder / path).open("rb") as plain:
            is_gzip = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            line = (gzip.GzipFile(fileobj=plain) if is_gzip else plain).readline()
            found = json.loads(line)
    except (ValueError, EOFError, OSError, zlib.error):
        return {}
    return found if isinstance(found, dict) else {}


def save_folder(settings: Settings, test: str) -> Path:
    """A test's own folder, also when tests run in parallel."""
    return settings.save / re.sub(r"[^\w.-]+", "-", test).strip("-")


class LockstepItem(pytest.Item):
    """One test. `find` runs it: None where everything agrees."""

    settings: Settings
    save: Path  # its smallest case

    def find(self) -> Failure | None:
        raise NotImplementedError

    def lockstep_judged(self) -> list[dict[str, Any]]:
        """For the summary; what was judged, when the test has run."""
        raise NotImplementedError

    def runtest(self) -> None:
        failure = self.find()
        if failure is None:
            return
        for known in self.settings.known:
            if known.fits(self.name, failure.check, failure.line):
                pytest.xfail(f"{known.id}: {failure.line}")
        raise LockstepFailed(failure)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, LockstepFailed):
            return text_of(excinfo.value.failure)
        if isinstance(excinfo.value, command.LockstepError):
            return f"lockstep: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name


def _smallest(
    settings: Settings, path: Path, save: Path, backend: bool
) -> tuple[str, Failure | None]:
    """Shrinks a case: the command that explains it, and its failure; ("", None): none."""
    stem = path.name.removesuffix(".jsonl").removesuffix(".case")
    smallest = save / f"{stem}.min.case.jsonl"
    judging = settings.judging(backend)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as holder:
        said = command.run("shrink", path, "--output", Path(holder) / smallest.name, *judging,
                           "--shrink-seconds", SHRINK_SECONDS)  # fmt: skip
        found = said.json
        if said.status == command.AGREED or "after" not in found:
            return "", None
        (command.folder / save).mkdir(parents=True, exist_ok=True)
        for made in Path(holder).iterdir():  # with an engine, its recording too
            shutil.move(made, command.folder / save / made.name)
    # The case holds the backend; the deciding engine is passed again.
    again = command.line_to_repeat("explain", smallest, *settings.judging(backend=False))
    line = f"{found['check']} step {found['step']}"
    line += f" request {found['request']}" if found["request"] else ""
    details = settings.planted(smallest)
    details += f"The smallest case, {smallest}:\n{_sizes(found['after'])}"
    if narrative := command.narrative(smallest, save, *settings.judging(backend=False)):
        details += f"\nWhat happens in it: {narrative.path}"
    return again, Failure(found["check"], f"{line}: {found['what']}", again, details)


def _sizes(sizes: dict[str, int]) -> str:
    return "  " + ", ".join(f"{count} {what}" for what, count in sizes.items())


class CaseItem(LockstepItem):
    """A saved case, judged by everything there is: pages, audit, and the model's invariants."""

    file: Path

    def find(self) -> Failure | None:
        return _smallest(self.settings, self.file, self.save, backend=True)[1]

    def lockstep_judged(self) -> list[dict[str, Any]]:
        backend = self.settings.backend or first_object(self.file).get("backend", "")
        return [judged(1, "case", self.settings.decided_by, self.settings.checks(backend))]


class RecordingItem(LockstepItem):
    """A recording of an engine, audited."""

    file: Path

    def find(self) -> Failure | None:
        return audit(self.settings, self.file, self.save)

    def lockstep_judged(self) -> list[dict[str, Any]]:
        return [judged(1, "recording", engine_of(self.file), "the audit")]


def engine_of(recording: Path) -> str:
    """The name and version in its header."""
    engine = first_object(recording)["engine"]
    return f"{engine['name']} {engine['version']}"


def _bucket_of_finding(recording: Path, finding: dict[str, Any]) -> str:
    """Its rule and the kind of its group: a long recording shows one bug in many sentences."""
    kind = ""
    if finding["group"] >= 0:
        kind = first_object(recording)["groups"][finding["group"]]["spec"]["type"]
    return f"audit.{finding['rule']} {kind}".rstrip()


def audit(settings: Settings, file: Path, save: Path) -> Failure | None:
    said = command.run("audit", file)
    if not said.json["findings"]:
        return None
    first = said.json["findings"][0]
    check = f"audit.{first['rule']}"
    details = "".join(f"{finding['line']}\n" for finding in said.json["findings"][1:])
    if file.parent == save:  # the recording of a test: it is named by the step that failed
        named = file.with_name(f"{file.name.removesuffix('.jsonl')}-step{first['step']}.jsonl")
        file = (command.folder / file).rename(command.folder / named) and named
        details += f"The recording: {file}\n"
    again = command.line_to_repeat("audit", file)
    details += settings.planted()
    bucket = _bucket_of_finding(file, first)
    if settings.is_new(bucket):
        details += _evidence(settings, file, save, check)
    return Failure(check, first["line"], again, details, bucket)


def _evidence(settings: Settings, file: Path, save: Path, check: str) -> str:
    """The smallest case of a recording's finding, or else what happens in the recording."""
    try:
        smaller = _smallest(settings, file, save, backend=False)[1]
    except command.LockstepError:
        smaller = None  # of an engine without a profile
    if smaller is not None and smaller.check == check:
        return f"{smaller.details}\n  {smaller.again}"
    narrative = command.narrative(file, save)
    return f"What happens in it: {narrative.path}\n" if narrative else ""


class PlansItem(LockstepItem):
    """Memory plans of an engine, compared with the model's."""

    file: Path

    def find(self) -> Failure | None:
        said = command.run("conform", self.file)
        if said.status == command.AGREED:
            return None
        first = said.json["mismatches"][0]
        line = f"conform line {first['step']}: {first['what']} is {first['recorded']}, the model's "
        line += f"{first['model']}"
        return Failure("conform", line, command.line_to_repeat("conform", self.file), said.out)

    def lockstep_judged(self) -> list[dict[str, Any]]:
        return [judged(1, "file of layouts", engine_of(self.file), "the model's plans")]


class TraceItem(LockstepItem):
    """A request trace, replayed."""

    file: Path
    options: list[str]

    def find(self) -> Failure | None:
        return replay(self.settings, str(self.file), self.save, self.options)

    def lockstep_judged(self) -> list[dict[str, Any]]:
        checks = f"pages on {self.settings.backend or 'simt'}"
        return [judged(1, "trace", self.settings.decided_by, checks)]


class LayoutItem(TraceItem):
    """The first requests of a trace in a generated layout, on the backend below the model; skips a
    layout that the backend refuses, with its reason."""

    def find(self) -> Failure | None:
        try:
            return replay(self.settings, str(self.file), self.save, self.options, decides=False)
        except command.LockstepError as refused:
            of_backend = f"{self.settings.backend}: " in str(refused)
            if of_backend and "refuses this plan" not in str(refused):
                raise  # there is no such backend, or it cannot be loaded
            return pytest.skip(f"refused: {refused}")

    def lockstep_judged(self) -> list[dict[str, Any]]:
        return [judged(1, "layout", "the model", f"pages on {self.settings.backend or 'simt'}")]


def replay(
    settings: Settings, trace: str, save: Path, options: list[str], decides: bool = True
) -> Failure | None:
    """`decides`: the engine of the settings does, where they name one."""
    words = ["replay", trace, *options, "--backend", settings.backend or "simt"]
    words += ["--decisions", settings.decisions] if decides and settings.decisions else []
    said = command.run(*words)
    if said.status == command.AGREED:
        if said.json.get("verdict") == "done":
            pytest.skip("nothing was compared")
        return None
    again = command.line_to_repeat(*words)
    found = said.json.get("divergence")
    if found is None:
        verdict = said.json["verdict"]
        where = said.out.rpartition("Verdict: ")[2].splitlines()
        return Failure(verdict, f"{verdict}: {where[0] if where else ''}", again)
    line = f"{found['phase']} step {found['step']}"
    line += f" request {found['request']}" if found["request"] else ""
    details = settings.planted()
    bucket = bucket_of(found["phase"], f"{line}: {found['message']}")
    if (
        settings.is_new(bucket) and "--decisions" not in words
    ):  # a case saves what the model decides
        (command.folder / save).mkdir(parents=True, exist_ok=True)
        saved = command.run(*words, "--save", save, "--shrink",
                            "--shrink-seconds", SHRINK_SECONDS).out  # fmt: skip
        begin = saved.rfind("Shrunk: ")
        details += saved[begin:] if begin >= 0 else ""
        for case in saved.splitlines():
            if case.startswith("Explained: "):
                again = case.removeprefix("Explained: ")
                smallest = Path(shlex.split(again)[2])
                if narrative := command.narrative(smallest, save):
                    details += f"What happens in it: {narrative.path}\n"
                    settings.buckets[bucket] = bucket_of(narrative.check, narrative.what)
    return Failure(
        found["phase"],
        f"{line}: {found['message']}",
        again,
        details,
        settings.buckets[bucket],
    )


class SeedItem(LockstepItem):
    """A generated case."""

    seed: int
    runs: SeedRuns

    def find(self) -> Failure | None:
        return self.runs.failure_of(self.seed)

    def lockstep_judged(self) -> list[dict[str, Any]]:
        without = self.settings.decisions or self.seed in self.runs.without_backend
        backend = "" if without else self.settings.backend
        return [judged(1, "seed", self.settings.decided_by, self.settings.checks(backend))]


class SeedRuns:
    """Runs the seeds of a session, many in one process; none twice."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chosen: set[int] = set()
        self._failures: dict[int, dict[str, Any] | None] = {}
        self._refused: dict[int, str] = {}  # the reasons
        self.without_backend: set[int] = set()  # judged, but not on the backend

    def choose(self, seeds: Iterator[int]) -> None:
        """The seeds of the tests that are left after selection."""
        self._chosen = set(seeds)

    def _words(self, seed: int) -> list[str]:
        # Judges the deciding engine, or else the backend.
        words = ["fuzz", "--seed", str(seed)]
        words += self._settings.judging(backend=not self._settings.decisions)
        return words + (["--engine", self._settings.engine] if self._settings.engine else [])

    def _run(self, seed: int, count: int) -> None:
        said = command.run(*self._words(seed), "--runs", str(count), may_refuse=True)
        if said.json is None:  # a check of the program, or a signal, ended it
            if count > 1:
                for one in range(seed, seed + count):
                    self._run(one, 1)
                return
            what = said.err.strip().splitlines()
            last = what[-1] if what else f"status {said.status}"
            self._failures[seed] = dict(check="crash", step=-1, request="", what=last)
            return
        self._failures |= dict.fromkeys(range(seed, seed + count))
        self._failures |= {failure["seed"]: failure for failure in said.json["failures"]}
        self.without_backend |= set(said.json.get("without_backend", []))
        for reason, cases in said.json["refusals"].items():
            self._refused |= dict.fromkeys(cases["seeds"], reason)

    def failure_of(self, seed: int) -> Failure | None:
        """Skips the test of a case that the engine or the backend refuses."""
        if seed not in self._failures:
            most = 1 if self._settings.one_at_a_time else SEEDS_AT_A_TIME
            count = next(n for n in itertools.count(1) if n == most or seed + n not in self._chosen)
            self._run(seed, count)
        if seed in self._refused:
            pytest.skip(self._refused[seed])
        found = self._failures[seed]
        if found is None:
            return None
        line = f"{found['check']}" + (f" step {found['step']}" if found["step"] >= 0 else "")
        line += f" request {found['request']}" if found["request"] else ""
        again = command.line_to_repeat(*self._words(seed))
        details = self._settings.planted()
        bucket = bucket_of(found["check"], f"{line}: {found['what']}")
        buckets = self._settings.buckets
        if self._settings.is_new(bucket):
            saved = self._saved(seed)
            details += saved
            for row in saved.splitlines():
                if ".min.case.jsonl" in row:
                    smallest = Path(row.split("  ")[1])
                    judging = self._settings.judging(backend=False)
                    again = command.line_to_repeat("explain", smallest, *judging)
                    if narrative := command.narrative(smallest, smallest.parent, *judging):
                        details += f"  {narrative.path}  what happens in it\n"
                        buckets[bucket] = bucket_of(narrative.check, narrative.what)
        line = f"{line}: {found['what']}"
        return Failure(found["check"], line, again, details, buckets[bucket])

    def _saved(self, seed: int) -> str:
        """The files of a seed that fails, small too."""
        (command.folder / self._settings.save).mkdir(parents=True, exist_ok=True)
        said = command.run(*self._words(seed), "--save", self._settings.save,
                           "--shrink-seconds", SHRINK_SECONDS, may_refuse=True)  # fmt: skip
        return "Saved:\n" + said.out.rpartition("\nSaved:\n")[2]


# What of a folder is a test, by a key of a file's first line. `lockstep replay` reads or refuses
# the other files.

_KINDS: dict[str, tuple[str, type[LockstepItem]]] = {
    "lockstep_case": ("case", CaseItem),
    "schedule_recording": ("recording", RecordingItem),
    "layout_recording": ("layouts", PlansItem),
    "lockstep_trace": ("trace", TraceItem),
}


def items_of_folder(
    suite: pytest.Collector, folder: Path, settings: Settings
) -> Iterator[LockstepItem]:
    for path in sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.gz")]):
        if path.exists() and not path.is_file():  # a folder, a FIFO
            continue
        first = first_object(path)
        name, cls = next((_KINDS[key] for key in _KINDS if key in first), ("file", TraceItem))
        item = cls.from_parent(suite, name=f"{name}[{path.relative_to(folder).as_posix()}]")
        item.settings, item.file = settings, path
        item.save = settings.save / path.relative_to(folder).parent
        item.options = []
        yield item


def items_of_seeds(
    suite: pytest.Collector, seeds: range, settings: Settings
) -> Iterator[LockstepItem]:
    runs = SeedRuns(settings)
    for seed in seeds:
        item = SeedItem.from_parent(suite, name=f"seed[{seed}]")
        item.settings, item.seed, item.runs = settings, seed, runs
        yield item


def items_of_layouts(
    suite: pytest.Collector, seeds: range, settings: Settings
) -> Iterator[LockstepItem]:
    for seed in seeds:
        layout = layouts.layout_of(seed)
        item = LayoutItem.from_parent(suite, name=f"layout[{seed}-{layouts.name_of(layout)}]")
        item.settings, item.file = settings, Path(settings.trace)
        item.save = save_folder(settings, item.name)
        item.options = ["--limit", LAYOUT_RECORDS, *layout]
        yield item
