"""The classes of docs/examples with one planted defect each: each defect is one that serving
engines have had."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

import torch  # noqa: E402
from flashinfer_kernels import FlashInfer  # noqa: E402
from state_kernels import States  # noqa: E402
from torch_kernels import Sdpa  # noqa: E402


class ForgetsTheNewest(Sdpa):
    """Attention over the context before this step's token."""

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        known = (seq_lens - 1).clamp(min=1)
        return super().attend(layer, query, kv_cache, block_table, known, query_start_loc)


class ChangesTheTable(Sdpa):
    """Metadata of the next step overwrites a table that is still in use."""

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        output = super().attend(layer, query, kv_cache, block_table, seq_lens, query_start_loc)
        block_table.zero_()
        return output


class SeesTheWholeChunk(Sdpa):
    """Queries of a prefill chunk attend to the tokens after them."""

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        each = torch.arange(len(query) + 1, dtype=torch.int32)
        of_query = torch.bucketize(each[:-1], query_start_loc, right=True) - 1
        tables, lengths = block_table[of_query], seq_lens[of_query]
        return super().attend(layer, query, kv_cache, tables, lengths, each)


class FullPagesAreEmpty(FlashInfer):
    """A last page that is full has 0 tokens."""

    def pages(self, block_table, seq_lens, page_size):
        kv_indptr, kv_indices, _ = super().pages(block_table, seq_lens, page_size)
        return kv_indptr, kv_indices, seq_lens % page_size


class KeepsTheChunkAlone(States):
    """Inputs before a chunk that is shorter than the convolution are lost."""

    def conv(self, layer, x, conv_state, weight, *sequences):
        output = super().conv(layer, x, conv_state, weight, *sequences)
        starts, _, _, cache_indices = sequences
        for tokens, cache in zip(starts.diff().tolist(), cache_indices.tolist(), strict=True):
            conv_state[cache, :, : max(0, conv_state.shape[2] - tokens)] = 0
        return output


class StartsFromZeros(States):
    """The state of a prefix hit, or of the previous step, is not read."""

    def delta(self, layer, q, k, v, g, beta, ssm_state, starts, initial, has_initial, cache):
        none = torch.zeros_like(has_initial)
        return super().delta(layer, q, k, v, g, beta, ssm_state, starts, initial, none, cache)


class OnlyTheLastOutput(States):
    """Outputs of all tokens of a chunk but the last are zero."""

    def conv(self, layer, x, conv_state, weight, starts, *indices):
        output = super().conv(layer, x, conv_state, weight, starts, *indices)
        last = starts[1:].long() - 1
        return torch.zeros_like(output).index_copy(0, last, output[last])


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


class ClampsAt127(Sdpa):
    """Quantises to e4m3 with the limit of int8."""

    def quantised(self, x):
        return x.clamp(-127, 127)

    def write(self, layer, key, value, kv_cache, slot_mapping):
        scale = layer.k_scale
        rows = (self.quantised(one.float() / scale) * scale for one in (key, value))
        super().write(layer, *rows, kv_cache, slot_mapping)


class NanAbove448(ClampsAt127):
    def quantised(self, x):
        return torch.where(x.abs() > 448, torch.nan, x)


class DropsSmallNumbers(ClampsAt127):
    def quantised(self, x):
        return torch.where(x.abs() < 50, 0.0, x)


class SubtractsNoMaximum(Sdpa):
    """Decodes and chunks without windows; weights overflow where scores exceed 88."""

    def attend(self, layer, query, kv_cache, block_table, seq_lens, query_start_loc):
        output, size = torch.empty_like(query), kv_cache.shape[2]
        for i, length in enumerate(seq_lens.tolist()):
            begin, end = query_start_loc[i : i + 2].tolist()
            position = torch.arange(length)
            k, v = kv_cache[:, block_table[i, position // size], position % size].float()
            groups = query.shape[1] // k.shape[1]
            k, v = (one.repeat_interleave(groups, 1).transpose(0, 1) for one in (k, v))
            scores = query[begin:end].transpose(0, 1) @ k.transpose(1, 2) * layer.scale
            seen = torch.arange(length - (end - begin), length)[:, None] + 1
            weights = scores.exp() * (position < seen)
            out = weights @ v / weights.sum(-1, keepdim=True)
            output[begin:end] = out.transpose(0, 1)
        return output
