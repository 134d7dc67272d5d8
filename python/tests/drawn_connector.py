"""A KV connector whose answers and reports are generated from a seed, and kept for the recording.

Scheduler and worker are one object: the worker reports with a step's output what the
scheduler received at its beginning. Steps are counted by report().
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scripted_connector import ScriptedConnector
from vllm.v1.outputs import KVConnectorOutput


@dataclass
class _Transfer:
    due: int  # the step that reports it
    blocks: list[int]  # that it does not fill


class DrawnConnector(ScriptedConnector):
    """REQUIRES: begin() before the first step."""

    def begin(self, name: str, block_size: int, takes_losses: bool) -> None:
        """`name`: the seed. Loads fail only in engines of one group: vLLM supports no others."""
        self._rng = random.Random(name)
        self._block_size = block_size
        self._lossy = self._rng.choice((0.0, 0.3, 0.7)) if takes_losses else 0.0
        self._long = self._rng.choice((0.0, 0.5, 1.0))  # loads that take longer than a step
        self._kept = self._rng.choice((0.0, 0.5))  # requests that finish and are sent away
        self._step = 0
        self._answered: dict[str, bool] = {}  # whether the load is a long one, by request
        self._loads: dict[str, _Transfer] = {}
        self._sends: dict[str, int] = {}
        self._in_report: set[str] = set()  # ended loads not yet reported to the scheduler
        self._lost: list[int] = []  # in this step
        self.answers: list[dict[str, Any]] = []  # since they were last taken
        self.held: list[str] = []
        self.finished: list[str] = []  # in the order in which vLLM freed them
        self.on_report: Any = lambda report: None  # receives each, in a recording's terms

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name, rng = request.request_id, self._rng
        is_long = rng.random() < self._long
        external: int | None = 0
        if rng.random() < 0.15:
            external = None
        elif rng.random() < 0.8:
            left = request.num_tokens - num_computed_tokens - (0 if is_long else 1)
            external = rng.randint(0, left // self._block_size) * self._block_size
            if is_long and left > 0 and rng.random() < 0.3:
                external = left
        is_long = is_long and bool(external)
        self._answered[name] = is_long
        self.answers.append(
            {"id": name, "local": num_computed_tokens, "external": external, "async": is_long}
        )
        return external, is_long

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        if not num_external:
            return
        name, rng = request.request_id, self._rng
        lost: list[int] = []
        if rng.random() < self._lossy:
            (table,) = blocks.get_block_ids()
            first = self.answers[-1]["local"]
            entries = slice(
                first // self._block_size, -(-(first + num_external) // self._block_size)
            )
            candidates = [block for block in table[entries] if block]
            lost = rng.sample(candidates, rng.randint(0, len(candidates)))
        if self._answered[name]:
            self._loads[name] = _Transfer(self._step + rng.randint(0, 6), lost)
        else:
            self._lost += lost

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.loads_within = getattr(scheduler_output, "has_sync_kv_loads", False)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, _: Any) -> tuple[bool, None]:
        name = request.request_id
        self.finished.append(name)
        if name in self._loads or name in self._in_report or self._rng.random() >= self._kept:
            return False, None
        self._sends[name] = self._step + self._rng.randint(1, 6)
        self.held.append(name)
        return True, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._in_report -= output.finished_recving or set()

    def report(self) -> KVConnectorOutput | None:
        """The worker's report of the step that has just been scheduled."""
        received = sorted(name for name, load in self._loads.items() if load.due <= self._step)
        sent = sorted(name for name, due in self._sends.items() if due <= self._step)
        lost, self._lost = self._lost, []
        for name in received:
            lost += self._loads.pop(name).blocks
        for name in sent:
            del self._sends[name]
        self._in_report.update(received)
        self._step += 1
        if not (received or sent or lost):
            return None
        lost = list(dict.fromkeys(lost))
        self.on_report({"received": received, "sent": sent, "invalid_blocks": lost})
        return KVConnectorOutput(
            finished_recving=set(received),
            finished_sending=set(sent),
            invalid_block_ids=set(lost),
        )

    def take(self, what: str) -> list[Any]:
        """`answers`, `held` or `finished` since they were last taken."""
        taken: Iterable[Any] = getattr(self, what)
        setattr(self, what, [])
        return list(taken)
