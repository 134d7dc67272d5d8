"""Model runner V1: a resumed request computes its output again. A few of these tokens after its
prompt count as drafts, of which the next step finds none accepted."""

import pytest
from small_engine import SmallEngine, full, states
from small_runner import SmallRunner

BLOCK = 2


def wrong_states(num_blocks):
    """(tokens in the state that the younger request continues from, tokens computed) where these
    differ. No step has drafts; the older request needs the younger's blocks if there are few."""
    engine = SmallEngine(
        [states(BLOCK, num_speculative_blocks=1), full(BLOCK)], num_blocks, eagle=1
    )
    runner = SmallRunner(engine)
    engine.add("older", 2, max_tokens=5)
    runner.step()
    engine.add("younger", 2, max_tokens=9, first_token=50)
    steps = [runner.step() for _ in range(6)]
    return [read["younger"] for read in steps if len({*read.get("younger", ())}) > 1]


def test_without_a_preemption_states_are_right():
    assert wrong_states(num_blocks=20) == []


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="a row is a prefill up to the end of its prompt, not of its known tokens",
)  # fmt: skip
def test_after_a_preemption_too():
    assert wrong_states(num_blocks=10) == []
