"""vLLM's two schedulers, each with a recorder at its side.

Every method does what the scheduler's does and tells the recorder; nothing else.
"""

import os
from collections.abc import Iterable
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lockstep_recorder.recorder import Recorder


class _Recorded:
    """Goes in front of a scheduler in the order of base classes."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        hash_block_size = kwargs.get("hash_block_size") or self.block_size
        self.recorder = Recorder.start(self, vllm.__version__, hash_block_size, dict(os.environ))

    def add_request(self, request: Any) -> None:
        self.recorder.added(request, request.request_id in self.requests)
        super().add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        self.recorder.finished_by_client(finished)
        return finished

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        succeeded = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        self.recorder.reset(succeeded, reset_running_requests)
        return succeeded

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.scheduling()
        output = super().schedule(*args, **kwargs)
        self.recorder.scheduled(self, output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        sampled = self.recorder.tokens_of(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.recorder.updated(scheduler_output, sampled, outputs)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        self.recorder.drafted(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)

    def shutdown(self) -> None:
        self.recorder.finish()
        super().shutdown()


class AsyncRecordingScheduler(_Recorded, AsyncScheduler):
    """Records asynchronous scheduling: a step is decided before the last one's tokens are there."""


class RecordingScheduler(_Recorded, Scheduler):
    """Records the scheduler that vLLM would have chosen by itself."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is RecordingScheduler and vllm_config.scheduler_config.async_scheduling:
            return AsyncRecordingScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


__all__ = ["AsyncRecordingScheduler", "RecordingScheduler"]
