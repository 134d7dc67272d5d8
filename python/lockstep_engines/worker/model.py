"""A model without weights for vLLM's worker: keys and values are the contents of sim/protocol, the
logits are the tokens that the engine sampled.

The model takes the requests of its rows from the worker's batch, and finds each token's content by
the request and the position that the worker computed. A wrong position gets no content, and is
reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context

from lockstep_engines.worker import layers as worker_layers
from lockstep_engines.worker.case import VOCABULARY
from lockstep_engines.worker.contents import NO_CONTENT
from lockstep_engines.worker.layers import Layer

# Of a draft that pads a row, of unknown content.
ANY_TOKEN = -1


@dataclass
class Step:
    """What a step should compute, by request."""

    first: dict[str, int] = field(default_factory=dict)  # position of the first scheduled token
    contents: dict[str, numpy.ndarray] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # all that are known, and drafts


@dataclass
class Batch:
    """The worker's view of the step, in its own order."""

    names: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)  # by layer
    slot_mappings: Any = None
    faults: list[str] = field(default_factory=list)


class Plan:
    """The layers of the case that is being opened; vLLM makes the model, so it is found here."""

    layers: list[Layer] = []


class ContentModel(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)
        cache_config = get_current_vllm_config().cache_config
        self.kinds = [worker_layers.make(layer, cache_config) for layer in Plan.layers]
        self.layers = nn.ModuleList([kind.module for kind in self.kinds])
        self.hidden_size = vllm_config.model_config.get_hidden_size()
        self.batch_of_worker: Any = None  # () -> names and numbers of tokens, in its order
        self.is_idle = False  # an idle rank's batch
        self.step = Step()
        self.batch = Batch()
        self.logits: torch.Tensor | None = None
        self.answers: list[int] | None = None  # a token for each row of logits

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), self.hidden_size)

    get_input_embeddings = embed_input_ids

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        contents = self._look_around(input_ids, positions)
        for kind in self.kinds:
            metadata = self.batch.metadata.get(kind.layer.name)
            self.batch.faults += kind.write(contents, metadata)
        return torch.zeros(len(positions), self.hidden_size)

    def _look_around(self, input_ids: torch.Tensor, positions: torch.Tensor) -> numpy.ndarray:
        """Records the worker's view of the step; returns the content of each of its tokens."""
        context = get_forward_context()
        names, num_tokens = ([], []) if self.is_idle else self.batch_of_worker()
        batch = self.batch = Batch(names, num_tokens)
        batch.metadata = context.attn_metadata or {}
        batch.slot_mappings = getattr(context, "slot_mapping", None)
        contents = numpy.full(len(positions), NO_CONTENT, dtype=numpy.uint64)
        batch.positions = positions[: sum(num_tokens)].tolist()
        inputs = input_ids[: sum(num_tokens)].tolist()
        first = 0
        for name, count in zip(names, num_tokens, strict=True):
            base, known = self.step.first.get(name, 0), self.step.contents.get(name)
            for i in range(first, first + count):
                at = batch.positions[i] - base
                if known is None or not 0 <= at < len(known):
                    batch.faults.append(
                        f"row {name} computes position {batch.positions[i]}, which was not "
                        "scheduled"
                    )
                    continue
                contents[i] = known[at]
                token = self.step.tokens[name][batch.positions[i]]
                if token not in (ANY_TOKEN, inputs[i]):
                    batch.faults.append(
                        f"row {name} feeds the model token {inputs[i]} at position "
                        f"{batch.positions[i]}; expected {token}"
                    )
            first += count
        return contents

    def compute_logits(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        logits = self.logits = torch.zeros(len(hidden_states), VOCABULARY)
        self.give_answers()
        return logits

    def give_answers(self) -> None:
        """The tokens that the engine sampled win. The worker may have asked for logits before they
        were known."""
        if self.logits is None or self.answers is None:
            return
        for row, token in enumerate(self.answers[: len(self.logits)]):
            self.logits[row, token] = 1.0
        self.answers = self.logits = None

    def load_weights(self, weights: Any) -> set[str]:
        return set()


class HybridContentModel(ContentModel):
    """For vLLM, a model that keeps states and attention's rows."""

    is_hybrid = has_inner_state = True
    supports_mamba_prefix_caching = True

    @staticmethod
    def _states() -> dict[str, Any]:
        return next(layer.spec for layer in Plan.layers if layer.state_type)

    @classmethod
    def get_mamba_state_shape_from_config(cls, _: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(shape) for shape in cls._states()["shapes"])

    @classmethod
    def get_mamba_state_dtype_from_config(cls, _: Any) -> tuple[torch.dtype, ...]:
        return tuple(worker_layers.TORCH_DTYPES[name] for name in cls._states()["dtypes"])

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        states = cls._states()
        return worker_layers.copy_functions(
            states["num_speculative_blocks"] > 0, len(states["shapes"])
        )

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, ...]]:
        made = {}
        for layer in Plan.layers:
            if layer.state_type and worker_layers.STATE_TYPES[layer.state_type] in mamba_types:
                made[worker_layers.STATE_TYPES[layer.state_type]] = worker_layers.copy_functions(
                    layer.spec["num_speculative_blocks"] > 0, len(layer.spec["shapes"])
                )
        return made
