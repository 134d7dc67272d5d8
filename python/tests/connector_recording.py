"""Records vLLM's two schedulers with a DrawnConnector. A recording of a server has no connector, so
this is not part of the recorder: it needs a connector that reports its answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from lockstep_engines.vllm import engine as vllm_engine
from lockstep_recorder.cache_counter import CacheCounter
from lockstep_recorder.recording_file import RecordingFile, encode_json
from lockstep_recorder.releases import release_of
from lockstep_recorder.step_log import StepLog

RELEASE = release_of(vllm_engine.VERSION)
TABLES_EVERY = 8


# The fields of a step as Lockstep writes them.
FIELDS = """step before connector scheduled preempted finished common_prefix_blocks zero hisparse
running waiting skipped free_blocks tables loading kv_holding deferred loads_within during worker
sampled output_of_step stopped drafts held stored evicted cleared""".split()


class _OrderedFile(RecordingFile):
    """Takes a step's fields in any order."""

    def write_line(self, line: bytes) -> None:
        step = json.loads(line)
        if "step" in step:
            line = encode_json({key: step[key] for key in sorted(step, key=FIELDS.index)})
        super().write_line(line)


class _ConnectorStepLog(StepLog):
    """The steps of a scheduler with a connector. All of them have an output."""

    num_updated = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: set[str] = set()  # by workers; the scheduler has not heard of it

    def _add_state(self, line: dict[str, Any], scheduler: Any) -> None:
        super()._add_state(line, scheduler)
        if RELEASE.waiting_queues[0] == "kv_holding_waiting":
            line["kv_holding"] = line.pop("skipped")
            line["deferred"] = sorted(one.request_id for one in scheduler.deferred_waiting)
            line["loads_within"] = scheduler.connector.loads_within
        if loading := scheduler.loading() - self.received:
            tables = scheduler.kv_cache_manager.get_block_ids
            line["loading"] = {name: list(tables(name)) for name in sorted(loading)}
        if answers := scheduler.connector.take("answers"):
            line["connector"] = answers
        if told := getattr(scheduler.connector, "told", None):
            line["hisparse"] = told

    def reported(self, report: dict[str, Any]) -> None:
        """The workers have run the last step and report."""
        self._lines[-1].tail["worker"] = report
        self.received.update(report["received"])

    def keeps(self, held: list[str]) -> None:
        """These requests ended but keep their blocks."""
        if held:
            self._lines[-1].tail.setdefault("held", []).extend(held)

    def updated(
        self,
        output: Any,
        sampled: dict[str, list[int]],
        stopped: list[tuple[str, str]],
        is_async: bool,
    ) -> None:
        super().updated(output, sampled, stopped, is_async)
        if not output.num_scheduled_tokens:
            tail = self._lines[-1].tail
            if is_async:
                tail["output_of_step"] = self.num_updated
            if stopped:
                tail["stopped"] = stopped
                self._live.difference_update(name for name, _ in stopped)
        self.num_updated += 1


class _Recorded:
    """Precedes a scheduler in the order of base classes."""

    path: Path
    header: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.header["config"]
        self._is_async = config.get("async_scheduling", False)
        name = f"connector {self.header['family']} {self.header['seed']}"
        takes_losses = len(self.header["groups"]) == 1
        self.connector.begin(name, config["block_size"], takes_losses)
        self._left_while_loading: set[str] = set()
        first = {"schedule_recording": 1}
        first |= {"engine": {"name": "vllm", "version": RELEASE.version}} | self.header
        first |= {
            "scheduler_block_size": self.block_size,
            "hash_block_size": kwargs["hash_block_size"],
        }
        first["config"] = {"async_scheduling": False} | config
        counter = CacheCounter(self.kv_cache_manager.block_pool, RELEASE.hash_movers)
        file = _OrderedFile(str(self.path))
        self.log = _ConnectorStepLog(file, first, RELEASE, counter, TABLES_EVERY, True)
        self.connector.on_report = self.log.reported

    def _waiting_to_load(self) -> set[str]:
        return {
            request.request_id
            for request in getattr(self, RELEASE.waiting_queues[0])
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request.request_id not in self.finished_recving_kv_req_ids
        }

    def loading(self) -> set[str]:
        """Requests with a load in flight, ended requests included."""
        return self._waiting_to_load() | self._left_while_loading

    def add_request(self, request: Any) -> None:
        self.log.add(request)
        super().add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        # Those whose load waits for steps in flight have none to report.
        loading = self._waiting_to_load() - set(getattr(self, "deferred_loads", ()))
        finished = super().finish_requests(request_ids, finished_status)
        names = [RELEASE.finished_id(element) for element in finished]
        self._left_while_loading |= loading & set(names)
        if finished_status != RequestStatus.FINISHED_ERROR:
            self.log.abort(names)
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        succeeded = super().reset_prefix_cache(*args, **kwargs)
        self.log.reset(succeeded)
        return succeeded

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.log.scheduling()
        output = super().schedule(*args, **kwargs)
        self.log.scheduled(self, output)
        self.log.keeps(self.connector.take("held"))
        return output

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        index, rows = model_output.req_id_to_index, model_output.sampled_token_ids
        names = scheduler_output.num_scheduled_tokens
        sampled = {name: list(rows[index[name]]) for name in names if rows[index[name]]}
        self.connector.take("finished")
        outputs = super().update_from_output(scheduler_output, model_output)
        reasons = {
            row.request_id: str(row.finish_reason)
            for of_client in outputs.values()
            for row in of_client.outputs
            if row.finished
        }
        # Of those that fail together it is an accident of hashed names which ends first.
        stopped = [(name, reasons[name]) for name in self.connector.take("finished")]
        self.log.updated(scheduler_output, sampled, stopped, self._is_async)
        self.log.keeps(self.connector.take("held"))
        if report := model_output.kv_connector_output:
            self._left_while_loading -= report.finished_recving or set()
            self.log.received -= report.finished_recving or set()
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        rows = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        self.log.drafted({name: list(tokens) for name, tokens in rows})
        super().update_draft_token_ids(draft_token_ids)


def scheduler_class(path: Path, header: dict[str, Any]) -> type:
    """The scheduler that vLLM would have chosen for this header, recording to `path`."""
    base = AsyncScheduler if header["config"].get("async_scheduling") else Scheduler
    return type("RecordedScheduler", (_Recorded, base), {"path": path, "header": header})
