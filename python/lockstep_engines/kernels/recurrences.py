"""Kernels of layers that keep recurrent states in blocks of a cache, for kernels/check.py. The
loops are those of kernels/loops_of_states.py. A kernel must not change a bit of the states of
requests that the step leaves out, of the padding between pages, or of the null block.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from itertools import accumulate
from typing import Any

import numpy
import torch
from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssd_combined

from lockstep_engines.kernels import loops_of_states as loops
from lockstep_engines.kernels.check import (
    Check,
    Trial,
    bytes_of,
    doubles,
    drawn_numbers,
    fitting,
    poisoned,
)

_DTYPES = (torch.float32, torch.float16)
# Relative to the largest expected number: sums in another order; fp16 also rounds products' inputs.
_TOLERANCES = {torch.float32: 5e-5, torch.float16: 1e-2}


def _fla(module: str) -> Any:
    """vLLM's copy of flash-linear-attention's kernels; its path depends on the release."""
    for place in ("third_party.flash_linear_attention", "model_executor.layers.fla"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"vllm.{place}.ops.{module}")
    raise ModuleNotFoundError(f"vLLM's {module}")


class _States:
    """A state per block in poisoned memory, with padding after it, generated for the blocks of
    requests. `turned`: a block's elements are transposed in memory."""

    def __init__(
        self,
        draw: random.Random,
        count: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        turned: bool = False,
    ) -> None:
        self.blocks = 1 + count + draw.randint(0, 2)
        size = int(numpy.prod(shape))
        stride = size + draw.choice((0, 16))
        self.memory = poisoned(self.blocks * stride * dtype.itemsize)
        steps = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
        if turned:
            steps = [1, shape[0]]
        self.view = torch.as_strided(
            self.memory.view(dtype), (self.blocks, *shape), (stride, *steps)
        )
        self.of = draw.sample(range(1, self.blocks), count)
        for block in self.of:
            self.view[block] = drawn_numbers(draw, shape, dtype)
        self.before = doubles(self.view)

    def trial(
        self, text: str, expected: Any, found: Any, states: dict[int, Any], dtype: torch.dtype
    ) -> Trial:
        """`states`: the contents of written blocks, NaN where there is none; all other bytes are
        unchanged."""
        made = [doubles(self.view[block]) for block in states]
        kept = [numpy.where(numpy.isnan(want), 0.0, want) for want in states.values()]
        made = [
            numpy.where(numpy.isnan(want), 0.0, have)
            for want, have in zip(states.values(), made, strict=True)
        ]
        rest = self.view.clone()
        for block in states:
            self.view[block] = torch.from_numpy(self.before[block]).to(self.view.dtype)
        unwritten = bytes_of(self.memory)
        for block in range(self.blocks):  # what they were, poison that is NaN as well
            self.view[block] = rest[block]
        return Trial(
            text,
            [*expected, *kept, self.untouched],
            [*found, *made, unwritten],
            _TOLERANCES[dtype],
        )

    def keep(self) -> None:
        """Before the launch."""
        self.untouched = bytes_of(self.memory)


def _starts(counts: list[int]) -> tuple[list[int], torch.Tensor]:
    starts = [0, *accumulate(counts)]
    return starts, torch.tensor(starts, dtype=torch.int32)


# Convolutions.


def _convolve_prompts(draw: random.Random) -> Trial:
    """Chunks of prompts, first or later ones; padding in the batch."""
    dtype, count = draw.choice(_DTYPES), draw.randint(1, 4)
    channels, width = draw.choice((3, 16, 70)), draw.choice((2, 3, 4))
    states = _States(draw, count, (channels, width - 1), dtype, turned=draw.random() < 0.6)
    counts = [draw.choice((1, 2, width, 9, 20)) for _ in range(count)]
    begun = [draw.random() < 0.5 for _ in range(count)]
    starts, of_starts = _starts(counts)
    inputs = drawn_numbers(draw, (starts[-1], channels), dtype)
    weights = drawn_numbers(draw, (channels, width), dtype)
    bias = drawn_numbers(draw, (channels,), dtype)
    acts = draw.random() < 0.6
    states.keep()
    out = causal_conv1d.causal_conv1d_fn(
        inputs.transpose(0, 1),
        weights,
        bias,
        activation="silu" if acts else None,
        conv_states=states.view,
        has_initial_state=torch.tensor(begun),
        cache_indices=torch.tensor(states.of, dtype=torch.int32),
        query_start_loc=of_starts,
    ).transpose(0, 1)
    expected, written = numpy.empty(tuple(out.shape)), {}
    for i, block in enumerate(states.of):
        some = slice(starts[i], starts[i + 1])
        history = states.before[block].T * begun[i]
        sums, known = loops.convolve(
            history, doubles(inputs[some]), doubles(weights), doubles(bias)
        )
        expected[some] = loops.silu(sums) if acts else sums
        written[block] = known[-(width - 1) :].T
    text = f"{dtype}, {channels} channels, width {width}, {counts} tokens, begun {begun}"
    return states.trial(text, [expected], [doubles(out)], written, dtype)


def _convolve_tokens(draw: random.Random) -> Trial:
    """One token per request, or drafts after some accepted tokens; rows of padding use the null
    block."""
    dtype, count, drafts = draw.choice(_DTYPES), draw.randint(1, 5), draw.choice((0, 0, 1, 3))
    channels, width = draw.choice((3, 16, 300)), draw.choice((2, 3, 4))
    length = width - 1 + drafts
    states = _States(draw, count, (channels, length), dtype, turned=draw.random() < 0.6)
    counts = [1 + draw.randint(0, drafts) for _ in range(count)]
    accepted = [1 + draw.randint(0, drafts) for _ in range(count)]
    is_padding = [draw.random() < 0.2 for _ in range(count)]
    starts, of_starts = _starts(counts)
    inputs = drawn_numbers(draw, (starts[-1], channels), dtype)
    weights = drawn_numbers(draw, (channels, width), dtype)
    bias = drawn_numbers(draw, (channels,), dtype)
    blocks = [0 if skip else block for block, skip in zip(states.of, is_padding, strict=True)]
    options: dict[str, Any] = {}
    if drafts:
        options["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
        options |= {"query_start_loc": of_starts, "max_query_len": 1 + drafts}
    given = doubles(inputs)
    states.keep()
    out = causal_conv1d.causal_conv1d_update(
        inputs,
        states.view,
        weights,
        bias,
        "silu",
        conv_state_indices=torch.tensor(blocks, dtype=torch.int32),
        **options,
    )
    expected, written = given.copy(), {}  # padding: the inputs, which outputs replace
    for i, block in enumerate(blocks):
        if not block:
            continue
        some = slice(starts[i], starts[i + 1])
        first = accepted[i] - 1 if drafts else 0
        history = states.before[block].T[first : first + width - 1]
        sums, known = loops.convolve(history, given[some], doubles(weights), doubles(bias))
        expected[some] = loops.silu(sums)
        new = numpy.full((length, channels), numpy.nan)
        kept = known[1:] if drafts else known[-(width - 1) :]
        new[: len(kept)] = kept
        new[len(kept) :] = states.before[block].T[len(kept) :]
        written[block] = new.T
    text = f"{dtype}, {channels} channels, width {width}, {counts} tokens after {accepted}, "
    return states.trial(text + f"blocks {blocks}", [expected], [doubles(out)], written, dtype)


# Mamba.


class _Mamba:
    """Numbers of a layer: a decay per head as in Mamba2, or per element."""

    def __init__(self, draw: random.Random, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.groups = draw.randint(1, 2)
        self.heads = self.groups * draw.randint(1, 3)
        self.elements, self.size = draw.choice(sizes), draw.choice(sizes)
        of_head = drawn_numbers(draw, (self.heads, 3), torch.float32)
        self.decay, self.bias, self.direct = -of_head[:, 0].exp(), of_head[:, 1], of_head[:, 2]
        self.draw, self.dtype = draw, dtype

    def inputs(self, count: int) -> None:
        draw, groups = self.draw, (count, self.groups, self.size)
        self.x = drawn_numbers(draw, (count, self.heads, self.elements), self.dtype)
        self.dt = drawn_numbers(draw, (count, self.heads), self.dtype)
        self.z = drawn_numbers(draw, (count, self.heads, self.elements), self.dtype)
        self.write = drawn_numbers(draw, groups, self.dtype)
        self.read = drawn_numbers(draw, groups, self.dtype)

    def run(self, state: numpy.ndarray, some: slice, gated: bool) -> Any:
        shape = (self.heads, self.elements, self.size)
        steps = loops.softplus(doubles(self.dt[some]) + doubles(self.bias))[:, :, None]
        x = doubles(self.x[some])
        outputs, states = loops.scan(
            state,
            x,
            numpy.broadcast_to(steps, x.shape),
            numpy.broadcast_to(doubles(self.decay)[:, None, None], shape),
            *(
                doubles(one[some]).repeat(self.heads // self.groups, axis=1)
                for one in (self.write, self.read)
            ),
        )
        outputs = outputs + x * doubles(self.direct)[:, None]
        return (outputs * loops.silu(doubles(self.z[some])) if gated else outputs), states

    def text(self) -> str:
        return (
            f"{self.dtype}, {self.heads} heads of {self.elements} in {self.groups} groups, "
            f"states of {self.size}"
        )


def _update_states(draw: random.Random) -> Trial:
    """One token per request, in place or from one block into another; or drafts, each with its own
    block."""
    dtype, count, drafts = draw.choice(_DTYPES), draw.randint(1, 4), draw.choice((0, 0, 1, 3))
    mamba, columns = _Mamba(draw, dtype, (3, 16, 40)), 1 + drafts
    states = _States(draw, 2 * count * columns, (mamba.heads, mamba.elements, mamba.size), dtype)
    table = numpy.array(states.of[: count * columns]).reshape(count, columns)
    target = table
    if not drafts and draw.random() < 0.5:
        target = numpy.array(states.of[count:]).reshape(-1, 1)[:count]
    table[:, 0] *= [draw.random() < 0.8 for _ in range(count)]  # padding is of the null block
    target[:, 0] *= table[:, 0] > 0
    counts = [1 + draw.randint(0, drafts) for _ in range(count)]
    starts, of_starts = _starts(counts)
    accepted = [1 + draw.randint(0, drafts) for _ in range(count)]
    mamba.inputs(starts[-1])
    gated = draw.random() < 0.5
    out = torch.full(tuple(mamba.x.shape), -7.0).to(dtype)
    options: dict[str, Any] = {}
    if drafts:
        options["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
        options["cu_seqlens"] = of_starts
    shape = (mamba.heads, mamba.elements)
    states.keep()
    mamba_ssm.selective_state_update(
        states.view,
        mamba.x,
        mamba.dt[:, :, None].expand(-1, -1, mamba.elements),
        mamba.decay[:, None, None].expand(*shape, mamba.size),
        mamba.write,
        mamba.read,
        mamba.direct[:, None].expand(shape),
        dt_bias=mamba.bias[:, None].expand(shape),
        z=mamba.z if gated else None,
        dt_softplus=True,
        state_batch_indices=torch.tensor(table, dtype=torch.int32),
        dst_state_batch_indices=torch.tensor(target, dtype=torch.int32),
        out=out,
        **options,
    )
    expected, written = doubles(out), dict[int, Any]()
    for i in range(count):
        some = slice(starts[i], starts[i + 1])
        first = table[i, accepted[i] - 1 if drafts else 0]
        if not first:  # what padding puts out is unread
            continue
        expected[some], made = mamba.run(states.before[first], some, gated)
        if not drafts:
            made = made[-1:]
        written |= {block: new for block, new in zip(target[i], made, strict=False) if block}
    text = f"{mamba.text()}, {counts} tokens after {accepted}, {table.tolist()} to "
    return states.trial(text + f"{target.tolist()}", [expected], [doubles(out)], written, dtype)


def _scan_prompts(draw: random.Random) -> Trial:
    """Chunks of prompts, cut into pieces that restart with each request and whose first may be
    short, as in vLLM's metadata."""
    dtype, count, chunk = draw.choice(_DTYPES), draw.randint(1, 3), draw.choice((16, 32))
    mamba = _Mamba(draw, dtype, (16, 32))
    counts = [draw.choice((1, 5, 16, 33, 50)) for _ in range(count)]
    starts, of_starts = _starts(counts)
    pieces, owners, last = [0], [], []
    for i, tokens in enumerate(counts):
        at, front = 0, draw.choice((0, 0, draw.randint(1, chunk)))
        while at < tokens:
            at = min(tokens, at + (front or chunk))
            front = 0
            pieces.append(starts[i] + at)
            owners.append(i)
        last.append(len(owners) - 1)
    begun = [draw.random() < 0.5 for _ in range(count)]
    initial = drawn_numbers(draw, (count, mamba.heads, mamba.elements, mamba.size), torch.float32)
    initial = initial * torch.tensor(begun)[:, None, None, None]
    mamba.inputs(starts[-1])
    gated = draw.random() < 0.5
    out = torch.full(tuple(mamba.x.shape), numpy.nan).to(dtype)
    found = ssd_combined.mamba_chunk_scan_combined_varlen(
        mamba.x,
        mamba.dt,
        mamba.decay,
        mamba.write,
        mamba.read,
        chunk_size=chunk,
        cu_seqlens=of_starts,
        cu_chunk_seqlens=torch.tensor(pieces, dtype=torch.int32),
        last_chunk_indices=torch.tensor(last, dtype=torch.int32),
        seq_idx=torch.tensor(owners, dtype=torch.int32),
        out=out,
        D=mamba.direct,
        z=mamba.z if gated else None,
        dt_bias=mamba.bias,
        initial_states=initial,
        dt_softplus=True,
        state_dtype=torch.float32,
    )
    expected, states = numpy.empty(tuple(out.shape)), []
    for i in range(count):
        some = slice(starts[i], starts[i + 1])
        expected[some], made = mamba.run(doubles(initial[i]), some, gated)
        states.append(made[-1])
    text = f"{mamba.text()}, {counts} tokens in pieces {pieces}, begun {begun}"
    return Trial(
        text, [expected, numpy.array(states)], [doubles(out), doubles(found)], _TOLERANCES[dtype]
    )


# The gated delta rule.


class _Delta:
    """Numbers of a layer; several heads of values share one of keys."""

    def __init__(self, draw: random.Random, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.key_heads = draw.randint(1, 2)
        self.heads = self.key_heads * draw.randint(1, 2)
        self.size, self.size_v = draw.choice(sizes), draw.choice(sizes)
        self.draw, self.dtype = draw, dtype

    def inputs(self, count: int) -> None:
        draw, dtype = self.draw, self.dtype
        self.q = drawn_numbers(draw, (count, self.key_heads, self.size), dtype)
        self.k = drawn_numbers(draw, (count, self.key_heads, self.size), dtype)
        self.v = drawn_numbers(draw, (count, self.heads, self.size_v), dtype)
        self.gates = -drawn_numbers(draw, (count, self.heads), torch.float32).abs()
        self.rates = drawn_numbers(draw, (count, self.heads), torch.float32).sigmoid().to(dtype)

    def gate_by(self, a: torch.Tensor, b: torch.Tensor, of_head: torch.Tensor) -> None:
        """Gates and rates as layers compute them, from projections and two numbers per head."""
        of_log, bias = doubles(of_head)
        self.gates = -numpy.exp(of_log) * loops.softplus(doubles(a) + bias)
        self.rates = 1 / (1 + numpy.exp(-doubles(b)))

    def run(self, state: numpy.ndarray, some: slice) -> Any:
        shared = self.heads // self.key_heads
        q, k = (loops.unit(doubles(one[some])).repeat(shared, axis=1) for one in (self.q, self.k))
        gates, rates = (
            one[some] if isinstance(one, numpy.ndarray) else doubles(one[some])
            for one in (self.gates, self.rates)
        )
        return loops.delta(state, q * self.size**-0.5, k, doubles(self.v[some]), gates, rates)

    def text(self) -> str:
        heads = f"{self.heads} heads over {self.key_heads}"
        return f"{self.dtype}, {heads}, keys of {self.size}, values of {self.size_v}"


def _step_by_delta_rule(draw: random.Random, fuses: bool) -> Trial:
    """`fuses`: the kernel computes gates and rates."""
    dtype, count, drafts = draw.choice(_DTYPES), draw.randint(1, 4), draw.choice((0, 0, 1, 3))
    layer, columns = _Delta(draw, dtype, (8, 20, 64)), 1 + drafts
    states = _States(draw, count * columns, (layer.heads, layer.size_v, layer.size), torch.float32)
    table = numpy.array(states.of).reshape(count, columns)
    counts = [1 + draw.randint(0, drafts) for _ in range(count)]
    accepted = [1 + draw.randint(0, drafts) for _ in range(count)]
    starts, of_starts = _starts(counts)
    layer.inputs(starts[-1])
    options: dict[str, Any] = {
        "q": layer.q[None],
        "k": layer.k[None],
        "v": layer.v[None],
        "initial_state": states.view,
        "inplace_final_state": True,
        "cu_seqlens": of_starts,
        "ssm_state_indices": torch.tensor(table if drafts else table[:, 0], dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
    }
    if drafts:
        options["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
    states.keep()
    if fuses:
        a, b = (drawn_numbers(draw, (starts[-1], layer.heads), dtype) for _ in range(2))
        of_head = drawn_numbers(draw, (2, layer.heads), torch.float32)
        layer.gate_by(a, b, of_head)
        gating = {"A_log": of_head[0], "dt_bias": of_head[1]}
        fused = _fla("fused_sigmoid_gating")
        out, _ = fused.fused_sigmoid_gating_delta_rule_update(**options, **gating, a=a, b=b)
    else:
        made = _fla("fused_recurrent").fused_recurrent_gated_delta_rule
        out, _ = made(**options, g=layer.gates[None], beta=layer.rates[None])
    expected, written = numpy.empty(tuple(out.shape[1:])), dict[int, Any]()
    for i in range(count):
        some = slice(starts[i], starts[i + 1])
        first = table[i, accepted[i] - 1 if drafts else 0]
        expected[some], made = layer.run(states.before[first], some)
        if not drafts:
            made = made[-1:]
        written |= dict(zip(table[i], made, strict=False))
    text = f"{layer.text()}, {counts} tokens after {accepted}, blocks {table.tolist()}"
    return states.trial(text, [expected], [doubles(out[0])], written, dtype)


def _step(draw: random.Random) -> Trial:
    return _step_by_delta_rule(draw, fuses=False)


def _step_fused(draw: random.Random) -> Trial:
    return _step_by_delta_rule(draw, fuses=True)


def _step_packed(draw: random.Random) -> Trial | None:
    """One token per request from the convolution's rows; the output of padding is zero."""
    module = _fla("fused_recurrent")
    if not hasattr(module, "fused_recurrent_gated_delta_rule_packed_decode"):
        return None
    dtype, count = draw.choice(_DTYPES), draw.randint(1, 5)
    layer = _Delta(draw, dtype, (8, 20, 64))
    states = _States(draw, count, (layer.heads, layer.size_v, layer.size), torch.float32)
    blocks = [block if draw.random() < 0.8 else 0 for block in states.of]
    layer.inputs(count)
    rows = torch.cat([one.flatten(1) for one in (layer.q, layer.k, layer.v)], dim=1)
    a, b = (drawn_numbers(draw, (count, layer.heads), dtype) for _ in range(2))
    of_head = drawn_numbers(draw, (2, layer.heads), torch.float32)
    layer.gate_by(a, b, of_head)
    out = torch.full((count, 1, layer.heads, layer.size_v), numpy.nan).to(dtype)
    states.keep()
    module.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=rows,
        a=a,
        b=b,
        A_log=of_head[0],
        dt_bias=of_head[1],
        scale=layer.size**-0.5,
        initial_state=states.view,
        out=out,
        ssm_state_indices=torch.tensor(blocks, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    expected, written = numpy.zeros((count, layer.heads, layer.size_v)), {}
    for i, block in enumerate(blocks):
        if block:
            (expected[i],), (written[block],) = layer.run(states.before[block], slice(i, i + 1))
    text = f"{layer.text()}, blocks {blocks}"
    return states.trial(text, [expected], [doubles(out[:, 0])], written, dtype)


def _chunks_by_delta_rule(draw: random.Random) -> Trial:
    """Chunks of prompts of several requests, starting from states: cumulated gates, products of
    keys, their inverse, states between pieces of 64 tokens, outputs; vLLM's seven kernels in a
    row."""
    layer, count = _Delta(draw, torch.float16, (16, 32, 64)), draw.randint(1, 3)
    counts = [draw.choice((1, 5, 63, 64, 65, 130)) for _ in range(count)]
    starts, of_starts = _starts(counts)
    layer.inputs(starts[-1])
    initial = drawn_numbers(draw, (count, layer.heads, layer.size_v, layer.size), torch.float32)
    out, found = fitting(
        _fla("chunk").chunk_gated_delta_rule,
        q=layer.q[None],
        k=layer.k[None],
        v=layer.v[None],
        g=layer.gates[None],
        beta=layer.rates[None],
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=of_starts,
        use_qk_l2norm_in_kernel=True,
    )
    expected, states = numpy.empty(tuple(out.shape[1:])), []
    for i in range(count):
        some = slice(starts[i], starts[i + 1])
        expected[some], made = layer.run(doubles(initial[i]), some)
        states.append(made[-1])
    text = f"{layer.text()}, {counts} tokens"
    made = [doubles(out[0]), doubles(found)]
    return Trial(text, [expected, numpy.array(states)], made, _TOLERANCES[torch.float16])


def _prepare_delta_rule(draw: random.Random) -> Trial | None:
    """The convolution's rows into queries, keys, values, gates and rates."""
    with contextlib.suppress(ModuleNotFoundError):
        module = _fla("fused_gdn_prefill_post_conv")
        layer, count = _Delta(draw, draw.choice(_DTYPES), (8, 16, 64)), draw.randint(1, 40)
        layer.inputs(count)
        rows = torch.cat([one.flatten(1) for one in (layer.q, layer.k, layer.v)], dim=1)
        a, b = (drawn_numbers(draw, (count, layer.heads), layer.dtype) for _ in range(2))
        of_head = drawn_numbers(draw, (2, layer.heads), torch.float32)
        layer.gate_by(a, b, of_head)
        found = module.fused_post_conv_prep(
            rows,
            a,
            b,
            of_head[0],
            of_head[1],
            layer.key_heads,
            layer.size,
            layer.size_v,
        )
        keys = [loops.unit(doubles(one)) for one in (layer.q, layer.k)]
        expected = [*keys, doubles(layer.v), layer.gates, layer.rates]
        text = f"{layer.text()}, {count} tokens"
        made = [doubles(one) for one in found]
        return Trial(text, expected, made, _TOLERANCES[layer.dtype])
    return None


CHECKS = [
    Check("causal_conv1d_fn", _convolve_prompts),
    Check("causal_conv1d_update", _convolve_tokens),
    Check("selective_state_update", _update_states),
    Check("chunk scan of Mamba2", _scan_prompts),
    Check("delta rule, token by token", _step),
    Check("delta rule, gates in the kernel", _step_fused),
    Check("delta rule, packed decode", _step_packed),
    Check("delta rule, in chunks", _chunks_by_delta_rule),
    Check("delta rule, inputs", _prepare_delta_rule),
]
