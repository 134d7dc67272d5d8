"""Defects to plant in vLLM's worker (worker/plants.py) for what is not plain attention: MLA,
states, hidden states, and drafts of runner V2."""

from __future__ import annotations

from lockstep_engines.worker.plant import plant_of

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_BACKEND = "vllm.v1.attention.backend"
_BACKENDS = "vllm.v1.attention.backends"
_COPIES = "vllm.v1.worker.mamba_utils"
_HYBRID_V2 = "vllm.v1.worker.gpu.model_states.mamba_hybrid"
_HIDDEN = "vllm.model_executor.models.extract_hidden_states"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_BATCH_V2 = "vllm.v1.worker.gpu.input_batch"
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
)
