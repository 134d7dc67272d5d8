"""Recording whatever scheduler of vLLM a test makes, and auditing it.

While recorded_schedulers() is open, `Scheduler(...)` and `AsyncScheduler(...)` of vLLM make an
object of a class of their own, with the recorder in front: wherever the test has its name of the
class from, and for classes derived from them too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep_pytest import command, items


class LockstepWarning(UserWarning):
    """A scheduler of a test that cannot be recorded, and why."""


class _NoRecorder:
    """At the side of a scheduler that cannot be recorded."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: {}


class Progress:
    """Finds a scheduler whose requests wait, or are preempted, forever: in STEPS decisions none of
    its requests gets further than it has been, and none ends. Loads of a connector take time."""

    STEPS = 1024  # as many as `lockstep` waits for

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        self._steps = 0

    def is_stuck(self, requests: dict[str, Any]) -> bool:
        """After a decision; `requests`: the scheduler's own, by name."""
        reached = {name: max(request.num_computed_tokens, self._reached.get(name, 0))
                   for name, request in requests.items()}  # fmt: skip
        loads = any(request.status.name == "WAITING_FOR_REMOTE_KVS"
                    for request in requests.values())  # fmt: skip
        moved = not requests or loads or reached != self._reached
        self._reached, self._steps = reached, 0 if moved else self._steps + 1
        return self._steps >= self.STEPS


class Watch:
    """The recordings of one test, in its folder below .lockstep. Those of findings stay there, and
    those of a test that fails by itself."""

    def __init__(self, settings: items.Settings, save: Path, is_asked_for: bool) -> None:
        self._settings, self._is_asked_for = settings, is_asked_for
        self._save = save
        self._recorders: list[Any] = []
        self.num_schedulers = 0
        self.judged: list[dict[str, Any]] = []  # for the summary
        self.refused: list[str] = []  # why schedulers are not recorded

    def record(self, scheduler: Any, hash_block_size: int) -> Any:
        """The recorder of a scheduler that has just been made."""
        import vllm

        from lockstep_recorder.errors import RecorderError
        from lockstep_recorder.recorder import Recorder

        if not self.num_schedulers:
            self._make_folder()
        path = self._folder / f"scheduler{self.num_schedulers}.jsonl"
        self.num_schedulers += 1
        environment = {"LOCKSTEP_RECORDING": str(path), "LOCKSTEP_RECORDING_TABLES": "4"}
        try:
            recorder = Recorder.start(scheduler, vllm.__version__, hash_block_size, environment)
        except RecorderError as error:
            self.refused.append(str(error))
            return _NoRecorder()
        self._recorders.append(recorder)
        return recorder

    @property
    def _folder(self) -> Path:
        return command.folder / self._save

    def _make_folder(self) -> None:
        """Without what an earlier run of the test has left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("scheduler*"):
            path.unlink()

    def recordings(self) -> list[Path]:
        """Ends the recordings; the files, as the command line names them."""
        for recorder in self._recorders:
            recorder.finish()
        self._recorders = []
        return [self._save / path.name for path in sorted(self._folder.glob("scheduler*.jsonl"))]

    def check(self, test: str) -> None:
        """At the end of a test that has passed. Raises LockstepFailed for the first finding."""
        __tracebackhide__ = True
        recordings = self.recordings()
        for reason in self.refused:
            warnings.warn(f"not recorded: {reason}", LockstepWarning, stacklevel=2)
        if self._is_asked_for and not self.num_schedulers:
            line = "lockstep.recording: the test made no scheduler of vLLM: nothing was audited"
            nothing = items.Failure("lockstep.recording", line, f"pytest {test}")
            raise items.LockstepFailed(nothing)
        for recording in recordings:
            self.judged.append(
                items.judged(1, "scheduler", items.engine_of(recording), "the audit")
            )
            failure = items.audit(self._settings, recording, self._save)
            if failure is None:
                (command.folder / recording).unlink()
            elif not self._is_known(test, failure):
                raise items.LockstepFailed(failure)

    def fail_stuck(self, names: Iterable[str]) -> None:
        """Raises LockstepFailed in the test that drives a scheduler without progress."""
        __tracebackhide__ = True
        recording = self.recordings()[-1]
        line = (
            f"liveness: requests wait forever: in {Progress.STEPS} steps none of "
            f"{', '.join(sorted(names))} gets further or ends"
        )
        again = command.line_to_repeat("audit", recording)
        raise items.LockstepFailed(items.Failure("liveness", line, again))

    def forget(self) -> None:
        """Nothing stays of a test that has not run to its end."""
        for recording in self.recordings():
            (command.folder / recording).unlink()

    def _is_known(self, test: str, failure: items.Failure) -> bool:
        import pytest

        for known in self._settings.known:
            if known.fits(test, failure.check, failure.line):
                pytest.xfail(f"{known.id}: {failure.line}")
        return False


def _recorded_class(cls: type, watch: Watch) -> type:
    from lockstep_recorder.calls import end_on_others
    from lockstep_recorder.scheduler import Recorded

    class OfTest(Recorded):
        recorder: Any = _NoRecorder()  # of objects that were made without a constructor
        progress: Progress | None = None

        def start_recorder(self, hash_block_size: int) -> Any:
            self.progress = Progress()
            return watch.record(self, hash_block_size)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            output = super().schedule(*args, **kwargs)
            if self.progress is not None and self.progress.is_stuck(self.requests):
                watch.fail_stuck(self.requests)
            return output

    made = type(cls.__name__, (OfTest, cls), {"__module__": cls.__module__})
    return end_on_others(Recorded)(made)


_watches: list[Watch] = []  # the last one records


def _watch_class(scheduler: Any) -> None:
    """Once and for all: CPython does not give a class its old way of making objects back."""
    from lockstep_recorder.scheduler import Recorded

    made: dict[tuple[type, Watch], type] = {}

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not _watches or issubclass(cls, Recorded):
            return object.__new__(cls)
        key = cls, _watches[-1]
        if key not in made:
            made[key] = _recorded_class(cls, _watches[-1])
        return object.__new__(made[key])

    scheduler.__new__ = staticmethod(new)
    scheduler._is_watched_by_lockstep = True


@contextlib.contextmanager
def recorded_schedulers(watch: Watch) -> Iterator[None]:
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
    except ImportError:
        yield  # no scheduler can be made
        return
    if not getattr(Scheduler, "_is_watched_by_lockstep", False):
        _watch_class(Scheduler)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
