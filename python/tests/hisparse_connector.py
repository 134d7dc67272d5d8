"""vLLM's HiSparse connector on the scheduler's side, with peers and workers that are generated from
a seed.

Its decisions are vLLM's own (HiSparseConnectorScheduler and its coordinator). The peers stand for a
second connector of a MultiConnector, which supplies the prefixes that are loaded into host pages. A
worker runs what a step tells it at that step or the next, as HiSparseConnectorWorker does, and
reports each transfer as complete some steps later.
"""

from __future__ import annotations

from typing import Any

from drawn_connector import DrawnConnector
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorScheduler,
    HiSparseConnectorWorkerMetadata,
)
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.outputs import KVConnectorOutput


def words_of(metadata: Any, host_pool: Any) -> dict[str, Any]:
    """A step's commands to the workers, in a recording's terms, and the host pool's free blocks."""
    line: dict[str, Any] = {
        "transfers": [
            [
                transfer.transfer_id,
                transfer.host_block_id,
                list(transfer.resident_block_ids),
                "restore" if transfer.restore else "spill",
            ]
            for transfer in metadata.command.page_transfers
        ]
    }
    line["mirrors"] = {
        name: [
            [list(mirror.source_starts), mirror.destination_start, mirror.num_rows]
            for mirror in mirrors
        ]
        for name, mirrors in metadata.row_mirrors.items()
        if mirrors
    }
    line["all_resident"] = metadata.all_context_pages_resident
    line["residency"] = {
        name: [update.pages, list(update.block_ids)]
        for name, update in metadata.residency_updates.items()
    }
    line["free_host_blocks"] = host_pool.get_num_free_blocks()
    return line


class HiSparseDrawnConnector(DrawnConnector):
    """REQUIRES: begin() before the first step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        has_drafts = vllm_config.speculative_config is not None
        self.inner = HiSparseConnectorScheduler(
            async_speculative=bool(vllm_config.scheduler_config.async_scheduling and has_drafts),
            draft_kv_lookahead=vllm_config.num_lookahead_tokens,
        )
        self.told: dict[str, Any] = {}  # of the last step

    def begin(self, name: str, block_size: int, takes_losses: bool) -> None:
        super().begin(name, block_size, takes_losses)
        rng = self._rng
        self._has_peers = rng.random() < 0.5
        self._failing = rng.choice((0.0, 0.3))  # loads of which nothing arrives
        self._num_workers = rng.choice((1, 1, 2))
        self._delay = rng.choice((0, 1, 4))  # steps that a transfer takes at most
        self._next: list[int] = []  # submitted when the next step starts
        self._moving: dict[int, list[int]] = {}  # when each worker has done a transfer

    @property
    def coordinator(self) -> Any:
        return self.inner.coordinator

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.inner.bind_coordinator(get_hisparse_coordinator(kv_cache_manager))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._has_peers:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._answered[request.request_id] = False
        answer = {"id": request.request_id, "local": num_computed_tokens}
        self.answers.append(answer | {"external": 0, "async": False})
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        self.inner.requests[request.request_id] = request
        super().update_state_after_alloc(request, blocks, num_external)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.loads_within = scheduler_output.has_sync_kv_loads
        metadata = self.inner.build_connector_meta(scheduler_output)
        self.told = words_of(metadata, self.coordinator.get_host_block_pool())
        assert not metadata.host_block_copies, "hits that end inside a host block"
        started, self._next = self._next, []
        for transfer in metadata.command.page_transfers:
            (started if transfer.restore else self._next).append(transfer.transfer_id)
        self._started = started
        return metadata

    def request_finished_all_groups(self, request: Any, blocks: Any) -> tuple[bool, None]:
        self.inner.requests.pop(request.request_id, None)
        return super().request_finished_all_groups(request, blocks)

    def has_pending_push_work(self) -> bool:
        return self.coordinator.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        return self.coordinator.has_pending_reclamation()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        super().update_connector_output(output)
        self.inner.update_connector_output(output)

    def report(self) -> KVConnectorOutput | None:
        step, rng, last = self._step, self._rng, self.on_report
        lines: list[dict[str, Any]] = []
        self.on_report = lines.append
        report = super().report()
        self.on_report = last
        for name in self._started:
            due = [step + rng.randint(0, self._delay) for _ in range(self._num_workers)]
            self._moving[name] = due
        enqueued = dict.fromkeys(self._started, self._num_workers)
        completed = {}
        for name, due in list(self._moving.items()):
            done = sum(when <= step for when in due)
            if done:
                completed[name] = done
            if done < len(due):
                self._moving[name] = [when for when in due if when > step]
            else:
                del self._moving[name]
        if not (report or enqueued or completed):
            return None
        report = report or KVConnectorOutput()
        line = lines[0] if lines else {"received": [], "sent": [], "invalid_blocks": []}
        failed = [name for name in line["received"] if rng.random() < self._failing]
        if failed:
            line["failed"] = failed
            report.failed_recving = set(failed)
        if enqueued or completed:
            line["enqueued"] = [list(pair) for pair in enqueued.items()]
            line["completed"] = [list(pair) for pair in completed.items()]
            report.kv_connector_worker_meta = HiSparseConnectorWorkerMetadata(enqueued, completed)
        self.on_report(line)
        return report
