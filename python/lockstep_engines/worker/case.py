"""A case as vLLM's worker is made for it: what is refused, the layers, the backend of attention,
the configuration of a model that has no files."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from typing import Any, ClassVar

from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.mla import triton_mla

from lockstep_engines.protocol import Refused
from lockstep_engines.worker import layers as worker_layers
from lockstep_engines.worker.layers import Layer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
VOCABULARY = 512  # of the model
_READ_BY_ATTENTION = ("full", "sliding_window", "chunked_local", "mla")
TRITON_BACKEND = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


class SmallBlocksBackend(triton_attn.TritonAttentionBackend):
    """vLLM's Triton attention for block sizes that its kernels do not support: attention does not
    run here, and rows are written in blocks of any size."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return [triton_attn.MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """Of releases that ask a backend for it: as Triton attention's."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class SmallBlocksMlaBackend(triton_mla.TritonMLABackend):
    """The same of MLA."""

    get_supported_kernel_block_sizes = SmallBlocksBackend.get_supported_kernel_block_sizes
    supports_block_size = SmallBlocksBackend.supports_block_size


class SplitBlocksBackend(SmallBlocksBackend):
    """Takes blocks of `sizes` only, as the compiled backends do: vLLM splits every other block into
    kernel blocks of the largest of them that divides it."""

    sizes: ClassVar[list[int]] = []

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return SplitBlocksBackend.sizes


class SplitBlocksMlaBackend(SmallBlocksMlaBackend):
    """The same of MLA."""

    get_supported_kernel_block_sizes = SplitBlocksBackend.get_supported_kernel_block_sizes


class PairsApartImpl(triton_attn.TritonAttentionImpl):
    """Triton attention on a cache that starts with K of all blocks."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, *more: Any
    ) -> Any:
        return super().do_kv_cache_update(layer, key, value, kv_cache.transpose(0, 1), *more)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *more: Any, **named: Any
    ) -> Any:
        return super().forward(layer, query, key, value, kv_cache.transpose(0, 1), *more, **named)


class PairsApartBackend(SplitBlocksBackend):
    """Of releases that ask a backend for the shape of its cache: K of all blocks before V of all,
    as FlashAttention's. Hybrid models have both in a page, whatever the backend."""

    @staticmethod
    def get_impl_cls() -> Any:
        return PairsApartImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def latent_sizes() -> list[int]:
    """Elements per MLA row that vLLM's backends support."""
    return mla_attention.MLACommonBackend.get_supported_head_sizes()


def specs_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    return group.get("layer_specs") or [group["spec"]] * len(group["layers"])


def refuse(case: dict[str, Any], is_v2: bool) -> None:
    """Cases whose layers or options the worker is not driven with, by name."""
    config = case["config"]
    for group in case["groups"]:
        for spec in specs_of(group):
            _refuse_spec(spec)
    kinds = {spec["type"] for group in case["groups"] for spec in specs_of(group)}
    if "mla" in kinds and kinds & {"full", "sliding_window", "chunked_local"}:
        raise Refused("MLA with attention of other kinds: vLLM has no model with both")
    for option in ("dcp", "pcp"):
        if config.get(option, 1) != 1:
            raise Refused(f"{option} {config[option]}: ranks of a worker are not driven")
    needs_numba = config.get("num_spec_tokens") and not config.get("async_scheduling")
    if not is_v2 and needs_numba and not importlib.util.find_spec("numba"):
        raise Refused("drafts: vLLM's ngram proposer needs numba, which is not installed")
    if "connector" in case:
        raise Refused("a KV connector: its worker is not driven")


def _refuse_spec(spec: dict[str, Any]) -> None:
    kinds = worker_layers.KINDS
    if spec["type"] not in kinds:
        raise Refused(f"layers of kind {spec['type']}: the worker is driven with {kinds}")
    for dtype in spec.get("dtypes") or [spec["dtype"]]:
        if dtype not in DTYPES:
            raise Refused(f"caches of {dtype}: the worker is driven with {[*DTYPES]}")
    if spec["type"] == "mla" and spec["head_size"] not in latent_sizes():
        raise Refused(f"MLA with heads of {spec['head_size']}: vLLM takes {latent_sizes()}")
    if spec["type"] != "mamba":
        return
    if spec.get("mamba_cache_mode") == "all" and spec["num_speculative_blocks"]:
        raise Refused("states of drafts in cache mode all are not driven")
    sizes = [
        math.prod(shape) * worker_layers.TORCH_DTYPES[dtype].itemsize
        for shape, dtype in zip(spec["shapes"], spec["dtypes"], strict=True)
    ]
    if any(size % 8 for size in sizes):
        raise Refused(f"states of {sizes} bytes: the worker is driven with words of 8 bytes")


def model_config(layers: list[Layer]) -> dict[str, Any]:
    """What vLLM reads of a model before it builds it: that of MLA, else of the first layer with
    rows; for a model with only states, any value."""
    rows = [layer.spec for layer in layers if layer.spec["type"] not in ("mamba", "hidden_state")]
    any_row = {"num_kv_heads": 1, "head_size": 16, "dtype": "bf16"}
    mla = [spec for spec in rows if spec["type"] == "mla"]
    first: dict[str, Any] = (mla or rows or [any_row])[0]
    keeps_states = any(layer.state_type for layer in layers)
    head_dim = first["head_size"] + first["head_size"] % 2  # nothing here rotates, but it must fit
    config = {
        "architectures": [f"Lockstep{'Hybrid' if keeps_states else ''}ContentModel"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": first["num_kv_heads"] * head_dim,
        "intermediate_size": 16,
        "num_hidden_layers": len(layers),
        "num_attention_heads": first["num_kv_heads"],
        "num_key_value_heads": first["num_kv_heads"],
        "head_dim": head_dim,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": DTYPES[first["dtype"]],
    }
    if keeps_states:
        config["mamba_chunk_size"] = 8
        config["layers_block_type"] = [
            "mamba" if layer.state_type else "attention" for layer in layers
        ]
    if first.get("type") == "mla":
        latent, rope = worker_layers.mla_sizes(first)
        config |= {
            "model_type": "deepseek_v3",
            "kv_lora_rank": latent,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": 1,
            "v_head_dim": 1,
            "q_lora_rank": None,
        }
    return config


def describe_model(config: dict[str, Any], folder: str) -> None:
    """The configuration of a model without files."""
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def state_modes(chosen: str) -> list[str]:
    """Cache modes of states that the worker is driven with; `chosen`: see state_type_of()."""
    return ["none", "align", "all"] if chosen in ("", "mamba2") else ["none", "align"]


def state_type_of(spec: dict[str, Any], chosen: str) -> str:
    """Of a spec that keeps states; `chosen`: by the option of the worker. Short convolutions export
    no states in prefills."""
    exports = bool(spec.get("num_prefill_checkpoint_blocks"))
    if spec.get("mamba_cache_mode") == "all":
        if chosen not in ("", "mamba2"):
            raise Refused(f"states in cache mode all: vLLM has none of {chosen}, only mamba2")
        return "mamba2"
    if chosen == "short_conv" and exports:
        raise Refused("states that prefills export: short convolutions of vLLM export none")
    return chosen or ("short_conv" if len(spec["shapes"]) == 1 and not exports else "mamba2")


def plan_layers(groups: list[dict[str, Any]], chosen: str) -> list[Layer]:
    layers: list[Layer] = []
    for g, group in enumerate(groups):
        for name, spec in zip(group["layers"], specs_of(group), strict=True):
            kind = state_type_of(spec, chosen) if spec["type"] == "mamba" else ""
            layers.append(Layer(name, g, len(layers), spec, kind))
    return layers


def kernel_block_sizes(case: dict[str, Any], largest: int) -> list[int]:
    """Kernel block sizes per group: those of the case, else those that vLLM selects for a backend
    that supports the largest common size up to `largest` (0: no limit) and the blocks that cannot
    be split."""
    specs = [group["spec"] for group in case["groups"]]
    blocks = [spec["block_size"] for spec in specs]
    if "kernel_block_sizes" in case:
        sizes: list[int] = case["kernel_block_sizes"]
        for spec, block, size in zip(specs, blocks, sizes, strict=True):
            if block % size or (block != size and not _can_be_split(spec)):
                raise Refused(
                    f"kernel blocks of {size} tokens in blocks of {block}: vLLM splits blocks of "
                    "attention in pages without padding"
                )
        return sizes
    common = math.gcd(*(spec["block_size"] for spec in specs if _can_be_split(spec)))
    if not largest or not common:
        return blocks
    taken = {max(size for size in range(1, largest + 1) if common % size == 0)}
    rows = [spec for spec in specs if spec["type"] in _READ_BY_ATTENTION]
    taken |= {spec["block_size"] for spec in rows if not _can_be_split(spec)}
    return [
        max(size for size in taken if spec["block_size"] % size == 0)
        if _can_be_split(spec)
        else spec["block_size"]
        for spec in specs
    ]


def _can_be_split(spec: dict[str, Any]) -> bool:
    """True for attention in pages without padding."""
    return spec["type"] in _READ_BY_ATTENTION and spec.get("page_size_padded") is None


def refuse_apart(layers: list[Layer]) -> str:
    """Why tensors with separate K and V are refused; empty: they are supported."""
    if not hasattr(triton_attn.TritonAttentionBackend, "get_kv_cache_shape"):
        return "tensors with K and V apart: backends of this release have no shape of their own"
    rows = [layer.spec for layer in layers if layer.spec["type"] in _READ_BY_ATTENTION]
    if not all(_can_be_split(spec) for spec in rows):
        return "tensors with K and V apart in padded pages: vLLM strides K and V by a page"
    return ""


def backends_of(layers: list[Layer], kernel_sizes: list[int], pairs_apart: bool) -> tuple[str, str]:
    """Of attention and of MLA: Triton's; of blocks that its kernels do not take, with that limit
    lifted; where blocks are split (`kernel_sizes`: by group), one that takes these sizes only."""
    rows = [layer for layer in layers if layer.spec["type"] in _READ_BY_ATTENTION]
    backends: tuple[Any, Any] = (triton_attn.TritonAttentionBackend, triton_mla.TritonMLABackend)
    splits = any(kernel_sizes[layer.group] != layer.spec["block_size"] for layer in rows)
    if splits or pairs_apart:
        of_pairs = PairsApartBackend if pairs_apart else SplitBlocksBackend
        backends = (of_pairs, SplitBlocksMlaBackend)
        SplitBlocksBackend.sizes = sorted({kernel_sizes[layer.group] for layer in rows})
    elif any(layer.spec["block_size"] % 16 for layer in rows):
        backends = (SmallBlocksBackend, SmallBlocksMlaBackend)
    first, second = (f"{backend.__module__}.{backend.__qualname__}" for backend in backends)
    return first, second
