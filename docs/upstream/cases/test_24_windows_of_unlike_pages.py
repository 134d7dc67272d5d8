"""Windows of two page sizes in unlike numbers, blocks outermost: groups are dealt out with zip(),
which ends with the shorter list. Layers are in no group, or the engine stops on StopIteration."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_planning import _get_packed_kv_cache_groups
from vllm.v1.kv_cache_layout import KVCacheLayout


def layers_left_out(heads_of_windows):
    """Layers of a model that are in none of its groups: a layer of full attention, and windows."""
    shared = {"block_size": 16, "head_size": 64, "dtype": torch.bfloat16}
    layers = {"full": kv.FullAttentionSpec(num_kv_heads=1, **shared)}
    for place, heads in enumerate(heads_of_windows):
        layers[f"window.{place}"] = kv.SlidingWindowSpec(
            num_kv_heads=heads, sliding_window=128, **shared
        )
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC)
    try:
        groups = _get_packed_kv_cache_groups(SimpleNamespace(cache_config=cache), layers)
    except (StopIteration, RuntimeError) as error:
        return repr(error)
    return sorted(set(layers) - {name for group in groups for name in group.layer_names})


@pytest.mark.parametrize("heads", [[2, 1], [1, 2, 2]])
def test_windows_that_fit_a_block_are_all_planned(heads):
    assert layers_left_out(heads) == []


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="a bucket in unlike numbers is split with zip()"
)
@pytest.mark.parametrize("heads", [[2, 2, 1], [1, 1, 1, 1, 2, 2, 2]])
def test_windows_that_widen_the_block_are_all_planned(heads):
    assert layers_left_out(heads) == []
