"""A prompt that a connector loads whole is given blocks for the window of the token behind it. The
last prompt token is computed again, and its window begins one token earlier: in the null block."""

import pytest
from small_engine import SmallEngine, window

NULL = 0


def missing_tokens(num_tokens):
    """Tokens that the step attends to and that lie in the null block."""
    engine = SmallEngine(
        [window(5)], num_blocks=6, max_model_len=20, loads={"loaded": num_tokens}, loads_async=True
    )
    engine.add("loaded", num_tokens)
    engine.update(engine.schedule(), loaded=["loaded"])
    request = engine.schedule().scheduled_new_reqs[0]
    assert request.num_computed_tokens == num_tokens - 1
    first = max(request.num_computed_tokens - 4, 0)  # of the window of the token that is computed
    return [t for t in range(first, num_tokens) if request.block_ids[0][t // 4] == NULL]


@pytest.mark.parametrize("num_tokens", [7, 9])
def test_where_both_windows_begin_in_one_block_nothing_is_missing(num_tokens):
    assert missing_tokens(num_tokens) == []


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="blocks are allocated for num_computed_tokens, then one less",
)  # fmt: skip
def test_all_of_the_window_is_loaded():
    assert missing_tokens(8) == []
