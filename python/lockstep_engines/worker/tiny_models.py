"""vLLM's own models, tiny and with random weights, in its complete engine: the outputs for tokens
of requests that share memory (chunks of prompts, prefix hits, preemption) compared with the outputs
for the same tokens computed alone, unchunked, in an engine without a prefix cache.

run() needs a process that worker/device.py has set up. Nothing is left out: attention, convolutions
and recurrences are vLLM's, in Triton's interpreter. Memory is poisoned before the first step with a
number that is seen wherever it has any weight.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from lockstep_engines import scratch
from lockstep_engines.worker import case as worker_case
from lockstep_engines.worker.device import inspect_models_in_this_process
from lockstep_engines.worker.host import HostWorker
from lockstep_engines.worker.tiny_model_zoo import ZOO, TinyModel

_POISON = 1e4
_BLOCK_SIZE = 16
_MAX_STEPS = 400


class ModelWorker(HostWorker):
    """Allocates the cache as vLLM does, but neither profiles nor warms up."""

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        return contextlib.nullcontext()

    def determine_available_memory(self) -> int:
        return 1 << 28

    def compile_or_warm_up_model(self) -> Any:
        try:
            from vllm.v1.worker.worker_base import CompilationTimes
        except ImportError:
            return 0.0
        return CompilationTimes(language_model=0.0, encoder=0.0)


@dataclass
class Rows:
    """The model's output for each token, by request and position."""

    outputs: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # that came out of the sampler
    num_steps: int = 0
    num_chunks: int = 0  # of prompts, except each one's first
    num_hits: int = 0  # tokens that were found in the cache
    num_preemptions: int = 0


class _Engine:
    """vLLM's scheduler and worker in this process."""

    def __init__(self, model: TinyModel, is_v2: bool, reset_at: int = -1, **options: Any) -> None:
        type(current_platform).worker_class = f"{__name__}.{ModelWorker.__name__}"
        type(current_platform).attention_backends = (worker_case.TRITON_BACKEND, "")
        with scratch.folder() as folder:
            worker_case.describe_model(model.config, folder)
            arguments = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                enforce_eager=True,
                max_model_len=128,
                max_num_seqs=4,
                dtype=model.dtype,
                disable_log_stats=True,
                seed=0,
                async_scheduling=False,
                **options,
            )
            model.prepare()
            config = arguments.create_engine_config()
        self._core = EngineCore(config, UniProcExecutor, log_stats=False)
        gc.unfreeze()  # worker/bounds.py compares accesses with all live tensors
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._is_v2, self.rows, self._reset_at = is_v2, Rows(), reset_at
        model.draw_weights(self._runner.model)
        layers = config.compilation_config.static_forward_context.values()
        for layer in layers:
            caches = getattr(layer, "kv_cache", ())
            for cache in caches if isinstance(caches, list | tuple) else [caches]:
                cache.fill_(_POISON)
        self._watch()

    def _watch(self) -> None:
        """Records the requests of the rows of a batch, and the model's output for them."""
        runner, rows = self._runner, self.rows
        batch: list[tuple[str, int]] = []
        execute, forward = runner.execute_model, runner.model.forward

        def execute_model(output: Any, *args: Any, **options: Any) -> Any:
            self._count(output)
            self._scheduled = output.num_scheduled_tokens
            return execute(output, *args, **options)

        def take_down(*args: Any, **options: Any) -> Any:
            made = forward(*args, **options)
            outputs = made[0] if isinstance(made, tuple) else made
            positions = options["positions"] if "positions" in options else args[1]
            if not self._is_v2:
                names = runner.input_batch.req_ids
                batch[:] = [(name, self._scheduled[name]) for name in names]
            first = 0
            for name, count in batch:
                of_request = rows.outputs.setdefault(name, {})
                for i in range(first, first + count):
                    of_request[int(positions[i])] = outputs[i].float().clone()
                first += count
            return made

        runner.execute_model, runner.model.forward = execute_model, take_down
        if self._is_v2:
            prepare = runner.prepare_inputs

            def prepare_inputs(*args: Any, **options: Any) -> Any:
                made = prepare(*args, **options)
                counts = made.num_scheduled_tokens[: len(made.req_ids)]
                batch[:] = [(n, int(c)) for n, c in zip(made.req_ids, counts, strict=True)]
                return made

            runner.prepare_inputs = prepare_inputs

    def _count(self, output: Any) -> None:
        rows, cached = self.rows, output.scheduled_cached_reqs
        rows.num_preemptions += len(output.preempted_req_ids or ())
        rows.num_hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        rows.num_chunks += sum(output.num_scheduled_tokens[name] > 1 for name in cached.req_ids)

    def run(self, requests: list[tuple[int, str, list[int], int]]) -> None:
        """Per request: the step of its arrival, its name, its prompt, its number of output
        tokens."""
        core, waiting = self._core, list(requests)
        while waiting or core.scheduler.has_requests():
            for request in [one for one in waiting if one[0] <= self.rows.num_steps]:
                waiting.remove(request)
                self._add(*request[1:])
            if self.rows.num_steps == self._reset_at:
                self.rows.num_preemptions += len(core.scheduler.running)
                core.scheduler.reset_prefix_cache(reset_running_requests=True)
            made, _ = core.step_fn()
            for outputs in (made or {}).values():
                for one in outputs.outputs:
                    self.rows.tokens[one.request_id] += one.new_token_ids
            self.rows.num_steps += 1
            if self.rows.num_steps > _MAX_STEPS:
                raise RuntimeError(f"{len(requests)} requests do not end in {_MAX_STEPS} steps")

    def _add(self, name: str, prompt: list[int], num_tokens: int) -> None:
        self.rows.tokens[name] = []
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        self._core.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._core.request_block_hasher,
            )
        )

    def close(self) -> None:
        self._core.shutdown()


def _requests(draw: random.Random) -> list[tuple[int, str, list[int], int]]:
    """In pairs: the second one continues where the first one's prompt ended, some steps later."""
    made = []
    for i in range(3):
        prompt = [draw.randrange(3, 250) for _ in range(3 * _BLOCK_SIZE + draw.choice((1, 7, 20)))]
        longer = prompt + [draw.randrange(3, 250) for _ in range(draw.choice((1, 16, 25)))]
        step = draw.randint(0, 2)
        made.append((step, f"r{2 * i}", prompt, draw.randint(6, 20)))
        made.append((step + 5, f"r{2 * i + 1}", longer, draw.randint(6, 20)))
    return made


@dataclass
class Result:
    name: str
    text: str
    has_failed: bool


def run(names: list[str], runner: str, seed: int = 0) -> Iterator[Result]:
    """`names`: models of the zoo; empty: all of them."""
    inspect_models_in_this_process()
    for name in names or ZOO:
        if ZOO[name].config["architectures"][0] not in registry.ModelRegistry.get_supported_archs():
            yield Result(name, "not in this release", False)
            continue
        try:
            text = _compare(ZOO[name], runner == "v2", random.Random(seed))
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            yield Result(name, f"does not run: {type(error).__name__}: {lines[0]}", True)
            continue
        yield Result(name, text, text.startswith("differs"))


def _compare(model: TinyModel, is_v2: bool, draw: random.Random) -> str:
    requests = _requests(draw)
    shared = _Engine(
        model,
        is_v2,
        model.reset_at,
        block_size=_BLOCK_SIZE,
        enable_prefix_caching=True,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=model.num_blocks,
        **model.options,
    )
    shared.run(requests)
    shared.close()
    rows = shared.rows
    alone = _Engine(
        model,
        is_v2,
        block_size=_BLOCK_SIZE,
        enable_prefix_caching=False,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=64,
    )
    for _, name, prompt, _ in requests:
        alone.run([(0, name, prompt + rows.tokens[name][:-1], 1)])
    alone.close()
    most, num_tokens = 0.0, 0
    for _, name, _, _ in requests:
        expected = alone.rows.outputs[name]
        for position, found in rows.outputs[name].items():
            largest = max(1.0, float(expected[position].abs().max()))
            off = float((found - expected[position]).abs().max()) / largest
            if not off <= model.tolerance:
                return (
                    f"differs: {name}, position {position}: {off:.3g} of the largest number; "
                    f"the tolerance is {model.tolerance:g}"
                )
            most, num_tokens = max(most, off), num_tokens + 1
    for what in ("num_chunks", "num_hits", "num_preemptions"):
        if not getattr(rows, what):
            return f"differs from what it is to show: {what} is 0 in {rows.num_steps} steps"
    return (
        f"agreed: {num_tokens} tokens in {rows.num_steps} steps, {rows.num_chunks} later chunks, "
        f"{rows.num_hits} tokens hit, {rows.num_preemptions} preemptions; at most {most:.2g} off, "
        f"{model.tolerance:g} allowed"
    )
