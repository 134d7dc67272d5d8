"""A state that a kernel exports from inside a prefill goes, by the worker's own rule and its own
row of blocks, into the block of the running state."""

import pytest
from small_engine import SmallEngine, full, states
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

NULL, BLOCK = 0, 4


def blocks_of_the_last_chunk(num_tokens):
    """Where the worker writes the running state and the checkpoint of the step before the last."""
    kinds = {"num_speculative_blocks": 1, "num_prefill_checkpoint_blocks": 1,
             "prefill_checkpoint_alignment": BLOCK}  # fmt: skip
    engine = SmallEngine(
        [states(**kinds), full()], num_blocks=19, eagle=1, async_scheduling=True, retention=0,
        max_num_batched_tokens=8,
    )  # fmt: skip
    engine.add("long", num_tokens)
    row, written, in_flight = [], [], []  # a worker's row only grows
    for _ in range(2):
        step = engine.schedule()
        for request in step.scheduled_new_reqs:
            row += request.block_ids[0]
        for new in step.scheduled_cached_reqs.new_block_ids:
            row += new[0] if new else []
        chunk = step.num_scheduled_tokens["long"]
        end = chunk + sum(count for count, _ in written)
        _, (column,) = compute_mamba_prefill_checkpoints(
            [end], [chunk], hash_block_size=BLOCK, mamba_block_size=BLOCK,
            checkpoint_alignment=BLOCK, drop_eagle_block=False, cache_hit_alignment_tokens=BLOCK,
            num_hash_lookahead_tokens=engine.config.num_hash_lookahead_tokens,
        )  # fmt: skip
        written.append((chunk, (row[(end - 1) // BLOCK], row[column] if column >= 0 else NULL)))
        in_flight.append(step)
        if len(in_flight) > 1:
            engine.update(in_flight.pop(0))
    return written[-1][1]


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="the worker exports from chunks for which the scheduler has reserved no block",
)  # fmt: skip
def test_a_checkpoint_is_not_written_over_the_running_state():
    state, checkpoint = blocks_of_the_last_chunk(17)
    assert checkpoint == NULL or checkpoint != state
