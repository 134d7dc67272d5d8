"""Tasks on an executor: one whose worker dies runs again on another.

A task that no worker finishes ends the loop: what runs is awaited, and nothing else starts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_campaign.executors import Executor, Lost
from lockstep_campaign.tasks import Done, Task

_TRIES = 5
_TRIES_OF_A_CRASH = 2


class Refused(Exception):
    """The campaign cannot run; the text says why and what to do."""


@dataclass
class Ended:
    """The workers that finished tasks, and the tasks that none did."""

    lost: list[str] = field(default_factory=list)  # why tasks ran again
    given_up: str = ""  # the task that no worker finished, and why
    workers: set[str] = field(default_factory=set)
    seconds: float = 0


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def check_output(option: str, path: str | Path | None) -> None:
    """Refuses a file that cannot be written, before the run that it would lose."""
    if path is None or path == "-":
        return
    file = Path(path)
    folder = file.resolve().parent
    if file.is_dir():
        raise Refused(f"{option}: {path}: is a folder; give the name of a file")
    if not folder.is_dir():
        raise Refused(f"{option}: {path}: no folder {folder}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise Refused(f"{option}: {path}: cannot be written")


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith("Run with --help")]
    return lines[-1] if lines else "no message"


class Loop:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.handlers: dict[str, Callable[[Done], None]] = {}  # by task
        self.started = time.monotonic()
        self.ended = Ended()
        self.stops = False  # ask for no more tasks
        self.interrupted = False  # start none of the queue either
        self._queue: deque[Task] = deque()
        self._tries: dict[str, int] = {}

    def add(self, task: Task, handler: Callable[[Done], None]) -> None:
        self._queue.append(task)
        self.handlers[task.name] = handler

    def work(self) -> None:
        """Runs the tasks that were added, then `more` while there are any."""
        running = 0
        while True:
            while running < self.executor.size() and (task := self._next_task()) is not None:
                self.executor.start(task)
                running += 1
            if running == 0:
                break
            ended = self.executor.wait(1.0)
            if ended is None:
                continue
            running -= 1
            if isinstance(ended, Done) and ended.status >= 0:
                self.ended.workers.add(ended.worker)
                self.handlers.pop(ended.task.name)(ended)
            else:
                self._again(ended)
        self.ended.seconds = self.ended.seconds or time.monotonic() - self.started

    def more(self) -> Task | None:
        """The next task after those that were added."""
        return None

    def _next_task(self) -> Task | None:
        if self.interrupted:
            return None
        if self._queue:
            return self._queue.popleft()
        return None if self.stops else self.more()

    def _again(self, ended: Done | Lost) -> None:
        why = ended.why if isinstance(ended, Lost) else (
            f"ended by signal {-ended.status}: {last_line(ended.err)}")  # fmt: skip
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
