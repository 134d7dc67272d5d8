"""Any scheduler of vLLM's, with the live check at its side.

A recorder (lockstep_recorder/recorder.py) that hands what it sees to another thread (live_log.py).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lockstep_live.live_log import LiveLog, LockstepViolation
from lockstep_live.settings import Settings, SettingsError, settings_of
from lockstep_recorder.calls import end_on_others
from lockstep_recorder.errors import RecorderError
from lockstep_recorder.header import header_of
from lockstep_recorder.recorder import Recorder
from lockstep_recorder.releases import Release, release_of
from lockstep_recorder.scheduler import Recorded
from lockstep_recorder.step_log import StepLog

logger = logging.getLogger("vllm.lockstep_live")


def _step_of(output: Any) -> Any:
    """What is written of a SchedulerOutput, which workers in this process may change."""
    cached = output.scheduled_cached_reqs
    return SimpleNamespace(
        num_scheduled_tokens=dict(output.num_scheduled_tokens),
        total_num_scheduled_tokens=output.total_num_scheduled_tokens,
        scheduled_spec_decode_tokens=dict(output.scheduled_spec_decode_tokens),
        scheduled_new_reqs=list(output.scheduled_new_reqs),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached.req_ids),
            resumed_req_ids=set(cached.resumed_req_ids),
            new_block_ids=list(cached.new_block_ids),
            num_computed_tokens=list(cached.num_computed_tokens),
        ),
        preempted_req_ids=set(output.preempted_req_ids or ()),
        finished_req_ids=set(output.finished_req_ids),
        num_common_prefix_blocks=list(output.num_common_prefix_blocks),
        new_block_ids_to_zero=list(output.new_block_ids_to_zero or ()),
        kv_cache_block_copies=list(getattr(output, "kv_cache_block_copies", None) or ()),
    )


class LiveRecorder(Recorder):
    """What the scheduler's methods call."""

    def __init__(
        self, scheduler: Any, log: LiveLog, release: Release, header: dict[str, Any]
    ) -> None:
        super().__init__(scheduler, log, release, header)  # type: ignore[arg-type]
        self.live_log = log
        self.closing: threading.Thread | None = None  # while the engine serves on
        self._in_flight: deque[tuple[Any, Any]] = deque()  # a step as vLLM has it, and its copy

    @classmethod
    def begin(cls, scheduler: Any, hash_block_size: int, settings: Settings) -> LiveRecorder:
        """Raises RecorderError."""
        release = release_of(vllm.__version__)
        header = header_of(scheduler, release, hash_block_size, family="live", seed=0)
        # Steps are without `waiting` (long, and not otherwise traversed), `stored` and `evicted`.
        header.setdefault("x_beyond_format", []).append("live_check")
        return cls(scheduler, LiveLog(settings, header, release), release, header)

    def begins(self, call: str, scheduler: Any) -> None:
        super().begins(call, scheduler)
        if call == "schedule" and (line := self.live_log.violation()) is not None:
            raise LockstepViolation(line)

    def _is_in_flight(self, name: str) -> bool:
        return any(name in step.num_scheduled_tokens for _, step in self._in_flight)

    def scheduled(self, scheduler: Any, output: Any) -> None:
        pool = scheduler.kv_cache_manager.block_pool
        free_blocks = pool.get_num_free_blocks()
        seen = SimpleNamespace(
            running=list(scheduler.running),
            kv_cache_manager=SimpleNamespace(
                block_pool=SimpleNamespace(get_num_free_blocks=lambda: free_blocks)
            ),
            **{queue: () for queue in self._release.waiting_queues},
        )
        step = _step_of(output)
        if step.num_scheduled_tokens:
            self._in_flight.append((output, step))
        self._do(StepLog.scheduled, seen, step)

    def tokens_of(self, output: Any, model_output: Any) -> Any:
        rows = model_output.sampled_token_ids
        if output.scheduled_spec_decode_tokens:
            rows = [list(row) for row in rows]  # the scheduler trims them in place
        return SimpleNamespace(sampled_token_ids=rows, req_id_to_index=model_output.req_id_to_index)

    def updated(self, output: Any, sampled: Any, outputs: dict[int, Any]) -> None:
        if self._log is None:
            return
        while self._in_flight and self._in_flight[0][0] is not output:
            self._in_flight.popleft()
        if not self._in_flight:
            if output.num_scheduled_tokens:
                self.unrecorded("an output of a step that was not checked")
            return
        _, step = self._in_flight.popleft()
        self._do(self._take_output, step, sampled, outputs)

    def _take_output(self, log: StepLog, step: Any, sampled: Any, outputs: Any) -> None:
        rows, index, tokens = sampled.sampled_token_ids, sampled.req_id_to_index, {}
        for name in step.num_scheduled_tokens if rows else ():
            row = rows[index[name]] if name in index else None
            if row:
                tokens[name] = row
        reasons = {
            row.request_id: str(row.finish_reason)
            for of_client in outputs.values()
            for row in of_client.outputs
            if row.finish_reason is not None
        }
        stopped = [(name, reasons[name]) for name in step.num_scheduled_tokens if name in reasons]
        log.updated(step, tokens, stopped, self._is_async)

    def finish(self, stopped_because: str | None = None) -> None:
        log, self._log = self._log, None
        if log is None:
            return
        if stopped_because is None:
            atexit.unregister(self.finish)
            self.live_log.close()
            return
        # The engine serves on, and does not wait for the audit of what came before.
        logger.error("lockstep: the live check ends here: %s", stopped_because)
        self.closing = threading.Thread(target=self.live_log.close, name="lockstep-close")
        self.closing.start()

    def _do(self, what: Any, *args: Any) -> None:
        if self._log is not None:
            self.live_log.put(what, *args)


class _Off:
    """No recorder: the check cannot be made, and the engine serves."""

    def __getattr__(self, _: str) -> Any:
        return lambda *args, **kwargs: None


class LiveChecked(Recorded):
    """Goes in front of a scheduler in the order of base classes."""

    def start_recorder(self, hash_block_size: int) -> Any:
        environment = dict(os.environ)
        try:
            return LiveRecorder.begin(self, hash_block_size, settings_of(environment))
        except (RecorderError, SettingsError, OSError) as error:
            if environment.get("LOCKSTEP") == "raise":
                raise
            logger.error("lockstep: nothing is checked: %s", error)
            return _Off()


@cache
def live_class(scheduler_cls: type) -> type:
    """`scheduler_cls` with the live check."""
    if issubclass(scheduler_cls, LiveChecked) or not issubclass(scheduler_cls, Scheduler):
        return scheduler_cls
    made = type(f"Live{scheduler_cls.__name__}", (LiveChecked, scheduler_cls), {})
    return end_on_others(Recorded)(made)


AsyncLiveScheduler = live_class(AsyncScheduler)


class LiveScheduler(live_class(Scheduler)):  # type: ignore[misc]
    """For --scheduler-cls: the one that vLLM would have chosen by itself."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is LiveScheduler and vllm_config.scheduler_config.async_scheduling:
            return AsyncLiveScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


__all__ = ["AsyncLiveScheduler", "LiveScheduler", "LockstepViolation", "live_class"]
