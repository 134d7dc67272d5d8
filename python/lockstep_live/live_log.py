"""The thread between an engine and the audit of its steps.

1. The engine's thread only puts down what it has seen (a copy where the engine changes it later);
   rows, JSON and the pipe are this thread's.
2. When more than `queue_steps` steps wait, the check ends at the last that was taken and counts all
   that come after it: an audit cannot leave out steps in between.
3. Nothing here raises in the engine's thread but violation(), when asked to.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import re
import shlex
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from lockstep_live.audit_process import AuditProcess, free_name, write_narrative
from lockstep_live.settings import Settings
from lockstep_recorder.errors import EndOfRecording
from lockstep_recorder.releases import Release
from lockstep_recorder.step_log import StepLog

logger = logging.getLogger("vllm.lockstep_live")


class LockstepViolation(Exception):
    """A decision that breaks memory, as the audit names it."""


class _NoCounter:
    """What is stored in and evicted from the prefix cache is not counted: the audit follows it."""

    def watch(self) -> None: ...

    def take(self) -> tuple[int, int]:
        return 0, 0

    seen = take

    def forget_since(self, _: Any) -> None: ...


class _Lines:
    """A StepLog's file: the audit's standard input."""

    def __init__(self, process: AuditProcess) -> None:
        self._process = process
        self.is_ending = False  # an audit that has ended is reported once

    def write_line(self, line: bytes) -> None:
        self._process.write_line(line, is_needed=not self.is_ending)

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class _Copy:
    """A StepLog's file: a recording that ends here, behind the lines that went in before."""

    def __init__(self, process: AuditProcess, path: str) -> None:
        process.copy_spool(path)
        self._file = open(path, "ab")

    def write_line(self, line: bytes) -> None:
        self._file.write(line + b"\n")

    def finish(self) -> None:
        self._file.close()

    abandon = finish


Work = tuple[Callable[..., None], tuple[Any, ...]]


class LiveLog:
    def __init__(self, settings: Settings, header: dict[str, Any], release: Release) -> None:
        self._settings = settings
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._put = 0  # steps; by the engine's thread
        self._taken = 0  # steps; by this one
        self.dropped = 0  # steps
        self.findings: list[str] = []
        self._saved: set[str] = set()  # rules with a saved recording
        self._stopped = ""  # why checking has stopped
        self._rank = os.getpid()
        self._engine = f"{header['engine']['name']} {header['engine']['version']}"
        self._process = AuditProcess(settings, self._found)
        self._lines = _Lines(self._process)
        self._log: StepLog | None = None  # of this object's thread, while it runs
        self._thread = threading.Thread(
            target=self._run, args=(header, release), name="lockstep-live", daemon=True
        )
        self._thread.start()

    # The engine's thread.

    def put(self, what: Callable[..., None], *args: Any) -> None:
        """what(StepLog, *args), later."""
        if self._stopped:
            self.dropped += what is StepLog.scheduled
            return
        if what is StepLog.scheduled:
            if self._put - self._taken >= self._settings.queue_steps:
                self.dropped += 1
                self._stop(
                    f"{self._settings.queue_steps} steps wait for the audit, which is too slow"
                )
                return
            self._put += 1
        self._queue.put((what, args))

    def violation(self) -> str | None:
        """The first finding, where the engine is to stop on it."""
        return self.findings[0] if self.findings and self._settings.mode == "raise" else None

    def close(self) -> None:
        """Waits for the audit, for a while; says what was checked."""
        self._queue.put(None)
        self._thread.join(self._settings.drain_s)
        if self._thread.is_alive():
            self._stop("the audit did not end in time")
        status = self._process.close(self._settings.drain_s)
        self._thread.join(self._settings.drain_s)
        if not self._thread.is_alive():
            self._save_the_rest()
            self._process.forget()
        left = self._put - self._taken
        self.dropped += left
        words = f" ({self._process.last_words})" if status not in (0, 1) else ""
        logger.warning(
            "lockstep: %s decided; %d steps audited, %d dropped, %d findings%s",
            self._engine, self._taken, self.dropped, len(self.findings), words,
        )  # fmt: skip

    def _stop(self, why: str) -> None:
        self._stopped = why
        logger.error("lockstep: nothing is checked from here on: %s", why)

    # This thread, and that of the findings.

    def _found(self, line: str) -> None:
        self.findings.append(line)
        logger.error("lockstep: %s", line)
        self._queue.put((self._save, (line,)))

    def _run(self, header: dict[str, Any], release: Release) -> None:
        try:
            log = self._log = StepLog(self._lines, header, release, _NoCounter(), 0)
            while (work := self._queue.get()) is not None:
                what, args = work
                if what == self._save:
                    self._save(*args)
                elif not self._lines.is_ending:
                    self._do(log, what, args)
            self._end(log, self._stopped or None)
        except OSError as error:
            self._stop(f"the audit has ended ({error.strerror}) {self._process.last_words}")
        except Exception:
            logger.exception("lockstep: the live check failed; the engine serves on without it")
            self._stop("the live check failed")

    def _do(self, log: StepLog, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            what(log, *args)
            self._taken += what is StepLog.scheduled
        except EndOfRecording as end:
            self._stop(str(end))
            self._end(log, str(end))

    def _end(self, log: StepLog, why: str | None) -> None:
        """Once: writes the end of the recording."""
        if not self._lines.is_ending:
            self._lines.is_ending = True
            log.finish(why)

    def _save_the_rest(self) -> None:
        """What the audit has found since this thread's end."""
        while not self._queue.empty():
            what, args = self._queue.get() or (None, ())
            if what == self._save:
                self._save(*args)

    def _save(self, line: str) -> None:
        """A recording of all steps so far. One for each kind of finding is enough."""
        rule = line.split(" ", 1)[0]
        if rule in self._saved or self._log is None:
            return
        self._saved.add(rule)
        if not self._process.is_spooling:
            logger.error("lockstep: too many steps to be kept (LOCKSTEP_SPOOL_MB); no recording")
            return
        step = re.search(r" step (\d+)", line)
        stem = rule.removeprefix("audit.") + (f"-step{step[1]}" if step else "")
        try:
            path = free_name(self._settings.folder, f"{stem}-pid{self._rank}")
            self._write_recording(self._log, path, line)
            text = write_narrative(self._settings.command, path)
        except OSError as error:
            logger.error("lockstep: no recording: %s", error)
            return
        again = shlex.join(("lockstep", "audit", path))
        logger.error("lockstep: saved; `%s` finds it again, %s tells what happens", again, text)

    def _write_recording(self, log: StepLog, path: str, why: str) -> None:
        if self._lines.is_ending:  # the end follows the lines that went in
            self._process.copy_spool(path)
            return
        until_now = copy.copy(log)
        until_now._events = list(log._events)
        until_now._live = set(log._live)
        until_now._lines = deque(copy.copy(step) for step in log._lines)
        for step in until_now._lines:
            step.tail = copy.deepcopy(step.tail)
        until_now._file = _Copy(self._process, path)
        until_now.finish(why)
