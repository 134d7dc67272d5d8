"""Where tasks run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import queue
import re
import socket
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep_campaign import tasks
from lockstep_campaign.tasks import CannotRun, Done, Task

Run = Callable[[Task], Done]
_CONNECT_SECONDS = 5


@dataclass(frozen=True)
class Lost:
    """A task whose worker died: it can run again elsewhere."""

    task: Task
    why: str


class Executor(Protocol):
    def size(self) -> int:
        """Tasks that can run at once now."""

    def start(self, task: Task) -> None: ...

    def wait(self, seconds: float) -> Done | Lost | None:
        """The next task that ends; None after `seconds`."""

    def close(self) -> None: ...


class Local:
    def __init__(self, run: Run, workers: int) -> None:
        self._run_task, self._workers = run, workers
        self._pool = ThreadPoolExecutor(workers)
        self._ended: queue.Queue[Done | Lost] = queue.Queue()

    def size(self) -> int:
        return self._workers

    def start(self, task: Task) -> None:
        self._pool.submit(self._run, task)

    def _run(self, task: Task) -> None:
        try:
            self._ended.put(self._run_task(task))
        except (OSError, CannotRun) as error:
            self._ended.put(Lost(task, str(error)))

    def wait(self, seconds: float) -> Done | Lost | None:
        try:
            return self._ended.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._pool.shutdown()


def check_address(address: str) -> None:
    """Raises OSError if nothing listens at HOST:PORT or ray://HOST:PORT: Ray would try for long."""
    found = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    if found:
        socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()


class OnRay:
    """A task is one CPU of a cluster whose machines come and go."""

    def __init__(self, run: Run, address: str | None) -> None:
        import ray

        self._ray = ray
        ray.cloudpickle.register_pickle_by_value(tasks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level="ERROR",
                     include_dashboard=False if address is None else None)  # fmt: skip
        # The campaign counts and reports retries, so Ray makes none.
        self._remote = ray.remote(num_cpus=1, max_retries=0)(lambda task: run(task))
        self._running: dict[Any, Task] = {}

    def size(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 0)))

    def start(self, task: Task) -> None:
        self._running[self._remote.remote(task)] = task

    def wait(self, seconds: float) -> Done | Lost | None:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        if not ready:
            return None
        task = self._running.pop(ready[0])
        try:
            done: Done = self._ray.get(ready[0])
            return done
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error  # of a task's own exception
            return Lost(task, str(cause).strip().splitlines()[0].partition(". ")[0])

    def close(self) -> None:
        self._ray.shutdown()
