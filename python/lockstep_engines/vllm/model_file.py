"""A model file (docs/planner.md) of the layers that vLLM builds for a config.json."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

Object = dict[str, Any]

_KINDS = {
    "FullAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "RSWASpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "CrossAttentionSpec": "cross_attention",
    "CircularBufferSpec": "circular_buffer",
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "uint8",
           "int8": "int8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2"}  # fmt: skip
# KVQuantMode -> kv_cache_dtype of a model file.
_FORMATS = {"FP8_PER_TENSOR": "fp8", "NVFP4": "nvfp4"}
# vLLM's backend (of that module, where two share a name) -> its name in Lockstep.
_BACKENDS = {
    "BAILING_LINEAR_ATTN": "",
    "DEEPSEEK_SPARSE_SWA": "sparse_swa",
    "DEEPSEEK_V32_INDEXER": "indexer_v32",
    "DEEPSEEK_V4_INDEXER": "indexer_v4",
    "DEEPSEEK_V41_INDEXER": "indexer_v41",
    "DEEPSEEK_V41_SPARSE_INDEXER": "indexer_v41_sparse",
    "FLASHINFER_MLA_SPARSE_DSV4": "v4_flashinfer",
    "FLASHINFER_MLA_SPARSE_DSV41": "v41_flashinfer",
    "FLASHMLA_SPARSE_DSV4": "v4_flashmla",
    "FLASHMLA_SPARSE_DSV41": "v41_flashmla",
    "INKLING_SCONV_SWA": "inkling_sconv",
    "MINIMAX_M3_SPARSE_INDEXER": "indexer_m3",
}
_SAME_NAME = ("CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "FLASHMLA",
              "FLASHMLA_SPARSE", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASH_ATTN_MLA",
              "FLASH_ATTN_MLA_SPARSE", "FLEX_ATTENTION", "KPOOL_TAIL", "MINIMAX_M3_SPARSE",
              "TOKENSPEED_MLA", "TRITON_ATTN", "TRITON_MLA", "TURBOQUANT")  # fmt: skip
# Fields that follow from the rest, or from the options of a plan.
_DERIVED = {"block_size", "block_stride_alignment", "cache_role", "dtypes",
            "extra_retained_tokens", "is_draft", "is_index_group_leader", "kv_quant_mode",
            "mamba_cache_mode", "mamba_type", "max_tp_shards", "num_head_slots",
            "num_heads", "num_prefill_checkpoint_blocks", "num_speculative_blocks",
            "page_size_padded", "shapes", "state_content_bytes",
            "non_causal_multi_token_decode"}  # fmt: skip
_SAID = {"alignment", "attention_chunk_size", "non_causal", "cache_dtype_str", "dcp_sharded",
         "dtype", "head_size", "head_size_v", "model_version", "num_kv_heads",
         "prefill_checkpoint_alignment", "rswa_window", "sink_len", "sliding_window",
         "tokens_per_state", "topk_buffer_width", "bounded_replay"}  # fmt: skip


class NotInModelFiles(Exception):
    """A layer that the format cannot express; the text names it and the field."""


def _backend(layer: Any) -> str:
    name, module = layer.backend.get_name(), layer.backend.__module__
    if layer.backend.is_ssm():
        return ""
    if layer.backend.__name__ == "Glm5NextIndexerBackend":
        return "indexer_kpool"
    if layer.backend.__name__ == "CompressorBackend":
        return "compressor_v41" if "v41" in module else "compressor_v4"
    if name in _BACKENDS or name in _SAME_NAME:
        return _BACKENDS.get(name, name.lower())
    raise NotInModelFiles(f"layer {layer.name}: backend {name} is not one of Lockstep's")


def _states(layer: Any, dtype: str) -> Object:
    spec, family = layer.spec, layer.spec.mamba_type.name
    shapes, dtypes = spec.shapes, [_DTYPES[str(one).removeprefix("torch.")] for one in spec.dtypes]
    kind: Object = {"kind": "mamba"}
    try:
        if family == "GDN_ATTN":
            (kept, width), (heads, dim, k_dim) = shapes
            k_heads, rest = divmod(width - heads * dim, 2 * k_dim)
            kind |= {"states": "gated_delta_net", "num_heads": heads, "head_dim": dim,
                     "num_k_heads": k_heads, "head_k_dim": k_dim, "conv_kernel": kept + 1,
                     }  # fmt: skip
        elif family == "MAMBA2":
            (kept, width), (heads, dim, size) = shapes
            groups, rest = divmod(width - heads * dim, 2 * size)
            kind |= {"states": "mamba2", "num_heads": heads, "head_dim": dim, "state_size": size,
                     "intermediate_size": heads * dim, "n_groups": groups,
                     "conv_kernel": kept + 1}  # fmt: skip
        elif family == "MAMBA1":
            (kept, width), (channels, size) = shapes
            rest = width - channels
            kind |= {"states": "mamba1", "intermediate_size": width, "state_size": size,
                     "conv_kernel": kept + 1}  # fmt: skip
        elif family == "SHORT_CONV":
            ((kept, width),), rest = shapes, 0
            kind |= {"states": "short_conv", "intermediate_size": width, "conv_kernel": kept + 1}
        else:
            ((heads, dim, size),) = shapes
            rest = size - dim
            kind |= {"states": "linear_attention", "num_heads": heads, "head_dim": dim}
    except ValueError:
        rest = 1
    if rest != 0:
        raise NotInModelFiles(f"layer {layer.name}: no family of states has shapes {shapes}")
    if dtypes[0] != dtype:
        kind["conv_dtype"] = dtypes[0]
    if dtypes[-1] != dtypes[0]:
        kind["ssm_dtype"] = dtypes[-1]
    return kind | {"prefill_checkpoint_alignment": spec.prefill_checkpoint_alignment or 0}


def _rows(layer: Any, dtype: str) -> Object:
    spec, name = layer.spec, type(layer.spec).__name__
    kind: Object = {"kind": _KINDS[name], "num_kv_heads": spec.num_kv_heads,
                    "head_size": spec.head_size}  # fmt: skip
    if name in ("SlidingWindowMLASpec", "CircularBufferSpec"):
        kind["mla_rows"] = True
    elif spec.head_size_v == 0 and name != "MLAAttentionSpec":
        kind |= {"head_size": spec.head_size // 2, "x_one_row": spec.head_size}  # the same bytes
    elif spec.head_size_v not in (0, spec.head_size):
        kind["head_size_v"] = spec.head_size_v
    for key in ("sliding_window", "attention_chunk_size", "rswa_window", "sink_len",
                "alignment", "model_version", "bounded_replay"):  # fmt: skip
        if value := getattr(spec, key, None):
            kind[key] = value
    if (tokens := spec.tokens_per_state) != 1:
        kind["compress_ratio"] = tokens if isinstance(tokens, int) else str(tokens)
    if topk := getattr(spec, "topk_buffer_width", None):
        kind["index_topk"] = topk
    if (text := getattr(spec, "cache_dtype_str", None)) in ("fp8_ds_mla", "nvfp4_ds_mla"):
        kind["cache_dtype_str"] = text
    if "mla_rows" in kind:
        kind["block_size"] = spec.block_size
    if not spec.dcp_sharded:
        kind["dcp_sharded"] = False
    if getattr(spec, "non_causal", False):
        kind["x_non_causal"] = True
    own = _DTYPES[str(spec.dtype).removeprefix("torch.")]
    # Rows that do not follow --kv-cache-dtype.
    is_own = name == "CircularBufferSpec" or _backend(layer) == "inkling_sconv"
    is_own |= own != dtype or _is_indexer(layer)
    if is_own and ("cache_dtype_str" in kind or not _quantized(layer)):
        kind["dtype"] = own
    return kind


def _quantized(layer: Any) -> str:
    """The format of rows that the checkpoint quantizes; empty: the model's dtype, or its own."""
    mode = getattr(getattr(layer.spec, "kv_quant_mode", None), "name", "NONE")
    own = getattr(layer.spec, "cache_dtype_str", None) in ("fp8_ds_mla", "nvfp4_ds_mla")
    if mode == "NONE" or own:
        return ""
    if mode not in _FORMATS:
        raise NotInModelFiles(f"layer {layer.name}: a model file has no key for {mode}")
    return _FORMATS[mode]


def _cache_format(layers: list[Any]) -> Object:
    """kv_cache_dtype, which holds for all rows of a model file without a dtype of their own."""
    rows = [layer for layer in layers if layer.spec and type(layer.spec).__name__ in _KINDS]
    formats = {_quantized(layer): layer.name for layer in rows if not _is_indexer(layer)}
    if len(formats) > 1 and any(formats):
        raise NotInModelFiles(f"layers {', '.join(formats.values())} have different cache formats")
    return {"kv_cache_dtype": next(iter(formats))} if any(formats) else {}


def _kind(layer: Any, dtype: str) -> Object:
    spec = layer.spec
    for entry in dataclasses.fields(spec):
        value = getattr(spec, entry.name)
        if entry.name not in _DERIVED | _SAID and value != entry.default:
            raise NotInModelFiles(
                f"layer {layer.name}: a model file has no key for {entry.name} {value}"
            )
    if type(spec).__name__ == "MambaSpec":
        return _states(layer, dtype)
    if type(spec).__name__ not in _KINDS:
        raise NotInModelFiles(f"layer {layer.name}: a model file has no {type(spec).__name__}")
    kind = _rows(layer, dtype)
    if (backend := _backend(layer)) != "flash_attn":
        kind["backend"] = backend
    if backend == "inkling_sconv":
        kind["block_size"] = spec.block_size
    return kind


def model_file(made: Any, name: str) -> Object:
    """Of model_layers.Layers."""
    config = made.config.model_config
    dtype = _DTYPES[str(config.dtype).removeprefix("torch.")]
    kinds: dict[str, Object] = {}
    caches: list[tuple[int, str]] = []  # number of the layer, kind
    for layer in made.layers:
        if layer.spec is None:
            continue
        kind = _kind(layer, dtype)
        if made.model_class == "FalconForCausalLM":  # created without the cache's configuration
            kind["dtype"] = dtype
        word = next((word for word, known in kinds.items() if known == kind), None)
        if word is None:
            base = kind["states" if "states" in kind else "kind"].split("_")[0]
            if _is_indexer(layer):
                base = "indexer"
            word = base if base not in kinds else f"{base}{len(kinds)}"
            if base == "indexer":
                word = word if word == base else f"{len(kinds)}_indexer"
            kinds[word] = kind
        caches.append((_number(layer.name), word))
    if not caches:
        raise NotInModelFiles("no layer keeps a cache")
    sizes: Object = {"num_attention_heads": config.model_arch_config.total_num_attention_heads,
                     "num_hidden_layers": config.get_total_num_hidden_layers()}  # fmt: skip
    layers = _by_number(caches)
    if len(layers) > sizes["num_hidden_layers"]:
        del sizes["num_hidden_layers"]
    if made.shared:
        sizes["first_shared_layer"] = min(map(_number, made.shared))
    if not made.supports_pp:
        sizes["supports_pp"] = False
    return {"model_file": 1, "name": name, "dtype": dtype, "max_model_len": config.max_model_len,
            **{key: value for key, value in sizes.items() if value or key != "num_attention_heads"},
            **_cache_format(made.layers),
            "x_built_by": f"vLLM {made.version}: {made.model_class}", "layer_kinds": kinds,
            "layers": _runs(layers)}  # fmt: skip


def _number(name: str) -> int:
    """Of a layer, as vLLM reads it from names such as model.layers.3.self_attn.attn."""
    number = re.search(r"\.(\d+)(?:\.|$)", name)
    return int(number[1]) if number else -1


def _by_number(caches: list[tuple[int, str]]) -> list[Any]:
    """The caches of each layer: one by its kind, several or none as a list. Names that do not
    number the layers in order: each cache is a layer."""
    numbers = [number for number, _ in caches]
    if numbers != sorted(numbers) or numbers[0] < 0:
        return [word for _, word in caches]
    layers: list[Any] = [[] for _ in range(numbers[-1] + 1)]
    for number, word in caches:
        layers[number].append(word)
    return [words[0] if len(words) == 1 else words for words in layers]


def _is_indexer(layer: Any) -> bool:
    return getattr(getattr(layer.spec, "cache_role", None), "name", "") == "INDEXER"


def _runs(layers: list[Any]) -> list[Any]:
    """Equal layers in a row as one entry."""
    entries: list[Any] = []
    for word in layers:
        if entries and entries[-1]["of"] == [word]:
            entries[-1]["repeat"] += 1
        else:
            entries.append({"repeat": 1, "of": [word]})
    return [entry if entry["repeat"] > 1 else entry["of"][0] for entry in entries]
