"""With asynchronous scheduling a request of Mamba states needs one block more than is planned for
it: alone in a pool that the check at start accepts, it is preempted."""

import pytest
from small_engine import SmallEngine, full, states


def planned_blocks(config, specs):
    """As the check at start counts them for one request of max_model_len."""
    return sum(
        -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs
    )  # fmt: skip


def preemptions(async_scheduling):
    specs = [states(), full()]
    options = {"max_model_len": 16, "max_num_batched_tokens": 8}
    engine = SmallEngine(specs, 6, async_scheduling=async_scheduling, **options)
    assert planned_blocks(engine.config, specs) == 6
    engine.add("alone", 12, max_tokens=3)
    count, in_flight = 0, []
    for _ in range(12):
        step = engine.schedule()
        count += len(step.preempted_req_ids or ())
        in_flight.append(step)
        if len(in_flight) > (1 if async_scheduling and step.num_scheduled_tokens else 0):
            engine.update(in_flight.pop(0))
    return count


def test_without_asynchronous_scheduling_the_plan_is_enough():
    assert preemptions(async_scheduling=False) == 0


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="three states are held while a step is in flight",
)  # fmt: skip
def test_a_request_that_is_alone_is_not_preempted():
    assert preemptions(async_scheduling=True) == 0
