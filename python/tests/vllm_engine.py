"""vLLM's scheduler on a CPU, with the model replaced by whoever calls it.

make_engine() builds the scheduler for the header of a recording out of vLLM's own public classes;
an Engine then plays the part of vLLM's engine loop, step by step. Nothing here knows the recorder.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
import vllm
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logging.getLogger("vllm").setLevel(logging.ERROR)

VERSION = vllm.__version__.split("+", 1)[0]

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "uint8": torch.uint8,
}


# The format's word for a kind of attention -> vLLM's class, where the release has it.
_KINDS = {
    "full": "FullAttentionSpec",
    "mla": "MLAAttentionSpec",
    "hidden_state": "HiddenStateCacheSpec",
    "sliding_window": "SlidingWindowSpec",
    "sliding_window_mla": "SlidingWindowMLASpec",
    "chunked_local": "ChunkedLocalAttentionSpec",
    "circular_buffer": "CircularBufferSpec",
}


def make_spec(spec: dict[str, Any], is_draft: bool = False) -> Any:
    """vLLM's spec for one in the words of the recording format."""
    keys = {key: value for key, value in spec.items() if key != "type"}
    if is_draft:
        keys["is_draft"] = True
    if spec["type"] == "mamba":
        keys["shapes"] = tuple(tuple(shape) for shape in spec["shapes"])
        keys["dtypes"] = tuple(_DTYPES[dtype] for dtype in spec["dtypes"])
        return kv.MambaSpec(**keys)
    keys["dtype"] = _DTYPES[spec["dtype"]]
    return getattr(kv, _KINDS[spec["type"]])(**keys)


def _bare(cls: type, **fields: Any) -> Any:
    """An object of one of vLLM's configuration classes with these fields only: making a whole one
    wants a model, a device and the network."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


class Speculative(SimpleNamespace):
    """What the scheduler asks of a speculative configuration; `method` is the format's word or,
    for drafters that it counts as EAGLE, vLLM's."""

    num_speculative_tokens_per_batch_size = None
    disable_eagle_block_drop = False
    disable_lookahead_block_hashes = False

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 1 if self.uses_draft_model() else 0

    def use_eagle(self) -> bool:
        return self.method in ("eagle", "eagle3", "mtp")

    def use_eagle_block_drop(self) -> bool:
        return self.method in ("eagle", "eagle3", "mtp")

    def needs_eagle_block_drop(self) -> bool:
        return self.method in ("eagle", "eagle3", "mtp")

    def uses_draft_model(self) -> bool:
        return self.method == "draft_model"

    def use_dspark(self) -> bool:
        return False

    use_dflash = use_dspark

    def use_multi_module_mtp(self) -> bool:
        return self.num_modules > 1


def _speculative(config: dict[str, Any]) -> Speculative | None:
    if not config.get("num_spec_tokens"):
        return None
    return Speculative(
        num_speculative_tokens=config["num_spec_tokens"],
        method=config.get("x_method", config["spec_method"]),
        num_modules=config.get("num_prefill_lookahead_tokens", 1),
    )


class ModelStandIn(SimpleNamespace):
    """What the scheduler asks of a model's configuration."""


def _connector(header: dict[str, Any], path: str) -> KVTransferConfig | None:
    """The connector of a header: `path` is its module and class."""
    if "connector" not in header:
        return None
    module, name = path.split(".")
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy=header["connector"]["kv_load_failure_policy"],
    )


class _VllmConfig(VllmConfig):
    """A configuration that never chooses the second model runner: it asks the platform."""

    use_v2_model_runner = False


def make_config(header: dict[str, Any], connector: str) -> Any:
    """The configuration of a recording's header; `connector`: of a header that has one."""
    config = header["config"]
    max_model_len = config["max_model_len"]
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        enable_chunked_prefill=config.get("enable_chunked_prefill", True),
        long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
        policy=config.get("policy", "fcfs"),
        async_scheduling=config.get("async_scheduling", False),
        scheduler_reserve_full_isl=config.get("scheduler_reserve_full_isl", True),
    )
    cache = CacheConfig(
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
        mamba_cache_mode=config.get("mamba_cache_mode", "none"),
        mamba_block_size=config.get("mamba_block_size"),
    )
    cache.num_gpu_blocks = header["num_blocks"]
    for key, option in (
        ("hash_algorithm", "prefix_caching_hash_algo"),
        ("prefix_match_unit", "prefix_match_unit"),
    ):
        if key in config:
            setattr(cache, option, config[key])
    if speculative := _speculative(config):
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
        if VERSION == "0.22.1":  # the later release counts these slots step by step
            slots = speculative.max_num_new_slots_for_drafting * scheduler.max_num_seqs
            scheduler.max_num_scheduled_tokens -= slots
    parallel = ParallelConfig()
    parallel.decode_context_parallel_size = config.get("dcp", 1)
    parallel.prefill_context_parallel_size = config.get("pcp", 1)
    parallel.data_parallel_index = 0
    model = ModelStandIn(
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_return_routed_experts=False,
        is_multimodal_model=False,
        supports_multimodal_inputs=False,
        runner_type="generate",
        is_diffusion=False,
        supports_kv_cache_grouping=False,
        uses_mrope=False,
        return_sampling_mask=False,
        multimodal_config=None,
        skip_tokenizer_init=True,
    )
    off = SimpleNamespace(
        kv_cache_metrics=False,
        enable_mfu_metrics=False,
        per_request_spec_decode_metrics="none",
        enabled=False,
        get_encoder_cache_manager_obj=lambda: None,
    )
    return _bare(
        _VllmConfig,
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=parallel,
        model_config=model,
        speculative_config=speculative,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=_connector(header, connector),
        ec_transfer_config=None,
        observability_config=off,
        aux_output_config=off,
        ec_manager_config=off,
        diffusion_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        structured_outputs_config=SimpleNamespace(reasoning_parser="", reasoning_parser_plugin=""),
    )


def _group(group: dict[str, Any], is_eagle: bool) -> Any:
    made = make_spec(group["spec"])
    if "layer_specs" in group:
        specs = zip(group["layers"], map(make_spec, group["layer_specs"]), strict=True)
        made = kv.UniformTypeKVCacheSpecs(made.block_size, kv_cache_specs=dict(specs))
    marks = {"is_eagle_group": True} if is_eagle or group.get("is_eagle_group") else {}
    return kv.KVCacheGroupSpec(group["layers"], made, **marks)


def make_groups(header: dict[str, Any]) -> list[Any]:
    """vLLM's KV cache groups for those of a header."""
    marked = header["config"].get("x_eagle_groups", ())
    return [_group(group, i in marked) for i, group in enumerate(header["groups"])]


def expand(prompt: Any) -> list[int]:
    """The tokens of a prompt: [[seed, n], ...] or {"tokens": [...]}."""
    if isinstance(prompt, dict):
        return list(prompt["tokens"])
    mask = (1 << 64) - 1
    tokens = []
    for seed, count in prompt:
        for i in range(count):
            x = ((seed << 32) + i + 0x9E3779B97F4A7C15) & mask
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            tokens.append((x ^ (x >> 31)) % 50000)
    return tokens


@dataclass
class Engine:
    """A scheduler and what vLLM's engine loop keeps beside it."""

    scheduler: Any
    hasher: Any
    is_async: bool
    in_flight: list[Any] = field(default_factory=list)  # outputs of schedule(), oldest first

    def add(self, event: dict[str, Any]) -> None:
        """Adds a request from the `add` entry of a recording."""
        ending = {
            key: event[key] for key in ("min_tokens", "skip_reading_prefix_cache") if key in event
        }
        if "repetition_detection" in event:
            ending["repetition_detection"] = RepetitionDetectionParams(
                **event["repetition_detection"]
            )
        params = SamplingParams(
            max_tokens=event["max_tokens"],
            stop_token_ids=event.get("stop_token_ids"),
            temperature=0,
            **ending,
        )
        params._eos_token_id = event.get("eos")
        self.scheduler.add_request(
            Request(
                request_id=event["add"],
                prompt_token_ids=expand(event["prompt"]),
                sampling_params=params,
                pooling_params=None,
                arrival_time=float(event.get("arrival", 0.0)),
                cache_salt=event.get("cache_salt"),
                priority=event.get("priority", 0),
                block_hasher=self.hasher,
            )
        )

    def abort(self, names: list[str]) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def pause(self, state: str) -> None:
        self.scheduler.set_pause_state(PauseState[state])

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        if output.num_scheduled_tokens:
            self.in_flight.append(output)
        return output

    def wants_output(self, output: Any) -> bool:
        """Whether the loop now waits for the oldest step: at once, or with one step in flight."""
        return len(self.in_flight) > (1 if self.is_async and output.num_scheduled_tokens else 0)

    def model_output(self, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        """What the model returned for the oldest step: tokens by request, none for the others."""
        names = list(self.in_flight[0].num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[list(sampled.get(name, ())) for name in names],
        )

    def update(
        self, model_output: ModelRunnerOutput, drafts: dict[str, list[int]] | None = None
    ) -> None:
        """The oldest step's output comes in, and the drafts for the next step."""
        self.scheduler.update_from_output(self.in_flight.pop(0), model_output)
        if drafts is not None:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
            )


def make_engine(
    header: dict[str, Any],
    scheduler_cls: type | None = None,
    connector: str = "scripted_connector.ScriptedConnector",
    groups: list[Any] | None = None,
) -> Engine:
    """An engine for the header of a recording; `scheduler_cls`: instead of vLLM's own;
    `connector`: of a header that has one, the one whose answers are given to it; `groups`: those
    that the header's were made of, where it does not say all of them."""
    config = make_config(header, connector)
    groups = groups or make_groups(header)
    retention = "prefix_cache_retention_interval"
    kept = {retention: header["config"][retention]} if retention in header["config"] else {}
    cache_config = kv.KVCacheConfig(
        num_blocks=header["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups, **kept
    )
    block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache_config, config)
    is_async = bool(config.scheduler_config.async_scheduling)
    if scheduler_cls is None:
        scheduler_cls = AsyncScheduler if is_async else Scheduler
    scheduler = scheduler_cls(
        vllm_config=config,
        kv_cache_config=cache_config,
        structured_output_manager=_bare(StructuredOutputManager, backend=None, vllm_config=config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    hasher = None
    if config.cache_config.enable_prefix_caching:
        from vllm.utils.hashing import get_hash_fn_by_name

        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_function)
        # As vLLM's engine core calls it; 0.22.1 hashes blocks without what is behind them.
        lookahead = getattr(config, "num_hash_lookahead_tokens", 0)
        hasher = kv_cache_utils.get_request_block_hasher(
            hash_block_size, hash_function, *([lookahead] if lookahead else [])
        )
    return Engine(scheduler, hasher, is_async)
