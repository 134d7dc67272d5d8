"""Speculators without weights for vLLM's runners, which verify the drafts of their own speculator:
the drafts of the current step are written where the runner keeps them. Runner V1 receives drafts
with the step, except those in flight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Speculator:
    """The part of a speculator that the runner calls. Its proposals are replaced before the next
    step."""

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


def replace_v1(num_tokens: int) -> None:
    """Replaces the class of EAGLE speculators, of which runner V1 makes one per case. The
    kernel that counts accepted drafts on the device stays vLLM's."""
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


def replace_v2(num_tokens: int) -> None:
    """Replaces vLLM's maker of speculators, which runner V2 calls once per case."""
    from vllm.v1.worker.gpu import model_runner

    model_runner.init_speculator = lambda *_, **__: Speculator(num_tokens)


def put_v2(runner: Any, drafts: dict[str, list[int]]) -> None:
    """Writes the drafts of these requests where runner V2 keeps those of its speculator."""
    states = runner.req_states
    for name, tokens in drafts.items():
        if name in states.req_id_to_index:
            row = states.draft_tokens[states.req_id_to_index[name]]
            row[: len(tokens)] = torch.tensor(tokens, dtype=row.dtype)


def put_v1(runner: Any, drafts: dict[str, list[int]]) -> None:
    """The same for runner V1, which keeps drafts by the rows of the previous step."""
    rows = runner.input_batch.prev_req_id_to_index or {}
    if runner._draft_token_ids is None:
        return
    # After a batch that the speculator skipped, all rows are views of one element.
    kept = runner._draft_token_ids = runner._draft_token_ids.contiguous()
    for name, tokens in drafts.items():
        if name in rows:
            kept[rows[name], : len(tokens)] = torch.tensor(tokens, dtype=kept.dtype)
