"""A request that goes back to a block that could not be loaded lacks the window before it: those
blocks were freed, or never loaded."""

import pytest
from small_engine import SmallEngine, window

NULL = 0


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="only num_computed_tokens is cut back, not the window",
)  # fmt: skip
def test_the_window_of_the_token_it_goes_back_to_is_there():
    engine = SmallEngine([window(5)], num_blocks=6, max_model_len=20, loads={"loaded": 8})
    engine.add("loaded", 9)
    step = engine.schedule()
    request = step.scheduled_new_reqs[0]
    assert (request.num_computed_tokens, request.block_ids[0][0]) == (8, NULL)
    engine.update(step, invalid_blocks=[request.block_ids[0][1]])
    step = engine.schedule()
    first_token = step.scheduled_cached_reqs.num_computed_tokens[0]
    table = engine.table("loaded")[0]
    missing = [t for t in range(max(first_token - 4, 0), first_token) if table[t // 4] == NULL]
    # Token 4 is computed, and attends to tokens 0 to 3 in the null block.
    assert missing == []
