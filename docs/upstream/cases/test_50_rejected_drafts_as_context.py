"""MLA: a row with drafts that counts as a prefill takes the length of its context from an upper
bound, which includes the drafts that were rejected."""

from types import SimpleNamespace

import pytest
import torch
from small_engine import SIZES, SmallEngine, bare
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder
from vllm.v1.kv_cache_interface import MLAAttentionSpec

BLOCK, DRAFTS = 16, 2


def build(lengths, tokens, bounds):
    """Triton MLA's metadata of rows of these lengths, after which these tokens are computed."""
    builder = bare(
        TritonMLAMetadataBuilder, device="cpu", metadata_cls=MLACommonMetadata, use_pcp=False,
        reorder_batch_threshold=1 + DRAFTS, page_size=BLOCK, dcp_world_size=1, dcp_manager=None,
        dcp_local_block_size=1, dcp_virtual_block_size=1, q_data_type=None,
        chunked_prefill_workspace=None, chunked_prefill_workspace_size=64,
        model_config=SimpleNamespace(dtype=None, get_head_size=lambda: 576),
        _prefill_backend=SimpleNamespace(get_name=str, prepare_metadata=lambda _: None),
    )  # fmt: skip
    starts, total = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    return builder.build(0, CommonAttentionMetadata(
        starts, starts, seq_lens=tokens, seq_lens_cpu_upper_bound=bounds, num_reqs=len(lengths),
        num_actual_tokens=total, max_query_len=max(lengths), max_seq_len=int(max(bounds)),
        block_table_tensor=torch.ones(2, 1), slot_mapping=torch.zeros(total),
    ))  # fmt: skip


def wrong_contexts(max_model_len):
    """(tokens gathered as context, tokens computed) of the third step's rows where these differ. In
    the second step each request accepts one of two drafts."""
    spec = MLAAttentionSpec(block_size=BLOCK, **SIZES)
    engine = SmallEngine([spec], 16, max_model_len, drafts=DRAFTS, async_scheduling=True)
    engine.add("a", 2, max_tokens=9)
    engine.add("b", 1, max_tokens=9, first_token=50)
    first, second = engine.schedule(), engine.schedule()
    engine.update(first)
    step = engine.schedule()  # as if all drafts of the second were accepted
    assert second.scheduled_spec_decode_tokens == dict.fromkeys("ab", [-1] * DRAFTS)
    lengths = torch.tensor([step.num_scheduled_tokens[name] for name in "ab"])
    bounds = torch.tensor(step.scheduled_cached_reqs.num_computed_tokens) + lengths
    built = build(lengths.tolist(), bounds - 1, bounds)
    gathered = built.prefill.chunked_context.context_lens_list if built.prefill else []
    computed = (bounds - 1 - lengths).tolist()[built.num_decodes :]
    return [pair for pair in zip(gathered, computed, strict=True) if len({*pair}) > 1]


def test_rows_of_equal_length_are_not_prefills():
    assert wrong_contexts(max_model_len=64) == []


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bound is exact for prompts only")
def test_rows_of_different_lengths_gather_what_was_computed():
    assert wrong_contexts(max_model_len=7) == []
