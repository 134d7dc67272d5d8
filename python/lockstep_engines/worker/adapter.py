"""vLLM's own worker behind the worker protocol: its unedited GPU worker and model runner on the
host, on memory that it shares with Lockstep, fed with decisions step by step.

Worker.open() builds the worker of a case from vLLM's public classes; execute() passes it one
decision and reports what it made of it. A step's tokens are sampled when the next message brings
them, before anything else happens to the worker.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention import selector

from lockstep_engines import scratch
from lockstep_engines.protocol import EngineFault, Refused
from lockstep_engines.vllm.engine import VERSION
from lockstep_engines.worker import batch as worker_batch
from lockstep_engines.worker import case as worker_case
from lockstep_engines.worker import configuration, memory, metadata
from lockstep_engines.worker import hidden_states as worker_hidden_states
from lockstep_engines.worker import host as worker_host
from lockstep_engines.worker import layers as worker_layers
from lockstep_engines.worker import model as worker_model
from lockstep_engines.worker import padding as worker_padding
from lockstep_engines.worker import speculator as worker_speculator
from lockstep_engines.worker.facts import (
    Facts,
    clears_moved_rows,
    kernel_block_sizes,
    nulls_windows,
)
from lockstep_engines.worker.steps import Steps
from lockstep_recorder.releases import version_key


@dataclasses.dataclass(frozen=True)
class Options:
    """`states`: which of worker_layers.STATE_TYPES layers with recurrent states become; empty:
    short convolutions for those with one state, else Mamba2. `pads`: batches are padded as for
    captured graphs. `kernel_blocks`: largest block that attention takes, where the case does not
    say; 0: blocks are not split. `pairs_apart`: tensors have K of all blocks before V. `idles`: an
    idle rank's batch runs before each step. `warms_up`: the worker profiles and warms up before the
    first step. `lifts_refusals`: vLLM's configuration no longer refuses what its runner V2 does not
    support."""

    runner: str = "v1"
    states: str = ""
    pads: bool = False
    kernel_blocks: int = 0
    pairs_apart: bool = False
    idles: bool = False
    warms_up: bool = False
    lifts_refusals: bool = False


class Worker:
    """Drives one case after another. `worker_class`: vLLM's worker, or a subclass under test."""

    def __init__(
        self, options: Options, worker_class: type[worker_host.HostWorker] = worker_host.HostWorker
    ) -> None:
        self._is_v2 = options.runner == "v2"
        self._options = options
        self._worker_class = worker_class
        self._worker: Any = None
        self._facts: Any = None
        self._batch: Any = None
        self._metadata: Any = None
        self._accepted: worker_batch.AcceptedCounts | None = None
        self._hidden_states: worker_hidden_states.HiddenStates | None = None
        scratch.remove_abandoned()
        worker_host.patch_vllm()
        if options.lifts_refusals:
            VllmConfig._get_v2_model_runner_unsupported_features = lambda *_: []
        # vLLM collects garbage at each start: a second and more over all that was imported.
        gc.collect()
        gc.freeze()

    def hello(self) -> dict[str, Any]:
        runner = "v2" if self._is_v2 else "v1"
        return {
            "engine": {"name": "vllm", "version": VERSION},
            "features": [*self._kinds(), *self._features(), f"runner:{runner}"],
        }

    def _kinds(self) -> list[str]:
        """The configuration of 0.22.1 refuses states on runner V2."""
        refuses = self._is_v2 and not self._options.lifts_refusals
        if refuses and version_key(VERSION) < (0, 23):
            return [kind for kind in worker_layers.KINDS if kind != "mamba"]
        return worker_layers.KINDS

    def _features(self) -> list[str]:
        drafts = self._is_v2 or importlib.util.find_spec("numba")
        types = [f"dtype:{name}" for name in worker_case.DTYPES]
        modes = worker_case.state_modes(self._options.states)
        types += [f"mamba_cache_mode:{mode}" for mode in modes]
        if self._options.states == "short_conv":
            types.append("lacks:prefill_checkpoints")
        drafted = ["drafts", "drafts_in_flight"] if drafts else []
        latents = [f"latent:{size}" for size in worker_case.latent_sizes()]
        return ["async_scheduling", "kernel_blocks", *drafted, *types, *latents]

    # A case.

    def open(self, case: dict[str, Any], _: Any = None) -> dict[str, Any]:
        worker_case.refuse(case, self._is_v2)
        groups = case["groups"]
        kinds = {spec["type"] for group in groups for spec in worker_case.specs_of(group)}
        if why := worker_padding.refuse(kinds, self._is_v2, self._options.pads):
            raise Refused(why)
        self._replace_speculator(case["config"])
        self.close()
        layers = worker_case.plan_layers(groups, self._options.states)
        worker_model.Plan.layers = layers
        selector._cached_get_attn_backend.cache_clear()
        sizes = worker_case.kernel_block_sizes(case, self._options.kernel_blocks)
        apart = self._options.pairs_apart
        if apart and (why := worker_case.refuse_apart(layers)):
            raise Refused(why)
        backends = worker_case.backends_of(layers, sizes, apart)
        type(current_platform).attention_backends = backends
        with scratch.folder() as folder:
            worker_case.describe_model(worker_case.model_config(layers), folder)
            vllm_config = configuration.make_config(case, folder, self._is_v2)
        kv_config, shared = self._start(case, vllm_config)
        self._runner = self._worker.model_runner
        self._model = self._runner.model
        self._steps = Steps(len(groups), self._is_v2, self._has_drafts_in_flight)
        parts = self._parts(groups, sizes)
        self._facts = Facts(self._runner, self._model, groups, parts, self._is_v2)
        self._is_due = False  # the previous step's tokens are not sampled yet
        keeps_drafts = any(
            spec.get("num_speculative_blocks") and spec.get("mamba_cache_mode") == "align"
            for group in groups
            for spec in worker_case.specs_of(group)
        )
        in_flight = keeps_drafts and not self._is_v2 and self._has_drafts_in_flight
        self._accepted = worker_batch.AcceptedCounts(self._runner) if in_flight else None
        self._faults: list[str] = []
        self._watch_batch()
        self._watch_metadata(groups, parts)
        self._is_warm = not self._options.warms_up
        if self._options.pads:
            worker_padding.pad(self._runner, self._is_v2, lambda: self._model.is_idle)
        if "hidden_state" in kinds:
            self._hidden_states = worker_hidden_states.HiddenStates(
                vllm_config, kv_config, self._model.kinds
            )
        order = getattr(self._worker.cache_config, "kv_cache_layout", None) or ""
        return memory.description(kv_config, order, self._model.kinds, shared.first_byte)

    def close(self) -> None:
        if self._hidden_states:
            self._hidden_states.close()
        self._hidden_states = None
        self._worker = self._runner = self._model = self._facts = None
        if self._accepted:
            self._accepted.stop()
        self._batch = self._metadata = self._accepted = None

    def _replace_speculator(self, config: dict[str, Any]) -> None:
        self._has_drafts_in_flight = configuration.has_drafts_in_flight(config)
        num_drafts = config.get("num_spec_tokens", 0)
        if self._is_v2 and num_drafts:
            worker_speculator.replace_v2(num_drafts)
        elif self._has_drafts_in_flight:
            worker_speculator.replace_v1(num_drafts)

    def _start(self, case: dict[str, Any], vllm_config: Any) -> tuple[Any, memory.SharedMemory]:
        """Makes the worker, its model and its cache; returns the plan and the memory."""
        self._worker = worker = self._worker_class(
            vllm_config=vllm_config,
            local_rank=0,
            rank=0,
            distributed_init_method=worker_host.INIT_METHOD,
            is_driver_worker=True,
        )
        with set_current_vllm_config(vllm_config):
            worker.init_device()
            worker.load_model()
            if self._options.warms_up:
                self._profile(worker.model_runner)
            groups = configuration.make_groups(case, self._options.states)
            kv_config = memory.plan(worker, vllm_config, groups, case["num_blocks"])
            shared = memory.SharedMemory(case["memory"], memory.buffer_sizes(kv_config))
            worker.allocation = shared
            worker.initialize_from_config(kv_config)
            shared.check_used_up()
        return kv_config, shared

    def _parts(self, groups: list[dict[str, Any]], sizes: list[int]) -> list[int]:
        """Kernel blocks per block, by group. Raises Refused where vLLM selects other sizes."""
        selected = kernel_block_sizes(self._runner)
        if selected != sizes:
            raise Refused(f"kernel blocks of {sizes} tokens: vLLM selects {selected}")
        blocks = [group["spec"]["block_size"] for group in groups]
        return [block // size for block, size in zip(blocks, sizes, strict=True)]

    def _watch_metadata(self, groups: list[dict[str, Any]], parts: list[int]) -> None:
        """Has what attention receives, and the persistent batch, compared in every step."""
        for kind in self._model.kinds:
            kind.written_parts = kind.parts()
        nulls, in_flight = nulls_windows(self._is_v2), self._has_drafts_in_flight
        self._metadata = metadata.MetadataCheck(
            self._runner, self._model.kinds, groups, parts, nulls, in_flight
        )
        if self._is_v2:
            self._batch = worker_batch.SecondBatch(self._runner, clears_moved_rows())
        else:
            self._batch = worker_batch.FirstBatch(self._runner, clears_moved_rows(), in_flight)

    def _compare(self, facts: dict[str, Any]) -> list[str]:
        """What differs in the batch and in its metadata, after a forward pass. Where positions,
        tables or slots differ, Lockstep reports them instead."""
        expected, made = self._steps.expected, self._model.batch
        if facts["faults"]:
            return []
        rows = [expected.rows[name] for name in made.names if name in expected.rows]
        if len(rows) < len(made.names) or not self._metadata.agrees(rows, facts["groups"]):
            return []
        return self._batch.of_step(expected) + self._metadata.of_step(rows, made.metadata)

    def _watch_batch(self) -> None:
        """Has the model read the batch in the worker's own order."""
        runner, model = self._runner, self._model
        if not self._is_v2:
            model.batch_of_worker = lambda: (
                list(runner.input_batch.req_ids),
                [self._steps.scheduled.get(name, 0) for name in runner.input_batch.req_ids],
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

    def extract(self, wanted: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._hidden_states is not None
        save, expected = self._hidden_states.save, self._steps.expected
        return {"files": [save(states, expected) for states in wanted]}

    def execute(self, message: dict[str, Any]) -> dict[str, Any]:
        self._faults = []
        self._sample(dict(message["sampled"]))
        rows: dict[str, int] = {}
        if self._has_drafts_in_flight and not self._is_v2:
            rows = self._runner.input_batch.prev_req_id_to_index or {}
        self._model.step = worker_model.Step()
        output = self._steps.begin(message, self._model.step, rows)
        if not self._is_warm:
            self._warm_up()
        if self._options.idles:
            self._run_without_requests(self._worker.execute_dummy_batch)
        self._model.batch = worker_model.Batch()
        self._metadata.begin()
        self._batch.begin()
        with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
            if self._is_v2:
                worker_speculator.put_v2(self._runner, self._steps.drafts)
            elif self._has_drafts_in_flight:
                worker_speculator.put_v1(self._runner, self._steps.drafts)
            try:
                result = self._worker.execute_model(output)
            except Exception as error:
                self._facts.name_exception(error)
                for fault in getattr(self._batch, "faults", ()):  # its cause, seen before
                    if fault.startswith("finding "):
                        raise EngineFault(fault) from error
                raise
        self._is_due = result is None
        if self._accepted:
            self._faults += self._accepted.faults[:1]
        facts = self._facts.of_step(self._steps.drafts, self._faults)
        facts["faults"] += self._compare(facts)
        return facts

    def _run_without_requests(self, run: Any) -> None:
        """Runs a batch without requests: a data parallel rank does while other ranks have some, and
        a worker does before it serves."""
        model = self._worker.model_runner.model
        model.is_idle = True
        with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
            run()
        model.is_idle = False

    def _profile(self, runner: Any) -> None:
        """Comes before the cache exists. The run of the sampler leaves nothing in the cache."""
        runner._dummy_sampler_run = lambda *_, **__: None
        self._run_without_requests(runner.profile_run)

    def _warm_up(self) -> None:
        """Runs the batch sizes that a server compiles and captures, over poisoned pages."""
        self._is_warm = True
        runner = self._runner
        most = self._worker.vllm_config.scheduler_config.max_num_batched_tokens
        for size in sorted({1, 2, runner.max_num_reqs, most}, reverse=True):
            self._run_without_requests(lambda size=size: runner._dummy_run(size))

    def _sample(self, sampled: dict[str, list[int]]) -> None:
        """Has the worker sample the previous step's tokens."""
        drafts = self._steps.drafts  # of the previous step
        own = self._steps.sampled(sampled)
        if not self._is_due:
            return
        self._is_due = False
        answers: list[int] = []
        for name in self._model.batch.names:
            count = 1 + len(drafts.get(name, ()))
            answers += (own.get(name, []) + [0] * count)[:count]
        with set_current_vllm_config(self._worker.vllm_config), torch.inference_mode():
            self._model.answers = answers
            self._model.give_answers()
            result = self._worker.sample_tokens(None)
        self._faults += self._batch.while_sampling()
        if self._accepted:
            self._accepted.after_sampling()
        if hasattr(result, "get_output"):
            result = result.get_output()
        self._model.answers = self._model.logits = None
        for name, found in zip(result.req_ids, result.sampled_token_ids, strict=True):
            expected = own.get(name)
            if expected and list(map(int, found)) != expected:
                self._faults.append(f"row {name} returns tokens {found}; expected {expected}")
