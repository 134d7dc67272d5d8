"""A drafter without weights for vLLM's second runner, which verifies what its own drafter said: the
drafts of the step at hand are put where it keeps a drafter's."""

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


def take_the_place(num_tokens: int) -> None:
    """Of every drafter that the second runner makes from now on."""
    from vllm.v1.worker.gpu import model_runner

    model_runner.init_speculator = lambda *_, **__: Drafter(num_tokens)


def put(runner: Any, drafts: dict[str, list[int]]) -> None:
    """What the drafter said of these requests."""
    states = runner.req_states
    for name, tokens in drafts.items():
        if name in states.req_id_to_index:
            row = states.draft_tokens[states.req_id_to_index[name]]
            row[: len(tokens)] = torch.tensor(tokens, dtype=row.dtype)
