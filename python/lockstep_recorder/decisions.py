"""What a scheduler has decided, and how it left queues and pool, in the words of the format.

Used for a recording's lines and for the replies of an engine under test.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lockstep_recorder.errors import EndOfRecording
from lockstep_recorder.releases import Release


class _Names:
    """The names of the requests in a queue, in order. A queue is long and changes seldom: what was
    made last is given again while it holds the same requests."""

    def __init__(self) -> None:
        self._requests: list[Any] = []
        self._names: list[str] = []

    def of(self, queue: Iterable[Any]) -> list[str]:
        requests = list(queue)
        if requests != self._requests:
            self._requests = requests
            self._names = [request.request_id for request in requests]
        return self._names


class Decisions:
    """Reads one scheduler's decisions, in their order."""

    def __init__(self, release: Release, beside_connector: bool = False) -> None:
        """`beside_connector`: the first of the two waiting queues is shown separately, with the
        status of each request."""
        self._queues = release.waiting_queues
        self._beside_connector = beside_connector
        self._started: set[str] = set()  # have been scheduled once
        self._running = _Names()
        self._waiting = [_Names() for _ in self._queues]

    def ended(self, names: Iterable[str]) -> None:
        """These requests have ended: their names may be reused at once."""
        self._started.difference_update(names)

    def of_step(self, output: Any) -> dict[str, Any]:
        """The decision in `output`, a SchedulerOutput: from `scheduled` to `copies`. Raises
        EndOfRecording where the worker would read what no key of the format has."""
        self._check_worker_input(output)
        line: dict[str, Any] = {"scheduled": self._rows(output)}
        for key, names in (
            ("preempted", output.preempted_req_ids),
            ("finished", output.finished_req_ids),
        ):
            if names:
                line[key] = sorted(names)
        line["common_prefix_blocks"] = list(output.num_common_prefix_blocks)
        if output.new_block_ids_to_zero:
            line["zero"] = output.new_block_ids_to_zero
        if copies := getattr(output, "kv_cache_block_copies", None):
            line["copies"] = [[copy.src_block_id, copy.dst_block_id] for copy in copies]
        return line

    def _check_worker_input(self, output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        total, tokens = output.total_num_scheduled_tokens, sum(scheduled.values())
        if total != tokens:
            raise EndOfRecording(f"found a step of {tokens} tokens; the worker receives {total}")
        for name in output.scheduled_spec_decode_tokens:
            if name not in scheduled:
                raise EndOfRecording(f"found drafts of request {name}, which has no row")
        for new in output.scheduled_new_reqs:
            # Runner V2 receives resumed requests as new, with their tokens. V1 takes a known
            # request for a streaming session, which the format lacks, and clears its output.
            is_v1 = getattr(new, "prefill_token_ids", None) is None
            if is_v1 and new.req_id in self._started:
                raise EndOfRecording(f"found resumed request {new.req_id} in scheduled_new_reqs")

    def _rows(self, output: Any) -> list[dict[str, Any]]:
        """The requests of the step in the scheduler's own order. What costs most: it is done for
        every running request in every step."""
        cached = output.scheduled_cached_reqs
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        if not drafts and not cached.resumed_req_ids and cached.req_ids == list(scheduled):
            # No request is admitted: nearly every step of an engine that serves.
            return [
                {"id": name, "tokens": tokens, "computed": computed, "blocks": blocks}
                for (name, tokens), computed, blocks in zip(
                    scheduled.items(), cached.num_computed_tokens, cached.new_block_ids, strict=True
                )
            ]
        # Computed tokens and block ids (per group, or None) of every request.
        places = zip(cached.num_computed_tokens, cached.new_block_ids, strict=True)
        handed = dict(zip(cached.req_ids, places, strict=True))
        entering = set(cached.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            handed[new.req_id] = new.num_computed_tokens, new.block_ids
            entering.add(new.req_id)
        rows: list[dict[str, Any]] = []
        for name, tokens in scheduled.items():
            computed, blocks = handed[name]
            if name in entering:
                row = {"id": name, "tokens": tokens, "new": True}
                # One of vLLM's model runners does not receive which of the new requests resume.
                if name in self._started:
                    row["resumed"] = True
                self._started.add(name)
                row["computed"], row["blocks"] = computed, blocks
            else:
                row = {"id": name, "tokens": tokens, "computed": computed, "blocks": blocks}
            if drafts and drafts.get(name):
                row["spec"] = drafts[name]
            rows.append(row)
        return rows

    def state_of(self, scheduler: Any) -> dict[str, Any]:
        """The queues and the pool: from `running` to `free_blocks`. To be encoded before the next
        call: lists are given again."""
        line: dict[str, Any] = {"running": self._running.of(scheduler.running)}
        first, second = (
            names.of(getattr(scheduler, queue))
            for names, queue in zip(self._waiting, self._queues, strict=True)
        )
        line["waiting"] = first + second if first and not self._beside_connector else second
        if self._beside_connector:
            line["skipped"] = [
                [request.request_id, request.status.name]
                for request in getattr(scheduler, self._queues[0])
            ]
        line["free_blocks"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return line


def tables_of(scheduler: Any) -> dict[str, Any]:
    """The block tables of all running requests, per group."""
    block_ids = scheduler.kv_cache_manager.get_block_ids
    return {request.request_id: block_ids(request.request_id) for request in scheduler.running}


def held_drafts_of(scheduler: Any, line: dict[str, Any]) -> dict[str, list[int]]:
    """The drafts that requests keep for a later step: those that the `line` does not schedule."""
    scheduled = {row["id"] for row in line["scheduled"]}
    held = (
        (name, list(request.spec_token_ids))
        for name, request in scheduler.requests.items()
        if request.spec_token_ids and name not in scheduled
    )
    return dict(sorted(held))
