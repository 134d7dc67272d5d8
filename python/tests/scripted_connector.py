"""A KV connector whose answers are written down: vLLM's scheduler asks it, and it moves nothing.

vLLM makes it by name, as it makes any connector from outside. Whoever drives the scheduler puts in
what it is to answer in a step, and plays the worker that reports loads.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """The side of the scheduler. An answer is an entry of `connector` in a recording."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._answers: deque[dict[str, Any]] = deque()
        self._held: set[str] = set()

    def expect(self, answers: Iterable[dict[str, Any]], held: Iterable[str]) -> None:
        """What to answer in the next step, in this order, and whose blocks to keep when they
        finish. AssertionError when the step before asked less than it was to."""
        assert not self._answers, f"vLLM did not ask for {list(self._answers)}"
        self._answers.extend(answers)
        self._held = set(held)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._answers, f"vLLM asked for {request.request_id}, which nobody expected"
        answer = self._answers.popleft()
        asked = {"id": request.request_id, "local": num_computed_tokens}
        assert asked == {key: answer[key] for key in asked}, f"{asked} is not {answer}"
        return answer["external"], answer["async"]

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, _: Any) -> tuple[bool, None]:
        return request.request_id in self._held, None

    # The side of the worker, which nobody makes.

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
