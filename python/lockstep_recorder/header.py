"""The first line of a recording: what the scheduler was configured with.

Reads vLLM's configuration objects by attribute, so that nothing here imports vLLM.
"""

from typing import Any

from lockstep_recorder.errors import RecorderError
from lockstep_recorder.releases import Release

# vLLM's class of a layer's spec -> the word of the format. Subclasses do not count as their base:
# an unknown class may lay out or keep its blocks differently.
_KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "HiddenStateCacheSpec": "hidden_state",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "mamba",
    "CrossAttentionSpec": "cross_attention",
    "EncoderOnlyAttentionSpec": "encoder_only",
}

_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
    "torch.uint8": "uint8",
}

_QUANT_MODES = {
    "NONE": "none",
    "FP8_PER_TENSOR": "fp8_per_tensor",
    "INT8_PER_TOKEN_HEAD": "int8_per_token_head",
    "FP8_PER_TOKEN_HEAD": "fp8_per_token_head",
    "NVFP4": "nvfp4",
}


def _word(words: dict[str, str], name: str, what: str) -> str:
    if name not in words:
        raise RecorderError(f"found {what} {name}; the format has a word for {', '.join(words)}")
    return words[name]


def _dtype(dtype: Any) -> str:
    return _word(_DTYPES, str(dtype), "an element type")


def _attention_keys(spec: Any, release: Release) -> dict[str, Any]:
    """The keys of a spec that keeps tokens; sizes in elements, windows and chunks in tokens."""
    keys: dict[str, Any] = {
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": _dtype(spec.dtype),
    }
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None):
            keys[name] = getattr(spec, name)
    is_mla = "MLA" in type(spec).__name__ or type(spec).__name__ == "HiddenStateCacheSpec"
    head_size_v = getattr(spec, "head_size_v", None)
    if not is_mla and head_size_v not in (None, spec.head_size):
        keys["head_size_v"] = head_size_v
    quant_mode = _word(_QUANT_MODES, spec.kv_quant_mode.name, "a cache quantization")
    if quant_mode != "none":
        keys["kv_quant_mode"] = quant_mode
    if type(spec).__name__ == "SlidingWindowMLASpec":
        keys["mla_rows"] = True
    for name in ("cache_dtype_str", "model_version", "alignment"):
        if getattr(spec, name, None):
            keys[name] = getattr(spec, name)
    compress_ratio = getattr(spec, release.compress_ratio_attribute, 1)
    if compress_ratio != 1:
        if not isinstance(compress_ratio, int):
            raise RecorderError(
                f"found {compress_ratio} tokens per stored row; expected a whole number"
            )
        keys["compress_ratio"] = compress_ratio
    return keys


def _mamba_keys(spec: Any) -> dict[str, Any]:
    """The keys of a spec that keeps states; shapes in elements, in page order."""
    return {
        "shapes": [list(shape) for shape in spec.shapes],
        "dtypes": [_dtype(dtype) for dtype in spec.dtypes],
        "mamba_cache_mode": spec.mamba_cache_mode,
        "num_speculative_blocks": spec.num_speculative_blocks,
    }


def spec_of(spec: Any, release: Release) -> dict[str, Any]:
    """vLLM's spec of one layer in the words of the format."""
    kind = _word(_KINDS, type(spec).__name__, "a kind of cache")
    keys = {"type": kind, "block_size": spec.block_size}
    keys |= _mamba_keys(spec) if kind == "mamba" else _attention_keys(spec, release)
    if getattr(spec, "page_size_padded", None):
        keys["page_size_padded"] = spec.page_size_padded
    return keys


def group_of(group: Any, release: Release) -> dict[str, Any]:
    """One KV cache group: its layers, the spec they share, or one spec each."""
    spec = group.kv_cache_spec
    keys: dict[str, Any] = {"layers": list(group.layer_names)}
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        specs = [spec_of(spec.kv_cache_specs[name], release) for name in group.layer_names]
        keys |= {"spec": specs[0], "layer_specs": specs}
    else:
        keys["spec"] = spec_of(spec, release)
    return keys


def _spec_method(speculative: Any) -> str:
    """What the drafts need of the cache: nothing, slots, or slots and the token after a hit."""
    if speculative.use_eagle():
        return "eagle"
    return "draft_model" if speculative.uses_draft_model() else "ngram"


def config_of(vllm_config: Any) -> dict[str, Any]:
    """The options that decide what the scheduler does, under their names in vLLM."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    config: dict[str, Any] = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": vllm_config.model_config.max_model_len,
        "block_size": cache.block_size,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "async_scheduling": bool(scheduler.async_scheduling),
        "scheduler_reserve_full_isl": bool(scheduler.scheduler_reserve_full_isl),
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "policy": str(scheduler.policy),
        "mamba_cache_mode": cache.mamba_cache_mode,
        "dcp": parallel.decode_context_parallel_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    if getattr(cache, "mamba_block_size", None):
        config["mamba_block_size"] = cache.mamba_block_size
    if speculative is not None:
        config["num_spec_tokens"] = speculative.num_speculative_tokens
        config["spec_method"] = _spec_method(speculative)
    # What the engine core makes block hashes with; stated also as 0, where drafts like EAGLE's
    # would have one. Releases without the property hash blocks alone.
    lookahead = getattr(vllm_config, "num_hash_lookahead_tokens", None)
    if lookahead is not None and config.get("spec_method") == "eagle":
        config["num_hash_lookahead_tokens"] = lookahead
    return config


def beyond_format(scheduler: Any, release: Release) -> list[str]:
    """Names of choices that change decisions and that the format cannot say: an audit of such a
    recording is sound, a conform may part from it."""
    config = scheduler.vllm_config
    found = [what for what, holds in release.beyond_format if holds(config)]
    groups = scheduler.kv_cache_config.kv_cache_groups
    eagle_groups = [bool(getattr(group, "is_eagle_group", False)) for group in groups]
    if any(eagle_groups) and not all(eagle_groups):
        found.append("is_eagle_group")
    if getattr(config.speculative_config, "parallel_drafting", False):
        found.append("parallel_drafting")
    return found


def header_of(
    scheduler: Any, release: Release, hash_block_size: int, family: str, seed: int
) -> dict[str, Any]:
    """The header of a recording of `scheduler`, which has just been made.

    Raises RecorderError for what no recording can hold: connectors, encoder-decoder models, kinds
    of cache without a word in the format.
    """
    if scheduler.connector is not None or getattr(scheduler, "ec_connector", None) is not None:
        raise RecorderError("found a KV or encoder connector; recordings of serving have none")
    if scheduler.is_encoder_decoder:
        raise RecorderError("found an encoder-decoder model; expected a decoder")
    kv_cache_config = scheduler.kv_cache_config
    header = {
        "schedule_recording": 1,
        "engine": {"name": "vllm", "version": release.version},
        "family": family,
        "seed": seed,
        "config": config_of(scheduler.vllm_config),
        "groups": [group_of(group, release) for group in kv_cache_config.kv_cache_groups],
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "scheduler_block_size": scheduler.block_size,
        "hash_block_size": hash_block_size,
    }
    beyond = beyond_format(scheduler, release)
    if beyond:
        header["x_beyond_format"] = beyond
    return header
