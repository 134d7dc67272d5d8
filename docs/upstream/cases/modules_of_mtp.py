"""The kernels around the modules of MTP, in Triton's interpreter. No module is run."""

from types import SimpleNamespace

import torch
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator

DRAFTS = 3
ROOM = 16


class Drafter:
    """The speculator's own kernels around modules that are not run. A token is called after its
    position, a hidden state too; drafts are negative."""

    def __init__(self):
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(ROOM, dtype=torch.int32),
            positions=torch.zeros(ROOM, dtype=torch.int64),
            seq_lens=torch.zeros(1, dtype=torch.int32),
            query_start_loc=torch.zeros(2, dtype=torch.int32),
        )
        self.last = torch.zeros(1, dtype=torch.int64)
        self.kept_ids = torch.full((1, DRAFTS - 1), -9, dtype=torch.int64)
        self.kept_states = torch.full((1, DRAFTS - 1, 1), -9.0)
        self.states = torch.zeros(ROOM, 1)

    def step(self, first, num_tokens, num_rejected):
        """Positions and tokens of the first module's pass behind a step of the target."""
        self.buffers.query_start_loc[1] = num_tokens
        batch = SimpleNamespace(
            input_ids=torch.arange(first, first + num_tokens, dtype=torch.int32),
            positions=torch.arange(first, first + num_tokens),
            idx_mapping=torch.zeros(1, dtype=torch.int32),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([first + num_tokens], dtype=torch.int32),
        )
        rejected = torch.tensor([num_rejected], dtype=torch.int32)
        sampled = torch.tensor([[first + num_tokens - num_rejected]])
        speculator.prepare_input_buffers(
            1, batch, self.kept_ids, torch.ones(1, dtype=torch.int32), rejected, sampled,
            torch.zeros(DRAFTS, 1, dtype=torch.int32),
            torch.zeros(1, DRAFTS - 1, dtype=torch.int64),
            self.buffers, self.last, 1, DRAFTS,
        )  # fmt: skip
        speculator.prepare_input_hidden_states_and_embeddings(
            1, num_tokens, self.states, torch.arange(first, first + num_tokens)[:, None].float(),
            self.kept_states, None, None, batch, self.buffers, rejected, DRAFTS,
        )  # fmt: skip
        count = int(self.last[0]) + 1
        rows = list(
            zip(
                self.buffers.positions[:count].tolist(),
                self.buffers.input_ids[:count].tolist(),
                self.states[:count, 0].int().tolist(),
                strict=True,
            )
        )
        speculator.cache_inputs(
            self.buffers, None, self.states, self.kept_ids, None, self.kept_states, self.last,
            batch.idx_mapping, 1, DRAFTS, use_input_embeds=False,
        )  # fmt: skip
        return rows


def right(first, last):
    return [(p, p + 1, p) for p in range(first, last + 1)]
