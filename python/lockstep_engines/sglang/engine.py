"""SGLang's Scheduler without a model, a device or its own process.

The scheduler's own methods run as they are: admission, chunked prefill, retraction, the radix tree,
allocators and request rows, the results' processing, and the checks that it makes when idle. Only
its construction, which needs a model and a device, and the forward pass are replaced: _Worker
returns the tokens that it received. Reporting parts (metrics, streams, sockets) are objects that
accept everything and do nothing.

Only this file and sglang/adapter.py import SGLang.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from array import array
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# SGLang's own check that no page has two owners, and none is both free and owned.
os.environ.setdefault("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
warnings.filterwarnings("ignore", module=r"sglang\..*")
logging.disable(logging.WARNING)

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfigurator
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.version import __version__ as VERSION

__all__ = ["VERSION", "Engine", "Inputs", "Options", "Req", "ScheduleBatch"]

_DEVICE = "cpu"
_VOCAB_SIZE = 2**31 - 1
Inputs = tuple[list[int], list[int]]  # of a model: tokens, slots that it writes
_NO_TOKEN = _VOCAB_SIZE - 1  # of which no request's text consists; the model's own end of sequence


@dataclass(frozen=True)
class Options:
    """A case in SGLang's terms."""

    page_size: int
    max_running_requests: int
    context_length: int
    chunked_prefill_size: int  # -1: prompts are prefilled whole
    max_prefill_tokens: int
    full_pages: int
    swa_pages: int = 0
    mamba_slots: int = 0
    sliding_window: int | None = None  # tokens that attention reads, the token itself included
    enable_prefix_caching: bool = True
    by_priority: bool = False
    schedule_policy: str = "fcfs"
    mixed_chunk: bool = False
    tree_core: str | None = None
    overlap: bool = False
    swa_eviction_interval: int = 1  # tokens past a window before their slots are freed
    new_token_ratio: float = 0.7  # of the tokens that running requests may add, reserved at first

    @property
    def window_before(self) -> int | None:
        """SGLang's size of a window: the token itself excluded."""
        return None if self.sliding_window is None else self.sliding_window - 1


class _Ignored:
    """Accepts everything and does nothing: metrics, traces, sockets."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Stages(_Ignored):
    def record(self, *_: Any, **__: Any) -> Any:
        return nullcontext()


class _Worker:
    """Replaces the forward pass with the tokens of `next_token_ids`, one per row. It performs the
    deferred work on states that a forward pass starts with (ModelRunner).
    """

    def __init__(self, model_config: Any, kv_pool: Any) -> None:
        self.model_runner = SimpleNamespace(
            attn_backend=SimpleNamespace(),
            hisparse_coordinator=None,
            canary_manager=None,
            prefill_aware_swa=False,
            mtp_draft_device_pools=(),
            mtp_draft_mamba_pools=(),
            _pending_elastic_scale_update=None,
            model_config=model_config,
            token_to_kv_pool=kv_pool,
        )
        self.model_config = model_config
        self.next_token_ids: list[int] = []
        self.inputs: Inputs = [], []

    def forward_batch_generation(self, batch: ScheduleBatch, **_: Any) -> GenerationBatchResult:
        self.inputs = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        tokens = self.next_token_ids or [0] * len(batch.reqs)
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens))


class _Scheduler(Scheduler):
    """A Scheduler whose parts are set one by one."""

    def __init__(self) -> None:  # the parent's builds a model
        pass


class _Config:
    """The process-wide configuration, which SGLang reads everywhere."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-sglang-")
        self._model = Path(self._folder.name)
        (self._model / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "hidden_size": 8,
                    "intermediate_size": 8,
                    "num_attention_heads": 1,
                    "num_key_value_heads": 1,
                    "num_hidden_layers": 1,
                    "head_dim": 8,
                    "vocab_size": _VOCAB_SIZE,
                    "max_position_embeddings": 1 << 29,
                    "torch_dtype": "float32",
                    "bos_token_id": _NO_TOKEN,
                    "eos_token_id": _NO_TOKEN,
                }
            )
        )

    def publish(self, options: Options) -> tuple[ServerArgs, ModelConfig]:
        arguments = ServerArgs(
            model_path=str(self._model),
            device=_DEVICE,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            skip_tokenizer_init=True,
            disable_overlap_schedule=not options.overlap,
            disable_cuda_graph=True,
            mem_fraction_static=0.5,
            page_size=options.page_size,
            chunked_prefill_size=options.chunked_prefill_size,
            max_prefill_tokens=options.max_prefill_tokens,
            max_running_requests=options.max_running_requests,
            context_length=options.context_length,
            schedule_policy=options.schedule_policy,
            enable_mixed_chunk=options.mixed_chunk,
            enable_priority_scheduling=options.by_priority,
            schedule_low_priority_values_first=options.by_priority,
            disable_radix_cache=not options.enable_prefix_caching,
            **({"retraction_policy": "priority"} if options.by_priority else {}),
        )
        arguments._mamba_cache_chunk_size = max(64, options.page_size)
        runtime_context.publish(
            arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0)
        )
        runtime_context.get_context().override(
            "lockstep", pp_max_micro_batch_size=options.max_running_requests
        )
        return arguments, ModelConfig.from_server_args(arguments)


_config: _Config | None = None


def _publish(options: Options) -> tuple[ServerArgs, ModelConfig]:
    global _config
    _config = _config or _Config()
    return _config.publish(options)


def _small_pool(size: int, page_size: int) -> dict[str, Any]:
    return {
        "size": size,
        "page_size": page_size,
        "dtype": torch.float32,
        "head_num": 1,
        "head_dim": 1,
        "device": _DEVICE,
        "enable_memory_saver": False,
    }


def _request_rows(options: Options) -> ReqToTokenPool:
    rows: dict[str, Any] = {
        "size": options.max_running_requests,
        "max_context_len": options.context_length + 4,
        "device": _DEVICE,
        "enable_memory_saver": False,
    }
    if not options.mamba_slots:
        return ReqToTokenPool(**rows)
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=4,
        n_groups=1,
        num_heads=1,
        head_dim=4,
        state_size=1,
        conv_kernel=2,
    )
    dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    return HybridReqToTokenPool(
        **rows,
        mamba_size=options.mamba_slots,
        mamba_spec_state_size=0,
        cache_params=Mamba2CacheParams(shape=shape, layers=[1], dtype=dtype),
        mamba_layer_ids=[1],
        enable_mamba_extra_buffer=False,
        enable_overlap_schedule=options.overlap,
    )


def _token_allocator(options: Options, rows: ReqToTokenPool) -> Any:
    """SGLang's choice of allocator and pool (KVCacheConfigurator), for the case's kinds."""
    page = options.page_size
    size = options.full_pages * page
    if options.swa_pages:
        pool = SWAKVPool(
            **_small_pool(size, page),
            size_swa=options.swa_pages * page,
            swa_attention_layer_ids=[1],
            full_attention_layer_ids=[0],
        )
        MemoryPoolConfigurator.validate_swa_pool_size(
            options.swa_pages * page, options.window_before, page
        )
        return SWATokenToKVPoolAllocator(
            size,
            options.swa_pages * page,
            page_size=page,
            dtype=torch.float32,
            device=_DEVICE,
            kvcache=pool,
            need_sort=False,
        )
    if options.mamba_slots:
        pool = HybridLinearKVPool(
            **_small_pool(size, page),
            full_attention_layer_ids=[0],
            mamba_pool=rows.mamba_pool,
        )
    else:
        pool = MHATokenToKVPool(**_small_pool(size, page), layer_num=1)
    if page == 1:
        return TokenToKVPoolAllocator(size, torch.float32, _DEVICE, pool, False)
    return PagedTokenToKVPoolAllocator(size, page, torch.float32, _DEVICE, pool, False)


class Engine:
    """One scheduler and the state of the event loop."""

    def __init__(self, options: Options) -> None:
        self.options = options
        arguments, model_config = _publish(options)
        envs.SGLANG_SWA_EVICTION_INTERVAL.set(options.swa_eviction_interval)
        envs.SGLANG_INIT_NEW_TOKEN_RATIO.set(options.new_token_ratio)
        self.rows = _request_rows(options)
        self.allocator = _token_allocator(options, self.rows)
        self.worker = _Worker(model_config, self.allocator.get_kvcache())
        self.ended: list[Req] = []  # that the scheduler gave up by itself, outside a result
        self.scheduler = self._scheduler(arguments, model_config)
        self.tree = self.scheduler.tree_cache

    def _tree(self, arguments: ServerArgs, model_config: ModelConfig) -> Any:
        options = self.options
        window = options.sliding_window
        params = CacheInitParams(
            disable=not options.enable_prefix_caching,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=options.page_size,
            chunked_prefill_size=runtime_context.get_schedule().chunked_prefill_size,
            # SGLang counts the tokens before the one that reads.
            sliding_window_size=None if window is None else window - 1,
            tree_core_backend=options.tree_core,
        )
        context = TreeCacheBuildContext(
            server_args=arguments,
            params=params,
            is_hybrid_swa=window is not None,
            is_hybrid_ssm=options.mamba_slots > 0,
            enable_hierarchical_cache=False,
            disable_radix_cache=params.disable,
            tp_worker=self.worker,
            model_config=model_config,
            tp_size=1,
            tp_rank=0,
            tp_group=None,
            full_tokens_per_layer=self.options.full_pages * options.page_size,
        )
        return create_tree_cache(context)

    def _scheduler(self, arguments: ServerArgs, model_config: ModelConfig) -> Scheduler:
        """Scheduler.__init__, in its order, without what needs a model, a device or a socket."""
        options = self.options
        schedule = runtime_context.get_schedule()
        s = _Scheduler()
        s.server_args, s.model_config = arguments, model_config
        s.is_initializing = False
        s.processed_tokens_counter = 0
        s.schedule_policy = schedule.schedule_policy
        s.enable_priority_scheduling = schedule.enable_priority_scheduling
        s.abort_on_priority_when_disabled = schedule.abort_on_priority_when_disabled
        s.schedule_low_priority_values_first = schedule.schedule_low_priority_values_first
        s.priority_scheduling_preemption_threshold = (
            schedule.priority_scheduling_preemption_threshold
        )
        for feature in (
            "lora",
            "lora_overlap_loading",
            "overlap_mlx",
            "pdmux",
            "hierarchical_cache",
            "lmcache",
            "session_radix_cache",
            "hicache_storage",
            "unified_cache_external_linker",
            "decode_hicache",
            "hisparse",
            "unified_memory",
            "fpm",
            "async_d2h_copy",
        ):
            setattr(s, f"enable_{feature}", False)
        s.enable_overlap = options.overlap
        s.attn_dp_enabled = s.require_mlp_sync = False
        s.spec_algorithm = SpeculativeAlgorithm.from_string(None)
        s.page_size = options.page_size
        s.max_new_tokens_limit = None
        s.is_generation, s.skip_tokenizer_init = True, True
        s.tokenizer = s.rust_server = s.mm_receiver = s.metrics_collector = None
        s.dllm_config = None
        s.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        s.scripted_scheduler_hook = s.hisparse_coordinator = s.decode_offload_manager = None
        s.draft_worker = s.lora_drainer = s.min_free_slots_delayer = None
        s.disaggregation_mode = DisaggregationMode.NULL
        s.tp_worker = s.model_worker = self.worker
        s.ipc_channels = SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=self._output_sent)
        )
        s.device = _DEVICE
        s.schedule_stream = s.forward_stream = torch.cpu.current_stream()
        s._war_barrier_enabled = False
        s.max_total_num_tokens = options.full_pages * options.page_size
        s.max_prefill_tokens = options.max_prefill_tokens
        s.max_running_requests = options.max_running_requests
        s.max_queued_requests = None
        s.max_req_len = min(options.context_length - 1, s.max_total_num_tokens - 1)
        s.max_req_input_len = s.max_req_len - 5
        s.pad_input_ids_func = None
        s.is_hybrid_swa = options.sliding_window is not None
        s.is_hybrid_ssm = options.mamba_slots > 0
        s.sliding_window_size = options.window_before
        s.full_tokens_per_layer = options.full_pages * options.page_size
        s.swa_tokens_per_layer = options.swa_pages * options.page_size
        s.req_to_token_pool, s.token_to_kv_pool_allocator = self.rows, self.allocator
        s.disable_radix_cache = not options.enable_prefix_caching
        s.tree_cache = self._tree(arguments, model_config)
        s.init_kv_event_lora_names()
        s.init_running_status()
        s.init_chunked_prefill()
        s.dynamic_chunk_sizer = None
        s.scheduler_stage_metrics = _Stages(_trace_stage=None)
        s.metrics_reporter = _Ignored(
            enable_metrics=False,
            num_generated_tokens=0,
            forward_ct_decode=0,
            num_retracted_reqs=0,
            is_stats_logging_rank=False,
            current_scheduler_metrics_enabled=False,
        )
        s.init_schedule_policy()
        s.profiler_manager = _Ignored()
        s.kv_events_publisher = _Ignored()
        s.load_publisher = _Ignored()
        s.load_inquirer = _Ignored(_get_num_pending_tokens=lambda **_: 0)
        s.init_overlap()
        s.ngram_embedding_manager = SimpleNamespace(
            prepare_for_forward=lambda batch, chunked_req: batch
        )
        s.use_ngram_embedding = False
        s.enable_skip_finishing_decode = options.overlap
        s.truncation_align_size = None
        s.grammar_manager = _Ignored(
            grammar_queue=[],
            has_waiting_grammars=lambda: False,
            process_req_with_grammar=lambda req: False,
        )
        s.dp_attn_adapter = _Ignored(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=False: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        s.output_streamer = _Ignored()
        s.init_pool_stats_observer()
        s.init_invariant_checker()
        s.total_prefill_uncached_tokens = s.total_prefill_busy_us = 0
        s.decode_moment_totals = [0.0] * 6
        s._prev_step = s._prev_prefill_end_ts = s._pause_started_at = None
        s._sched_idled = False
        s._pause_intervals = deque(maxlen=4)
        s.init_batch_result_processor()
        s.publish_load_snapshot = lambda force=False: None
        s.maybe_sleep_on_idle = lambda: None
        return s

    def _output_sent(self, output: Any, req: Any) -> None:
        """An end that the scheduler reports to the front end without a result."""
        if isinstance(output, AbortReq) and isinstance(req, Req):
            self.ended.append(req)

    def add(
        self,
        rid: str,
        tokens: list[int],
        max_new_tokens: int,
        stop_token_ids: list[int],
        priority: int | None,
        cache_salt: str | None,
    ) -> Req:
        """The request, in the waiting queue. Raises ValueError if SGLang would answer it with an
        error, or with fewer tokens."""
        parameters = SamplingParams(
            max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, temperature=0
        )
        parameters.normalize(None)
        received = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            priority=priority if self.options.by_priority else None,
            cache_salt=cache_salt,
        )
        queue = self.scheduler.waiting_queue
        num_waiting = len(queue)
        self.scheduler.handle_generate_request(received)
        if len(queue) == num_waiting:
            raise ValueError("the scheduler has not queued it")
        request = queue[-1]
        refusal = request.to_finish
        allowed = request.sampling_params.max_new_tokens
        wanted = min(max_new_tokens, self.options.context_length - 2 - len(tokens))
        if isinstance(refusal, FINISH_ABORT) or allowed < wanted:
            self.abort(rid)
            self.ended.remove(request)
            raise ValueError(
                refusal.message
                if isinstance(refusal, FINISH_ABORT)
                else f"the pool lets it sample {allowed} tokens of {wanted}"
            )
        return request

    def abort(self, rid: str) -> None:
        self.scheduler.abort_request(AbortReq(rid=rid))

    def next_batch(self) -> ScheduleBatch | None:
        """The first half of the event loop's turn: what it decides. 0.5.22 notices that a full
        batch has ended only after it has looked for prefills: that turn is idle, and the next one
        is not. With overlap, an idle turn first processes the pending result."""
        s = self.scheduler
        was_full = s.running_batch.batch_is_full
        batch = self._turn()
        if not batch and was_full and not s.running_batch.batch_is_full and not s.result_queue:
            batch = self._turn()
        return batch

    def _turn(self) -> ScheduleBatch | None:
        s = self.scheduler
        plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
        s.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if not batch:
            s._sched_idled = True
            if not s.last_batch or not self.options.overlap:
                s.on_idle()
            if not s.result_queue:
                s.last_batch = None
        return batch

    def take_in(self, batch: ScheduleBatch, next_token_ids: list[int]) -> Inputs:
        """The second half (event_loop_normal), with the tokens that the model returned. Returns
        what the model received."""
        s = self.scheduler
        self.worker.next_token_ids = next_token_ids
        result = s.run_batch(batch)
        s.process_batch_result(batch, result)
        s.last_batch = batch
        s.invariant_checker.self_check_during_busy()
        return self.worker.inputs

    def launch(self, batch: ScheduleBatch) -> Inputs:
        """The second half in event_loop_overlap: a forward pass starts, whose tokens are pending.
        Returns what the model received."""
        s = self.scheduler
        self.worker.next_token_ids = []
        result = s.run_batch(batch)
        s.result_queue.append((batch.copy(), result))
        return self.worker.inputs

    def sampled(self, next_token_ids: list[int]) -> None:
        """The tokens of the first forward pass in the queue, for its result and for the relay from
        which the next pass reads them."""
        batch, result = self.scheduler.result_queue[0]
        result.next_token_ids.copy_(torch.tensor(next_token_ids))
        relay = self.scheduler.future_map.output_tokens_buf
        relay[batch.req_pool_indices] = result.next_token_ids

    def process_first(self, last_batch: ScheduleBatch | None) -> None:
        """The result of the first forward pass in the queue. `last_batch`: the next one."""
        s = self.scheduler
        s.process_batch_result(*s.result_queue.popleft())
        s.last_batch = last_batch
        s.invariant_checker.self_check_during_busy()

    def reset(self, running: bool) -> bool:
        s = self.scheduler
        if running:
            s.pause_generation(PauseGenerationReqInput(mode="retract"))
        done = s.flush_cache(empty_cache=False)
        if running:
            s.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return bool(done)

    def running(self, decided: ScheduleBatch | None) -> list[Req]:
        """All requests that have rows or will have one without being admitted again; `decided` is
        the batch whose output is pending."""
        s = self.scheduler
        found: dict[int, Req] = {}
        for batch in (s.running_batch, decided or s.last_batch):
            for request in batch.reqs if batch else ():
                found[id(request)] = request
        if s.chunked_req is not None:
            found[id(s.chunked_req)] = s.chunked_req
        return [request for request in found.values() if not request.finished()]


def own_tree_core() -> str:
    """SGLang's choice of a radix tree: compiled (rust) or python."""
    tree = Engine(Options(1, 1, 16, 4, 4, full_pages=16)).tree
    return "rust" if type(tree.tree_core).__name__.startswith("Rust") else "python"
