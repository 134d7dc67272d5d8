"""A prompt of one token is padded with placeholders for drafts. The worker takes a request of which
nothing was computed for a prefill, and runs its states over the placeholders."""

import numpy as np
import pytest
from small_engine import SmallEngine, full, states


def is_run_as_decode(computed_of_prompt, scheduled, drafts):
    """By the rule of vllm/v1/worker/gpu/model_runner.py, `prefill_runs_as_decode_np`."""
    new = np.array([scheduled]) - np.array([drafts])
    return bool(((new == 1) & (np.array([computed_of_prompt]) > 0))[0])


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="the scheduler pads what the worker does not take for a step that verifies drafts",
)  # fmt: skip
def test_what_is_padded_runs_as_a_decode():
    engine = SmallEngine(
        [states(num_speculative_blocks=1), full()], num_blocks=19, eagle=1, async_scheduling=True,
        retention=0,
    )  # fmt: skip
    engine.add("busy", 5, max_tokens=8)
    in_flight = []
    for _ in range(4):
        in_flight.append(engine.schedule())
        if len(in_flight) > 1:
            engine.update(in_flight.pop(0))
    engine.add("one", 1, max_tokens=3, first_token=500)
    step = engine.schedule()
    new = next(request for request in step.scheduled_new_reqs if request.req_id == "one")
    drafts = len(step.scheduled_spec_decode_tokens.get("one", ()))
    scheduled = step.num_scheduled_tokens["one"]
    assert new.num_computed_tokens == 0 and scheduled == 1 + drafts
    # A prefill of more tokens than the prompt has ends in a state that has seen placeholders.
    assert scheduled == 1 or is_run_as_decode(new.num_computed_tokens, scheduled, drafts)
