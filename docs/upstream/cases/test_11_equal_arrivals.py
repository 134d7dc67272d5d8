"""Two requests of equal priority and arrival, as the samples of one request are, preempt each other
for ever."""

import pytest
from small_engine import SmallEngine, full


def steps_until_both_end(second_arrival):
    engine = SmallEngine(
        [full()], num_blocks=3, caching=False, policy="priority", max_num_seqs=2,
        max_num_batched_tokens=2, long_prefill_token_threshold=1, scheduler_reserve_full_isl=False,
    )  # fmt: skip
    engine.add("a", 9)
    engine.add("b", 9, arrival=second_arrival, first_token=50)
    for step in range(500):
        engine.step()
        if not engine.scheduler.requests:
            return step
    return None


def test_a_nanosecond_apart_both_end():
    assert steps_until_both_end(second_arrival=1e-9) is not None


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="max() takes the first of equal victims, the older one",
)  # fmt: skip
def test_arriving_together_both_end():
    assert steps_until_both_end(second_arrival=0.0) is not None
