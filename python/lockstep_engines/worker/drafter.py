"""Drafters without weights for vLLM's runners, which verify what their own drafter said: the drafts
of the current step are put where a runner keeps a drafter's. The runner V1 is told them, but for
those in flight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Drafter:
    """What the runner asks of any drafter. What it proposes is replaced before the next step."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager = None
    draft_token_confidence_probs = None

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.model = nn.Module()

    def load_model(self, *_: Any) -> None: ...

    def set_attn(self, *_: Any) -> None: ...

    def init_cudagraph_manager(self, *_: Any) -> None: ...

    def capture(self, *_: Any) -> None: ...

    def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(input_batch.req_ids), self._num_tokens, dtype=torch.int64)


def take_the_place_in_first(num_tokens: int) -> None:
    """Of every EAGLE drafter that runner V1 makes from now on. What counts accepted drafts
    on the device is its own."""
    from vllm.v1.spec_decode import eagle
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker import gpu_model_runner

    class Silent(eagle.EagleProposer):
        def __init__(self, vllm_config: Any, device: Any, runner: Any = None) -> None:
            most = vllm_config.scheduler_config.max_num_seqs
            self.backup_next_token_ids = CpuGpuBuffer(
                most, dtype=torch.int32, device=device, pin_memory=False
            )
            self.eagle3_use_aux_hidden_state = self.supports_mm_inputs = False
            self.kv_cache_gid = 0
            self.model = nn.Module()

        def _nothing(self, *_: Any, **__: Any) -> None: ...

        load_model = initialize_attn_backend = initialize_cudagraph_keys = _nothing
        dummy_run = validate_same_kv_cache_group = take_last_draft_probs = _nothing

        def propose(self, *_: Any, next_token_ids: torch.Tensor, **__: Any) -> torch.Tensor:
            return torch.zeros(len(next_token_ids), num_tokens, dtype=torch.int32)

    gpu_model_runner.EagleProposer = Silent


def take_the_place(num_tokens: int) -> None:
    """Of every drafter that runner V2 makes from now on."""
    from vllm.v1.worker.gpu import model_runner

    model_runner.init_speculator = lambda *_, **__: Drafter(num_tokens)


def put(runner: Any, drafts: dict[str, list[int]]) -> None:
    """What the drafter of runner V2 said of these requests."""
    states = runner.req_states
    for name, tokens in drafts.items():
        if name in states.req_id_to_index:
            row = states.draft_tokens[states.req_id_to_index[name]]
            row[: len(tokens)] = torch.tensor(tokens, dtype=row.dtype)


def put_in_first(runner: Any, drafts: dict[str, list[int]]) -> None:
    """The same of runner V1, which keeps them by the rows of the previous step."""
    rows = runner.input_batch.prev_req_id_to_index or {}
    if runner._draft_token_ids is None:
        return
    # Of a batch that its drafter skipped, all rows are views of one element.
    kept = runner._draft_token_ids = runner._draft_token_ids.contiguous()
    for name, tokens in drafts.items():
        if name in rows:
            kept[rows[name], : len(tokens)] = torch.tensor(tokens, dtype=kept.dtype)
