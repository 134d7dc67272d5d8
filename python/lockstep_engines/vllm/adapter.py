"""vLLM's own scheduler behind the scheduler protocol: no GPU, no compiled code, no model.

Decisions are written by the code that writes recordings (lockstep_recorder).
"""

from __future__ import annotations

import gc
import inspect
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from lockstep_engines.prompts import expand
from lockstep_engines.protocol import Client, Object, ProtocolError, Refused
from lockstep_engines.vllm import engine as vllm_engine
from lockstep_engines.vllm.engine import (
    CLIENT_ERRORS,
    KVConnectorOutput,
    NotInThisRelease,
    PauseState,
    RequestStatus,
    Scheduler,
)
from lockstep_recorder.cache_counter import CacheCounter
from lockstep_recorder.calls import is_refused_reset
from lockstep_recorder.decisions import Decisions, tables_of

_CONNECTORS = {
    True: "lockstep_engines.vllm.connector.AskingConnector",
    False: "lockstep_engines.vllm.connector.AskingConnectorOfOneGroup",
}

# Options of a case that vllm_engine passes on, or that determine their meaning.
_CONFIG_KEYS = frozenset(
    """max_num_seqs max_num_batched_tokens max_model_len block_size mamba_block_size
    enable_prefix_caching enable_chunked_prefill async_scheduling scheduler_reserve_full_isl
    long_prefill_token_threshold policy mamba_cache_mode num_spec_tokens spec_method dcp pcp
    hash_algorithm num_hash_lookahead_tokens num_prefill_lookahead_tokens prefix_match_unit
    prefix_cache_retention_interval""".split()
)
# vLLM's defaults of options that every case needs.
_DEFAULTS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 32768,
    "block_size": 16,
    "enable_prefix_caching": True,
}
_CONNECTOR_KEYS = frozenset(
    ("kv_load_failure_policy", "supports_hybrid_groups", "requires_kv_delivery")
)
_GROUP_KEYS = frozenset(("layers", "spec", "layer_specs", "layers_per_page", "is_eagle_group"))
_GARBAGE_MAX = 200_000  # objects that cases may leave until they are collected
# What vLLM raises for a configuration that it refuses.
_REFUSALS = (NotInThisRelease, *CLIENT_ERRORS, AssertionError, NotImplementedError)


def _features() -> list[str]:
    """The features of this release, in the protocol's terms."""
    reset = inspect.signature(Scheduler.reset_prefix_cache).parameters
    params = inspect.signature(vllm_engine.SamplingParams).parameters
    found = vllm_engine.kinds() + ["async_scheduling", "priority", "dcp", "pcp", "connector"]
    if vllm_engine.keeps_whole_caches():
        found.append("dcp_sharded")
    if vllm_engine.replays_windows():
        found.append("bounded_replay")
    found += [f"spec:{method}" for method in ("ngram", "draft_model", "eagle")]
    found += ["no_chunked_prefill", "no_prefix_caching", "cache_salt", "min_tokens"]
    found += [name for name in ("repetition_detection", "skip_reading_prefix_cache")
              if name in params]  # fmt: skip
    found.append("reset_prefix_cache")
    if "reset_running_requests" in reset:
        found.append("reset_running")
    if hasattr(Scheduler, "set_pause_state"):
        found.append("pause_state")
    return found


def _reason(error: BaseException) -> str:
    """Its message; without one, the statement that raised it."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return str(error) or f"`{raised.line}` ({Path(raised.filename).name}, line {raised.lineno})"


def _refuse_others(what: str, found: Object, known: frozenset[str]) -> None:
    for key, value in found.items():
        if key not in known and not key.startswith("x_"):
            raise Refused(f"found {what} {key} = {value}; this adapter does not pass it to vLLM")


class _Case:
    """One case: a scheduler from its first request to its last."""

    def __init__(self, case: Object, client: Client) -> None:
        config = case["config"]
        self._max_model_len = config["max_model_len"]
        connector = case.get("connector")
        path = _CONNECTORS[bool(connector and connector.get("supports_hybrid_groups", True))]
        groups = vllm_engine.scheduler_groups(case)
        self.engine = vllm_engine.make_engine(case, connector=path, groups=groups)
        self.scheduler = self.engine.scheduler
        self._connector = self.scheduler.connector
        if self._connector is not None:
            self._connector.client = client
        release = vllm_engine.RELEASE
        self._queues = release.waiting_queues
        self._counter = CacheCounter(
            self.scheduler.kv_cache_manager.block_pool, release.hash_movers
        )
        self._decisions = Decisions(release, beside_connector=self._connector is not None)
        self._outputs: deque[tuple[int, Any]] = deque()  # decided, not updated; by step
        self._num_steps = 0
        self._was_cleared = False
        self._left_while_loading: set[str] = set()

    def refuse_at_front_end(self, event: Object, num_tokens: int) -> None:
        """Checks a request as vLLM's front end does, since the engine core does not: raises
        Refused."""
        if num_tokens == 0:
            raise Refused("the prompt is empty")
        if num_tokens >= self._max_model_len:
            raise Refused(
                f"the prompt has {num_tokens} tokens; with one to sample a model of "
                f"{self._max_model_len} takes no more than {self._max_model_len - 1}"
            )
        if event["add"] in self.scheduler.requests:
            raise Refused(f"request {event['add']} already exists")

    def add(self, event: Object) -> None:
        tokens = expand(event["prompt"])
        self.refuse_at_front_end(event, len(tokens))
        try:
            request = self.engine.request_of(event, tokens)
        except CLIENT_ERRORS as error:
            raise Refused(str(error)) from None
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        loading = self._waiting_to_load()
        self.engine.abort([name])
        self._left_while_loading |= loading - self._waiting_to_load()
        self._decisions.ended((name,))

    def reset(self, running: bool) -> Object:
        options = {"reset_running_requests": True} if running else {}
        try:
            done = self.scheduler.reset_prefix_cache(**options)
        except RuntimeError as error:
            if not is_refused_reset(error):
                raise
            done = False
        if done:
            self._was_cleared = True
            self._counter.watch()
        return {"reset_prefix_cache": bool(done)} | self._state()

    def schedule(self, step: int, with_tables: bool) -> Object:
        if step != self._num_steps:
            raise ProtocolError(f"found step {step}; expected {self._num_steps}")
        self._num_steps += 1
        output = self.scheduler.schedule()
        self._outputs.append((step, output))
        reply = self._decisions.of_step(output)
        if with_tables:
            reply["tables"] = tables_of(self.scheduler)
        if self._connector is not None and (loading := self._loading()):
            block_ids = self.scheduler.kv_cache_manager.get_block_ids
            reply["loading"] = {name: block_ids(name) for name in sorted(loading)}
        return reply | self._state()

    def update(self, message: Object) -> Object:
        while self._outputs and self._outputs[0][0] < message["update"]:
            self._outputs.popleft()  # steps of no tokens, whose output is not awaited
        if not self._outputs or self._outputs[0][0] != message["update"]:
            raise ProtocolError(f"found an output of step {message['update']}, which has none")
        _, output = self._outputs.popleft()
        report = self._report_of(message)
        requests = self.scheduler.requests
        of_step = [
            (name, requests[name]) for name in output.num_scheduled_tokens if name in requests
        ]
        loading = self._waiting_to_load()
        outputs = self.engine.take_in(output, message["sampled"], message.get("drafts"), report)
        stopped = [
            (row.request_id, str(row.finish_reason))
            for of_client in outputs.values()
            for row in of_client.outputs
            if row.finish_reason is not None
        ]
        reply: Object = {}
        names = {name for name, _ in stopped}
        if stopped:
            reply["stopped"] = stopped
            self._decisions.ended(names)
        if stopped or self._connector is not None:
            of_step = [
                (name, request)
                for name, request in of_step
                if name in names or (requests.get(name) is request and not self._is_held(request))
            ]
        reply["num_tokens"] = {name: request.num_tokens for name, request in of_step}
        if self._connector is not None:
            self._left_while_loading |= loading - self._waiting_to_load()
            if report is not None:
                self._left_while_loading -= report.finished_recving
            if held := self._connector.take_held():
                reply["held"] = held
        return reply | self._state()

    def _is_held(self, request: Any) -> bool:
        """Whether a request has ended but keeps its blocks, which only a connector causes."""
        return self._connector is not None and request.is_finished()

    def _report_of(self, message: Object) -> KVConnectorOutput | None:
        """The report of a connector's workers."""
        worker = message.get("worker")
        if worker is None:
            return None
        if self._connector is None:
            raise ProtocolError("found a worker's report; the case has no connector")
        report = KVConnectorOutput(
            finished_sending=set(worker["sent"]),
            finished_recving=set(worker["received"]),
            invalid_block_ids=set(worker["invalid_blocks"]),
        )
        if failed := worker.get("failed"):
            if not hasattr(report, "failed_recving"):
                raise RuntimeError("this release reports failed loads by their blocks only")
            report.failed_recving = set(failed)
        return report

    def _state(self) -> Object:
        line = self._decisions.state_of(self.scheduler)
        stored, evicted = self._counter.take()
        if stored:
            line["stored"] = stored
        if evicted:
            line["evicted"] = evicted
        if self._was_cleared:
            line["cleared"] = True
            self._was_cleared = False
        return line

    def _waiting_to_load(self) -> set[str]:
        """Live requests with a load in flight."""
        if self._connector is None:
            return set()
        received = self.scheduler.finished_recving_kv_req_ids
        return {
            request.request_id
            for queue in self._queues
            for request in getattr(self.scheduler, queue)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.request_id not in received
        }

    def _loading(self) -> set[str]:
        return self._waiting_to_load() | self._left_while_loading


class VllmAdapter:
    """Decides cases with the vLLM that is imported."""

    def __init__(self) -> None:
        self._case: Any = None
        # What has been imported stays, and cases are short: a collector that runs when it likes
        # costs a tenth of the time.
        gc.collect()
        gc.freeze()
        gc.disable()

    def hello(self) -> Object:
        return {
            "engine": {"name": "vllm", "version": vllm_engine.VERSION},
            "features": _features(),
        }

    def open(self, case: Object, client: Client) -> Object:
        _refuse_others("option", case["config"], _CONFIG_KEYS)
        _refuse_others("key of the connector", case.get("connector", {}), _CONNECTOR_KEYS)
        for group in case["groups"]:
            plain = {key: group[key] for key in group if (key, group[key]) != ("role", "default")}
            _refuse_others("key of a group", plain, _GROUP_KEYS)
        case = case | {"config": _DEFAULTS | case["config"]}
        try:
            self._case = _Case(case, client)
        except _REFUSALS as error:
            raise Refused(f"{type(error).__name__}: {_reason(error)}") from None
        return {
            "scheduler_block_size": self._case.scheduler.block_size,
            "hash_block_size": self._case.engine.hash_block_size,
        }

    def close(self) -> None:
        self._case = None
        if gc.get_count()[0] > _GARBAGE_MAX:
            gc.collect()

    def add(self, event: Object) -> None:
        self._case.add(event)

    def abort(self, name: str) -> None:
        self._case.abort(name)

    def pause(self, state: str) -> None:
        if state not in PauseState.__members__:
            states = ", ".join(PauseState.__members__)
            raise ProtocolError(f"found pause_state {state}; expected one of {states}")
        self._case.engine.pause(state)

    def reset(self, running: bool) -> Object:
        return self._case.reset(running)

    def schedule(self, step: int, with_tables: bool) -> Object:
        return self._case.schedule(step, with_tables)

    def update(self, message: Object) -> Object:
        return self._case.update(message)
