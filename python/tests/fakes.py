"""A scheduler's objects as the recorder sees them, without vLLM: only attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class HashTable:
    """The pool's table from hashes to blocks."""

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}

    def insert(self, key: str, block: int) -> None:
        self.blocks[key] = block

    def pop(self, key: str, block_id: int) -> int | None:
        return self.blocks.pop(key, None)


class BlockPool:
    """Blocks and their hashes; `free` counts free blocks."""

    def __init__(self, num_gpu_blocks: int = 9) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.free = num_gpu_blocks - 1
        self.cached_block_hash_to_block = HashTable()

    def get_num_free_blocks(self) -> int:
        return self.free

    def move_block_hashes(self, key: str, block: int) -> None:
        self.cached_block_hash_to_block.pop(key, 0)
        self.cached_block_hash_to_block.insert(key, block)

    def reset_prefix_cache(self) -> None:
        self.cached_block_hash_to_block = HashTable()


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """A layer's spec whose class is called `kind`."""
    defaults = dict(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype="torch.bfloat16",
        kv_quant_mode=SimpleNamespace(name="NONE"),
    )
    return type(kind, (SimpleNamespace,), {})(**(defaults | fields))


def config(**changes: Any) -> Any:
    """A VllmConfig; `changes` to any of its parts' fields."""
    parts = dict(
        scheduler_config=dict(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_num_scheduled_tokens=None,
            max_num_active_seqs=None,
            enable_chunked_prefill=True,
            async_scheduling=False,
            scheduler_reserve_full_isl=True,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            policy="fcfs",
            watermark=0.0,
            prefill_schedule_interval=1,
        ),
        cache_config=dict(
            block_size=16,
            enable_prefix_caching=True,
            mamba_cache_mode="none",
            mamba_block_size=None,
            enable_mamba_shared_prefix_checkpoint=False,
            prefix_match_unit=None,
            prefix_caching_hash_algo="sha256",
        ),
        parallel_config=dict(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        ),
        model_config=dict(
            max_model_len=128, is_encoder_decoder=False, is_diffusion=False, runner_type="generate"
        ),
    )
    made = {}
    for part, fields in parts.items():
        changed = {name: changes.pop(name) for name in list(changes) if name in fields}
        made[part] = SimpleNamespace(**(fields | changed))
    return SimpleNamespace(**({"speculative_config": None} | made | changes))


def drafts(method: str, **fields: Any) -> Any:
    """A SpeculativeConfig; `method` is the format's name for it."""
    defaults = dict(
        method=method,
        num_speculative_tokens=2,
        max_num_new_slots_for_drafting=int(method == "draft_model"),
        use_eagle=lambda: method == "eagle",
        use_eagle_block_drop=lambda: method == "eagle",
        uses_draft_model=lambda: method == "draft_model",
    )
    return SimpleNamespace(**(defaults | fields))


def group(layer_spec: Any, *layers: str, **fields: Any) -> Any:
    return SimpleNamespace(
        layer_names=list(layers or ("layers.0",)), kv_cache_spec=layer_spec, **fields
    )


def cache(groups: list[Any], **fields: Any) -> Any:
    """A KVCacheConfig."""
    return SimpleNamespace(**({"kv_cache_groups": groups} | fields))


class Scheduler:
    """Queues, pool and configuration of a scheduler that has just been made."""

    def __init__(self, vllm_config: Any = None, groups: list[Any] | None = None) -> None:
        self.vllm_config = vllm_config or config()
        self.kv_cache_config = cache(groups or [group(spec())])
        self.block_size = 16
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.kv_cache_manager = SimpleNamespace(
            block_pool=BlockPool(), get_block_ids=lambda name: self.tables[name]
        )
        self.requests: dict[str, Any] = {}
        self.pause_state = 0
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.skipped_waiting: list[Any] = []
        self.kv_holding_waiting: list[Any] = []


class AsyncScheduler(Scheduler):
    """A scheduler that decides before the last step's tokens arrive."""


class Embeddings:
    """A tensor of bytes, one per token."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, part: slice) -> Embeddings:
        return Embeddings(self._rows[part])

    def cpu(self) -> Embeddings:
        return self

    float = numpy = cpu

    def tobytes(self) -> bytes:
        return bytes(self._rows)


def request(name: str, **changes: Any) -> Any:
    """A request of three tokens; `changes` to its fields or to those of its sampling parameters."""
    params = dict(eos_token_id=None, stop_token_ids=None, min_tokens=0, repetition_detection=None)
    chosen = {key: changes.pop(key) for key in list(changes) if key in params}
    fields = dict(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        prompt_embeds=None,
        mm_features=[],
        lora_request=None,
        pooling_params=None,
        sampling_params=SimpleNamespace(**(params | chosen)),
        structured_output_request=None,
        resumable=False,
        max_tokens=4,
        arrival_time=0.5,
        priority=0,
        cache_salt=None,
        skip_reading_prefix_cache=False,
        block_hashes=[],
        num_computed_tokens=0,
        status=SimpleNamespace(name="WAITING"),
        num_preemptions=0,
        num_output_tokens=0,
        spec_token_ids=[],
    )
    return SimpleNamespace(**(fields | changes))


def output(
    tokens: dict[str, int],
    new: dict[str, tuple[int, Any]] | None = None,
    cached: dict[str, tuple[int, Any]] | None = None,
    **changes: Any,
) -> Any:
    """A SchedulerOutput; `new` and `cached` map a request to (computed tokens, block ids)."""
    new, cached = new or {}, cached or {}
    fields = dict(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks)
            for name, (computed, blocks) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            new_block_ids=[blocks for _, blocks in cached.values()],
            resumed_req_ids=set(changes.pop("resumed", ())),
        ),
        scheduled_spec_decode_tokens={},
        preempted_req_ids=set(),
        finished_req_ids=set(),
        num_common_prefix_blocks=[0],
        new_block_ids_to_zero=None,
    )
    return SimpleNamespace(**(fields | changes))


def model_output(tokens: dict[str, list[int]]) -> Any:
    """A ModelRunnerOutput with these rows."""
    return SimpleNamespace(
        sampled_token_ids=list(tokens.values()),
        req_id_to_index={name: i for i, name in enumerate(tokens)},
    )


def engine_outputs(reasons: dict[str, str]) -> dict[int, Any]:
    """What update_from_output() returns for one client."""
    rows = [SimpleNamespace(request_id=name, finish_reason=r) for name, r in reasons.items()]
    return {0: SimpleNamespace(outputs=rows)}
