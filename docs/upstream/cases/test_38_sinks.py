"""Sinks (openPangu): the manager of their group does not take what every manager is given; and with
that repaired it keeps no blocks for them, while the worker writes them to the first ones."""

import pytest
from small_engine import SIZES, SmallEngine, full
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import single_type_kv_cache_manager as managers

SINKS = 8


def first_table(spec):
    """Blocks of the first request, of one token."""
    engine = SmallEngine([spec], num_blocks=8)
    engine.add("r", 1)
    engine.schedule()
    return engine.table("r")[0]


def sinks():
    return kv.SinkFullAttentionSpec(block_size=4, sink_len=SINKS, **SIZES)


def test_without_sinks_the_first_block_is_handed_out():
    assert first_table(full()) == [1]


@pytest.mark.xfail(
    strict=True, raises=TypeError, reason="its constructor has no needs_kv_cache_zeroing"
)
def test_an_engine_with_sinks_starts():
    first_table(sinks())


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="StaticSinkAttention writes sinks to blocks 1 to sink_len / block_size",
)  # fmt: skip
def test_the_blocks_of_sinks_are_not_handed_out(monkeypatch):
    made = managers.SinkFullAttentionManager.__init__

    def repaired(self, *arguments, needs_kv_cache_zeroing=False, **named):
        made(self, *arguments, **named)

    monkeypatch.setattr(managers.SinkFullAttentionManager, "__init__", repaired)
    assert min(first_table(sinks())) > SINKS // 4
