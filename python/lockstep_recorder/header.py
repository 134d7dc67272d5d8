"""The first line of a recording: what the scheduler was configured with.

Reads vLLM's configuration objects by attribute, so that nothing here imports vLLM.
"""

from typing import Any

from lockstep_recorder.errors import RecorderError
from lockstep_recorder.options import CONFIG_KEYS, FLAGS, REFUSALS, attribute_of, role_of
from lockstep_recorder.releases import Release

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
    "INT4_PER_TOKEN_HEAD": "int4_per_token_head",
    "NVFP4": "nvfp4",
}


# Of the algorithms that hash blocks those that the format names; which one it is decides nothing.
_HASH_ALGORITHMS = ("sha256_cbor", "xxhash_cbor")

# Written when set, under vLLM's names.
_OPTIONAL_OF_ATTENTION = (
    "sliding_window",
    "attention_chunk_size",
    "extra_retained_tokens",
    "bounded_replay",
    "sink_len",
    "rswa_window",
)


def _word(words: dict[str, str], name: str, what: str) -> str:
    if name not in words:
        raise RecorderError(f"found {what} {name}; the format has a word for {', '.join(words)}")
    return words[name]


def _dtype(dtype: Any) -> str:
    return _word(_DTYPES, str(dtype), "an element type")


def _attention_keys(spec: Any, release: Release) -> dict[str, Any]:
    """The keys of a spec that keeps tokens; sizes in elements, windows and chunks in tokens."""
    name = type(spec).__name__
    keys: dict[str, Any] = {
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": _dtype(spec.dtype),
    }
    is_mla = "MLA" in name or name == "HiddenStateCacheSpec"
    head_size_v = getattr(spec, "head_size_v", None)
    if not is_mla and head_size_v not in (None, spec.head_size):
        keys["head_size_v"] = head_size_v
    quant_mode = _word(_QUANT_MODES, spec.kv_quant_mode.name, "a cache quantization")
    if quant_mode != "none":
        keys["kv_quant_mode"] = quant_mode
    if name in release.mla_rows:
        keys["mla_rows"] = True
    for key in (*_OPTIONAL_OF_ATTENTION, *release.page_keys):
        if getattr(spec, key, None):
            keys[key] = getattr(spec, key)
    if not getattr(spec, "dcp_sharded", True):  # every rank keeps all of its tokens
        keys["dcp_sharded"] = False
    row_tokens = getattr(spec, release.row_tokens_attribute, 1)
    if row_tokens != 1:
        # A fraction, "1/4": several rows per token.
        keys[release.row_tokens_attribute] = (
            row_tokens if isinstance(row_tokens, int) else str(row_tokens)
        )
    return keys


def _mamba_keys(spec: Any) -> dict[str, Any]:
    """The keys of a spec that keeps states; shapes in elements, in page order."""
    keys = {
        "shapes": [list(shape) for shape in spec.shapes],
        "dtypes": [_dtype(dtype) for dtype in spec.dtypes],
        "mamba_cache_mode": spec.mamba_cache_mode,
        "num_speculative_blocks": spec.num_speculative_blocks,
    }
    if getattr(spec, "num_prefill_checkpoint_blocks", 0):
        keys["num_prefill_checkpoint_blocks"] = spec.num_prefill_checkpoint_blocks
    if getattr(spec, "prefill_checkpoint_alignment", None) is not None:
        keys["prefill_checkpoint_alignment"] = spec.prefill_checkpoint_alignment
    return keys


def spec_of(spec: Any, release: Release) -> dict[str, Any]:
    """vLLM's spec of one layer in the words of the format."""
    kind = _word(release.kinds, type(spec).__name__, "a kind of cache")
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
    if role_of(group) != "default":
        keys["role"] = role_of(group)
    return keys


def eagle_groups_of(groups: list[Any]) -> list[int]:
    """The groups that vLLM has marked as a drafter's, by number."""
    return [i for i, group in enumerate(groups) if getattr(group, "is_eagle_group", False)]


def groups_of(groups: list[Any], lookahead: int, release: Release) -> list[dict[str, Any]]:
    """All groups. A mark on every group decides what a mark on none decides: the last block of a
    hit is dropped in all. Where hashes cover the token after a block, no group drops one."""
    found = [group_of(group, release) for group in groups]
    marked = eagle_groups_of(groups)
    if not lookahead and len(marked) < len(found):
        for i in marked:
            found[i]["is_eagle_group"] = True
    return found


def _spec_method(speculative: Any) -> str:
    """What the drafts need of the cache: nothing, slots, or slots and the token after a hit."""
    if speculative.use_eagle():
        return "eagle"
    return "draft_model" if speculative.uses_draft_model() else "ngram"


def _drafts_of(vllm_config: Any) -> dict[str, Any]:
    """The keys of a configuration with drafts."""
    speculative = vllm_config.speculative_config
    method = _spec_method(speculative)
    keys = {"num_spec_tokens": speculative.num_speculative_tokens, "spec_method": method}
    # What the engine core makes block hashes with; stated also as 0, where drafts like EAGLE's
    # would have one. Releases without the property hash blocks alone.
    lookahead = getattr(vllm_config, "num_hash_lookahead_tokens", None)
    if lookahead is not None and method == "eagle":
        keys["num_hash_lookahead_tokens"] = lookahead
    prefill = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if prefill is not None and prefill != int(method == "eagle"):
        keys["num_prefill_lookahead_tokens"] = prefill
    if getattr(speculative, "method", method) != method:
        keys["x_method"] = str(speculative.method)
    return keys


def config_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """The options that decide what the scheduler does, under their names in vLLM."""
    config: dict[str, Any] = {}
    for key in CONFIG_KEYS:
        value = key.convert(attribute_of(vllm_config, key.path))
        if value != key.default:
            config[key.name] = value
    algorithm = attribute_of(vllm_config, "cache_config.prefix_caching_hash_algo")
    if algorithm in _HASH_ALGORITHMS:
        config["hash_algorithm"] = algorithm
    retention = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
    if retention is not None:
        config["prefix_cache_retention_interval"] = retention
    if vllm_config.speculative_config is not None:
        config |= _drafts_of(vllm_config)
        if marked := eagle_groups_of(kv_cache_config.kv_cache_groups):
            config["x_eagle_groups"] = marked
    model = attribute_of(vllm_config, "model_config.model")
    if isinstance(model, str):
        config["x_model"] = {"model": model}
    return config


def is_asynchronous(scheduler: Any) -> bool:
    """Whether a scheduler decides a step before the last one's tokens are there: what its class
    does, whatever its configuration says."""
    return any(cls.__name__ == "AsyncScheduler" for cls in type(scheduler).__mro__)


def beyond_format(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Names of choices that change decisions and that the format cannot say: an audit of such a
    recording is sound, a conform may part from it."""
    return [flag.name for flag in FLAGS if flag.holds(vllm_config, kv_cache_config)]


def header_of(
    scheduler: Any, release: Release, hash_block_size: int, family: str, seed: int
) -> dict[str, Any]:
    """The header of a recording of `scheduler`, which has just been made.

    Raises RecorderError for what no recording can hold: connectors, encoder-decoder models, kinds
    of cache without a word in the format.
    """
    vllm_config, kv_cache_config = scheduler.vllm_config, scheduler.kv_cache_config
    for refusal in REFUSALS:
        if refusal.holds(vllm_config):
            raise RecorderError(refusal.what)
    config = config_of(vllm_config, kv_cache_config)
    is_async, is_configured = is_asynchronous(scheduler), config["async_scheduling"]
    config["async_scheduling"] = is_async
    lookahead = config.get("num_hash_lookahead_tokens", 0)
    header = {
        "schedule_recording": 1,
        "engine": {"name": "vllm", "version": release.version},
        "family": family,
        "seed": seed,
        "config": config,
        "groups": groups_of(kv_cache_config.kv_cache_groups, lookahead, release),
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "scheduler_block_size": scheduler.block_size,
        "hash_block_size": hash_block_size,
    }
    beyond = beyond_format(vllm_config, kv_cache_config)
    if is_async != is_configured:
        beyond.append("async_scheduling")  # it decides on room for other steps in flight
    if beyond:
        header["x_beyond_format"] = beyond
    return header
