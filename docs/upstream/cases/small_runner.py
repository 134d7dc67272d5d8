"""vLLM's model runner V1 on a CPU, with Triton's interpreter for its kernels. Its model is one
recurrent layer whose state counts tokens: the state after n tokens is the number n."""

from contextlib import ExitStack, suppress
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import CompilationConfig, CUDAGraphMode, LoadConfig, OffloadConfig
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.utils import AttentionGroup

LAST_RANK = SimpleNamespace(is_last_rank=True, world_size=1, ranks=[0])
gpu_model_runner.get_pp_group = lambda: LAST_RANK


class Event:
    """A CUDA event. `copy`, if set, is a copy that completes when the event is waited for."""

    copy = None

    def __init__(self, **_):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        if self.copy:
            self.copy()
        self.copy = None


class Drafter(EagleProposer):
    kv_cache_gid = 0

    def __init__(self, *_):
        pass

    def prepare_next_token_ids_padded(self, tokens, *_):
        return tokens[:, 0], (tokens != -1).sum(dim=1).int()


class Sampled(Exception):
    """Ends a step once everything is done that later steps depend on."""


class SmallRunner(gpu_model_runner.GPUModelRunner):
    """Runs the steps of a SmallEngine with EAGLE. `copies_late`: counts of accepted tokens reach
    the host when their event is waited for, else right after sampling."""

    def __init__(self, engine, copies_late=False):
        self.engine, self.copies_late, self.in_flight, self.computed = engine, copies_late, [], {}
        config, plan = engine.config, engine.scheduler.kv_cache_config
        complete(config)
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(torch.cuda, Stream=Event, Event=Event))
            stack.enter_context(patch.object(torch, "Event", Event))
            stack.enter_context(patch.object(gpu_model_runner, "EagleProposer", Drafter))
            super().__init__(config, torch.device("cpu"))
        self.model = SimpleNamespace(
            compute_logits=lambda _: None,
            get_mamba_state_copy_funcs=lambda kinds: dict.fromkeys(
                kinds, (get_temporal_copy_spec,)
            ),
        )
        self.kv_cache_config = plan
        self.may_reinitialize_input_batch(plan)
        self.states = torch.zeros(plan.num_blocks, 1, dtype=torch.int64)
        for index, group in enumerate(plan.kv_cache_groups):
            self.attn_groups.append([])
            if isinstance(group.kv_cache_spec, MambaSpec):
                (self.layer,) = group.layer_names
                made = AttentionGroup(
                    ShortConvAttentionBackend, [self.layer], group.kv_cache_spec, index
                )
                made.create_metadata_builders(config, self.device)
                self.attn_groups[index].append(made)
        layers = config.compilation_config.static_forward_context
        layers[self.layer] = SimpleNamespace(kv_cache=[self.states])
        self.calculate_reorder_batch_threshold()

    def step(self, accepts=()):
        """Schedules and runs a step. The requests in `accepts` accept one draft, if they have any.
        Returns for each request: tokens in the state it continues from, tokens computed before."""
        step = self.engine.schedule()
        drafts, cached = step.scheduled_spec_decode_tokens, step.scheduled_cached_reqs
        self.accepted = {name: 1 for name in accepts if drafts.get(name)}
        for request in step.scheduled_new_reqs:
            self.computed[request.req_id] = request.num_computed_tokens
        for name, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self.computed[name] = num_computed
        self.continued = {}
        self.execute_model(step)
        with suppress(Sampled):
            self.sample_tokens(None)
        read = {name: (state, self.computed[name]) for name, state in self.continued.items()}
        for name, num_tokens in step.num_scheduled_tokens.items():
            rejected = len(drafts.get(name, ())) - self.accepted.get(name, 0)
            self.computed[name] += num_tokens - rejected
        self.in_flight.append((step, self.accepted))
        if len(self.in_flight) > self.use_async_scheduling:
            step, accepted = self.in_flight.pop(0)
            self.engine.update(step, accepted=accepted)
        return read

    def _model_forward(self, **_):
        """Reads and writes states as Mamba2's kernels do."""
        step = get_forward_context().attn_metadata[self.layer]
        lengths = self.query_start_loc.np[1:] - self.query_start_loc.np[:-1]
        for row, name in enumerate(self.input_batch.req_ids):
            if row < step.num_decodes:  # a state after each token, since drafts may be rejected
                blocks = step.state_indices_tensor_d[row].tolist()
                state = int(self.states[blocks[step.num_accepted_tokens[row] - 1]])
                for token in range(lengths[row]):
                    self.states[blocks[token]] = state + token + 1
            else:
                prefill = row - step.num_decodes
                block = step.state_indices_tensor_p[prefill]
                state = int(self.states[block]) if step.has_initial_states_p[prefill] else 0
                self.states[block] = state + int(lengths[row])
            self.continued[name] = state
        return torch.zeros(self.max_num_tokens, 1)

    def _sample(self, *_):
        shape = self.input_batch.num_reqs, 1 + self.num_spec_tokens
        tokens = torch.full(shape, -1, dtype=torch.int32)
        for row, name in enumerate(self.input_batch.req_ids):
            tokens[row, : 1 + self.accepted.get(name, 0)] = 7
        return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=None)

    def _update_states_after_model_execute(self, tokens, step):
        counts = self.input_batch.num_accepted_tokens_cpu_tensor
        before = counts.clone()
        super()._update_states_after_model_execute(tokens, step)
        if self.copies_late:
            after = counts[: len(tokens)].clone()
            counts.copy_(before)
            self.num_accepted_tokens_event.copy = lambda: counts[: len(after)].copy_(after)

    def propose_draft_token_ids(self, step, tokens, *_):
        self._copy_valid_sampled_token_count(*self.drafter.prepare_next_token_ids_padded(tokens))
        return torch.zeros(len(tokens), self.num_spec_tokens, dtype=torch.int32)

    def _copy_valid_sampled_token_count(self, tokens, counts):
        if self.use_async_scheduling:
            self.valid_sampled_token_count_cpu[: len(counts)] = counts
            self.valid_sampled_token_count_gpu = counts
            self.input_batch.prev_sampled_token_ids = tokens.unsqueeze(1)

    def eplb_step(self):
        raise Sampled

    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs, **_):
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens, num_reqs), False, None, None

    def _get_slot_mappings(self, **_):
        return [None] * len(self.attn_groups), None

    def _preprocess(self, *_):
        return None, None, None, None, {}, None

    def _copy_draft_token_ids_to_cpu(self, *_, **__):
        pass


def complete(config):
    """Adds the fields of a SmallEngine's configuration that only a runner reads."""
    vars(config.model_config).update(
        dtype=torch.float32, is_hybrid=True, mrope_num_dims=0, logits_processors=None,
        logprobs_mode="raw_logprobs", use_fp64_gumbel=False, rswa_window=None,
        get_inputs_embeds_size=lambda: 1, get_vocab_size=lambda: 100,
    )  # fmt: skip
    vars(config.speculative_config).update(
        draft_model_config=None, parallel_drafting=False, rejection_sample_method="standard",
        disable_padded_drafter_batch=False, use_ngram_gpu=lambda: False,
        use_gemma4_mtp=lambda: False, use_step3p5_mtp=lambda: False,
    )  # fmt: skip
    fields = {
        "compilation_config": CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE),
        "load_config": LoadConfig(), "offload_config": OffloadConfig(), "reasoning_config": None,
    }  # fmt: skip
    for name, value in fields.items():
        object.__setattr__(config, name, value)
