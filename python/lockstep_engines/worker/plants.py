"""Defects to plant in vLLM's worker (plants.py), by class.

Each is a plausible slip in a change: an index one off, a row forgotten, a group
mistaken for another. For 0.33.0 and, where the text exists, other releases; `runner` is the one
that has it, "both" where the two share the code.
"""

from __future__ import annotations

from lockstep_engines.kernels.plants import PLANTS_OF_KERNELS
from lockstep_engines.worker.plant import plant_of
from lockstep_engines.worker.plants_of_batches import PLANTS_OF_BATCHES
from lockstep_engines.worker.plants_of_kinds import PLANTS_OF_KINDS

_TABLE_V1 = "vllm.v1.worker.block_table"
_TABLE_V2 = "vllm.v1.worker.gpu.block_table"
_BATCH_V1 = "vllm.v1.worker.gpu_input_batch"
_BATCH_V2 = "vllm.v1.worker.gpu.input_batch"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_WRITE = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
_TRITON = "vllm.v1.attention.backends.triton_attn"


PLANTS = (
    plant_of(
        "v1",
        "slot-off-by-one",
        "slots",
        "Every token goes to the slot behind its own.",
        _TABLE_V1,
        "slot_ids = block_numbers * KV_CACHE_BLOCK_SIZE + local_block_offsets",
        "slot_ids = block_numbers * KV_CACHE_BLOCK_SIZE + local_block_offsets + 1",
        "slot_ids = block_numbers * block_size + local_block_offsets",
        "slot_ids = block_numbers * block_size + local_block_offsets + 1",
    ),
    plant_of(
        "v1",
        "slot-of-first-block",
        "slots",
        "Tokens after the first block are given slots of the first one.",
        _TABLE_V1,
        "block_table_ptr + row_offset + virtual_block_indices,",
        "block_table_ptr + row_offset + virtual_block_indices * 0,",
        "block_table_ptr + row_offset + block_indices",
        "block_table_ptr + row_offset + block_indices * 0",
    ),
    plant_of(
        "v1",
        "slot-of-next-row",
        "slots",
        "A token's slot is looked up in the table of the row before.",
        _TABLE_V1,
        "row_offset = req_idx * block_table_stride",
        "row_offset = (req_idx - (req_idx > 0)) * block_table_stride",
    ),
    plant_of(
        "v1",
        "wrong-group-block-size",
        "slots",
        "All groups compute slots with the block size of the first one.",
        _TABLE_V1,
        "            self.slot_mapping.gpu,\n            self.block_size,",
        "            self.slot_mapping.gpu,\n            16,",
        "            self.block_size,\n            self.slot_mapping.gpu,",
        "            16,\n            self.slot_mapping.gpu,",
    ),
    plant_of(
        "v1",
        "append-replaces-last",
        "tables",
        "Blocks that are added replace the last one.",
        _TABLE_V1,
        "        start = self.num_blocks_per_row[row_idx]\n",
        "        start = max(self.num_blocks_per_row[row_idx] - 1, 0)\n",
    ),
    plant_of(
        "v1",
        "moved-row-loses-last-block",
        "tables",
        "A row that moves into a gap leaves its last block behind.",
        _TABLE_V1,
        "block_table_np[tgt, :num_blocks] = block_table_np[src, :num_blocks]",
        "block_table_np[tgt, : num_blocks - 1] = block_table_np[src, : num_blocks - 1]",
    ),
    plant_of(
        "v1",
        "stale-table-row",
        "tables",
        "The last row of the batch is not copied to the device.",
        _TABLE_V1,
        "self.block_table.copy_to_gpu(num_reqs)",
        "self.block_table.copy_to_gpu(num_reqs - 1)",
    ),
    plant_of(
        "v1",
        "resumed-keeps-old-blocks",
        "tables",
        "A request that comes back keeps the blocks that it had, before the new ones.",
        _RUNNER_V1,
        "req_state.block_ids = new_block_ids\n\n            if req_index is None:",
        "req_state.block_ids = tuple(a + b for a, b in "
        "zip(req_state.block_ids, new_block_ids))\n\n            if req_index is None:",
    ),
    plant_of(
        "v1",
        "computed-not-taken-over",
        "inputs",
        "A running request's computed tokens stay what they were.",
        _RUNNER_V1,
        "self.input_batch.num_computed_tokens_cpu[req_index] = num_computed_tokens",
        "self.input_batch.num_computed_tokens_cpu[req_index] += 0",
    ),
    plant_of(
        "v1",
        "new-blocks-of-first-group",
        "tables",
        "What is added to a table is the first group's blocks, in all groups.",
        _TABLE_V1,
        "block_table.append_row(block_ids[i], row_idx)",
        "block_table.append_row(block_ids[0], row_idx)",
    ),
    plant_of(
        "v1",
        "swapped-tokens",
        "inputs",
        "A sampled token is kept one place too late.",
        _RUNNER_V1,
        "start_idx = self.input_batch.num_tokens_no_spec[req_idx]\n",
        "start_idx = self.input_batch.num_tokens_no_spec[req_idx] + 1\n",
    ),
    plant_of(
        "both",
        "row-in-next-slot",
        "writes",
        "The kernel that writes rows shifts them by one slot within their block.",
        _WRITE,
        "            block_idx * block_stride\n            + block_offset * page_stride",
        "            block_idx * block_stride\n"
        "            + (block_offset + 1) % block_size * page_stride",
        within="def reshape_and_cache_kernel_flash(",
    ),
    plant_of(
        "both",
        "values-in-next-block",
        "writes",
        "V of a token is written one block further.",
        _WRITE,
        "        tgt_idx_v = tgt_idx_k\n",
        "        tgt_idx_v = tgt_idx_k + block_stride\n",
        within="def reshape_and_cache_kernel_flash(",
    ),
    plant_of(
        "both",
        "heads-swapped",
        "writes",
        "The heads of a token are written in the opposite order.",
        _WRITE,
        "            + block_offset * page_stride\n            + cur_head * head_stride",
        "            + block_offset * page_stride\n"
        "            + (num_heads - 1 - cur_head) * head_stride",
        within="def reshape_and_cache_kernel_flash(",
    ),
    plant_of(
        "both",
        "keys-for-values",
        "views",
        "K and V of a page are exchanged.",
        _TRITON,
        "key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)\n"
        "        if is_quantized_kv_cache(self.kv_cache_dtype):\n"
        "            key_cache = key_cache.view(self.fp8_dtype)\n"
        "            value_cache = value_cache.view(self.fp8_dtype)\n"
        "        if self._set_kv_ptr_range:\n"
        "            set_triton_ptr_range(kv_cache, key_cache, value_cache)\n"
        "        triton_reshape_and_cache_flash(",
        "value_cache, key_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)\n"
        "        triton_reshape_and_cache_flash(",
        "key_cache, value_cache = kv_cache.unbind(1)\n"
        "        if is_quantized_kv_cache(self.kv_cache_dtype):\n"
        "            key_cache = key_cache.view(self.fp8_dtype)\n"
        "            value_cache = value_cache.view(self.fp8_dtype)\n"
        "        triton_reshape_and_cache_flash(",
        "value_cache, key_cache = kv_cache.unbind(1)\n        triton_reshape_and_cache_flash(",
        within="def do_kv_cache_update(",
    ),
    plant_of(
        "both",
        "view-in-another-order",
        "views",
        "Rows of a token are taken to lie head by head, as another order of the cache has them.",
        _TRITON,
        "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)\n"
        "        if is_quantized_kv_cache(self.kv_cache_dtype):\n"
        "            key_cache = key_cache.view(self.fp8_dtype)\n"
        "            value_cache = value_cache.view(self.fp8_dtype)\n"
        "        if self._set_kv_ptr_range:\n",
        "kv_cache.as_strided((len(kv_cache), *kv_cache.shape[2:0:-1], kv_cache.shape[3]), "
        "(kv_cache.stride(0), kv_cache.shape[3], kv_cache.shape[2] * kv_cache.shape[3], 1))"
        ".split(self.head_size, dim=-1)\n"
        "        if self._set_kv_ptr_range:\n",
        within="def do_kv_cache_update(",
    ),
    plant_of(
        "v2",
        "second-slot-off-by-one",
        "slots",
        "Every token goes to the slot behind its own.",
        _TABLE_V2,
        "slot_ids = block_numbers * kv_block_size + block_offsets",
        "slot_ids = block_numbers * kv_block_size + block_offsets + 1",
        "slot_ids = block_numbers * block_size + block_offsets",
        "slot_ids = block_numbers * block_size + block_offsets + 1",
    ),
    plant_of(
        "v1",
        "padding-behind-slots",
        "bounds",
        "Padding of the slots goes one place beyond their buffer.",
        _TABLE_V1,
        "                    mask=offsets < max_num_tokens,",
        "                    mask=offsets <= max_num_tokens,",
        "                mask=offsets < max_num_tokens,",
        "                mask=offsets <= max_num_tokens,",
    ),
    plant_of(
        "v2",
        "second-padding-behind-slots",
        "bounds",
        "Padding of the slots goes one place beyond their buffer.",
        _TABLE_V2,
        "PAD_ID, mask=offset < max_num_tokens)",
        "PAD_ID, mask=offset <= max_num_tokens)",
    ),
    plant_of(
        "v2",
        "slots-by-place-in-batch",
        "slots",
        "Slots are looked up by a request's place in the batch, not by its row of the table.",
        _TABLE_V2,
        "    req_state_idx = tl.load(idx_mapping + batch_idx)\n    # idx_mapping == -1",
        "    req_state_idx = batch_idx\n    # idx_mapping == -1",
        "    req_state_idx = tl.load(idx_mapping + batch_idx)\n",
        "    req_state_idx = batch_idx\n",
    ),
    plant_of(
        "v2",
        "gathered-by-place-in-batch",
        "tables",
        "Attention is given the tables by place in the batch.",
        _TABLE_V2,
        "    req_idx = tl.load(batch_idx_to_req_idx + batch_idx)\n",
        "    req_idx = batch_idx\n",
    ),
    plant_of(
        "v2",
        "new-row-not-overwritten",
        "tables",
        "A new request's blocks are put behind those that its row had before.",
        _TABLE_V2,
        "start = self.num_blocks.np[i, req_index] if not overwrite else 0",
        "start = self.num_blocks.np[i, req_index]",
    ),
    plant_of(
        "v2",
        "window-nulled-too-far",
        "tables",
        "One block too many below a sliding window is taken out of what attention reads.",
        _TABLE_V2,
        "reach > 0, tl.maximum(first_pos - reach, 0) // block_size, 0",
        "reach > 0, tl.maximum(first_pos - reach, 0) // block_size + 1, 0",
    ),
    plant_of(
        "v2",
        "gather-stops-early",
        "tables",
        "Attention is given every table without its last block.",
        _TABLE_V2,
        "        tl.store(dst_row_ptr + offset, block_ids, mask=offset < num_blocks)",
        "        tl.store(dst_row_ptr + offset, block_ids, mask=offset < num_blocks - 1)",
    ),
    plant_of(
        "v2",
        "position-off-by-one",
        "inputs",
        "Positions of a request that has computed tokens are one too high.",
        _BATCH_V2,
        "        tl.store(pos_ptr + start + block, pos, mask=mask)",
        "        tl.store(pos_ptr + start + block, pos + (num_computed_tokens > 0), mask=mask)",
    ),
    plant_of(
        "v2",
        "prefill-token-off-by-one",
        "inputs",
        "A prompt's tokens are taken from one place further.",
        _BATCH_V2,
        "tokens = tl.load(request_ptr + num_computed + block, mask=mask)",
        "tokens = tl.load(request_ptr + num_computed + block + 1, mask=mask)",
    ),
    plant_of(
        "v1",
        "rejected-drafts-in-flight",
        "inputs",
        "Drafts in flight that were rejected stay in what the scheduler has counted.",
        "vllm.v1.spec_decode.utils",
        "    corrected = prev_computed + valid_counts.int()\n",
        "    corrected = cpu_num_computed_tokens\n",
    ),
    *PLANTS_OF_BATCHES,
    *PLANTS_OF_KINDS,
    *PLANTS_OF_KERNELS,
)
