"""A request that comes in with one token to compute is padded with placeholders for drafts, then
cut by long_prefill_token_threshold: the scheduler stops on an assertion, and the engine with it."""

import traceback

import pytest
from small_engine import SmallEngine, full


def steps_of_two_requests(threshold):
    engine = SmallEngine(
        [full()], num_blocks=7, max_model_len=16, eagle=1, max_num_batched_tokens=16,
        max_num_seqs=2, long_prefill_token_threshold=threshold,
    )  # fmt: skip
    engine.add("busy", 1, max_tokens=4)
    engine.step()
    engine.add("one", 1, max_tokens=2, first_token=500)
    try:
        return engine.step().num_scheduled_tokens
    except AssertionError as error:
        return f"stopped in {traceback.extract_tb(error.__traceback__)[-1].line}"


def test_without_a_threshold_it_is_padded():
    assert steps_of_two_requests(threshold=0) == {"busy": 1, "one": 2}


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="the threshold cuts tokens after the request was padded",
)  # fmt: skip
def test_with_a_threshold_of_one_the_engine_goes_on():
    assert steps_of_two_requests(threshold=1) == {"busy": 1, "one": 1}
