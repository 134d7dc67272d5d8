"""Model runner V1: a request that a step does not schedule leaves the batch, and the number of its
accepted drafts with it."""

import pytest
from small_engine import SmallEngine, states
from small_runner import SmallRunner

PROMPT, DRAFTS = 2, 3


def state_after_a_draft(max_model_len):
    """Tokens in the state that the request continues from, after one of its drafts is accepted, and
    tokens computed."""
    engine = SmallEngine(
        [states(2, num_speculative_blocks=DRAFTS)], 20, max_model_len, eagle=DRAFTS,
        async_scheduling=True,
    )  # fmt: skip
    runner = SmallRunner(engine)
    engine.add("r", PROMPT, max_tokens=4)
    runner.step()
    assert runner.step(accepts=["r"]) == {"r": (PROMPT, PROMPT)}
    engine.add("other", PROMPT, max_tokens=9, first_token=50)
    return next(read["r"] for read in iter(runner.step, None) if "r" in read)


def test_in_the_next_step_it_continues_from_its_last_token():
    assert state_after_a_draft(max_model_len=16) == (PROMPT + 2, PROMPT + 2)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="add_request() resets num_accepted_tokens_cpu to 1"
)
def test_a_step_later_too():
    assert state_after_a_draft(max_model_len=PROMPT + 4) == (PROMPT + 2, PROMPT + 2)
