"""What a session found: one failure for each bug, and one line that names the engine that decided
and the checks.

1. The process that runs a test attaches what it judged and what it found to the test's report;
   reports go from pytest-xdist's workers to its controller.
2. The process that prints counts. The first report of a bucket stays a failure, the others become
   expected failures that name it; errors of the set-up become skipped tests.
3. A bucket is a check and its line without numbers, of the smallest case where there is one; of an
   audited recording, the rule and the kind of group.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep_pytest import command, items

_SHOWN = 8  # tests of a bucket


@dataclass
class _Bucket:
    first: Any  # the report that stays
    others: list[str] = field(default_factory=list)  # tests


def note(item: pytest.Item, call: Any, report: Any) -> None:
    """Attaches to a report what the summary needs, as JSON has it."""
    error = call.excinfo.value if call.excinfo is not None else None
    judged = getattr(item, "lockstep_judged", None)
    was_judged = error is None or isinstance(error, (items.LockstepFailed, pytest.xfail.Exception))
    if judged is not None and report.when == "call":
        report.lockstep_judged = judged() if was_judged else []
    if isinstance(error, items.LockstepFailed):
        failure = error.failure
        report.lockstep_bucket = failure.bucket
        report.longrepr = items.text_of(failure)
    elif isinstance(error, command.LockstepError):
        report.lockstep_bucket = items.bucket_of("lockstep", str(error))
        report.lockstep_is_error = True
        report.longrepr = f"lockstep: {error}"
    elif error is None and report.failed and isinstance(item, items.LockstepItem):
        report.lockstep_bucket = f"known {item.nodeid}"  # XPASS(strict): it no longer fails


class Summary:
    """A plugin of the process that prints."""

    def __init__(self, settings: items.Settings) -> None:
        self._settings = settings
        self._root = command.folder / settings.save
        self._owns_root = not self._root.exists()
        self._folders: set[Path] = set()  # of tests that made schedulers
        self._buckets: dict[str, _Bucket] = {}
        self._judged: Counter[tuple[str, str, str]] = Counter()
        self._failed = 0  # tests

    @pytest.hookimpl(tryfirst=True)  # before pytest counts it
    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "lockstep_judged"):
            self._folders.add(command.folder / items.save_folder(self._settings, report.nodeid))
        for judged in getattr(report, "lockstep_judged", ()):
            key = judged["what"], judged["by"], judged["checks"]
            self._judged[key] += judged["count"]
        bucket = getattr(report, "lockstep_bucket", None)
        if bucket is None or not report.failed or hasattr(report, "wasxfail"):
            return
        self._failed += 1
        known = self._buckets.setdefault(bucket, _Bucket(report))
        if known.first is report:
            return
        known.others.append(report.nodeid)
        why = f"the failure of {known.first.nodeid}"
        report.outcome = "skipped"
        if getattr(report, "lockstep_is_error", False):
            report.longrepr = (report.location[0], report.location[1] or 0, f"Skipped: {why}")
        else:
            report.wasxfail = why

    @pytest.hookimpl(tryfirst=True)  # before failures are printed
    def pytest_sessionfinish(self) -> None:
        self._remove_empty_folders()
        for bucket in self._buckets.values():
            if not bucket.others:
                continue
            shown = "\n".join(bucket.others[:_SHOWN])
            if len(bucket.others) > _SHOWN:
                shown += f"\n... and {len(bucket.others) - _SHOWN} more"
            title = f"{len(bucket.others) + 1} tests fail this way; also"
            bucket.first.sections.append((title, shown))

    def _remove_empty_folders(self) -> None:
        """Of tests that left nothing. Only here: another process may be about to write into one."""
        for path in [*self._folders, *([self._root] if self._owns_root else [])]:
            with contextlib.suppress(OSError):
                path.rmdir()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if line := self.line():
            terminalreporter.write_line(line)

    def line(self) -> str:
        """Empty: nothing was judged."""
        if not self._judged and not self._buckets:
            return ""
        parts = [
            f"{_counted(count, what)} decided by {by}, judged by {checks}"
            for (what, by, checks), count in sorted(self._judged.items())
        ]
        found = _counted(len(self._buckets), "failure")
        if self._failed > len(self._buckets):
            found += f" in {self._failed} tests"
        return "lockstep: " + "; ".join([*parts, found])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
