"""Hidden states of finished requests, saved as vLLM's connector saves them: its scheduler side
queues a save, its worker side reads the rows through the request's blocks and writes a file.

The connector is driven where its scheduler side passes the blocks (0.33.0) and a case has one layer
of hidden states. Else the rows are read through the blocks here: earlier releases save during the
forward pass.
"""

from __future__ import annotations

import contextlib
import copy
import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lockstep_engines import scratch
from lockstep_engines.protocol import EngineFault
from lockstep_engines.worker.expected import Expected, Request
from lockstep_engines.worker.layers import HiddenStateLayer, ModelLayer

_IS_DRIVEN = hasattr(example_hidden_states_connector, "PendingSave")


class HiddenStates:
    """The files of one case, gone when it closes, and both sides of the connector if it is driven.

    Invariants:
    1. Both sides have the same step: every step of the scheduler's side is passed on at once.
    """

    def __init__(self, vllm_config: Any, kv_config: Any, kinds: list[ModelLayer]) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(scratch.folder())
        self._kinds = {k.layer.name: k for k in kinds if isinstance(k, HiddenStateLayer)}
        self._scheduler: Any = None
        if _IS_DRIVEN and len(self._kinds) == 1:
            self._make_connector(vllm_config, kv_config)

    def _make_connector(self, vllm_config: Any, kv_config: Any) -> None:
        config = copy.copy(vllm_config)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "shared_storage_path": self._folder,
                "num_writer_threads": 1,
            },
        )
        draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[0]))
        config.speculative_config = SimpleNamespace(draft_model_config=draft)
        make = example_hidden_states_connector.ExampleHiddenStatesConnector
        self._scheduler = make(config, KVConnectorRole.SCHEDULER, kv_config)
        self._worker = make(config, KVConnectorRole.WORKER, kv_config)
        caches = {name: kind.module.kv_cache for name, kind in self._kinds.items()}
        self._worker.register_kv_caches(caches)

    def close(self) -> None:
        self._stack.close()

    def save(self, asked: dict[str, Any], expected: Expected) -> str:
        """The file with the states of the first tokens of a request that has finished."""
        request, num_tokens = expected.requests[asked["id"]], asked["tokens"]
        if self._scheduler is not None:
            return self._by_connector(request, num_tokens)
        kind = self._kinds[asked["layer"]]
        table = torch.tensor(request.tables[kind.layer.group])
        size = kind.layer.spec["block_size"]
        at = torch.arange(num_tokens)
        rows = kind.parts()[0][table[at // size], at % size].contiguous()
        path = os.path.join(self._folder, f"{request.name}.{kind.layer.name}.safetensors")
        save_file({"hidden_states": rows}, path)
        return path

    def _by_connector(self, request: Request, num_tokens: int) -> str:
        name = request.name
        # The last token was sampled and never computed; sampled tokens of this step may be unknown.
        tokens = (request.tokens + [0] * (num_tokens + 1))[: num_tokens + 1]
        sampling = SimpleNamespace(extra_args={})
        arrived = SimpleNamespace(req_id=name, sampling_params=sampling)
        self._pass_on([arrived], set())
        finished = SimpleNamespace(
            request_id=name,
            kv_transfer_params={"include_output_tokens": True},
            all_token_ids=tokens,
            prompt_token_ids=tokens[: request.num_prompt],
        )
        keeps, said = self._scheduler.request_finished_all_groups(
            finished, tuple(list(table) for table in request.tables)
        )
        if not keeps or not said:
            raise EngineFault(f"the connector of hidden states saves nothing of {name}")
        self._pass_on([], {name})
        path = str(said["hidden_states_path"])
        saved = example_hidden_states_connector.load_hidden_states(path)
        if saved["token_ids"].tolist() != tokens[:-1]:
            raise EngineFault(f"the file of hidden states of {name} has other tokens")
        return path

    def _pass_on(self, arrived: list[Any], finished: set[str]) -> None:
        """A step of both sides."""
        step = SimpleNamespace(scheduled_new_reqs=arrived)
        self._worker.bind_connector_metadata(self._scheduler.build_connector_meta(step))
        self._worker.wait_for_save()
        self._worker.get_finished(finished)
        self._worker.clear_connector_metadata()
