"""HiSparse: the last page of a load gets a block on the device, to which the load is restored when
it is reported as over. A load within a step is not reported."""

import pytest
from hisparse_engine import BLOCK, RESIDENT, HiSparseEngine

PROMPT, LOADED = 6, 4


def unfilled_pages(is_async):
    """Of the loaded pages those that a worker is told lie on the device, and that nothing fills
    there: before the first step in which the prompt is computed, or in it."""
    engine = HiSparseEngine({"r": LOADED}, is_async)
    engine.add("r", PROMPT)
    restored = []
    while True:
        step = engine.schedule()
        told = engine.told(step)
        restored += [move.resident_block_ids[0] for move in told.command.page_transfers
                     if move.restore and not move.after_forward]  # fmt: skip
        if step.num_scheduled_tokens:
            break
        engine.update(step, loaded={"r"})
    assert step.num_scheduled_tokens == {"r": PROMPT - LOADED}
    assert told.all_context_pages_resident  # attention reads the device alone
    update = told.residency_updates["r"]
    places = dict(zip(update.pages, update.block_ids[0], strict=True))
    assert list(places.values()) == engine.table("r")[RESIDENT]
    return [page for page in range(LOADED // BLOCK) if places[page] not in restored]


def test_a_load_that_is_reported_is_restored():
    assert unfilled_pages(is_async=True) == []


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="finish_host_import() is called for loads that are reported alone",
)  # fmt: skip
def test_a_load_within_a_step_is_restored():
    assert unfilled_pages(is_async=False) == []
