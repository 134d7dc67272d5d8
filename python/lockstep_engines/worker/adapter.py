"""vLLM's own worker on a CPU: its unedited GPU worker and model runner, on memory that is shared
with Lockstep, fed with decisions step by step.

Worker.open() builds the worker of a case out of vLLM's public classes; execute() hands it one
decision and says what it made of it. The tokens of a step are sampled when the next message brings
them, which is before anything else happens to the worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import mmap
from typing import Any

import numpy
import torch
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry, registry
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention import selector
from vllm.v1.attention.backends import triton_attn
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker import gpu_worker

from lockstep_engines import scratch
from lockstep_engines.protocol import EngineFault, Refused, passes_on
from lockstep_engines.vllm import engine as vllm_engine
from lockstep_engines.worker import case as worker_case
from lockstep_engines.worker import drafter as worker_drafter
from lockstep_engines.worker import layers as worker_layers
from lockstep_engines.worker import model as worker_model
from lockstep_engines.worker import padding as worker_padding
from lockstep_recorder.releases import version_key

VERSION = vllm_engine.VERSION
# vLLM looks at a model's class in a process of its own, where nothing is set up.
registry._run_in_subprocess = lambda function: function()
_OUTPUT_FIELDS = frozenset(entry.name for entry in dataclasses.fields(SchedulerOutput))


def _skip_attention() -> None:
    """What attention would read is read by Lockstep, through the worker's tables."""

    def forward(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        output = options["output"] if "output" in options else args[6]
        return output.zero_()

    triton_attn.TritonAttentionImpl.forward = forward


class _SharedMemory(TorchFunctionMode):
    """Within it, the buffers of the cache are made in a mapped file: vLLM asks for zeros of bytes,
    as large as its plan says."""

    def __init__(self, path: str, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = list(sizes)
        with open(path, "r+b") as file:
            file.truncate(max(1, sum(sizes)))
            self._map = mmap.mmap(file.fileno(), max(1, sum(sizes)))
        self.first_byte = torch.frombuffer(self._map, dtype=torch.int8).data_ptr()
        self._used = 0

    @passes_on
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if args and isinstance(args[0], int) else None
        makes_zeros = getattr(func, "__name__", "") == "zeros"
        if makes_zeros and kwargs.get("dtype") == torch.int8 and size in self._sizes:
            self._sizes.remove(size)
            first, self._used = self._used, self._used + size
            # Its own storage: vLLM counts the offset of a view from the start of the storage.
            made = torch.frombuffer(self._map, dtype=torch.int8, count=size, offset=first)
            return made.zero_()
        return func(*args, **kwargs)

    def check_used_up(self) -> None:
        if self._sizes:
            raise EngineFault(f"vLLM never asked for buffers of {self._sizes} bytes")


class HostWorker(gpu_worker.Worker):
    """vLLM's GPU worker; only its device is the host."""

    allocation: Any = None

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        gpu_worker.set_random_seed(self.model_config.seed)
        if hasattr(self, "_init_workspace_and_model_runner"):
            return self._init_workspace_and_model_runner()
        gpu_worker.init_workspace_manager(self.device, 1)
        if self.use_v2_model_runner:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        else:
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        """Where vLLM puts what it allocates: the cache into memory that is shared."""
        return self.allocation if tag == "kv_cache" else contextlib.nullcontext()


def _rendezvous(*_: Any, **__: Any) -> Any:
    """One rank meets itself, without a file or a port."""
    yield torch.distributed.HashStore(), 0, 1


@dataclasses.dataclass
class _Known:
    """A request as the model knows it: token ids of its own small vocabulary."""

    tokens: list[int]
    num_prompt_tokens: int


def _token(token: int) -> int:
    """Of the model's vocabulary."""
    return token % 65521 % worker_case.VOCABULARY


def _sampled_tokens(tokens: list[int], drafts: list[int]) -> list[int]:
    """Of the model's vocabulary: all but the last are drafts that were accepted, and the last is
    not the draft in its place, whatever an engine has recorded there."""
    own = [_token(token) for token in tokens]
    for i, draft in enumerate(drafts[: len(own)]):
        if i < len(own) - 1:
            own[i] = _token(draft)
        elif own[i] == _token(draft):
            own[i] = (own[i] + 1) % worker_case.VOCABULARY
    return own


@dataclasses.dataclass(frozen=True)
class Options:
    """`states`: which of worker_layers.STATE_TYPES layers with states become; empty: those with one
    state short convolutions, others Mamba2. `pads`: batches, as for captured graphs. `idles`: a
    idle rank's batch runs before each step. `warms_up`: the worker profiles and warms up before
    the first one. `lifts_refusals`: of vLLM's configuration, which says what its runner V2 does
    not take yet."""

    runner: str = "v1"
    states: str = ""
    pads: bool = False
    idles: bool = False
    warms_up: bool = False
    lifts_refusals: bool = False


class Worker:
    def __init__(self, options: Options) -> None:
        self._is_v2 = options.runner == "v2"
        self._state_type = options.states
        self._options = options
        self._worker: Any = None
        scratch.remove_abandoned()
        register_rendezvous_handler("lockstep", _rendezvous)
        for prefix in ("", "Eagle"):  # vLLM's name for what drafts for a model
            for made in (worker_model.ContentModel, worker_model.HybridContentModel):
                ModelRegistry.register_model(f"{prefix}Lockstep{made.__name__}", made)
        _skip_attention()
        if options.lifts_refusals:
            VllmConfig._get_v2_model_runner_unsupported_features = lambda *_: []
        # vLLM collects garbage at each start: a second and more over all that was imported.
        gc.collect()
        gc.freeze()

    def hello(self) -> dict[str, Any]:
        runner = "v2" if self._is_v2 else "v1"
        return {
            "engine": {"name": "vllm", "version": VERSION},
            "features": [*worker_layers.KINDS, *self._features(), f"runner:{runner}"],
        }

    def _features(self) -> list[str]:
        drafts = self._is_v2 or importlib.util.find_spec("numba")
        types = [f"dtype:{name}" for name in worker_case.DTYPES]
        drafted = ["drafts", "drafts_in_flight"] if drafts else []
        return ["async_scheduling", *drafted, *types]

    # A case.

    def open(self, case: dict[str, Any], _: Any = None) -> dict[str, Any]:
        worker_case.refuse(case, self._is_v2)
        kinds = {spec["type"] for of in case["groups"] for spec in worker_case.specs_of(of)}
        options = self._options
        if why := worker_padding.refuse(kinds, self._is_v2, options.pads):
            raise Refused(why)
        num_drafts = case["config"].get("num_spec_tokens", 0)
        self._has_drafts_in_flight = num_drafts and case["config"].get("async_scheduling", False)
        if self._is_v2 and num_drafts:
            worker_drafter.take_the_place(num_drafts)
        elif self._has_drafts_in_flight:
            worker_drafter.take_the_place_in_first(num_drafts)
        self.close()
        groups = case["groups"]
        layers = worker_case.plan_layers(groups, self._state_type)
        worker_model.Plan.layers = layers
        selector._cached_get_attn_backend.cache_clear()
        type(current_platform).attention_backend = worker_case.backend_of(layers)
        with scratch.folder() as folder:
            worker_case.describe_model(worker_case.model_config(layers), folder)
            vllm_config = self._make_config(case, folder)
        self._worker = worker = HostWorker(
            vllm_config=vllm_config,
            local_rank=0,
            rank=0,
            distributed_init_method="lockstep://",
            is_driver_worker=True,
        )
        with set_current_vllm_config(vllm_config):
            worker.init_device()
            worker.load_model()
            if options.warms_up:
                self._profile(worker.model_runner)
            kv_config = self._make_kv_config(case, vllm_config)
            sizes = self._buffer_sizes(kv_config)
            worker.allocation = shared = _SharedMemory(case["memory"], sizes)
            worker.initialize_from_config(kv_config)
            shared.check_used_up()
        self._groups, self._layers, self._shared = groups, layers, shared
        self._runner = worker.model_runner
        self._model = self._runner.model
        self._requests: dict[str, _Known] = {}
        self._drafts: dict[str, list[int]] = {}  # of the current step
        self._ends: dict[str, int] = {}  # of the previous step: where its rows end, drafts included
        self._is_due = False  # the previous step's tokens are not sampled yet
        self._faults: list[str] = []
        self._watch_batch()
        self._is_warm = not options.warms_up
        if self._options.pads:
            worker_padding.pad(self._runner, self._is_v2, lambda: self._model.is_idle)
        return self._opened(kv_config, sizes)

    def close(self) -> None:
        self._worker = self._runner = self._model = None

    def _make_config(self, case: dict[str, Any], folder: str) -> Any:
        config = case["config"]
        rows = [group["spec"] for group in case["groups"] if group["spec"]["type"] != "mamba"]
        first = rows[0] if rows else {"block_size": config["block_size"], "dtype": "bf16"}
        drafts: dict[str, Any] = {}
        if config.get("num_spec_tokens"):
            drafts["speculative_config"] = self._drafter_of(config, folder)
        most = max(config["max_num_batched_tokens"], config["max_num_seqs"])
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=config["max_model_len"],
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=max(most, config["max_model_len"])
            if not config.get("enable_chunked_prefill", True)
            else most,
            block_size=first["block_size"],
            num_gpu_blocks_override=case["num_blocks"],
            dtype=worker_case.DTYPES[first["dtype"]],
            disable_log_stats=True,
            seed=0,
            async_scheduling=config.get("async_scheduling", False),
            enable_prefix_caching=config["enable_prefix_caching"],
            **drafts,
        )
        states = [group["spec"] for group in case["groups"] if group["spec"]["type"] == "mamba"]
        if states:
            arguments.mamba_cache_mode = states[0].get("mamba_cache_mode", "none")
        try:
            made = arguments.create_engine_config()
            for spec in states:
                self._set_states(spec, made.cache_config)
            return made
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
            reason = next((line for line in lines if line.startswith("Value error")), lines[0])
            raise Refused(f"the configuration: {reason.partition(' [type=')[0]}") from None

    def _drafter_of(self, config: dict[str, Any], folder: str) -> dict[str, Any]:
        """Whoever drafted, the worker verifies alike; what its own drafter says is not asked."""
        named = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
        has_ngrams = importlib.util.find_spec("vllm.v1.worker.gpu.spec_decode.ngram")
        if self._has_drafts_in_flight if not self._is_v2 else not has_ngrams:
            named = {"method": "eagle", "model": folder}
        return named | {"num_speculative_tokens": config["num_spec_tokens"]}

    @staticmethod
    def _set_states(spec: dict[str, Any], cache_config: Any) -> None:
        """What vLLM's executor works out between making a model and its cache."""
        asked, mode = spec.get("mamba_cache_mode", "none"), cache_config.mamba_cache_mode
        if asked != mode:
            raise Refused(f"states in cache mode {asked}: vLLM's configuration makes it {mode}")
        cache_config.mamba_block_size = spec["block_size"]
        cache_config.mamba_page_size_padded = spec.get("page_size_padded")

    def _make_kv_config(self, case: dict[str, Any], vllm_config: Any) -> Any:
        """vLLM's own plan of memory for the groups of the case."""
        groups = self._make_groups(case)
        cache_config = vllm_config.cache_config
        cache_config.num_gpu_blocks_override = case["num_blocks"]
        if hasattr(cache_config, "get_resolved_kv_cache_layout"):
            from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

            specs = [spec for group in groups for spec in _specs_in(group)]
            supported = self._worker.get_supported_kv_cache_layouts()
            resolve_kv_cache_layout(vllm_config, [supported], specs)
            from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
        else:
            get_kv_cache_config_from_groups = kv_cache_utils.get_kv_cache_config_from_groups
        made = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
        if made.num_blocks != case["num_blocks"]:
            raise Refused(f"vLLM plans {made.num_blocks} blocks instead of {case['num_blocks']}")
        return made

    def _make_groups(self, case: dict[str, Any]) -> list[Any]:
        try:
            groups = vllm_engine.make_groups(case)
        except vllm_engine.NotInThisRelease as error:
            raise Refused(str(error)) from None
        for group, told in zip(groups, case["groups"], strict=True):
            if told["spec"]["type"] == "mamba":
                kind = worker_case.state_type_of(told["spec"], self._state_type)
                group.kv_cache_spec = dataclasses.replace(
                    group.kv_cache_spec, mamba_type=worker_layers.STATE_TYPES[kind]
                )
        return groups

    @staticmethod
    def _buffer_sizes(kv_config: Any) -> list[int]:
        """One buffer for all tensors, or one for each."""
        tensors = kv_config.kv_cache_tensors
        if tensors and hasattr(tensors[0], "layer_stride"):
            return [tensors[0].size]
        return [tensor.size for tensor in tensors]

    def _pages(self, kv_config: Any) -> dict[str, tuple[int, int]]:
        """Of every layer: where the page of its first block begins, and how far the next one is."""
        pages: dict[str, tuple[int, int]] = {}
        offset = 0
        for tensor in kv_config.kv_cache_tensors:
            if hasattr(tensor, "layer_stride"):
                for i, name in enumerate(tensor.layers):
                    pages[name] = (tensor.offset + i * tensor.layer_stride, tensor.block_stride)
                continue
            for name in tensor.shared_by:
                pages[name] = (offset, tensor.size // kv_config.num_blocks)
            offset += tensor.size
        return pages

    def _opened(self, kv_config: Any, sizes: list[int]) -> dict[str, Any]:
        """The memory, and where every layer's rows and states lie in it, in bytes."""
        pages = self._pages(kv_config)
        layers = []
        for kind in self._model.kinds:
            offset, stride = pages[kind.layer.name]
            layer = {"name": kind.layer.name, "page_offset": offset, "page_stride": stride}
            layer["parts"] = [self._part(kind.layer, tensor) for tensor in kind.parts()]
            if states := kind.states():
                layer["states"] = [self._state(kind.layer, state) for state in states]
            layers.append(layer)
        order = getattr(self._worker.cache_config, "kv_cache_layout", None) or ""
        return {"bytes": sum(sizes), "order": order, "layers": layers}

    def _part(self, layer: worker_model.Layer, tensor: torch.Tensor) -> dict[str, Any]:
        size = tensor.element_size()
        if tensor.stride(3) != 1:
            raise Refused(f"{layer.name}: elements of a row are not contiguous")
        return {
            "offset": tensor.data_ptr() - self._shared.first_byte,
            "shape": [*tensor.shape[:3], tensor.shape[3] * size],
            "stride": [stride * size for stride in tensor.stride()[:3]],
        }

    def _state(self, layer: worker_model.Layer, state: torch.Tensor) -> dict[str, Any]:
        if not state[0].is_contiguous():
            raise Refused(f"{layer.name}: elements of a state are not contiguous")
        return {
            "offset": state.data_ptr() - self._shared.first_byte,
            "shape": [len(state), state[0].nbytes],
            "stride": state.stride(0) * state.element_size(),
        }

    def _watch_batch(self) -> None:
        """The worker's own order of the batch."""
        runner, model = self._runner, self._model
        if not self._is_v2:
            model.batch_of_worker = lambda: (
                list(runner.input_batch.req_ids),
                [self._scheduled.get(name, 0) for name in runner.input_batch.req_ids],
            )
            return
        prepare = runner.prepare_inputs

        def prepare_inputs(*args: Any, **options: Any) -> Any:
            batch = prepare(*args, **options)
            names = list(batch.req_ids)
            counts = [int(count) for count in batch.num_scheduled_tokens[: len(names)]]
            model.batch_of_worker = lambda: (names, counts)
            return batch

        runner.prepare_inputs = prepare_inputs

    # A step.

    def sample(self, sampled: dict[str, list[int]]) -> dict[str, Any]:
        self._faults = []
        self._sample(dict(sampled))
        return {"faults": self._faults}

    def execute(self, message: dict[str, Any]) -> dict[str, Any]:
        self._faults = []
        self._sample(dict(message["sampled"]))
        output = self._scheduler_output(message)
        if not self._is_warm:
            self._warm_up()
        if self._options.idles:
            self._run_for_nobody(self._worker.execute_dummy_batch)
        self._model.batch = worker_model.Batch()
        with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
            if self._is_v2:
                worker_drafter.put(self._runner, self._drafts)
            elif self._has_drafts_in_flight:
                worker_drafter.put_in_first(self._runner, self._drafts)
            result = self._worker.execute_model(output)
        self._is_due = result is None
        return self._facts()

    def _run_for_nobody(self, run: Any) -> None:
        """A batch without requests: as a rank of a data parallel group runs while others have
        some, or as it runs before it serves."""
        model = self._worker.model_runner.model
        model.is_idle = True
        with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
            run()
        model.is_idle = False

    def _profile(self, runner: Any) -> None:
        """Before there is a cache. Of a sampler over all tokens nothing stays."""
        runner._dummy_sampler_run = lambda *_, **__: None
        self._run_for_nobody(runner.profile_run)

    def _warm_up(self) -> None:
        """Batches of the sizes for which a server compiles and captures, over pages that are
        poisoned before."""
        self._is_warm = True
        runner = self._runner
        most = self._worker.vllm_config.scheduler_config.max_num_batched_tokens
        for size in sorted({1, 2, runner.max_num_reqs, most}, reverse=True):
            self._run_for_nobody(lambda size=size: runner._dummy_run(size))

    def _sample(self, sampled: dict[str, list[int]]) -> None:
        """What the model answered to the previous step."""
        drafts = self._drafts  # of the previous step
        own = {
            name: _sampled_tokens(tokens, drafts.get(name, [])) for name, tokens in sampled.items()
        }
        for name, tokens in own.items():
            self._requests[name].tokens += tokens
        if not self._is_due:
            return
        self._is_due = False
        answers: list[int] = []
        for name in self._model.batch.names:
            room = 1 + len(drafts.get(name, ()))
            answers += (own.get(name, []) + [0] * room)[:room]
        with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
            self._model.answers = answers
            self._model.give_answers()
            result = self._worker.sample_tokens(None)
        if hasattr(result, "get_output"):
            result = result.get_output()
        self._model.answers = self._model.logits = None
        for name, found in zip(result.req_ids, result.sampled_token_ids, strict=True):
            expected = own.get(name)
            if expected and list(map(int, found)) != expected:
                self._faults.append(f"row {name} returns tokens {found}; expected {expected}")

    def _scheduler_output(self, message: dict[str, Any]) -> SchedulerOutput:
        self._scheduled: dict[str, int] = {}
        new, cached = [], CachedRequestData.make_empty()
        drafts = self._drafts = {}
        ends: dict[str, int] = {}
        step = self._model.step = worker_model.Step()
        for row in message["scheduled"]:
            name, computed = row["id"], row["computed"]
            self._scheduled[name] = row["tokens"]
            if "prompt" in row:
                prompt = [_token(token) for token in row["prompt"]]
                self._requests[name] = _Known(prompt, len(prompt))
            known = self._requests[name]
            del known.tokens[row["known"] :]
            if row.get("spec"):
                drafts[name] = [_token(token) for token in row["spec"]]
            step.first[name] = computed
            step.contents[name] = numpy.array(row["contents"], dtype=numpy.uint64)
            step.tokens[name] = known.tokens + [
                _token(token) if token >= 0 else worker_model.ANY_TOKEN
                for token in row.get("spec") or ()
            ]
            if row.get("new") and (self._is_v2 or not row.get("resumed")):
                new.append(self._new_request(name, row, known))
            else:
                self._cached_request(name, self._counted(row), known, cached)
            ends[name] = computed + row["tokens"]
        self._ends = ends
        if self._has_drafts_in_flight:
            drafts = self._as_scheduled(drafts)
        fields = {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": cached,
            "num_scheduled_tokens": dict(self._scheduled),
            "total_num_scheduled_tokens": sum(self._scheduled.values()),
            "scheduled_spec_decode_tokens": drafts,
            "scheduled_encoder_inputs": {},
            "finished_req_ids": set(message["finished"]),
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": set(message["preempted"]),
            "new_block_ids_to_zero": message["zero"] or None,
            "num_common_prefix_blocks": [0] * len(self._groups),
        }
        if message["copies"]:
            if "kv_cache_block_copies" not in _OUTPUT_FIELDS:
                raise EngineFault(f"copies of blocks: vLLM {VERSION} has none")
            fields["kv_cache_block_copies"] = [
                kv_cache_utils.KVCacheBlockCopy(*copy) for copy in message["copies"]
            ]
        scheduled = message["scheduled"]
        gone = set(message["finished"]) - {row["id"] for row in scheduled if "prompt" in row}
        for name in gone:
            self._requests.pop(name, None)
        return SchedulerOutput(**{k: v for k, v in fields.items() if k in _OUTPUT_FIELDS})

    def _as_scheduled(self, drafts: dict[str, list[int]]) -> dict[str, list[int]]:
        """A scheduler does not know drafts in flight. Runner V1 keeps them by the rows of the
        previous step: it would reject those of a request that was not in it, so they are passed."""
        kept = self._runner.input_batch.prev_req_id_to_index or {} if not self._is_v2 else drafts
        return {
            name: [-1] * len(tokens) if name in kept else tokens for name, tokens in drafts.items()
        }

    def _counted(self, row: dict[str, Any]) -> dict[str, Any]:
        """As the scheduler counts. Lockstep says where a request stands; a scheduler that has
        drafts in flight decides before it receives those of the last step, and counts them all."""
        if not self._has_drafts_in_flight or row.get("resumed"):
            return row
        return row | {"computed": self._ends.get(row["id"], row["computed"])}

    def _new_request(self, name: str, row: dict[str, Any], known: _Known) -> NewRequestData:
        more = {"prefill_token_ids": list(known.tokens)} if self._is_v2 else {}
        return NewRequestData(
            req_id=name,
            prompt_token_ids=known.tokens[: known.num_prompt_tokens],
            mm_features=[],
            sampling_params=SamplingParams(
                max_tokens=row["max_tokens"], temperature=0, ignore_eos=True
            ),
            pooling_params=None,
            block_ids=tuple(row["blocks"]),
            num_computed_tokens=row["computed"],
            lora_request=None,
            **more,
        )

    def _cached_request(self, name: str, row: dict[str, Any], known: _Known, cached: Any) -> None:
        if row.get("resumed"):
            cached.resumed_req_ids.add(name)
        if row.get("resumed") or name not in self._ends:  # was not in the previous step
            cached.all_token_ids[name] = list(known.tokens)
        blocks = tuple(row["blocks"])
        cached.req_ids.append(name)
        cached.new_block_ids.append(blocks if row.get("resumed") or any(blocks) else None)
        cached.num_computed_tokens.append(row["computed"])
        num_output = len(known.tokens) - known.num_prompt_tokens
        if self._has_drafts_in_flight and num_output:  # as the scheduler counts: all accepted
            num_output = max(num_output, row["computed"] + 1 - known.num_prompt_tokens)
        cached.num_output_tokens.append(num_output)

    # What it made of it.

    def _facts(self) -> dict[str, Any]:
        batch = self._model.batch
        groups = [self._group_facts(g, batch) for g in range(len(self._groups))]
        return {
            "rows": batch.names,
            "num_tokens": batch.num_tokens,
            "positions": batch.positions,
            "groups": groups if batch.names else [],
            "faults": self._known_defects(batch) + self._faults + batch.faults,
        }

    def _known_defects(self, batch: worker_model.Batch) -> list[str]:
        """Findings of docs/findings.md that show in this step, by their cause: runner V1 passes the
        metadata of a layer with states no counts of accepted drafts."""
        if self._is_v2 or version_key(VERSION) >= (0, 33):
            return []
        accepted = self._runner.num_accepted_tokens.np
        for kind in self._model.kinds:
            layer, metadata = kind.layer, batch.metadata.get(kind.layer.name)
            if not layer.spec.get("num_speculative_blocks") or metadata is None:
                continue
            if metadata.num_accepted_tokens is not None:
                continue
            is_short = layer.state_type == "short_conv"
            for i, name in enumerate(batch.names):
                if accepted[i] > 1 or is_short and self._drafts.get(name):
                    number = 26 if is_short else 48
                    return [
                        f"finding {number}: the metadata of {layer.name} has no counts of accepted "
                        f"drafts; {name} has {accepted[i]} and {len(self._drafts.get(name, ()))} "
                        "to verify"
                    ]
        return []

    def _group_facts(self, g: int, batch: worker_model.Batch) -> dict[str, Any]:
        if not batch.names:
            return {}
        tables = [self._row_of_table(g, name) for name in batch.names]
        kind = self._groups[g]["spec"]["type"]
        if kind == "mamba":
            return {"tables": tables, "slots": []}
        name = self._groups[g]["layers"][0]
        metadata = batch.metadata[name]
        slots = batch.slot_mappings[name] if batch.slot_mappings else metadata.slot_mapping
        facts = {"tables": tables, "slots": slots[: len(batch.positions)].tolist()}
        if kind not in ("chunked_local", "hidden_state"):  # cut into chunks; not attended to
            reads = self._reads(metadata, tables)
            if any(mine != row[: len(mine)] for mine, row in zip(reads, tables, strict=True)):
                facts["reads"] = reads
        return facts

    @staticmethod
    def _reads(metadata: Any, tables: list[list[int]]) -> list[list[int]]:
        """The rows of the table that attention is given, as far as its requests reach."""
        if hasattr(metadata, "block_table"):
            given = metadata.block_table[: len(tables)].tolist()
        else:  # of MLA, decodes and prefills apart
            parts = (metadata.decode, metadata.prefill)
            given = [row for part in parts if part for row in part.block_table.tolist()]
        given = given[: len(tables)]  # padding follows
        return [mine[: len(row)] for mine, row in zip(given, tables, strict=True)]

    def _row_of_table(self, g: int, name: str) -> list[int]:
        """A request's table as the runner keeps it, in kernel blocks."""
        if not self._is_v2:
            table = self._runner.input_batch.block_table[g]
            index = self._runner.input_batch.req_id_to_index[name]
            count = int(table.num_blocks_per_row[index])
            return table.block_table.np[index, :count].tolist()
        tables = self._runner.block_tables
        index = self._runner.req_states.req_id_to_index[name]
        count = int(tables.num_blocks.np[g, index])
        return tables.block_tables[g].gpu[index, :count].tolist()


def _specs_in(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())
