"""vLLM's own scheduler on a CPU: no model, no worker, no server. What a model would return, and
what a KV connector would answer, the cases say."""

from types import SimpleNamespace

import torch
from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

SIZES = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}


def full(block_size=4):
    return kv.FullAttentionSpec(block_size=block_size, **SIZES)


def window(tokens, block_size=4):
    return kv.SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **SIZES)


def states(block_size=4, **more):
    return kv.MambaSpec(
        block_size=block_size, shapes=((4, 16),), dtypes=(torch.bfloat16,),
        mamba_cache_mode="align", **more,
    )  # fmt: skip


class Loads(KVConnectorBase_V1, SupportsHMA):
    """A connector that has `tokens` of each request in it, and leaves blocks at once."""

    tokens: dict = {}
    is_async = False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        has = self.tokens.get(request.request_id, 0) - num_computed_tokens
        return max(has, 0), self.is_async and has > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens, *_):
        pass

    def build_connector_meta(self, _):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        return False, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, *_, **__):
        raise NotImplementedError  # of the worker, which nobody makes

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def is_hisparse(specs):
    return any(isinstance(spec, kv.HiSparseResidentSpec) for spec in specs)


class Config(VllmConfig):
    use_v2_model_runner = False  # asks the platform otherwise


def bare(cls, **fields):
    """One of vLLM's objects with these fields: making a whole one wants a model and a device."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


class Model(SimpleNamespace):
    def __getattr__(self, name):
        if name.startswith(("enable_", "is_", "supports_", "uses_")):
            return False
        raise AttributeError(name)


def config_of(
    specs, max_model_len, loads=None, drafts=0, eagle=0, unit=None, caching=True, **scheduling
):
    """A VllmConfig; `drafts`: of a draft model, `eagle`: of EAGLE; `loads`: tokens a connector has,
    by request; `unit`: prefix_match_unit."""
    scheduler = SchedulerConfig(
        max_model_len=max_model_len, is_encoder_decoder=False, enable_chunked_prefill=True,
        **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False} | scheduling,
    )  # fmt: skip
    scheduler.disable_hybrid_kv_cache_manager = False
    block_size = min(spec.block_size for spec in specs)
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
    if any(isinstance(spec, kv.MambaSpec) for spec in specs):
        cache.mamba_cache_mode, cache.mamba_block_size = "align", block_size
    cache.prefix_match_unit = unit
    parallel = ParallelConfig()
    parallel.data_parallel_index = 0
    speculative = None
    if drafts or eagle:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
        speculative = SimpleNamespace(
            num_speculative_tokens=drafts or eagle, method="eagle" if eagle else "draft_model",
            disable_lookahead_block_hashes=not eagle,
            num_speculative_tokens_per_batch_size=None, disable_eagle_block_drop=False,
            max_num_new_slots_for_drafting=1 if drafts else 0, use_eagle=lambda: eagle > 0,
            use_eagle_block_drop=lambda: eagle > 0, needs_eagle_block_drop=lambda: eagle > 0,
            uses_draft_model=lambda: drafts > 0, use_dspark=lambda: False,
            use_dflash=lambda: False, use_multi_module_mtp=lambda: False,
        )  # fmt: skip
    role = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    loader = {"kv_connector": "Loads", "kv_connector_module_path": "small_engine"} | role
    both = [{"kv_connector": "HiSparseConnector"} | role, loader]
    if is_hisparse(specs):
        extra = {"kv_connector_extra_config": {"connectors": both}}
        loader = {"kv_connector": "MultiConnector"} | extra | role
    connector = loads is not None and KVTransferConfig(**loader)
    off = SimpleNamespace(
        kv_cache_metrics=False, enable_mfu_metrics=False, per_request_spec_decode_metrics="none",
        enabled=False, get_encoder_cache_manager_obj=lambda: None,
    )  # fmt: skip
    model = Model(
        max_model_len=max_model_len, runner_type="generate", return_sampling_mask=False,
        multimodal_config=None, skip_tokenizer_init=True,
    )  # fmt: skip
    return bare(
        Config, scheduler_config=scheduler, cache_config=cache, parallel_config=parallel,
        model_config=model, speculative_config=speculative, lora_config=None, kv_events_config=None,
        kv_transfer_config=connector or None, ec_transfer_config=None, observability_config=off,
        aux_output_config=off, ec_manager_config=off, diffusion_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        structured_outputs_config=SimpleNamespace(reasoning_parser="", reasoning_parser_plugin=""),
    )  # fmt: skip


class SmallEngine:
    """`num_blocks`, `num_host_blocks`: without the null block; `retention`:
    prefix_cache_retention_interval. With HiSparse's specs the first is the host's."""

    def __init__(
        self, specs, num_blocks, max_model_len=64, loads=None, loads_async=False, retention=None,
        num_host_blocks=0, **options,
    ):  # fmt: skip
        self.config = config_of(specs, max_model_len, loads, **options)
        self.config.cache_config.num_gpu_blocks = num_blocks + 1
        groups = [kv.KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        plan = kv.KVCacheConfig(
            num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups,
            prefix_cache_retention_interval=retention,
        )  # fmt: skip
        if is_hisparse(specs):
            plan.hisparse_host_num_blocks = num_host_blocks + 1
            groups[0].host_resident, groups[0].role = True, kv.KVCacheGroupRole.HISPARSE_SOURCE
            groups[1].role = kv.KVCacheGroupRole.HISPARSE_INDEXER
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(plan, self.config)
        kv_cache_utils.init_none_hash(sha256)
        lookahead = self.config.num_hash_lookahead_tokens  # a block's hash covers one of EAGLE's
        self.hasher = kv_cache_utils.get_request_block_hasher(sizes[1], sha256, lookahead)
        if not self.config.cache_config.enable_prefix_caching:
            self.hasher = None
        is_async = self.config.scheduler_config.async_scheduling
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=self.config, kv_cache_config=plan, block_size=sizes[0],
            hash_block_size=sizes[1], log_stats=False,
            structured_output_manager=bare(
                StructuredOutputManager, backend=None, vllm_config=self.config
            ),
        )  # fmt: skip
        if loads is not None:
            connector = self.scheduler.connector
            connector = getattr(connector, "sub_connectors", [connector])[-1]
            connector.tokens, connector.is_async = loads, loads_async

    def add(self, name, num_tokens, max_tokens=1, arrival=0.0, priority=0, first_token=1):
        tokens = list(range(first_token, first_token + num_tokens))
        self.add_tokens(name, tokens, max_tokens, arrival, priority)

    def add_tokens(self, name, tokens, max_tokens=1, arrival=0.0, priority=0):
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.scheduler.add_request(
            Request(name, tokens, params, None, arrival_time=arrival, priority=priority,
                    block_hasher=self.hasher)
        )  # fmt: skip

    def schedule(self):
        return self.scheduler.schedule()

    def update(self, step, token=7, invalid_blocks=(), loaded=(), worker=None, accepted=()):
        """The step's output: `token` for every request whose known tokens are all computed, once
        more for each accepted draft."""
        names, requests = list(step.num_scheduled_tokens), self.scheduler.requests
        sampled = [
            [token] * (1 + dict(accepted).get(name, 0)) if name in requests
            and requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in names
        ]  # fmt: skip
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )  # fmt: skip
        if invalid_blocks or loaded or worker:
            output.kv_connector_output = KVConnectorOutput(
                finished_recving=set(loaded), invalid_block_ids=set(invalid_blocks),
                kv_connector_worker_meta=worker,
            )  # fmt: skip
        return self.scheduler.update_from_output(step, output)

    def step(self, **output):
        step = self.schedule()
        self.update(step, **output)
        return step

    def table(self, name):
        return [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]
