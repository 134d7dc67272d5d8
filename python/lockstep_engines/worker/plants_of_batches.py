"""Defects to plant in vLLM's worker (worker/plants.py) that change no byte of the cache: lengths
and windows of attention, table rows after the requests that used them, placeholders of asynchronous
scheduling, files of hidden states."""

from __future__ import annotations

from lockstep_engines.worker.plant import plant_of

_TABLE_V1 = "vllm.v1.worker.block_table"
_TABLE_V2 = "vllm.v1.worker.gpu.block_table"
_BATCH_V1 = "vllm.v1.worker.gpu_input_batch"
_ATTN_V2 = "vllm.v1.worker.gpu.attn_utils"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_UTILS = "vllm.v1.attention.backends.utils"
_TRITON = "vllm.v1.attention.backends.triton_attn"
_SAVES = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"

PLANTS_OF_BATCHES = (
    plant_of(
        "both",
        "window-one-short",
        "metadata",
        "Attention leaves out the first token of every window.",
        _TRITON,
        "            self.sliding_window = (sliding_window - 1, 0)\n",
        "            self.sliding_window = (sliding_window - 2, 0)\n",
    ),
    plant_of(
        "v1",
        "lengths-without-new-tokens",
        "metadata",
        "Attention sees only the tokens that were computed before the step.",
        _RUNNER_V1,
        "            self.num_computed_tokens[:num_reqs] + num_scheduled_tokens_gpu\n",
        "            self.num_computed_tokens[:num_reqs]\n",
    ),
    plant_of(
        "v2",
        "second-lengths-one-short",
        "metadata",
        "Attention does not see the last token of any row.",
        _ATTN_V2,
        "    seq_lens = seq_lens[:num_reqs]\n",
        "    seq_lens = seq_lens[:num_reqs] - 1\n",
    ),
    plant_of(
        "both",
        "whole-chunk-has-no-length",
        "metadata",
        "A row of chunked attention that ends with its chunk sees none of it.",
        _UTILS,
        "    tokens_in_last_block = attn_chunk_size + (seq_lens_np % -attn_chunk_size)\n",
        "    tokens_in_last_block = seq_lens_np % attn_chunk_size\n",
    ),
    plant_of(
        "v1",
        "cleared-row-keeps-its-first-block",
        "batch",
        "A row that is cleared keeps its first entry, past the end of a later request's table.",
        _TABLE_V1,
        "            self.block_table.np[row_idx, :num_blocks] = 0\n",
        "            self.block_table.np[row_idx, 1:num_blocks] = 0\n",
    ),
    plant_of(
        "v1",
        "moved-row-stays",
        "batch",
        "The row from which a request moves keeps its entries.",
        _TABLE_V1,
        "        block_table_np[src, :num_blocks] = 0\n        self.num_blocks_per_row[src] = 0\n",
        "        self.num_blocks_per_row[src] = 0\n",
    ),
    plant_of(
        "v2",
        "rows-of-a-larger-batch-stay",
        "batch",
        "Rows of the tables of a step that a larger batch filled stay filled.",
        _TABLE_V2,
        "            num_rows = max(num_rows, self._num_dirty_rows)\n",
        "            num_rows = max(num_rows, 0)\n",
    ),
    plant_of(
        "v1",
        "placeholder-of-another-row",
        "batch",
        "A placeholder becomes the token that was sampled at the request's new row.",
        _BATCH_V1,
        "            new_ids: list[int] = sampled_token_ids[prev_index]\n",
        "            new_ids: list[int] = sampled_token_ids[index % len(sampled_token_ids)]\n",
    ),
    plant_of(
        "v1",
        "token-before-a-placeholder-replaced",
        "batch",
        "A sampled token replaces its placeholder and the token before it.",
        _BATCH_V1,
        "            req_output_token_ids[first_placeholder:] = new_ids\n",
        "            req_output_token_ids[max(first_placeholder - 1, 0) :] = new_ids\n",
    ),
    plant_of(
        "both",
        "saved-through-blocks-of-first-group",
        "saves",
        "Hidden states are read through the request's blocks in the first group.",
        _SAVES,
        "        return self.request_finished(request, block_ids[self._cache_kv_group_id])\n",
        "        return self.request_finished(request, block_ids[0])\n",
    ),
    plant_of(
        "both",
        "saved-one-token-late",
        "saves",
        "Hidden states of each token are those of the next one.",
        _SAVES,
        "            block_offsets.reshape((1, self._block_size))\n",
        "            (block_offsets + 1).reshape((1, self._block_size))\n",
    ),
)
