"""Behind a chunk of a prompt EAGLE's drafter is given the prompt's last token, not the next one."""

import os
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is loaded

import numpy
import pytest
import torch
import triton
import triton.language
from vllm import triton_utils

triton_utils.triton, triton_utils.tl = triton, triton.language  # left out where there is no GPU

from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.utils import CpuGpuBuffer

PROMPT = list(range(100, 140))


def token_behind_a_chunk(num_computed):
    """What runner V1 puts behind the chunk, whose sampled token is discarded."""
    request = SimpleNamespace(get_token_id=PROMPT.__getitem__, num_computed_tokens=num_computed)
    # As InputBatch.add_request leaves it: all tokens that are known, computed or not.
    batch = SimpleNamespace(
        num_reqs=1, req_ids=["r"], vocab_size=1000,
        num_tokens_no_spec=numpy.array([len(PROMPT)]),
    )  # fmt: skip
    buffer = CpuGpuBuffer(1, dtype=torch.int32, device=torch.device("cpu"))
    sampled = torch.tensor([[7]], dtype=torch.int32)
    tokens, _ = SpecDecodeBaseProposer.prepare_next_token_ids_padded(
        SimpleNamespace(backup_next_token_ids=buffer), sampled, {"r": request}, batch,
        torch.tensor([True]),
    )  # fmt: skip
    return tokens.tolist()


def test_before_the_last_token_it_is_right():
    assert token_behind_a_chunk(len(PROMPT) - 1) == [PROMPT[-1]]


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="it is the last token that is known, however long the chunk is",
)  # fmt: skip
def test_behind_16_of_40_tokens_comes_token_16():
    assert token_behind_a_chunk(16) == [PROMPT[16]]
