"""EAGLE, runner V1: where one request is too close to the model's length, the drafter is left
out of the step, and the other requests' tokens get no rows in its cache."""

from types import SimpleNamespace

import pytest
from small_engine import bare
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

MAX_LEN, DRAFTS = 64, 3


class Runner(GPUModelRunner):
    """Of sample_tokens() what decides whether the drafter runs."""

    drafts = False

    def _sample(self, *_):
        return SimpleNamespace(sampled_token_ids=None)

    def propose_draft_token_ids(self, *_):
        self.drafts = True

    def _bookkeeping_sync(self, *_):
        raise NotImplementedError  # what follows the drafter

    def _copy_draft_token_ids_to_cpu(self, *_, **__):
        pass

    _update_states_after_model_execute = _copy_draft_token_ids_to_cpu


def drafts(*lengths):
    """Whether the drafter runs behind a step in which requests have come to these lengths."""
    spec = SimpleNamespace(use_eagle=lambda: True, use_dflash=lambda: False,
                           disable_padded_drafter_batch=False)  # fmt: skip
    batch = SimpleNamespace(req_ids=[str(length) for length in lengths], sampling_metadata=None)
    step = SimpleNamespace(total_num_scheduled_tokens=len(lengths))
    length = SimpleNamespace(max_seq_len=max(lengths))
    runner = bare(
        Runner, speculative_config=spec, drafter=bare(EagleProposer), input_batch=batch,
        num_spec_tokens=DRAFTS, effective_drafter_max_model_len=MAX_LEN, device="cpu",
        use_async_scheduling=False, valid_sampled_token_count_event=None,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        execute_model_state=[step, None, None, length] + [None] * 6,
    )  # fmt: skip
    with pytest.raises(NotImplementedError):
        runner.sample_tokens(None)
    return runner.drafts


def test_of_a_prompt_alone_the_drafter_has_rows():
    assert drafts(16)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="max_seq_len is that of the step")
def test_beside_a_request_at_its_last_token_too():
    assert drafts(16, MAX_LEN)
