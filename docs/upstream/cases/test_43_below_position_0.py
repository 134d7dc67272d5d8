"""A prompt of one token that is padded with drafts is run again from positions that it has not."""

import pytest
from modules_of_mtp import DRAFTS, Drafter, right


def test_without_padding_its_one_token_is_run():
    assert Drafter().step(0, 1, 0) == right(0, 0)


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="the drafts that pad a prompt of one token count as rejected",
)  # fmt: skip
def test_padded_it_has_no_tokens_before_it():
    assert Drafter().step(0, 1 + DRAFTS, DRAFTS) == right(0, 0)
