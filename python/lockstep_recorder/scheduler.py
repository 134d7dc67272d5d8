"""vLLM's two schedulers, each with a recorder at its side.

Every method calls the scheduler's and notifies the recorder; nothing else. Any other access to the
scheduler ends the recording: unknown methods, attributes that are set from outside.
"""

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lockstep_recorder.calls import ATTRIBUTES_WITHOUT_EFFECT, end_on_others, is_refused_reset
from lockstep_recorder.recorder import Recorder


class _Call:
    """One call of the engine, from its beginning to its end."""

    def __init__(self, scheduler: Any, name: str) -> None:
        self._scheduler, self._name = scheduler, name

    def __enter__(self) -> bool:
        """Whether the engine called, and not the scheduler itself."""
        scheduler = self._scheduler
        is_outer = scheduler.calls_open == 0
        if is_outer:
            scheduler.recorder.begins(self._name, scheduler)
        scheduler.calls_open += 1
        return is_outer

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scheduler = self._scheduler
        scheduler.calls_open -= 1
        if scheduler.calls_open:
            return
        if error is not None:
            scheduler.recorder.failed(self._name, error)
        scheduler.recorder.ends(scheduler)


# Calls of super() go to the scheduler that follows in the order of base classes.
_AnyScheduler: Any = object


class Recorded(_AnyScheduler):
    """Goes in front of a scheduler in the order of base classes."""

    calls_open = 1  # methods of the scheduler that have not returned, its constructor for one
    recorder: Recorder

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        hash_block_size = getattr(self, "hash_block_size", None) or (
            kwargs.get("hash_block_size") or self.block_size
        )
        self.recorder = self.start_recorder(hash_block_size)
        self.calls_open = 0

    def start_recorder(self, hash_block_size: int) -> Recorder:
        """Raises RecorderError where nothing can be recorded: the engine does not start."""
        return Recorder.start(self, vllm.__version__, hash_block_size, dict(os.environ))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not self.calls_open and name not in ATTRIBUTES_WITHOUT_EFFECT:
            self.recorder.unrecorded(f"a change of {name}")

    def add_request(self, request: Any) -> None:
        with _Call(self, "add_request"):
            self.recorder.added(request, request.request_id in self.requests)
            super().add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        with _Call(self, "finish_requests") as is_outer:
            finished = super().finish_requests(request_ids, finished_status)
            if is_outer:
                self.recorder.finished_by_client(finished)
            elif finished:
                self.recorder.unrecorded("requests that the scheduler itself has ended")
        return finished

    def set_pause_state(self, pause_state: Any) -> None:
        with _Call(self, "set_pause_state"):
            self.recorder.paused(pause_state)
            super().set_pause_state(pause_state)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        refused = None
        with _Call(self, "reset_prefix_cache"):
            num_preempted = len(self.running) if reset_running_requests else 0
            try:
                succeeded = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
            except RuntimeError as error:
                if not is_refused_reset(error):
                    raise
                succeeded, refused = False, error
            self.recorder.reset(succeeded, num_preempted)
        if refused is not None:
            raise refused
        return succeeded

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with _Call(self, "schedule"):
            if any(args) or any(kwargs.values()):  # throttle_prefills
                self.recorder.unrecorded("a step that throttles prefills")
            self.recorder.scheduling()
            output = super().schedule(*args, **kwargs)
            self.recorder.scheduled(self, output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        with _Call(self, "update_from_output"):
            self.recorder.output_begins(self, scheduler_output)
            sampled = self.recorder.tokens_of(scheduler_output, model_runner_output)
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.recorder.updated(scheduler_output, sampled, outputs)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        with _Call(self, "update_draft_token_ids"):
            self.recorder.drafted(draft_token_ids)
            super().update_draft_token_ids(draft_token_ids)

    def shutdown(self) -> None:
        with _Call(self, "shutdown"):
            self.recorder.finish()
            super().shutdown()


@end_on_others(Recorded)
class AsyncRecordingScheduler(Recorded, AsyncScheduler):
    """Records asynchronous scheduling: a step is decided before the last one's tokens are there."""


@end_on_others(Recorded)
class RecordingScheduler(Recorded, Scheduler):
    """Records the scheduler that vLLM would have chosen by itself."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is RecordingScheduler and vllm_config.scheduler_config.async_scheduling:
            return AsyncRecordingScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


__all__ = ["AsyncRecordingScheduler", "RecordingScheduler"]
