"""vLLM's scheduler on a CPU, with the model replaced by the caller.

make_engine() builds the scheduler for the header of a recording out of vLLM's own public classes;
an Engine then plays the part of vLLM's engine loop, step by step. Any release since 0.20.0; a
feature that a release lacks is refused by name.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
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
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lockstep_engines.prompts import expand
from lockstep_recorder.releases import nearest_release, version_key

logging.getLogger("vllm").setLevel(logging.ERROR)

__all__ = ["KVConnectorOutput", "PauseState", "RequestStatus", "SamplingParams", "Scheduler"]


def _version() -> str:
    """vLLM's version, without a build's local part. A checkout that was never built has none: then
    git's description, which starts with the previous release."""
    version = vllm.__version__.split("+", 1)[0]
    if version_key(version) < version_key(""):
        return version
    folder = os.path.dirname(os.path.dirname(vllm.__file__))
    if not os.path.exists(os.path.join(folder, ".git")):
        return version
    described = subprocess.run(
        ["git", "-C", folder, "describe", "--tags", "--match", "v[0-9]*"],
        capture_output=True,
        text=True,
    )
    return described.stdout.strip().removeprefix("v") or version


VERSION = _version()
RELEASE = nearest_release(VERSION)


# What vLLM's front end raises for parameters that it refuses.
CLIENT_ERRORS = (ValueError, VLLMValidationError)


class NotInThisRelease(Exception):
    """The installed vLLM lacks what a header asks for; the text names it."""


_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
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
    "hisparse_resident": "HiSparseResidentSpec",
    "hisparse_hot": "HiSparseHotSpec",
}

# ... where a key makes it another.
_KINDS_BY_KEY = {
    "mla_rows": "SlidingWindowMLASpec",
    "sink_len": "SinkFullAttentionSpec",
    "rswa_window": "RSWASpec",
}


# Fields that only memory and kernels use: a release without the field decides the same.
_OF_MEMORY = (
    "alignment",
    "cache_dtype_str",
    "head_size_v",
    "kv_quant_mode",
    "model_version",
    "page_size_padded",
)


@cache
def _fields_of(cls: type) -> frozenset[str]:
    return frozenset(entry.name for entry in dataclasses.fields(cls))


def kinds() -> list[str]:
    """The format's names of the kinds of cache that can be built."""
    return [word for word, name in _KINDS.items() if hasattr(kv, name)] + ["mamba"]


def replays_windows() -> bool:
    """Whether a window can be computed again after a hit, instead of cached."""
    return "bounded_replay" in _fields_of(getattr(kv, "SlidingWindowMLASpec", kv.KVCacheSpec))


def keeps_whole_caches() -> bool:
    """Whether a cache can be replicated on every rank while others are sharded by token."""
    return "dcp_sharded" in _fields_of(kv.FullAttentionSpec)


def _class_of(spec: dict[str, Any]) -> type:
    kind = spec["type"]
    name = "MambaSpec" if kind == "mamba" else _KINDS.get(kind, "")
    for key, other in _KINDS_BY_KEY.items():
        if spec.get(key):
            kind, name = f"{kind} with {key}", other
    if not hasattr(kv, name):
        raise NotInThisRelease(f"found a group of kind {kind}; vLLM {VERSION} builds {kinds()}")
    return getattr(kv, name)


def make_spec(spec: dict[str, Any], is_draft: bool = False) -> Any:
    """vLLM's spec for a spec of the recording format."""
    cls = _class_of(spec)
    keys: dict[str, Any] = {"is_draft": True} if is_draft else {}
    for key, value in spec.items():
        if key in ("type", "mla_rows"):
            continue
        if key == "dtype":
            value = _DTYPES[value]
        elif key == "dtypes":
            value = tuple(_DTYPES[dtype] for dtype in value)
        elif key == "shapes":
            value = tuple(tuple(shape) for shape in value)
        elif key == "kv_quant_mode":
            value = kv.KVQuantMode[value.upper()]
        elif key in ("tokens_per_state", "compress_ratio"):
            key = RELEASE.row_tokens_attribute
            value = Fraction(value) if isinstance(value, str) else value
        if key in _fields_of(cls):
            keys[key] = value
        elif (
            (value or key == "dcp_sharded")
            and key not in _OF_MEMORY
            and not (key == "compress_ratio" and value == 1)
        ):
            raise NotInThisRelease(f"found {key} = {value}; {cls.__name__} of {VERSION} has none")
    return cls(**keys)


def _bare(cls: type, **fields: Any) -> Any:
    """An object of one of vLLM's configuration classes with these fields only: constructing a
    complete one needs a model, a device and the network."""
    made: Any = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


class Speculative(SimpleNamespace):
    """What the scheduler reads from a speculative configuration; `method` is the format's name or,
    for draft models that it counts as EAGLE, vLLM's."""

    num_speculative_tokens_per_batch_size = None
    disable_eagle_block_drop = False

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
        disable_lookahead_block_hashes=config.get("num_hash_lookahead_tokens", -1) == 0,
    )


class ModelStandIn(SimpleNamespace):
    """What the scheduler reads from a model's configuration: of the abilities that a release may
    check, it has only those given."""

    def __getattr__(self, name: str) -> bool:
        if name.startswith(("enable_", "is_", "supports_", "uses_")):
            return False
        raise AttributeError(name)


def _connector(header: dict[str, Any], path: str) -> KVTransferConfig | None:
    """The connector of a header: `path` is its module and class."""
    if "connector" not in header:
        return None
    module, name = path.rsplit(".", 1)
    asked = header["connector"]
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy=asked.get("kv_load_failure_policy", "fail"),
        kv_connector_extra_config={
            "requires_kv_delivery": asked.get("requires_kv_delivery", False)
        },
    )


class _VllmConfig(VllmConfig):
    """A configuration that never chooses the model runner V2: it asks the platform."""

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
    # A connector of one group: vLLM's engine then keeps no groups of several kinds.
    one_group = not header.get("connector", {}).get("supports_hybrid_groups", True)
    scheduler.disable_hybrid_kv_cache_manager = one_group
    cache = CacheConfig(
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
        mamba_cache_mode=config.get("mamba_cache_mode", "none"),
        mamba_block_size=config.get("mamba_block_size") or None,
    )
    # A header that is planned by this configuration has no groups yet.
    sizes = [group["spec"]["block_size"] for group in header.get("groups", ())]
    smallest = min(sizes, default=0)
    if (smallest > cache.block_size or len(sizes) == 1) and version_key(VERSION) >= (0, 23):
        cache.block_size = smallest  # as the engine core does; before 0.23.0 it decides nothing
    cache.num_gpu_blocks = header["num_blocks"]
    if config.get("hash_algorithm", "content") != "content":
        cache.prefix_caching_hash_algo = config["hash_algorithm"]
    if config.get("prefix_match_unit"):
        if not hasattr(cache, "prefix_match_unit"):
            raise NotInThisRelease(f"found prefix_match_unit; vLLM {VERSION} has none")
        cache.prefix_match_unit = config["prefix_match_unit"]
    if config.get("num_prefill_lookahead_tokens", 1) > 1 and not hasattr(
        VllmConfig, "num_prefill_lookahead_tokens"
    ):
        raise NotInThisRelease(f"found several modules of MTP; vLLM {VERSION} takes one")
    if speculative := _speculative(config):
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
        if not RELEASE.counts_draft_slots_by_step:
            slots = speculative.max_num_new_slots_for_drafting * scheduler.max_num_seqs
            scheduler.max_num_scheduled_tokens -= slots
            if scheduler.max_num_scheduled_tokens <= 0:
                raise ValueError(
                    f"max_num_batched_tokens {scheduler.max_num_batched_tokens} leaves no token "
                    f"to schedule: the draft model takes {slots}"
                )
    parallel = ParallelConfig()
    parallel.decode_context_parallel_size = config.get("dcp", 1)
    parallel.prefill_context_parallel_size = config.get("pcp", 1)
    parallel.data_parallel_index = 0
    model = ModelStandIn(
        max_model_len=max_model_len,
        runner_type="generate",
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
    marks: dict[str, Any] = {}
    if is_eagle or group.get("is_eagle_group"):
        marks["is_eagle_group"] = True
    if (role := group.get("role", "default")) != "default":
        marks |= {"role": role, "host_resident": role == "hisparse_source"}
    for key, value in marks.items():
        if key not in _fields_of(kv.KVCacheGroupSpec):
            raise NotInThisRelease(f"found group {key} = {value}; vLLM {VERSION} has none")
    return kv.KVCacheGroupSpec(group["layers"], made, **marks)


def make_groups(header: dict[str, Any]) -> list[Any]:
    """vLLM's KV cache groups for those of a header."""
    marked = header["config"].get("x_eagle_groups", ())
    return [_group(group, i in marked) for i, group in enumerate(header["groups"])]


def scheduler_groups(header: dict[str, Any]) -> list[Any]:
    """The groups as vLLM's scheduler receives them: for layers that differ only in size, the first
    layer's spec."""
    groups = make_groups(header)
    for group in groups:
        if layers := getattr(group.kv_cache_spec, "kv_cache_specs", None):
            group.kv_cache_spec = next(iter(layers.values()))
    return groups


@dataclass
class Engine:
    """A scheduler and the state of vLLM's engine loop."""

    scheduler: Any
    hasher: Any
    hash_block_size: int
    is_async: bool
    in_flight: list[Any] = field(default_factory=list)  # outputs of schedule(), oldest first

    def request_of(self, event: dict[str, Any], tokens: list[int]) -> Request:
        """vLLM's request for the `add` entry of a recording, whose prompt is `tokens`. Raises
        one of CLIENT_ERRORS where vLLM's front end refuses the parameters."""
        ending: dict[str, Any] = {
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
        return Request(
            request_id=event["add"],
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(event.get("arrival", 0.0)),
            cache_salt=event.get("cache_salt"),
            priority=event.get("priority", 0),
            block_hasher=self.hasher,
        )

    def add(self, event: dict[str, Any]) -> None:
        """Adds a request from the `add` entry of a recording."""
        self.scheduler.add_request(self.request_of(event, expand(event["prompt"])))

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
        """What the model returned for the oldest step."""
        return output_of_model(
            self.in_flight[0], {name: list(tokens) for name, tokens in sampled.items()}
        )

    def update(
        self, model_output: ModelRunnerOutput, drafts: dict[str, list[int]] | None = None
    ) -> None:
        """The oldest step's output arrives, and the drafts for the next step."""
        self.scheduler.update_from_output(self.in_flight.pop(0), model_output)
        self._take_drafts(drafts)

    def take_in(
        self,
        output: Any,
        sampled: dict[str, list[int]],
        drafts: dict[str, list[int]] | None,
        report: Any,
    ) -> dict[int, Any]:
        """What the model and, with a connector, the workers returned for the step `output`; what
        the engine returns to its clients."""
        model_output = output_of_model(output, sampled)
        model_output.kv_connector_output = report
        outputs = self.scheduler.update_from_output(output, model_output)
        self._take_drafts(drafts)
        return outputs

    def _take_drafts(self, drafts: dict[str, list[int]] | None) -> None:
        if drafts is not None:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
            )


def output_of_model(output: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
    """Tokens by request of the step `output`, none for the others. vLLM may cut the lists."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[sampled.get(name) or [] for name in names],
    )


def _retention(config: dict[str, Any]) -> dict[str, int]:
    """The argument of KVCacheConfig that determines which windows and states stay cached."""
    name = "prefix_cache_retention_interval"
    if config.get(name, -1) < 0:
        return {}
    if name not in _fields_of(kv.KVCacheConfig):
        raise NotInThisRelease(f"found {name}; vLLM {VERSION} has no such option")
    return {name: config[name]}


def _num_hash_lookahead(vllm_config: Any, header: dict[str, Any]) -> int:
    """The tokens after a block that its hash covers, as vLLM's engine core derives them, if the
    release has any. Raises NotInThisRelease if the header has another number."""
    asked = header["config"].get("num_hash_lookahead_tokens", -1)
    has = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    if asked not in (-1, has):
        raise NotInThisRelease(f"found num_hash_lookahead_tokens {asked}; vLLM {VERSION} has {has}")
    return has


def make_engine(
    header: dict[str, Any],
    scheduler_cls: type | None = None,
    connector: str = "lockstep_engines.vllm.connector.AskingConnector",
    groups: list[Any] | None = None,
) -> Engine:
    """An engine for the header of a recording; `scheduler_cls`: instead of vLLM's own;
    `connector`: module and class for a header that has a connector; `groups`: the groups from
    which the header's were made, if the header does not describe them completely."""
    config = make_config(header, connector)
    groups = groups or make_groups(header)
    kept = _retention(header["config"])
    if "hisparse_host_num_blocks" in header:
        kept["hisparse_host_num_blocks"] = header["hisparse_host_num_blocks"]
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
        lookahead = _num_hash_lookahead(config, header)
        hasher = kv_cache_utils.get_request_block_hasher(
            hash_block_size, hash_function, *([lookahead] if lookahead else [])
        )
    return Engine(scheduler, hasher, hash_block_size, is_async)
