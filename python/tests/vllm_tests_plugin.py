"""A pytest plugin that records every scheduler which one of vLLM's own tests makes.

    pytest -p vllm_tests_plugin ...      with $LOCKSTEP_VLLM_TESTS: the folder to record to

Without the variable it only chooses the platform, so that the same tests run on a CPU. The folder
gets one recording per scheduler, and tests.jsonl, which says per test how it came out and what was
recorded of it. record_vllm_tests.py runs it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = os.environ.get("LOCKSTEP_VLLM_TESTS", "")
OUTCOMES = os.environ.get("LOCKSTEP_VLLM_OUTCOMES", "")


class _NoRecorder:
    """At the side of a scheduler that cannot be recorded."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: {}


class _Test:
    """The test that runs now, and its recordings."""

    def __init__(self) -> None:
        self.name = ""
        self.recordings: list[dict[str, Any]] = []
        self.recorders: list[Any] = []

    def begin(self, name: str) -> None:
        self.name, self.recordings, self.recorders = name, [], []

    def record(self, scheduler: Any, hash_block_size: int) -> Any:
        import vllm

        from lockstep_recorder.errors import RecorderError
        from lockstep_recorder.recorder import Recorder

        slug = re.sub(r"[^A-Za-z0-9_]+", "_", self.name.split("/tests/v1/")[-1])[:150]
        path = Path(FOLDER) / f"{slug}.{len(self.recordings)}.jsonl"
        noted: dict[str, Any] = {"file": path.name}
        self.recordings.append(noted)
        environment = {"LOCKSTEP_RECORDING": str(path), "LOCKSTEP_RECORDING_TABLES": "4"}
        try:
            recorder = Recorder.start(scheduler, vllm.__version__, hash_block_size, environment)
        except RecorderError as error:
            noted["refused"] = str(error)
            return _NoRecorder()
        self.recorders.append(recorder)
        return recorder

    def end(self) -> list[dict[str, Any]]:
        for recorder in self.recorders:
            recorder.finish()
        self.recorders = []
        for noted in self.recordings:
            if "refused" in noted:
                continue
            # With several data parallel engines the file has the engine's number in its name.
            there = sorted(Path(FOLDER).glob(f"{noted['file'].removesuffix('.jsonl')}*.jsonl"))
            noted |= {"file": there[0].name} if there else {"gave_up": True}
        return self.recordings


_test = _Test()


def _install() -> None:
    """Puts recorded classes where tests import schedulers from."""
    from vllm.v1.core.sched import async_scheduler, scheduler

    from lockstep_recorder.calls import end_on_others
    from lockstep_recorder.scheduler import Recorded

    class OfTest(Recorded):
        recorder = _NoRecorder()  # of objects that were made without a constructor

        def start_recorder(self, hash_block_size: int) -> Any:
            return _test.record(self, hash_block_size)

    plain, plain_async = scheduler.Scheduler, async_scheduler.AsyncScheduler
    made = type("Scheduler", (OfTest, plain), {"__module__": plain.__module__})
    made_async = type("AsyncScheduler", (OfTest, plain_async), {"__module__": plain.__module__})
    scheduler.Scheduler = end_on_others(Recorded)(made)
    async_scheduler.AsyncScheduler = end_on_others(Recorded)(made_async)


@pytest.hookimpl(tryfirst=True)  # conftest.py files import schedulers, too
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    if FOLDER:
        _install()


@pytest.hookimpl(tryfirst=True)  # fixtures make schedulers, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    _test.begin(item.nodeid)


_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome
    if report.when == "teardown":
        line: dict[str, Any] = {"test": report.nodeid, "outcome": _outcomes[report.nodeid]}
        if FOLDER:
            line["recordings"] = _test.end()
        with open(OUTCOMES, "a") as file:
            file.write(json.dumps(line) + "\n")
