"""The layers of the model without weights, by kind: vLLM's own layer and its writing kernel where
that is Triton or torch; for compiled kernels and for those that compute numbers, a stand-in.

vLLM's runner finds a layer's `module` as it finds any model's. A stand-in uses the metadata that
vLLM's builders made for the step and by nothing else: which slots are written, which state a row
reads, how many of its tokens it has, where the state after each goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, mla_attention
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import extract_hidden_states
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from lockstep_engines.protocol import EngineFault
from lockstep_engines.worker import contents as worker_contents

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# vLLM's kinds of state layers that are driven.
STATE_TYPES = {
    "mamba2": MambaAttentionBackendEnum.MAMBA2,
    "short_conv": MambaAttentionBackendEnum.SHORT_CONV,
    "gdn": MambaAttentionBackendEnum.GDN_ATTN,
}
_NULL_BLOCK = 0


@dataclass
class Layer:
    """One layer of the plan; `index`: its place there; `state_type`: where it keeps states."""

    name: str
    group: int
    index: int
    spec: dict[str, Any]
    state_type: str = ""


class ModelLayer:
    """A layer of the model. `parts` are views of its rows in the cache, [blocks, tokens, heads,
    elements], `states` of its states, [blocks, ...]; it keeps one of the two."""

    module: Any
    # The arguments of the last call of the attention kernel; None: not called, or another kind.
    attended: dict[str, Any] | None = None

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.written_parts: list[torch.Tensor] = []  # `parts` of the opened case

    def write(self, contents: numpy.ndarray, metadata: Any) -> list[str]:
        """A step; returns the faults of the metadata, one line each."""
        raise NotImplementedError

    def parts(self) -> list[torch.Tensor]:
        return []

    def states(self) -> list[torch.Tensor]:
        return []


class RowLayer(ModelLayer):
    """Keeps rows, [tokens, heads * size]."""

    def _rows(self, contents: numpy.ndarray, part: int, size: int) -> torch.Tensor:
        spec = self.layer.spec
        dtype = TORCH_DTYPES[spec["dtype"]]
        made = worker_contents.rows(
            contents,
            self.layer.index,
            part,
            spec["num_kv_heads"],
            size * dtype.itemsize,
            spec["dtype"],
        )
        flat = torch.from_numpy(numpy.ascontiguousarray(made).reshape(len(contents), -1))
        return flat.view(dtype)

    def _cache(self) -> torch.Tensor:
        cache = self.module.kv_cache
        return cache[0] if isinstance(cache, list) else cache


# Arguments of calls of the attention kernel, in place of the kernel.
_attention_calls: list[dict[str, Any]] = []


def take_down_attention(**arguments: Any) -> None:
    """Replaces vLLM's unified_attention: Lockstep reads the cache through the worker's tables, so
    attention does not run; the kernel's arguments are compared."""
    _attention_calls.append(arguments)
    arguments["out"].zero_()


class AttentionLayer(RowLayer):
    """K and V: vLLM's layer, written by its Triton kernel."""

    def __init__(self, layer: Layer, cache_config: Any) -> None:
        super().__init__(layer)
        spec = layer.spec
        options = {
            "num_heads": spec["num_kv_heads"],
            "head_size": spec["head_size"],
            "scale": 1.0,
            "num_kv_heads": spec["num_kv_heads"],
            "cache_config": cache_config,
            "prefix": layer.name,
        }
        if spec["type"] == "chunked_local":
            from vllm.model_executor.layers.attention import ChunkedLocalAttention

            self.module = ChunkedLocalAttention(
                attention_chunk_size=spec["attention_chunk_size"], **options
            )
            return
        window = spec.get("sliding_window")
        self.module = Attention(per_layer_sliding_window=window, **options)

    def write(self, contents: numpy.ndarray, metadata: Any) -> list[str]:
        spec = self.layer.spec
        key = self._rows(contents, 0, spec["head_size"])
        value = self._rows(contents, 1, spec.get("head_size_v", spec["head_size"]))
        _attention_calls.clear()
        self.module(torch.zeros_like(key), key, value)
        self.attended = _attention_calls[-1] if _attention_calls else None
        return []

    def parts(self) -> list[torch.Tensor]:
        """As vLLM passes them to the kernel that writes rows."""
        seen: list[torch.Tensor] = []

        def take_down(_: Any, __: Any, key_cache: Any, value_cache: Any, *___: Any) -> None:
            seen.extend((key_cache, value_cache))

        attention = getattr(self.module, "attn", self.module)
        nothing = torch.zeros(0, attention.num_kv_heads, attention.head_size)
        write = triton_attn.triton_reshape_and_cache_flash
        triton_attn.triton_reshape_and_cache_flash = take_down
        try:
            slots = torch.zeros(0, dtype=torch.int64)
            attention.impl.do_kv_cache_update(attention, nothing, nothing, self._cache(), slots)
        finally:
            triton_attn.triton_reshape_and_cache_flash = write
        return seen


def _concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Writes the latent and then the part with positions, as vLLM's compiled kernel does."""
    block_size, latent = kv_cache.shape[1], kv_c.shape[1]
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            if slot >= len(kv_cache) * block_size:
                raise EngineFault(f"MLA writes slot {slot} of {len(kv_cache) * block_size}")
            row = kv_cache[slot // block_size, slot % block_size]
            row[:latent] = kv_c[i]
            row[latent:] = k_pe[i]


class _NoPrefill:
    """A backend of MLA's prefills that prepares nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def clone(self) -> _NoPrefill:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _MlaAttention(mla_attention.MLAAttention):
    def process_weights_after_loading(self, *_: Any) -> None:
        """There are none."""

    def forward_impl(self, *args: Any, **options: Any) -> torch.Tensor:
        return options["output"].zero_()


def _patch_mla() -> None:
    """Replaces two parts of vLLM's MLA: the backend of prefills, since nothing attends, and the
    compiled kernel that writes rows, which only a build has."""
    from vllm import _custom_ops

    mla_attention.get_mla_prefill_backend = lambda *_, **__: _NoPrefill
    _custom_ops.concat_and_cache_mla = _concat_and_cache_mla


class MlaLayer(RowLayer):
    """One row per token: vLLM's layer and views, and a stand-in for the kernel that writes."""

    def __init__(self, layer: Layer, cache_config: Any) -> None:
        super().__init__(layer)
        self.sizes = mla_sizes(layer.spec)
        latent, rope = self.sizes
        _patch_mla()
        projection = nn.Linear(latent, 2, bias=False)
        projection.weight.requires_grad_(False)
        self.module = _MlaAttention(
            num_heads=1,
            scale=1.0,
            qk_nope_head_dim=1,
            qk_rope_head_dim=rope,
            v_head_dim=1,
            q_lora_rank=None,
            kv_lora_rank=latent,
            kv_b_proj=projection,
            cache_config=cache_config,
            prefix=layer.name,
        )

    def write(self, contents: numpy.ndarray, metadata: Any) -> list[str]:
        latent, rope = self.sizes
        row = self._rows(contents, 0, latent + rope)
        query = torch.zeros(len(row), 1, 1 + rope, dtype=row.dtype)
        self.module(query, row[:, :latent], row[:, None, latent:], output_shape=(len(row), 1))
        return []

    def parts(self) -> list[torch.Tensor]:
        return [self._cache().unsqueeze(2)]


def mla_sizes(spec: dict[str, Any]) -> tuple[int, int]:
    """The two parts of a row: the latent, and the part with positions."""
    rope = min(64, spec["head_size"] // 4)
    return spec["head_size"] - rope, rope


class HiddenStateLayer(RowLayer):
    """vLLM's layer for hidden states of some layers, and its writes."""

    def __init__(self, layer: Layer, cache_config: Any) -> None:
        super().__init__(layer)
        self.module = extract_hidden_states.CacheOnlyAttentionLayer(
            layer.spec["num_kv_heads"],
            layer.spec["head_size"],
            cache_config=cache_config,
            prefix=layer.name,
        )

    def write(self, contents: numpy.ndarray, metadata: Any) -> list[str]:
        spec = self.layer.spec
        rows = self._rows(contents, 0, spec["head_size"])
        cache = self._cache()
        null_block = cache[:1].clone()  # before there is a cache: nothing
        self.module(rows.view(len(rows), spec["num_kv_heads"], spec["head_size"]))
        if (contents == worker_contents.NO_CONTENT).any():  # padding, which vLLM writes there
            cache[:1] = null_block
        return []

    def parts(self) -> list[torch.Tensor]:
        """Releases that ask a backend for the shape of its cache have heads after tokens in it."""
        asked = "get_kv_cache_shape" in vars(extract_hidden_states.CacheOnlyAttentionBackend)
        return [self._cache() if asked else self._cache().transpose(1, 2)]


# States.


@dataclass
class Chain:
    """Tokens of one row that follow each other: their places in the batch, the block whose state
    they continue (None: none), and the block that the state after each goes to."""

    tokens: range | list[int]
    source: int | None
    targets: list[int | None]


def _rows_of(starts: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Row, first token and end, of rows that have tokens."""
    bounds = starts.tolist()
    for row in range(len(bounds) - 1):
        if bounds[row] < bounds[row + 1]:
            yield row, bounds[row], bounds[row + 1]


def _last(count: int, block: int, exported: tuple[int, int] | None = None) -> list[int | None]:
    """Keeps the state after the last token, and the state that a prefill exports inside a chunk."""
    targets: list[int | None] = [None] * (count - 1) + [block]
    if exported:
        offset, target = exported
        if not 0 < offset < count:
            raise EngineFault(f"a prefill of {count} tokens exports its state after {offset}")
        targets[offset - 1] = target
    return targets


def exported_of(checkpoint: Any, row: int) -> tuple[int, int] | None:
    """For a row of a layer's checkpoints: after how many tokens, and to which block."""
    if checkpoint is None:
        return None
    offset, block = int(checkpoint.checkpoint_offsets[row]), int(checkpoint.state_indices[row])
    return (offset, block) if offset > 0 and block != _NULL_BLOCK else None


def checkpoint_of(metadata: Any) -> tuple[Any, int]:
    """The states that prefills of a step export, and the row of the first prefill among them:
    Mamba2 has rows of prefills only, other layers of all requests without drafts."""
    if hasattr(metadata, "checkpoint_meta"):
        return metadata.checkpoint_meta, 0
    return getattr(metadata, "checkpoint", None), metadata.num_decodes


def _source(blocks: list[int], accepted: int) -> int:
    """The state after the last accepted draft."""
    if not 0 < accepted <= len(blocks):
        raise EngineFault(f"a row has {accepted} accepted tokens and {len(blocks)} states")
    return blocks[accepted - 1]


def _chains_of_mamba(metadata: Any) -> Iterator[Chain]:
    """Decodes, which with drafts keep a state for each token, then prefills."""
    source: int | None
    if metadata.num_decodes > 0:
        blocks = metadata.state_indices_tensor_d.tolist()
        accepted = metadata.num_accepted_tokens
        if accepted is None:
            for row in range(metadata.num_decodes):
                block = blocks[row][0] if isinstance(blocks[row], list) else blocks[row]
                yield Chain([row], block, [block])
        else:
            starts = metadata.query_start_loc_d[: metadata.num_decodes + 1]
            for row, first, end in _rows_of(starts):
                source = _source(blocks[row], int(accepted[row]))
                yield Chain(range(first, end), source, blocks[row][: end - first])
    if metadata.num_prefills > 0:
        blocks = metadata.state_indices_tensor_p.flatten().tolist()
        continues = metadata.has_initial_states_p.tolist()
        checkpoint, first_row = checkpoint_of(metadata)
        for row, first, end in _rows_of(metadata.query_start_loc_p[: metadata.num_prefills + 1]):
            tokens = range(metadata.num_decode_tokens + first, metadata.num_decode_tokens + end)
            source = blocks[row] if continues[row] else None
            exported = exported_of(checkpoint, first_row + row)
            yield Chain(tokens, source, _last(end - first, blocks[row], exported))


def _chains_in_all_blocks(metadata: Any, block_size: int) -> Iterator[Chain]:
    """Mode `all`, without drafts: a block keeps the state after its last token, and the last block
    of a row the state after the row's last token."""
    last_computed = metadata.block_idx_last_computed_token.tolist()
    last_scheduled = metadata.block_idx_last_scheduled_token.tolist()
    for row in range(metadata.num_decodes):
        blocks = metadata.state_indices_tensor_d[row].tolist()
        yield Chain([row], blocks[last_computed[row]], [blocks[last_scheduled[row]]])
    if metadata.num_prefills == 0:
        return
    continues = metadata.has_initial_states_p.tolist()
    for row, first, end in _rows_of(metadata.query_start_loc_p[: metadata.num_prefills + 1]):
        blocks = metadata.state_indices_tensor_p[row].tolist()
        last = last_scheduled[metadata.num_decodes + row]
        targets = _last(end - first, blocks[last])
        for column in range(int(metadata.block_idx_first_scheduled_token_p[row]), last):
            end_of_block = (column + 1) * block_size - int(metadata.num_computed_tokens_p[row])
            if not 0 < end_of_block <= len(targets):
                raise EngineFault(f"a row of {len(targets)} tokens fills block {column}")
            targets[end_of_block - 1] = blocks[column]
        source = blocks[last_computed[metadata.num_decodes + row]] if continues[row] else None
        tokens = range(metadata.num_decode_tokens + first, metadata.num_decode_tokens + end)
        yield Chain(tokens, source, targets)


def _chains_of_gdn(metadata: Any) -> Iterator[Chain]:
    """Rows with drafts, which keep a state for each token, and the others."""
    source: int | None
    has_drafts = metadata.spec_sequence_masks is not None
    if has_drafts:
        places = metadata.spec_token_indx.tolist()
        blocks = metadata.spec_state_indices_tensor.tolist()
        accepted = metadata.num_accepted_tokens.tolist()
        starts = metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1]
        for row, first, end in _rows_of(starts):
            source = _source(blocks[row], accepted[row])
            yield Chain(places[first:end], source, blocks[row][: end - first])
    num_rows = metadata.num_decodes + metadata.num_prefills
    if num_rows == 0:
        return
    blocks = metadata.non_spec_state_indices_tensor.tolist()
    continues = [True] * num_rows
    if metadata.num_prefills > 0:
        continues = metadata.has_initial_state.tolist()
    for row, first, end in _rows_of(metadata.non_spec_query_start_loc[: num_rows + 1]):
        tokens: range | list[int] = range(first, end)
        if has_drafts:
            tokens = metadata.non_spec_token_indx[first:end].tolist()
        source = blocks[row] if continues[row] else None
        exported = exported_of(getattr(metadata, "checkpoint", None), row)
        yield Chain(tokens, source, _last(end - first, blocks[row], exported))


class _StateModule(nn.Module, MambaBase):
    """For vLLM, a layer with these states, of one of its kinds."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.layer_name = layer.name
        self.kv_cache = ()
        get_current_vllm_config().compilation_config.static_forward_context[layer.name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(shape) for shape in self.layer.spec["shapes"])

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(TORCH_DTYPES[name] for name in self.layer.spec["dtypes"])

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return STATE_TYPES[self.layer.state_type]


class StateLayer(ModelLayer):
    """Keeps states: rule (2) of sim/protocol/backend.h in place of a recurrence, read and written
    where the metadata of vLLM's kind of layer says."""

    def __init__(self, layer: Layer, cache_config: Any) -> None:
        super().__init__(layer)
        self.module = _StateModule(layer)

    def write(self, contents: numpy.ndarray, metadata: Any) -> list[str]:
        faults: list[str] = []
        if metadata is None:  # an idle rank's batch
            return faults
        for chain in self._chains(metadata):
            if self._is_padding(contents, chain):
                continue  # as vLLM's kernels skip it
            if chain.source == _NULL_BLOCK or _NULL_BLOCK in chain.targets:
                faults.append(
                    f"{self.layer.name}: a state is kept in the null block, of the row with "
                    f"token {chain.tokens[0]} of the batch"
                )
                continue
            self._check(contents, chain)
            for s, state in enumerate(self.states()):
                self._advance(s, state, contents, chain)
        return faults

    def _chains(self, metadata: Any) -> Iterator[Chain]:
        spec = self.layer.spec
        if self.layer.state_type == "gdn":
            return _chains_of_gdn(metadata)
        if spec.get("mamba_cache_mode") == "all":
            return _chains_in_all_blocks(metadata, spec["block_size"])
        return _chains_of_mamba(metadata)

    def _check(self, contents: numpy.ndarray, chain: Chain) -> None:
        num_blocks = len(self.states()[0])
        blocks = [block for block in (chain.source, *chain.targets) if block is not None]
        if any(not 0 <= block < num_blocks for block in blocks):
            raise EngineFault(f"{self.layer.name}: states of blocks {blocks} of {num_blocks}")
        if len(chain.targets) != len(chain.tokens) or max(chain.tokens) >= len(contents):
            raise EngineFault(
                f"{self.layer.name}: tokens {[*chain.tokens]} of {len(contents)} go to "
                f"{len(chain.targets)} states"
            )

    @staticmethod
    def _is_padding(contents: numpy.ndarray, chain: Chain) -> bool:
        if not {chain.source, *chain.targets} <= {None, _NULL_BLOCK}:
            return False
        no_content = worker_contents.NO_CONTENT
        return all(contents[token] == no_content for token in chain.tokens if token < len(contents))

    def _advance(self, s: int, state: torch.Tensor, contents: numpy.ndarray, chain: Chain) -> None:
        words = numpy.zeros(_words_in(state, 0).shape, dtype=numpy.uint64)
        if chain.source is not None:
            words[:] = _words_in(state, chain.source)
        for token, target in zip(chain.tokens, chain.targets, strict=True):
            words = worker_contents.next_state(words, contents[token], self.layer.index, s)
            if target is not None:
                _words_in(state, target)[:] = words

    def states(self) -> list[torch.Tensor]:
        return list(self.module.kv_cache)


def _words_in(state: torch.Tensor, block: int) -> numpy.ndarray:
    """The words of a state in a block: a view of the cache."""
    return state[block].reshape(-1).view(torch.uint8).numpy().view(numpy.uint64)


def copy_functions(has_drafts: bool, num_states: int) -> tuple[Any, ...]:
    """vLLM's functions that move the states of a layer between blocks. With drafts all states move
    as recurrences do: rule (2) does not model a convolution's inputs, which shift."""
    temporal = mamba_utils.get_temporal_copy_spec
    first = temporal if has_drafts else mamba_utils.get_conv_copy_spec
    return (first, *[temporal] * (num_states - 1))


_KINDS = {
    "full": AttentionLayer,
    "sliding_window": AttentionLayer,
    "chunked_local": AttentionLayer,
    "mla": MlaLayer,
    "mamba": StateLayer,
    "hidden_state": HiddenStateLayer,
}
KINDS = [*_KINDS]


def make(layer: Layer, cache_config: Any) -> ModelLayer:
    return _KINDS[layer.spec["type"]](layer, cache_config)
