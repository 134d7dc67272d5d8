"""The classes of docs/examples with one planted defect each: each defect is one that serving
engines have had."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

from torch_kernels import Sdpa  # noqa: E402


class ForgetsTheNewest(Sdpa):
    """Attention over the context before this step's token."""

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        known = (seq_lens - 1).clamp(min=1)
        return super().attend(layer, query, kv_cache, block_table, known, query_start_loc)


class WritesPadding(Sdpa):
    """Slot -1 becomes slot 0."""

    def write(self, layer, key, value, kv_cache, slot_mapping):
        super().write(layer, key, value, kv_cache, slot_mapping.clamp(min=0))


class CopiesTheCache(Sdpa):
    """A cache that is made contiguous is written, not Lockstep's."""

    def write(self, layer, key, value, kv_cache, slot_mapping):
        super().write(layer, key, value, kv_cache.clone(), slot_mapping)


class IgnoresTheScale(Sdpa):
    """Elements are stored without the layer's scale."""

    def write(self, layer, key, value, kv_cache, slot_mapping):
        layer.k_scale = 1.0
        super().write(layer, key, value, kv_cache, slot_mapping)


class MovesBlocks(Sdpa):
    """Zeroes and copies blocks itself; sound."""

    def zero_blocks(self, group, pages, block_ids):
        for one in pages:
            one[block_ids] = 0

    def copy_blocks(self, group, pages, sources, targets):
        for one in pages:
            one[targets] = one[sources]


class ZeroesNothing(MovesBlocks):
    def zero_blocks(self, group, pages, block_ids):
        pass


class InBf16(Sdpa):
    """Sound: queries, weights and outputs of bf16, as serving kernels have them."""

    query_dtype = "bf16"


class ForgetsTheNewestInBf16(ForgetsTheNewest):
    query_dtype = "bf16"
