"""Models as vLLM 0.33.0 serves them: layers, block sizes and defaults, planned by vLLM itself.

A Model lists its layers, in the recording format's terms, and its draft model; vLLM's planner makes
the groups. Sizes are those of the models of that name, layers may be fewer. What the state layers
export inside a prefill is what their kernels do on the device named in the comment.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from scenarios import Workload
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_planning, kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from lockstep_engines.vllm import engine as vllm_engine
from lockstep_recorder.header import eagle_groups_of, groups_of
from lockstep_recorder.releases import release_of

Spec = dict[str, Any]
Layers = tuple[tuple[int, Spec], ...]  # how many, and what each keeps

VERSION = "0.33.0"
GRID_OF_HITS = -1  # of checkpoints: where hits can end
_ROW_BYTES = 584  # of a row of MLA in fp8, with its scales


@dataclass(frozen=True)
class Drafts:
    """A draft model whose layers keep a cache."""

    method: str  # vLLM's
    num_tokens: int
    layers: Layers
    num_modules: int = 1


@dataclass(frozen=True)
class Model:
    """A model as it is served."""

    layers: Layers
    drafts: Drafts | None = None
    checkpoints: int | None = None  # tokens of their grid; None: prefills export none
    match_unit: int | None = None
    block_step: int = 16  # of hybrids: their blocks hold multiples of this many tokens
    max_model_len: int = 0  # 0: a little more than seven blocks
    layout: str = "LBNHC"  # of the cache; block-outermost where pages of several sizes share one


def attention(heads: int, size: int, block_size: int = 16, **keys: Any) -> Spec:
    return {
        "type": "full",
        "block_size": block_size,
        "num_kv_heads": heads,
        "head_size": size,
        "dtype": "bf16",
    } | keys


def window(heads: int, size: int, width: int, block_size: int = 16, **keys: Any) -> Spec:
    return attention(heads, size, block_size, type="sliding_window", sliding_window=width, **keys)


def mla(block_size: int = 64, **keys: Any) -> Spec:
    return attention(1, 576, block_size, type="mla", **keys)


def rows(kind: str, block_size: int, **keys: Any) -> Spec:
    """Rows of MLA in fp8, as DeepSeek-V4 keeps them: pages are whole multiples of 576 bytes."""
    return attention(1, 512, block_size, type=kind, dtype="uint8", alignment=576,
                     state_content_bytes=_ROW_BYTES, **keys)  # fmt: skip


def raw(kind: str, block_size: int, size: int, **keys: Any) -> Spec:
    """A compressor's cache of tokens that are not yet compressed."""
    return attention(1, size, block_size, type=kind, dtype="fp32", **keys)


def states(shapes: list[list[int]], dtypes: list[str]) -> Spec:
    """One layer's state: the convolution's, then the recurrent one's."""
    return {"type": "mamba", "shapes": shapes, "dtypes": dtypes}


def mamba2(conv: int, heads: int, head: int, size: int, recurrent: str = "bf16") -> Spec:
    return states([[3, conv], [heads, head, size]], ["bf16", recurrent])


def delta_net(conv: int, heads: int) -> Spec:
    return states([[3, conv], [heads, 128, 128]], ["bf16", "fp32"])


_QWEN3_NEXT = ((12, delta_net(8192, 32)), (4, attention(2, 256)))
_QWEN35 = ((12, delta_net(10240, 48)), (4, attention(4, 256)))
_KIMI_K3 = ((9, states([[3, 24576], [64, 128, 128]], ["bf16", "fp32"])), (3, mla()))
_MIMO = (
    (39, window(8, 192, 128, head_size_v=128)),
    (9, attention(4, 192, head_size_v=128)),
)
_GPT_OSS = ((12, window(8, 64, 128)), (12, attention(8, 64)))
_MIMO_MODULE = window(8, 192, 128, head_size_v=128)


def _mtp(num_tokens: int, layer: Spec, num_modules: int = 1) -> Drafts:
    return Drafts("mtp", num_tokens, ((num_modules, layer),), num_modules)


def _eagle3(layer: Spec) -> Drafts:
    return Drafts("eagle3", 3, ((1, layer),))


def _flashinfer(layers: Layers, drafts: Drafts | None = None, **fields: Any) -> Model:
    """Gated delta nets with FlashInfer's prefill kernel, which sm90 has."""
    return Model(layers, drafts, GRID_OF_HITS, block_step=64, **fields)


MODELS: dict[str, Model] = {
    "llama-3.1-8b": Model(((32, attention(8, 128)),), max_model_len=512),
    "llama-3.1-8b-eagle3": Model(
        ((32, attention(8, 128)),), _eagle3(attention(8, 128)), max_model_len=512
    ),
    "deepseek-v3": Model(((61, mla()),), max_model_len=960),
    "deepseek-v3-mtp": Model(((61, mla()),), _mtp(1, mla()), max_model_len=960),
    "deepseek-v3.2": Model(
        ((61, mla(dtype="uint8", state_content_bytes=656)), (61, attention(1, 132, 64, type="mla",
         dtype="uint8"))), max_model_len=960
    ),
    "gemma-3-27b": Model(
        ((52, window(16, 128, 1024)), (10, attention(16, 128))), max_model_len=3648
    ),
    "gpt-oss-20b": Model(_GPT_OSS, max_model_len=736),
    "gpt-oss-20b-eagle3": Model(_GPT_OSS, _eagle3(attention(8, 64)), max_model_len=736),
    "mimo-v2-flash": Model(_MIMO, max_model_len=736),
    "mimo-v2-flash-mtp": Model(_MIMO, _mtp(1, _MIMO_MODULE), max_model_len=736),
    "mimo-v2-flash-mtp3": Model(_MIMO, _mtp(3, _MIMO_MODULE, 3), max_model_len=736),
    "llama-4-scout": Model(
        ((36, attention(8, 128, 128, type="chunked_local", attention_chunk_size=8192)),
         (12, attention(8, 128, 128))), max_model_len=21072
    ),
    "nemotron-h-8b": Model(
        ((24, mamba2(10240, 128, 64, 128)), (4, attention(8, 128))), checkpoints=1
    ),
    "nemotron-h-8b-match16": Model(
        ((24, mamba2(10240, 128, 64, 128)), (4, attention(8, 128))), checkpoints=1, match_unit=16
    ),
    "nemotron-3-nano-30b-a3b": Model(
        ((23, mamba2(6144, 64, 64, 128, "fp32")), (6, attention(2, 128))), checkpoints=1
    ),
    "bamba-9b": Model(((29, mamba2(8448, 128, 64, 128)), (3, attention(8, 128))), checkpoints=1),
    "zamba2-7b": Model(((81, mamba2(7424, 112, 64, 64)), (13, attention(32, 224))), checkpoints=1),
    "qwen3-next-80b-a3b": _flashinfer(_QWEN3_NEXT),
    "qwen3-next-80b-a3b-match64": _flashinfer(_QWEN3_NEXT, match_unit=64),
    "qwen3-next-80b-a3b-mtp": _flashinfer(_QWEN3_NEXT, _mtp(2, attention(2, 256))),
    "qwen3-next-80b-a3b-mtp-match64": _flashinfer(
        _QWEN3_NEXT, _mtp(2, attention(2, 256)), match_unit=64
    ),
    "qwen3-next-80b-a3b-triton": Model(_QWEN3_NEXT),
    "qwen3.5-27b": _flashinfer(_QWEN35),
    "qwen3.5-27b-mtp": _flashinfer(_QWEN35, _mtp(1, attention(4, 256))),
    "qwen3.5-4b-triton-mtp": Model(
        ((24, delta_net(8192, 32)), (8, attention(4, 256))), _mtp(1, attention(4, 256))
    ),
    "qwen4-exp-like": _flashinfer(
        (*_QWEN3_NEXT, (4, attention(1, 128, 8, type="circular_buffer", head_size_v=0))),
        layout="BLNHC",
    ),
    "kimi-k3-like": Model(_KIMI_K3, checkpoints=16, block_step=128),  # FlashKDA
    "kimi-k3-like-match24": Model(_KIMI_K3, checkpoints=16, block_step=128, match_unit=24),
    "kimi-linear-48b-a3b": Model(
        ((20, states([[3, 12288], [32, 128, 128]], ["bf16", "fp32"])), (7, mla())), block_step=128
    ),
    "jamba-mini": Model(
        ((28, states([[3, 8192], [8192, 16]], ["bf16", "bf16"])), (4, attention(8, 128)))
    ),
    "minimax-text-01": Model(
        ((70, states([[16, 128, 128]], ["fp32"])), (10, attention(2, 128)))
    ),
    "lfm2-1.2b": Model(
        ((10, states([[2, 2048]], ["bf16"])), (6, attention(8, 64))), max_model_len=736
    ),
    "deepseek-v4-like": Model(
        (
            (21, rows("sliding_window_mla", 64, sliding_window=128)),
            (29, rows("mla", 256, tokens_per_state=4)),
            (20, raw("sliding_window_mla", 4, 2048, sliding_window=8, alignment=576)),
            (9, raw("sliding_window_mla", 8, 1024, sliding_window=128, alignment=576)),
        ),
        max_model_len=1856, layout="BLNHC",
    ),
    "deepseek-v4.1-like": Model(
        (
            (20, rows("mla", 128)),
            (20, rows("sliding_window_mla", 32, sliding_window=128, bounded_replay=True)),
            (5, raw("circular_buffer", 8, 1024, head_size_v=0)),
        ),
        max_model_len=1856, layout="BLNHC",
    ),
}  # fmt: skip


def _page_bytes(spec: Spec) -> int:
    """Of a state, or of one token."""
    return vllm_engine.make_spec(spec | {"block_size": 1}).page_size_bytes


def _sized(model: Model) -> list[tuple[Spec, bool]]:
    """Every layer, and whether it is a drafter's; block sizes as the platform sets them: attention
    takes blocks that hold a state, and states get its page."""
    num_drafts = model.drafts.num_tokens if model.drafts else 0
    every = [(spec, False) for count, spec in model.layers for _ in range(count)]
    if model.drafts:
        every += [(spec, True) for count, spec in model.drafts.layers for _ in range(count)]
    kept = [spec for spec, _ in every if spec["type"] == "mamba"]
    if not kept:
        return every
    kept = [_with_drafts(spec, num_drafts) for spec in kept]
    base = next(s for s, _ in every if s["type"] in ("full", "mla"))
    step, token = model.block_step, _page_bytes(base)
    block_size = step * math.ceil(_page_bytes(kept[0]) / (step * token))
    page = block_size * token
    grid = model.checkpoints
    if grid == GRID_OF_HITS:
        grid = model.match_unit or block_size
    sized: list[tuple[Spec, bool]] = []
    for spec, is_draft in every:
        if spec["type"] == "mamba":
            spec = _with_drafts(spec, num_drafts) | {
                "block_size": block_size,
                "mamba_cache_mode": "align",
                "num_speculative_blocks": num_drafts,
            }
            if grid is not None:
                spec |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": grid}
            if page != _page_bytes(spec):
                spec["page_size_padded"] = page
        elif spec["type"] in ("full", "mla"):
            spec = spec | {"block_size": block_size}
        sized.append((spec, is_draft))
    return sized


def _with_drafts(spec: Spec, num_drafts: int) -> Spec:
    """The state of a layer that also keeps the convolution's last tokens for drafts."""
    (rows_kept, width), *others = spec["shapes"] if len(spec["shapes"]) > 1 else ((0, 0),)
    return spec if not others else spec | {"shapes": [[rows_kept + num_drafts, width], *others]}


def make_scenario(family: str, seed: int) -> tuple[dict[str, Any], list[Any]]:
    """The header of one scenario, a server's defaults and what vLLM plans for its layers; and the
    groups of that plan, which know more of a page than the header."""
    model = MODELS[family]
    rng = random.Random(f"served {family} {seed}")
    layers = _sized(model)
    largest = max(spec["block_size"] for spec, _ in layers)
    max_model_len = model.max_model_len or 7 * largest + 64
    small = largest <= 64
    config: dict[str, Any] = {
        "max_num_seqs": rng.choice((4, 8, 16, 64, 256)),
        "max_num_batched_tokens": rng.choice((256, 512, 2048) if small else (2048, 8192)),
        "max_model_len": max_model_len,
        "block_size": largest,
        "enable_prefix_caching": True,
        "async_scheduling": seed % 8 != 7,
        "hash_algorithm": "sha256_cbor",
        "prefix_cache_retention_interval": 0,
    }
    has_states = any(spec["type"] == "mamba" for spec, _ in layers)
    if has_states:
        config |= {"mamba_cache_mode": "align", "mamba_block_size": largest}
    if model.match_unit:
        config["prefix_match_unit"] = model.match_unit
    if drafts := model.drafts:
        config |= {"num_spec_tokens": drafts.num_tokens, "spec_method": "eagle",
                   "x_method": drafts.method}  # fmt: skip
        if drafts.num_modules > 1:
            config["num_prefill_lookahead_tokens"] = drafts.num_modules
    header = {"family": family, "seed": seed, "config": config, "num_blocks": 1}
    planned, groups = _planned(header, layers, model.layout, rng.uniform(1.05, 2.6))
    return header | planned, groups


def _planned(
    header: dict[str, Any], layers: list[tuple[Spec, bool]], layout: str, room: float
) -> tuple[dict[str, Any], list[Any]]:
    """Groups, blocks and block size by vLLM's planner; `room`: times what a request may need."""
    config = vllm_engine.make_config(header, "")
    config.cache_config.kv_cache_layout = layout
    register_all_kvcache_specs(config)
    specs = {f"layers.{i}": vllm_engine.make_spec(*layer) for i, layer in enumerate(layers)}
    groups = kv_cache_planning.get_global_kv_cache_groups(config, [specs])
    planned = kv.KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    # What the scheduler gets: of different layers in one group a single one's spec.
    groups = kv_cache_utils.generate_scheduler_kv_cache_config([planned]).kv_cache_groups
    needs = [-(-group.kv_cache_spec.max_memory_usage_bytes(config)
               // group.kv_cache_spec.page_size_bytes) for group in groups]  # fmt: skip
    cached = [g.kv_cache_spec.block_size for g in groups if g.kv_cache_spec.prefix_cacheable]
    options = header["config"] | {"block_size": min(cached)}
    if marked := eagle_groups_of(groups):
        options["x_eagle_groups"] = marked
    lookahead = config.num_hash_lookahead_tokens
    keys = {
        "config": options,
        "groups": groups_of(groups, lookahead, release_of(VERSION)),
        "num_blocks": 2 + int(sum(needs) * room),
    }
    return keys, groups


class ServedWorkload(Workload):
    """Clients of a server: prompts of a fraction of a block to six blocks, many at the edge of
    one; shared beginnings, resends, and sessions whose next turn repeats the prompt and answer."""

    def __init__(self, header: dict[str, Any], num_requests: int = 24) -> None:
        super().__init__(header, num_requests)
        specs = [group["spec"] for group in header["groups"]]
        self.block_size = max(spec["block_size"] for spec in specs)
        self.edges = [self.block_size, header["config"].get("prefix_match_unit", self.block_size)]
        self.turns: dict[str, list[int]] = {}  # the conversation so far, by request

    def _length(self, longest: int) -> int:
        edge = self.rng.choice(self.edges)
        count = self.rng.randint(1, max(1, min(6 * self.block_size, longest) // edge))
        near = edge * count + self.rng.choice((-2, -1, 0, 0, 1, 2, self.rng.randrange(edge)))
        return max(1, min(near, longest))

    def request(self) -> dict[str, Any]:
        event = super().request()
        longest = self.config["max_model_len"] - 64
        kind = self.rng.random()
        if kind < 0.35 and self.turns:
            said = self.turns[self.rng.choice(sorted(self.turns))]
            prompt = said + self._tokens(self.rng.choice((1, 7, 40)))
        elif kind < 0.5 and self.turns:
            prompt = self.turns[self.rng.choice(sorted(self.turns))]
        else:
            head = self.rng.choice(self.prefixes)[: self._length(longest)]
            prompt = head + self._tokens(self.rng.choice((0, 1, 7, 40)))
        event["prompt"] = {"tokens": prompt[:longest]}
        event["max_tokens"] = self.rng.choice((1, 2, 5, 16, 40))
        event["eos"] = 50001
        self.turns[event["add"]] = list(event["prompt"]["tokens"])
        return event

    def answered(self, name: str, tokens: list[int]) -> None:
        if name in self.turns:
            self.turns[name] += tokens
