"""Between a scheduler that serves and the log of its steps.

1. Before serving, what cannot be recorded is refused with a RecorderError.
2. While serving, recording never changes a decision and never stops the engine: when it cannot
   continue it reports that once, ends the recording where it is still right, and the engine
   continues to serve.
3. An unrecorded change ends the recording: between two calls the scheduler's state stays as the
   first left it, and only the scheduler sets its attributes.
"""

import atexit
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from lockstep_recorder.cache_counter import CacheCounter
from lockstep_recorder.errors import EndOfRecording, RecorderError
from lockstep_recorder.header import header_of
from lockstep_recorder.recording_file import RecordingFile
from lockstep_recorder.releases import Release, release_of
from lockstep_recorder.requests import why_not_recordable
from lockstep_recorder.step_log import StepLog

PATH_VARIABLE = "LOCKSTEP_RECORDING"
TABLES_VARIABLE = "LOCKSTEP_RECORDING_TABLES"
LATE_VARIABLE = "LOCKSTEP_RECORDING_LATE"

logger = logging.getLogger("vllm.lockstep_recorder")


def recording_path_of(vllm_config: Any, environment: dict[str, str]) -> str:
    """Where to record. With several data-parallel engines each has a file of its own: run.jsonl
    becomes run.dp3.jsonl. Raises RecorderError when the variable is not set."""
    path = environment.get(PATH_VARIABLE, "")
    if not path:
        raise RecorderError(
            f"set {PATH_VARIABLE} to the file that the recording is to be written to"
        )
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}.dp{parallel.data_parallel_index}{extension}"


def tables_every(environment: dict[str, str]) -> int:
    """Steps between two listings of all block tables, 0: none. They repeat the changes of each
    step, as a check, and are the most expensive part of a recording."""
    text = environment.get(TABLES_VARIABLE, "64")
    if not text.isascii() or not text.isdigit():
        raise RecorderError(
            f"found {TABLES_VARIABLE}={text}; expected a number of steps, 0 or more"
        )
    return int(text)


def late_keys(header: dict[str, Any], environment: dict[str, str]) -> dict[str, int]:
    """The keys by which a header says that its steps tell of drafts and outputs that come too
    late: where there can be any, and the environment does not keep them out."""
    text = environment.get(LATE_VARIABLE, "1")
    if text not in ("0", "1"):
        raise RecorderError(f"found {LATE_VARIABLE}={text}; expected 0 or 1")
    config = header["config"]
    keys = {
        "held_drafts": config.get("num_spec_tokens", 0) > 0,
        "stale_outputs": config["async_scheduling"],
    }
    return {key: 1 for key, is_told in keys.items() if is_told and text == "1"}


class Recorder:
    """Records one scheduler; what the scheduler's methods call."""

    def __init__(
        self, scheduler: Any, log: StepLog, release: Release, header: dict[str, Any]
    ) -> None:
        self._log: StepLog | None = log
        self._release = release
        self._header = header
        self._is_async = header["config"]["async_scheduling"]
        self._state = self._state_of(scheduler)
        # An interpreter that ends without shutdown() (an engine inside a script) ends it too.
        atexit.register(self.finish)

    @classmethod
    def start(
        cls,
        scheduler: Any,
        version: str,
        hash_block_size: int,
        environment: dict[str, str],
    ) -> "Recorder":
        """Begins a recording of `scheduler`, which has just been made, to the file that the
        environment names. Raises RecorderError."""
        path = recording_path_of(scheduler.vllm_config, environment)
        every = tables_every(environment)
        release = release_of(version)
        header = header_of(scheduler, release, hash_block_size, family="serving", seed=0)
        header |= late_keys(header, environment)
        file = RecordingFile(path)
        counter = CacheCounter(scheduler.kv_cache_manager.block_pool, release.hash_movers)
        logger.info("recording to %s", file.partial_path)
        log = StepLog(file, header, release, counter, every)
        return cls(scheduler, log, release, header)

    def added(self, request: Any, is_known: bool) -> None:
        """add_request() is about to take `request`; `is_known`: it has one of that name."""
        reason = "a request name twice" if is_known else self._why_not(request)
        if self._is_in_flight(request.request_id):
            reason = "a name that a request of a step in flight has had"
        if reason is not None:
            self.finish(f"request {request.request_id}: found {reason}")
        self._do(StepLog.add, request)

    def _is_in_flight(self, name: str) -> bool:
        """A step that waits for its output has a request of this name."""
        return self._log is not None and self._log.is_in_flight(name)

    def _why_not(self, request: Any) -> str | None:
        return why_not_recordable(request, self._header)

    def finished_by_client(self, finished: Iterable[Any]) -> None:
        """finish_requests() has ended `finished`, what it returned."""
        self._do(StepLog.abort, [self._release.finished_id(element) for element in finished])

    def reset(self, succeeded: bool, num_preempted: int) -> None:
        """reset_prefix_cache() has returned `succeeded` and preempted `num_preempted` requests."""
        self._do(StepLog.reset, succeeded, num_preempted > 0)

    def paused(self, state: Any) -> None:
        """set_pause_state() is about to set `state`."""
        self._do(StepLog.pause, state.name)

    # What keeps watch over the calls.

    def begins(self, call: str, scheduler: Any) -> None:
        """The engine calls a method of the scheduler, which is in none yet."""
        if self._log is not None and self._state_of(scheduler) != self._state:
            self.finish(f"found a change of the scheduler from outside before {call}()")

    def ends(self, scheduler: Any) -> None:
        """The method has returned."""
        if self._log is not None:
            self._state = self._state_of(scheduler)

    def failed(self, call: str, error: BaseException) -> None:
        """The method has raised `error`: what it has done until then is in no step."""
        if call == "update_from_output":
            self._do(StepLog.output_failed)
        self.finish(f"{call}() raised {type(error).__name__}")

    def unrecorded(self, what: str) -> None:
        """Something came to the scheduler that no recording says."""
        self.finish(f"found {what}, which is not recorded")

    def _state_of(self, scheduler: Any) -> tuple[int, ...]:
        """What a change from outside hardly leaves as it was, at the price of a few lengths."""
        queues = (len(getattr(scheduler, queue)) for queue in self._release.waiting_queues)
        pool = scheduler.kv_cache_manager.block_pool
        return (
            len(scheduler.requests),
            len(scheduler.running),
            *queues,
            pool.get_num_free_blocks(),
            int(scheduler.pause_state),
        )

    # A step.

    def scheduling(self) -> None:
        """schedule() is about to be called."""
        self._do(StepLog.scheduling)

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """schedule() has returned `output`."""
        self._do(StepLog.scheduled, scheduler, output)

    def output_begins(self, scheduler: Any, output: Any) -> None:
        """update_from_output() is about to take in the output of this step."""
        if "stale_outputs" in self._header:
            self._do(StepLog.note_late, output, scheduler.requests)

    def tokens_of(self, output: Any, model_output: Any) -> dict[str, list[int]]:
        """The sampled tokens, by request in the order of the step; without the requests that got
        none. To be taken before the scheduler trims rows of several tokens in place."""
        self._do(StepLog.output_begins)
        rows, index = model_output.sampled_token_ids, model_output.req_id_to_index
        if self._log is None or not rows:
            return {}
        tokens = {}
        for name in output.num_scheduled_tokens:
            # vLLM reads no row of an ended request.
            row = rows[index[name]] if name in index else None
            if row:
                tokens[name] = row if len(row) == 1 else list(row)
        return tokens

    def updated(self, output: Any, sampled: dict[str, list[int]], outputs: dict[int, Any]) -> None:
        """update_from_output() has returned `outputs`, by client."""
        if self._log is None:
            return
        reasons = {
            row.request_id: str(row.finish_reason)
            for of_client in outputs.values()
            for row in of_client.outputs
            if row.finish_reason is not None
        }
        stopped = [(name, reasons[name]) for name in output.num_scheduled_tokens if name in reasons]
        self._do(StepLog.updated, output, sampled, stopped, self._is_async)

    def drafted(self, draft_token_ids: Any) -> None:
        """update_draft_token_ids() is about to take these drafts."""
        if self._log is not None:
            rows = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
            self._do(StepLog.drafted, {name: list(tokens) for name, tokens in rows})

    def finish(self, stopped_because: str | None = None) -> None:
        """Ends the recording; the first call counts."""
        if stopped_because is not None and self._log is not None:
            logger.error("the recording ends here: %s", stopped_because)
        self._do(StepLog.finish, stopped_because)
        self._log = None
        atexit.unregister(self.finish)

    def _do(self, what: Callable[..., None], *args: Any) -> None:
        """Calls what(log, *args). Ends the recording when the log says that it must end, and gives
        it up when recording itself fails."""
        log = self._log
        if log is None:
            return
        try:
            what(log, *args)
        except EndOfRecording as end:
            self.finish(str(end))
        except Exception:
            logger.exception("recording failed; the engine serves on without it")
            self._log = None
            log.abandon()
