"""NIXL with decode context parallelism: the interleave is the smallest block of all groups. A ring
that every rank replicates counts, although its tokens are not sharded."""

from types import SimpleNamespace

import pytest
from small_engine import SIZES, Config, bare
from vllm.config import KVTransferConfig
from vllm.v1 import kv_cache_interface as kv

ROWS, RING = 128, 4


def interleave(*specs):
    """The interleave that the engine core sets for these groups, with two ranks."""
    parallel = SimpleNamespace(
        decode_context_parallel_size=2, dcp_kv_cache_interleave_size=1,
        cp_kv_cache_interleave_size=1, _allow_auto_resolve_cp_interleave_size=True,
    )  # fmt: skip
    config = bare(
        Config, parallel_config=parallel,
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
    )  # fmt: skip
    config.adjust_dcp_kv_cache_interleave_size([kv.KVCacheGroupSpec([], spec) for spec in specs])
    return parallel.cp_kv_cache_interleave_size


def rows():
    return kv.MLAAttentionSpec(block_size=ROWS, **SIZES)


def ring():
    return kv.CircularBufferSpec(block_size=RING, dcp_sharded=False, **SIZES)


def test_the_interleave_is_one_block():
    assert interleave(rows()) == ROWS


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the minimum includes groups that are not sharded"
)
def test_a_replicated_ring_does_not_change_it():
    assert interleave(rows(), ring()) == ROWS
