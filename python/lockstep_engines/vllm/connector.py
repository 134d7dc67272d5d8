"""A KV connector that moves no blocks: it passes the queries of vLLM's scheduler to its client.
vLLM constructs it by name, like any external connector. The caller sets `client` and reports loads
instead of a worker.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class AskingConnectorOfOneGroup(KVConnectorBase_V1):
    """The scheduler's side of a connector that does not support hybrids. `client`: a
    protocol.Client."""

    client: Any

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.held: list[str] = []  # finished requests whose blocks are kept, since last taken
        self._delivers: bool = vllm_config.kv_transfer_config.get_from_extra_config(
            "requires_kv_delivery", False
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return self._delivers

    def take_held(self) -> list[str]:
        held, self.held = self.held, []
        return held

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.client.matched_tokens(request.request_id, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, *_: Any
    ) -> None:
        self.client.allocated(request.request_id, num_external_tokens, blocks.get_block_ids())

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self._finished(request, (block_ids,))

    def _finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        name = request.request_id
        keeps = self.client.finished(name, blocks)
        if keeps:
            self.held.append(name)
        return keeps, None

    # The side of the worker, which is never made.

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class AskingConnector(AskingConnectorOfOneGroup, SupportsHMA):
    """The same for hybrids."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self._finished(request, block_ids)
