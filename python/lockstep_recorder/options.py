"""The handling of every option and field that vLLM's scheduling code reads.

Names are OWNER.ATTRIBUTE: a part of VllmConfig, `spec`, `group` (of KVCacheGroupSpec), `request`,
`sampling_params`. Each one that a supported release reads is in exactly one of four tables, and a
test inside vLLM finds the one that does not (python/tests/vllm_reads_test.py):

    written           into the header or the `add` of a request; header.py and requests.py say how
    FLAGS             named in the header's x_beyond_format when it is not the default
    REFUSALS          the recording does not start, or ends before the request
    WITHOUT_EFFECT    decides nothing that is recorded, for the reason given

Nothing here imports vLLM; an attribute that a release lacks has the default given here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep_recorder.without_effect import WITHOUT_EFFECT

ALWAYS = object()  # a default that no option has: the key is always written


def attribute_of(root: Any, path: str, default: Any = None) -> Any:
    """root.a.b for "a.b"; `default` where a step is missing or None."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return default
    return root


@dataclass(frozen=True)
class Key:
    """An option in the header's `config` under its name in vLLM."""

    path: str  # from VllmConfig
    default: Any = ALWAYS  # left out when it has this value
    key: str = ""  # where the format has another name
    convert: Callable[[Any], Any] = lambda value: value

    @property
    def name(self) -> str:
        return self.key or self.path.rsplit(".", 1)[-1]


CONFIG_KEYS = (
    Key("scheduler_config.max_num_seqs"),
    Key("scheduler_config.max_num_batched_tokens"),
    Key("model_config.max_model_len"),
    Key("cache_config.block_size"),
    Key("cache_config.enable_prefix_caching", convert=bool),
    Key("scheduler_config.enable_chunked_prefill", convert=bool),
    Key("scheduler_config.async_scheduling", convert=bool),
    Key("scheduler_config.scheduler_reserve_full_isl", convert=bool),
    Key("scheduler_config.long_prefill_token_threshold"),
    Key("scheduler_config.policy", convert=str),
    Key("cache_config.mamba_cache_mode"),
    Key("parallel_config.decode_context_parallel_size", key="dcp"),
    Key("parallel_config.prefill_context_parallel_size", key="pcp", convert=lambda n: n or 1),
    Key("cache_config.mamba_block_size", default=None),
    Key("cache_config.prefix_match_unit", default=None),
)

# Written by code of their own: header.py (spec, group, drafts, hashes), requests.py.
_WRITTEN_OTHERWISE = (
    "vllm_config.num_hash_lookahead_tokens",
    "vllm_config.num_prefill_lookahead_tokens",
    "vllm_config.num_speculative_tokens",  # num_spec_tokens
    "cache_config.prefix_caching_hash_algo",
    "speculative_config.num_speculative_tokens",
    "speculative_config.use_eagle",  # spec_method
    "speculative_config.uses_draft_model",  # spec_method
    "kv_cache_config.kv_cache_groups",
    "kv_cache_config.num_blocks",
    "kv_cache_config.prefix_cache_retention_interval",
    "group.is_eagle_group",
    "group.kv_cache_spec",
    "group.layer_names",
    "spec.attention_chunk_size",
    "spec.block_size",
    "spec.dcp_sharded",
    "spec.bounded_replay",
    "spec.extra_retained_tokens",
    "spec.kv_cache_specs",  # layer_specs
    "spec.mamba_cache_mode",
    "spec.num_prefill_checkpoint_blocks",
    "spec.num_speculative_blocks",
    "spec.prefill_checkpoint_alignment",
    "spec.sliding_window",
    "spec.sink_len",
    "spec.rswa_window",
    "spec.tokens_per_state",
    "spec.compress_ratio",
    "spec.head_size",
    "spec.head_size_v",
    "spec.num_kv_heads",
    "spec.dtype",
    "spec.dtypes",
    "spec.shapes",
    "spec.kv_quant_mode",
    "spec.page_size_padded",
    "spec.cache_dtype_str",
    "spec.model_version",
    "spec.alignment",
    "request.request_id",
    "request.prompt_token_ids",
    "request.max_tokens",
    "request.arrival_time",
    "request.priority",
    "request.cache_salt",
    "request.lora_request",
    "request.mm_features",
    "request.prompt_embeds",
    "request.prompt_is_token_ids",  # tokens replaced by embeddings
    "request._prompt_embeds_per_block_hashes",
    "request.sampling_params",
    "request.skip_reading_prefix_cache",
    "sampling_params.eos_token_id",
    "sampling_params.stop_token_ids",
    "sampling_params.min_tokens",
    "sampling_params.repetition_detection",
    "sampling_params.max_pattern_size",  # of repetition_detection
    "sampling_params.min_pattern_size",
    "sampling_params.min_count",
)


@dataclass(frozen=True)
class Flag:
    """A choice that changes decisions and that the format cannot say."""

    name: str  # in x_beyond_format
    reads: tuple[str, ...]  # what `holds` looks at, or stands for
    holds: Callable[[Any, Any], bool]  # (VllmConfig, KVCacheConfig)


def _draft_slots(config: Any) -> int:
    return attribute_of(config, "speculative_config.max_num_new_slots_for_drafting", 0)


def _token_limit_is_chosen(config: Any, _: Any) -> bool:
    """Whether the limit is other than what the release derives from what the format does say."""
    scheduler = config.scheduler_config
    batched = scheduler.max_num_batched_tokens
    limit = scheduler.max_num_scheduled_tokens
    return limit is not None and limit not in (
        batched,
        batched - _draft_slots(config) * scheduler.max_num_seqs,
    )


def _slots_are_other(config: Any, _: Any) -> bool:
    """Drafters that take more of a step's tokens than the method of the format (P-EAGLE, PARD)."""
    speculative = config.speculative_config
    return speculative is not None and _draft_slots(config) != int(speculative.uses_draft_model())


def _lookahead_is_other(config: Any, _: Any) -> bool:
    """Drafters that reserve other slots than num_spec_tokens (DFlash, DSpark)."""
    speculative = config.speculative_config
    lookahead = attribute_of(config, "num_lookahead_tokens")
    if speculative is None or lookahead is None:
        return False
    reserves = speculative.use_eagle() or speculative.uses_draft_model()
    return lookahead != (speculative.num_speculative_tokens if reserves else 0)


def _drop_is_other(config: Any, _: Any) -> bool:
    """Draft models that read hidden states and still keep the last block of a hit."""
    drops = attribute_of(config, "speculative_config.use_eagle_block_drop")
    return drops is not None and drops() != config.speculative_config.use_eagle()


def layer_specs_of(group: Any) -> list[Any]:
    """The spec of every layer of a group, or the one that they share."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(specs.values()) if specs else [group.kv_cache_spec]


def _has_host_groups(_: Any, cache: Any) -> bool:
    return getattr(cache, "hisparse_host_num_blocks", None) is not None or any(
        getattr(group, "host_resident", False) or role_of(group) != "default"
        for group in cache.kv_cache_groups
    )


def role_of(group: Any) -> str:
    """vLLM's word for what a group is for."""
    return str(getattr(getattr(group, "role", None), "value", "default"))


FLAGS = (
    Flag(
        "max_num_scheduled_tokens",
        ("scheduler_config.max_num_scheduled_tokens",),
        _token_limit_is_chosen,
    ),
    Flag(
        "pipeline_parallel_size",
        ("parallel_config.pipeline_parallel_size",),
        lambda c, _: c.parallel_config.pipeline_parallel_size > 1,
    ),
    Flag(
        "max_num_active_seqs",
        ("scheduler_config.max_num_active_seqs",),
        lambda c, _: attribute_of(c, "scheduler_config.max_num_active_seqs") is not None,
    ),
    Flag(
        "long_prefill_token_threshold_adaptive",
        ("scheduler_config.long_prefill_token_threshold_adaptive",),
        lambda c, _: attribute_of(
            c, "scheduler_config.long_prefill_token_threshold_adaptive", False
        ),
    ),
    Flag(
        "watermark",
        ("scheduler_config.watermark",),
        lambda c, _: attribute_of(c, "scheduler_config.watermark", 0.0) > 0,
    ),
    Flag(
        "prefill_schedule_interval",
        ("scheduler_config.prefill_schedule_interval", "parallel_config.data_parallel_size"),
        lambda c, _: attribute_of(c, "scheduler_config.prefill_schedule_interval", 1) > 1,
    ),
    Flag(
        "num_speculative_tokens_per_batch_size",
        ("speculative_config.num_speculative_tokens_per_batch_size",),
        lambda c, _: bool(
            attribute_of(c, "speculative_config.num_speculative_tokens_per_batch_size")
        ),
    ),
    Flag(
        "max_num_new_slots_for_drafting",
        ("speculative_config.max_num_new_slots_for_drafting",),
        _slots_are_other,
    ),
    Flag("num_lookahead_tokens", ("vllm_config.num_lookahead_tokens",), _lookahead_is_other),
    Flag(
        "use_eagle_block_drop",
        (
            "speculative_config.use_eagle_block_drop",
            "speculative_config.needs_eagle_block_drop",
            "speculative_config.disable_eagle_block_drop",
        ),
        _drop_is_other,
    ),
    Flag(
        "enable_mamba_shared_prefix_checkpoint",
        ("cache_config.enable_mamba_shared_prefix_checkpoint",),
        lambda c, _: attribute_of(c, "cache_config.enable_mamba_shared_prefix_checkpoint", False),
    ),
    Flag(
        "aux_output",
        ("vllm_config.aux_output_config", "aux_output_config.enabled"),
        lambda c, _: attribute_of(c, "aux_output_config.enabled", False),
    ),
    Flag(
        "hisparse",
        ("kv_cache_config.hisparse_host_num_blocks", "group.host_resident", "group.role"),
        _has_host_groups,
    ),
)


@dataclass(frozen=True)
class Refusal:
    """What no recording can hold."""

    what: str  # found; expected
    reads: tuple[str, ...]
    holds: Callable[[Any], bool]  # (VllmConfig)


REFUSALS = (
    Refusal(
        "found a KV connector; recordings of serving have none",
        (
            "vllm_config.kv_transfer_config",
            "kv_transfer_config.is_kv_consumer",
            "kv_transfer_config.is_kv_producer",
            "kv_transfer_config.kv_load_failure_policy",
        ),
        lambda c: attribute_of(c, "kv_transfer_config") is not None,
    ),
    Refusal(
        "found an encoder connector; recordings of serving have none",
        ("vllm_config.ec_transfer_config",),
        lambda c: attribute_of(c, "ec_transfer_config") is not None,
    ),
    Refusal(
        "found an encoder-decoder model; expected a decoder",
        ("model_config.is_encoder_decoder",),
        lambda c: attribute_of(c, "model_config.is_encoder_decoder", False),
    ),
    Refusal(
        "found an engine for encoders alone; expected one that samples",
        ("vllm_config.is_mm_encoder_only",),
        lambda c: attribute_of(c, "is_mm_encoder_only", False),
    ),
    Refusal(
        "found a diffusion model; its scheduler is one that is not recorded",
        ("model_config.is_diffusion", "sampling_params.extra_args"),
        lambda c: attribute_of(c, "model_config.is_diffusion", False),
    ),
    Refusal(
        "found a pooling model; expected one that samples",
        ("model_config.runner_type",),
        lambda c: attribute_of(c, "model_config.runner_type", "generate") == "pooling",
    ),
)

# Of requests: requests.py refuses those that have one.
REFUSED_OF_REQUESTS = (
    "request.pooling_params",
    "request.structured_output_request",
    "request.use_structured_output",
    "request.resumable",
    "request.streaming_queue",
)

# Kinds of cache that header.py has no word for, by the fields that only they have.
REFUSED_OF_SPECS = ("spec.blocks_per_request",)


def tables() -> dict[str, tuple[str, ...]]:
    """The four tables by name, each as OWNER.ATTRIBUTE."""

    def owned(path: str) -> str:
        return path if "." in path else f"vllm_config.{path}"

    return {
        "written": (*(owned(key.path) for key in CONFIG_KEYS), *_WRITTEN_OTHERWISE),
        "flagged": tuple(path for flag in FLAGS for path in flag.reads),
        "refused": (
            *(path for refusal in REFUSALS for path in refusal.reads),
            *REFUSED_OF_REQUESTS,
            *REFUSED_OF_SPECS,
        ),
        "without effect": tuple(WITHOUT_EFFECT),
    }
