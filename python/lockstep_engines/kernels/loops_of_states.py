"""Layers that keep states as plain loops in double precision, for kernels/recurrences.py: one
token after the other, as the papers define them. It contains no vLLM code."""

from __future__ import annotations

import numpy


def silu(x: numpy.ndarray) -> numpy.ndarray:
    return x / (1 + numpy.exp(-x))


def softplus(x: numpy.ndarray) -> numpy.ndarray:
    return numpy.logaddexp(0, x)


def convolve(
    history: numpy.ndarray, inputs: numpy.ndarray, weights: numpy.ndarray, bias: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """A causal convolution for each channel. history: [width - 1, channels], the oldest input
    first; inputs: [tokens, channels]; weights: [channels, width]. Returns the sums [tokens,
    channels] and all inputs, history first."""
    width = weights.shape[1]
    known = numpy.concatenate((history, inputs))
    sums = numpy.empty(inputs.shape)
    for i in range(len(inputs)):
        sums[i] = bias + sum(known[i + k] * weights[:, k] for k in range(width))
    return sums, known


def scan(
    state: numpy.ndarray,
    inputs: numpy.ndarray,
    steps: numpy.ndarray,
    decay: numpy.ndarray,
    write: numpy.ndarray,
    read: numpy.ndarray,
) -> tuple[numpy.ndarray, list[numpy.ndarray]]:
    """A selective state space (Mamba). state: [heads, elements, sizes]; inputs and steps (after
    softplus): [tokens, heads, elements]; decay: [heads, elements, sizes]; write and read: [tokens,
    heads, sizes]. Returns the outputs [tokens, heads, elements] and the state after each token."""
    outputs, states = numpy.empty(inputs.shape), []
    for i in range(len(inputs)):
        step = steps[i][:, :, None]
        state = state * numpy.exp(step * decay)
        state = state + step * inputs[i][:, :, None] * write[i][:, None, :]
        outputs[i] = (state * read[i][:, None, :]).sum(axis=2)
        states.append(state)
    return outputs, states


def unit(rows: numpy.ndarray) -> numpy.ndarray:
    """The rows scaled to length 1; rows of almost zero stay shorter."""
    return rows / numpy.sqrt((rows * rows).sum(axis=-1, keepdims=True) + 1e-6)


def delta(
    state: numpy.ndarray,
    queries: numpy.ndarray,
    keys: numpy.ndarray,
    values: numpy.ndarray,
    gates: numpy.ndarray,
    rates: numpy.ndarray,
) -> tuple[numpy.ndarray, list[numpy.ndarray]]:
    """The gated delta rule. state: [heads, elements of a value, of a key]; queries and keys:
    [tokens, heads, elements]; gates: logarithms, [tokens, heads] or one for each element of a key;
    rates: [tokens, heads]. Returns outputs [tokens, heads, elements] and the state after each
    token."""
    outputs, states = numpy.empty(values.shape), []
    for i in range(len(values)):
        gate = gates[i][:, None, None] if gates.ndim == 2 else gates[i][:, None, :]
        state = state * numpy.exp(gate)
        known = (state * keys[i][:, None, :]).sum(axis=2)
        change = rates[i][:, None] * (values[i] - known)
        state = state + change[:, :, None] * keys[i][:, None, :]
        outputs[i] = (state * queries[i][:, None, :]).sum(axis=2)
        states.append(state)
    return outputs, states
