"""Convolution, Mamba2 and the gated delta rule in PyTorch, token by token:
lockstep replay TRACE --numbers real --model M --kernels docs/examples/state_kernels.py:States"""

import torch
from torch.nn.functional import silu, softplus


class States:
    def conv(self, layer, x, conv_state, weight, query_start_loc, *indices):
        output, kept = torch.empty_like(x), conv_state.shape[2]
        for chunk, initial, cache in sequences(query_start_loc, *indices):
            before = conv_state[initial] if initial else torch.zeros_like(conv_state[0])
            inputs = torch.cat([before, x[chunk].T], dim=1)  # [dim, kept + tokens]
            windows = inputs.float().unfold(1, kept + 1, 1)
            output[chunk] = silu((windows * weight[:, None]).sum(-1)).T.to(x.dtype)
            conv_state[cache] = inputs[:, -kept:]
        return output

    def ssm(self, layer, x, dt, A, B, C, D, dt_bias, ssm_state, query_start_loc, *indices):
        output, dt = torch.empty_like(x), softplus(dt + dt_bias)
        B, C = (one.repeat_interleave(x.shape[1] // one.shape[1], 1)[:, :, None] for one in (B, C))
        decay, x_dt = torch.exp(A * dt)[..., None, None], (x * dt[..., None])[..., None]
        for chunk, initial, cache in sequences(query_start_loc, *indices):
            state = ssm_state[initial].float() if initial else torch.zeros(ssm_state.shape[1:])
            for t in range(chunk.start, chunk.stop):
                state = state * decay[t] + x_dt[t] * B[t]
                output[t] = (state * C[t]).sum(-1) + D[:, None] * x[t]
            ssm_state[cache] = state.to(ssm_state.dtype)
        return output

    def delta(self, layer, q, k, v, g, beta, ssm_state, query_start_loc, *indices):
        output, decay = torch.empty_like(v), torch.exp(g)[..., None, None]
        q, k = (one[:, :, None] * one.square().sum(-1)[..., None, None].rsqrt() for one in (q, k))
        for chunk, initial, cache in sequences(query_start_loc, *indices):
            state = ssm_state[initial].float() if initial else torch.zeros(ssm_state.shape[1:])
            for t in range(chunk.start, chunk.stop):
                state = state * decay[t]
                change = beta[t, :, None] * (v[t] - (state * k[t]).sum(-1))
                state = state + change[..., None] * k[t]
                output[t] = (state * q[t]).sum(-1) * layer.scale
            ssm_state[cache] = state.to(ssm_state.dtype)
        return output


def sequences(query_start_loc, initial_indices, has_initial_state, cache_indices):
    """The tokens of each sequence, the block of its initial state (0: zeros), that of its last."""
    ends, initial = query_start_loc.tolist(), initial_indices * has_initial_state
    chunks = (slice(*ends[i : i + 2]) for i in range(len(initial)))
    return zip(chunks, initial.tolist(), cache_indices.tolist(), strict=True)
