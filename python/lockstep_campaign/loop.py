"""Tasks on an executor: one whose worker dies runs again on another.

A task that no worker finishes ends the loop: what runs is awaited, and nothing else starts.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep_campaign.executors import Executor, Lost
from lockstep_campaign.tasks import Done, Task

_TRIES = 5
_TRIES_OF_A_CRASH = 2
# A terminal's signals stop the campaign, not a task: these are the machine's. The command reports
# them as 128 + N, after a part of its work.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


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


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith("Run with --help")]
    return lines[-1] if lines else "no message"


def _signal_of(done: Done) -> int:
    """The signal that ended a task before its end; 0: none did."""
    if done.status < 0:
        return -done.status
    number = done.status - 128
    return number if number in _FROM_OUTSIDE else 0


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
            if isinstance(ended, Done) and not _signal_of(ended):
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
        if self.interrupted:  # a service manager stops the tasks too
            return
        number = _signal_of(ended) if isinstance(ended, Done) else signal.SIGKILL
        why = ended.why if isinstance(ended, Lost) else (
            f"ended by signal {number}: {last_line(ended.err)}")  # fmt: skip
        task = ended.task
        is_own = number not in _FROM_OUTSIDE  # and comes again
        tries = self._tries[task.name] = self._tries.get(task.name, 0) + 1
        if tries == (_TRIES_OF_A_CRASH if is_own else _TRIES):
            self.ended.given_up = f"{task.name}, given up after {tries} tries: {why}"
            self.stops = True
            return
        say(f"{task.name} runs again: {why}")
        self.ended.lost.append(f"{task.name}: {why}")
        self._queue.appendleft(task)
