"""A request whose hit ends inside a block runs on to a checkpoint: the state after its hit is then
in the prefix cache as that after the whole block."""

import pytest
from small_engine import SmallEngine, full, states


def serve(engine, name, tokens):
    """Alone, to its end: where its chunks begin and end."""
    engine.add_tokens(name, tokens)
    begin, bounds = None, set()
    while name in engine.scheduler.requests:
        step = engine.step()
        if name not in step.num_scheduled_tokens:
            continue
        for request in step.scheduled_new_reqs:
            begin = request.num_computed_tokens
            bounds.add(begin)
        begin += step.num_scheduled_tokens[name]
        bounds.add(begin)
    engine.step()
    return bounds


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="the block of a hit is published though its chunk ran past it",
)  # fmt: skip
def test_a_state_is_published_under_the_prefix_that_it_was_computed_from():
    kinds = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 2}
    engine = SmallEngine([states(**kinds), full()], num_blocks=39, unit=2, retention=0)
    shared = [1, 2, 3, 4, 5]
    serve(engine, "long", shared + [6, 7, 8, 9])
    serve(engine, "short", shared[:3])
    # Of the states that other requests of this prefix may hit, `middle` alone could compute more.
    assert serve(engine, "middle", shared + [20, 21, 22, 23, 24, 25]) == {2, 11}
    hit = min(serve(engine, "reader", shared + [30, 31, 32, 33]))
    # No chunk that shares the prefix ended after 4 tokens.
    assert hit == 2
