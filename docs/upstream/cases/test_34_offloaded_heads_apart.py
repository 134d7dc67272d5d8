"""A layer whose blocks are not one page apart is taken for packed blocks, and the connector moves
one stride of bytes from byte 0. With heads outermost that stride is one head."""

from unittest import mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as offloading
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

BLOCKS = 4


def lost_bytes(layout, spec, layers):
    """Bytes of block 1 that block 2 lacks once 1 was stored and loaded there."""
    packed = len(layers) * spec.page_size_bytes if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = kv.compute_layout_strides(
        spec, BLOCKS, len(layers), layout, fixed_strides=(None, packed, None, None, None)
    )
    size = spec.page_size_bytes * BLOCKS * len(layers)
    tensor = kv.KVCacheTensor(size, layers, layer_stride, block_stride, offset=0)
    plan = kv.KVCacheConfig(BLOCKS, [tensor], [kv.KVCacheGroupSpec(layers, spec)])
    caches = allocate_kv_cache(plan, torch.device("cpu"), layout)
    memory = torch.empty(0, dtype=torch.int8).set_(caches[layers[0]].untyped_storage())
    memory.copy_(torch.arange(memory.numel()).remainder(251).sub(125))
    before = {name: cache[1].clone() for name, cache in caches.items()}

    worker = offloading.OffloadingConnectorWorker(mock.Mock(), mock.Mock(), plan)
    with (
        mock.patch.object(offloading, "derive_canonical_mappings", return_value={}),
        mock.patch.object(worker, "_init_worker") as taken,
    ):
        worker.register_kv_caches(caches)
    for region in taken.call_args.args[0].tensors:
        region.tensor[2] = region.tensor[1].clone()
    return sum(int((caches[name][2] != page).sum()) for name, page in before.items())


def attention(heads):
    return kv.FullAttentionSpec(16, num_kv_heads=heads, head_size=64, dtype=torch.int8)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_a_block_of_attention_comes_back_whole(layout):
    assert lost_bytes(layout, attention(heads=2), ["a", "b"]) == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="one stride is one head of one layer")
def test_a_block_whose_heads_lie_apart_comes_back_whole():
    assert lost_bytes(KVCacheLayout.LHBNC, attention(heads=2), ["a"]) == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a page stands for the stride")
def test_a_block_of_states_with_blocks_outermost_comes_back_whole():
    states = kv.MambaSpec(16, shapes=((640,),), dtypes=(torch.int8,), mamba_cache_mode="align")
    assert lost_bytes(KVCacheLayout.BLHNC, states, ["a", "b"]) == 0
