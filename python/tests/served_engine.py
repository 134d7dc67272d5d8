"""vLLM's own engine loop over a scheduler, with an executor that answers from a workload.

EngineCore's methods run unmodified: vLLM decides when a step is scheduled, when the loop waits for
its output, and where disconnected clients are noticed. Only its construction is replaced, since
that needs a model and a device.
"""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future
from typing import Any

from scenarios import Workload
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from lockstep_engines.vllm import engine as vllm_engine


class _Answer(Future):
    """A step's tokens, available when requested."""

    def __init__(self, output: ModelRunnerOutput, is_there: bool, on_result: Any) -> None:
        super().__init__()
        self.set_result(output)
        self._is_there, self._on_result = is_there, on_result

    def done(self) -> bool:
        return self._is_there

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._on_result()  # time passes while the model runs
        return super().result(timeout)


class _Executor:
    """Samples instead of running a model."""

    def __init__(self, engine: Any, workload: Workload, while_running: Any) -> None:
        self.scheduler, self.is_async = engine.scheduler, engine.is_async
        self.workload, self.while_running = workload, while_running
        self.scheduled: Any = None
        self.drafts: DraftTokenIds | None = None

    def execute_model(self, scheduler_output: Any, non_block: bool) -> Future:
        if scheduler_output.num_scheduled_tokens:
            self.scheduled = scheduler_output
            waiting: Future = Future()
            waiting.set_result(None)  # "call sample_tokens()"
            return waiting
        output = ModelRunnerOutput([], {}, kv_connector_output=self._report())
        return _Answer(output, True, lambda: None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = self._sample(self.scheduled)
        if not non_block:
            self.while_running()
            return output
        return _Answer(output, self.workload.rng.random() < 0.1, self.while_running)

    def _report(self) -> Any:
        """What the workers of a connector report with the step; None without one."""
        return self.scheduler.connector and self.scheduler.connector.report()

    def _sample(self, scheduled: Any) -> ModelRunnerOutput:
        names = list(scheduled.num_scheduled_tokens)
        entering = {new.req_id for new in scheduled.scheduled_new_reqs}
        entering |= set(scheduled.scheduled_cached_reqs.resumed_req_ids)
        rows, drafts = [], []
        for name in names:
            request = self.scheduler.requests[name]
            spec = scheduled.scheduled_spec_decode_tokens.get(name, [])
            # Placeholders (-1) stand for drafts that only the worker knows; a request that has
            # just arrived has none, whatever slots it received.
            if -1 in spec and (name in entering or not self.is_async):
                spec = []
            rows.append([] if request.is_prefill_chunk else self.workload.sample(spec))
            has_drafts = "num_spec_tokens" in self.workload.config and rows[-1]
            drafts.append(self.workload.drafts() if has_drafts else [])
            self.workload.answered(name, rows[-1])
        self.drafts = DraftTokenIds(names, drafts)
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, rows, kv_connector_output=self._report())

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.drafts


class ServedEngine:
    """Serves a workload to its end."""

    def __init__(
        self,
        header: dict[str, Any],
        scheduler_cls: type,
        workload: Workload,
        groups: list[Any] | None = None,
        connector: str = "drawn_connector.DrawnConnector",
    ) -> None:
        """`groups`: vLLM's, where the header does not say all of them; `connector`: of a header
        that has one."""
        self.engine = vllm_engine.make_engine(header, scheduler_cls, connector, groups)
        self.scheduler = self.engine.scheduler
        self.workload = workload
        config = self.scheduler.vllm_config
        config.observability_config.enable_logging_iteration_details = False
        core = object.__new__(EngineCore)
        core.vllm_config, core.scheduler = config, self.scheduler
        core.model_executor = _Executor(self.engine, workload, self._while_running)
        core.aborts_queue = queue.Queue()
        core.batch_queue_size = 2 if self.engine.is_async else 1
        core.batch_queue = deque(maxlen=2) if self.engine.is_async else None
        core.async_scheduling = self.engine.is_async
        core.use_spec_decode = core.check_for_draft_tokens = config.speculative_config is not None
        core.is_pooling_model = core.is_mm_encoder_only = core.log_stats = False
        core.is_ec_consumer = True
        core._weight_version = "default"
        self.core = core
        self.step = core.step_with_batch_queue if self.engine.is_async else core.step

    def _random_live(self) -> list[str]:
        live = sorted(self.scheduler.requests)
        return self.workload.rng.sample(live, min(len(live), self.workload.rng.choice((1, 1, 2))))

    def _while_running(self) -> None:
        if self.workload.rng.random() < 0.04:
            names = self._random_live()
            if names:
                self.core.aborts_queue.put(names)

    def _between_steps(self) -> None:
        rng = self.workload.rng
        for event in self.workload.arrivals():
            self.engine.add(event)
        if rng.random() < 0.03 and self.scheduler.requests:
            self.core.abort_requests(self._random_live())
        if rng.random() < 0.03:
            self.scheduler.reset_prefix_cache()
        if self.workload.pauses:
            self._pause_or_go_on()

    def _pause_or_go_on(self) -> None:
        """Pauses as the engine core does: new requests wait, or all requests do; with `abort` the
        current ones end first."""
        rng, scheduler = self.workload.rng, self.scheduler
        if scheduler.pause_state != PauseState.UNPAUSED:
            if rng.random() < 0.3 or not self.workload.left:
                scheduler.set_pause_state(PauseState.UNPAUSED)
        elif rng.random() < 0.1 and self.workload.left:
            state = rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))
            if state == PauseState.PAUSED_NEW and rng.random() < 0.5:
                scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
                scheduler.set_pause_state(state)
                scheduler.reset_prefix_cache(reset_running_requests=True)
            else:
                scheduler.set_pause_state(state)
                if state == PauseState.PAUSED_ALL and rng.random() < 0.5:
                    # Except with the option to keep the cache.
                    scheduler.reset_prefix_cache(reset_running_requests=True)

    def run(self, steps_max: int = 600) -> int:
        """Serves until no work is left. Returns the turns of the loop; requests that cannot make
        progress stay unfinished."""
        for turn in range(steps_max):
            self._between_steps()
            if not (self.workload.left or self.scheduler.has_requests() or self.core.batch_queue):
                return turn
            _, executed = self.step()
            self.core.post_step(executed)
        return steps_max
