"""Defects to plant in vLLM's worker (worker/plants.py) for what is not plain attention in whole
blocks: MLA, states, hidden states, drafts of runner V2, and kernel blocks."""

from __future__ import annotations

from lockstep_engines.plants import Edit
from lockstep_engines.worker.plant import WorkerPlant, plant_of

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_BACKEND = "vllm.v1.attention.backend"
_BACKENDS = "vllm.v1.attention.backends"
_COPIES = "vllm.v1.worker.mamba_utils"
_HYBRID_V2 = "vllm.v1.worker.gpu.model_states.mamba_hybrid"
_HIDDEN = "vllm.model_executor.models.extract_hidden_states"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_BATCH_V2 = "vllm.v1.worker.gpu.input_batch"
_TABLE_V1 = "vllm.v1.worker.block_table"
_TABLE_V2 = "vllm.v1.worker.gpu.block_table"
_UTILS = "vllm.v1.worker.utils"
_SPECS = "vllm.v1.kv_cache_interface"
_ZERO_V1 = (
    "        if scheduler_output.new_block_ids_to_zero:\n"
    "            self._zero_block_ids(scheduler_output.new_block_ids_to_zero)\n"
)
_ZERO_V2 = (
    "            self.kv_block_zeroer.zero_block_ids(scheduler_output.new_block_ids_to_zero)\n"
)
_END_OF_PAGE = (
    "        kv_cache.as_strided((len(kv_cache),), (kv_cache.stride(0),), "
    "kv_cache.storage_offset() + kv_cache.stride(0) - 1)"
    "[slot_mapping // kv_cache.shape[2]] = 1\n"
)
_SLOTS_BY_OTHER_BLOCKS = "Slots follow from blocks of another size than those of the table."

PLANTS_OF_KINDS = (
    plant_of(
        "both",
        "mla-row-of-another-stride",
        "views",
        "Rows of MLA are taken to lie half as far apart as they do.",
        _MLA,
        "self.kv_cache = kv_cache.squeeze(1)",
        "self.kv_cache = kv_cache.squeeze(1).as_strided(kv_cache.squeeze(1).shape, "
        "(kv_cache.stride(0), kv_cache.shape[-1] // 2, 1))",
    ),
    plant_of(
        "both",
        "mla-slots-one-token-late",
        "writes",
        "Each row of MLA goes to the slot of the token before.",
        _BACKEND,
        "            slot_mapping.flatten(),\n",
        "            slot_mapping.flatten().roll(1),\n",
        within="class MLAAttentionImpl(",
    ),
    plant_of(
        "both",
        "mla-prefill-reads-first-rows",
        "tables",
        "Prefills of MLA are given the tables of the first rows of the batch.",
        _MLA,
        "block_table=block_table_tensor[reqs_start:, ...]",
        "block_table=block_table_tensor[:num_prefills, ...]",
    ),
    plant_of(
        "v1",
        "state-left-behind",
        "states",
        "A state does not move on with its request into the next block.",
        _COPIES,
        "        if prev_state_idx != -1 and prev_state_idx != curr_state_idx:\n",
        "        if False and prev_state_idx != curr_state_idx:\n",
        within="def preprocess_mamba(",
    ),
    plant_of(
        "v1",
        "state-from-wrong-column",
        "states",
        "The state of a request admitted with a hit is read from the next column.",
        _COPIES,
        "prev_state_idx = (req_state.num_computed_tokens - 1) // block_size",
        "prev_state_idx = req_state.num_computed_tokens // block_size",
        within="def preprocess_mamba(",
    ),
    plant_of(
        "v2",
        "second-state-from-wrong-column",
        "states",
        "The state of a request admitted with a hit is read from the next column.",
        _HYBRID_V2,
        "(new_req_data.num_computed_tokens - 1) // mamba_block_size",
        "new_req_data.num_computed_tokens // mamba_block_size",
    ),
    plant_of(
        "v2",
        "second-state-in-attention-blocks",
        "states",
        "The column of a resumed state is counted in blocks of attention (vllm#55600).",
        _HYBRID_V2,
        "(new_req_data.num_computed_tokens - 1) // mamba_block_size",
        "(new_req_data.num_computed_tokens - 1) // self.cache_config.block_size",
    ),
    plant_of(
        "both",
        "state-copied-in-part",
        "states",
        "Of a state that moves into another block the last word stays behind.",
        "vllm.model_executor.layers.mamba.mamba_utils",
        "    src_state = state[src_block_id]\n"
        "    return MambaCopySpec(\n"
        "        start_addr=src_state.data_ptr(), num_elements=src_state.numel()\n"
        "    )\n",
        "    src_state = state[src_block_id]\n"
        "    return MambaCopySpec(\n"
        "        start_addr=src_state.data_ptr(), num_elements=src_state.numel() - 2\n"
        "    )\n",
        within="def get_temporal_copy_spec(",
    ),
    plant_of(
        "both",
        "state-in-next-block",
        "states",
        "A running state is looked up one block too late where its block is full.",
        f"{_BACKENDS}.utils",
        "(seq_lens - 1) // kv_cache_spec.block_size",
        "seq_lens // kv_cache_spec.block_size",
        within="def mamba_get_block_table_tensor(",
    ),
    plant_of(
        "both",
        "state-restarts",
        "states",
        "What a hit or an earlier chunk left is not read: a prefill begins at the zero state.",
        f"{_BACKENDS}.mamba_attn",
        "num_computed_tokens[num_reqs - num_prefills : num_reqs] > 0",
        "num_computed_tokens[num_reqs - num_prefills : num_reqs] < 0",
    ),
    plant_of(
        "both",
        "state-of-first-group",
        "states",
        "Groups of states that share their metadata share the blocks of the first one too.",
        f"{_BACKENDS}.mamba_attn",
        "            state_indices_tensor_d=state_indices_tensor_d,\n"
        "            state_indices_tensor_p=state_indices_tensor_p,\n",
        "",
        within="def update_block_table(",
    ),
    plant_of(
        "both",
        "accepted-drafts-not-counted",
        "states",
        "A row continues from the state before its accepted drafts.",
        f"{_BACKENDS}.mamba_attn",
        "num_accepted_tokens = num_accepted_tokens[:num_decodes]",
        "num_accepted_tokens = num_accepted_tokens[:num_decodes] * 0 + 1",
    ),
    plant_of(
        "v1",
        "zeroed-too-late",
        "zeroing",
        "New blocks are zeroed when the next step begins.",
        _RUNNER_V1,
        _ZERO_V1,
        '        self._zero_block_ids(getattr(self, "_zeroed_later", []))\n'
        "        self._zeroed_later = scheduler_output.new_block_ids_to_zero or []\n",
    ),
    plant_of(
        "v2",
        "second-zeroed-too-late",
        "zeroing",
        "New blocks are zeroed when the next step begins.",
        _RUNNER_V2,
        _ZERO_V2,
        '            self.kv_block_zeroer.zero_block_ids(getattr(self, "_zeroed_later", []))\n'
        "            self._zeroed_later = scheduler_output.new_block_ids_to_zero\n",
    ),
    plant_of(
        "both",
        "hidden-heads-swapped",
        "writes",
        "Hidden states of a token's layers are written in the opposite order.",
        _HIDDEN,
        "slot_mapping % block_size] = to_cache",
        "slot_mapping % block_size] = to_cache.flip(1)",
    ),
    plant_of(
        "both",
        "hidden-row-in-next-slot",
        "writes",
        "Hidden states go to the slot after their token's.",
        _HIDDEN,
        "slot_mapping % block_size] = to_cache",
        "(slot_mapping + 1) % block_size] = to_cache",
    ),
    plant_of(
        "both",
        "padding-written",
        "writes",
        "With the rows of attention the end of their page is written, behind what it uses.",
        f"{_BACKENDS}.triton_attn",
        "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)\n",
        f"kv_cache.transpose(1, 2).split(self.head_size, dim=-1)\n{_END_OF_PAGE}",
        "kv_cache.unbind(1)\n",
        f"kv_cache.unbind(1)\n{_END_OF_PAGE}",
        within="def do_kv_cache_update(",
    ),
    plant_of(
        "v2",
        "rejected-drafts-computed",
        "inputs",
        "Drafts that were rejected count as computed.",
        _BATCH_V2,
        "    computed_delta = query_len - num_rejected\n",
        "    computed_delta = query_len\n",
        "    num_computed += query_len - num_rejected\n",
        "    num_computed += query_len\n",
    ),
    WorkerPlant(
        "split-table-not-expanded",
        "kernel blocks",
        "Attention takes ids of blocks for ids of the kernel blocks that they are split into.",
        (
            (
                Edit(
                    _UTILS,
                    "        if self.kernel_block_size is None:\n"
                    "            return common_attn_metadata\n",
                    "        if True:\n            return common_attn_metadata\n",
                ),
            ),
            (
                Edit(
                    _TABLE_V1,
                    "        if self.use_hybrid_blocks:\n            block_ids",
                    "        if False:\n            block_ids",
                ),
                Edit(_TABLE_V2, "            if bpk > 1:\n", "            if False:\n"),
            ),
        ),
    ),
    WorkerPlant(
        "split-blocks-overlap",
        "kernel blocks",
        "The kernel blocks of a block begin at its own id, in the middle of those before it.",
        (
            (Edit(_UTILS, "alpha=self.kernel_block_stride or blocks_per_kv_block", "alpha=1"),),
            (
                Edit(
                    _TABLE_V1,
                    "kv_manager_block_ids.reshape(-1, 1) * blocks_per_kv_block",
                    "kv_manager_block_ids.reshape(-1, 1)",
                ),
                Edit(_TABLE_V2, "[b * bpk + k for b in", "[b + k for b in"),
            ),
        ),
    ),
    WorkerPlant(
        "slots-by-other-blocks",
        "kernel blocks",
        _SLOTS_BY_OTHER_BLOCKS,
        (
            (
                Edit(
                    _RUNNER_V1,
                    "            block_sizes.append(block_size)\n            if kv_cache_spec_kind",
                    "            block_sizes.append(self._kernel_block_sizes[len(block_sizes)])\n"
                    "            if kv_cache_spec_kind",
                ),
            ),
            (
                Edit(
                    _TABLE_V1,
                    "            self.block_size = kernel_block_size\n",
                    "            self.block_size = block_size\n",
                ),
            ),
        ),
        "v1",
    ),
    WorkerPlant(
        "second-slots-by-other-blocks",
        "kernel blocks",
        _SLOTS_BY_OTHER_BLOCKS,
        (
            (
                Edit(
                    _RUNNER_V2,
                    "            block_sizes=block_sizes,\n"
                    "            max_num_reqs=self.max_num_reqs,\n"
                    "            max_num_batched_tokens=self.max_num_tokens,\n"
                    "            max_num_blocks_per_group=max_num_blocks_per_group,\n"
                    "            device=self.device,\n"
                    "            slot_mapping_enabled",
                    "            block_sizes=self.kernel_block_sizes,\n"
                    "            max_num_reqs=self.max_num_reqs,\n"
                    "            max_num_batched_tokens=self.max_num_tokens,\n"
                    "            max_num_blocks_per_group=max_num_blocks_per_group,\n"
                    "            device=self.device,\n"
                    "            slot_mapping_enabled",
                ),
            ),
            (
                Edit(
                    _TABLE_V2,
                    "            self.kernel_block_sizes, dtype=torch.int32, device=self.device\n",
                    "            self.block_sizes, dtype=torch.int32, device=self.device\n",
                ),
            ),
        ),
        "v2",
    ),
    WorkerPlant(
        "split-views-of-too-few-blocks",
        "kernel blocks",
        "Views of the cache have as many kernel blocks as the pool has blocks (vllm#38081).",
        (
            (Edit(_SPECS, "        num_blocks * blocks_per_page,\n", "        num_blocks,\n"),),
            (
                Edit(
                    _RUNNER_V1,
                    "kernel_num_blocks = num_blocks * num_blocks_per_kv_block",
                    "kernel_num_blocks = num_blocks",
                ),
                Edit(
                    "vllm.v1.worker.gpu.attn_utils",
                    "num_blocks *= kv_cache_spec.block_size // kernel_block_size",
                    "num_blocks *= 1",
                ),
            ),
        ),
    ),
    plant_of(
        "both",
        "split-block-zeroed-in-part",
        "kernel blocks",
        "Of a new block only the first kernel block is zeroed.",
        _UTILS,
        "for virtual_index in range(ratio):",
        "for virtual_index in range(1):",
        "cur_page_el = kernel_block_el * ratio",
        "cur_page_el = kernel_block_el",
    ),
)
