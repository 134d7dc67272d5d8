"""Draws sets of layer specs from seeds and records what vLLM 0.33.0 plans for them:
`record_plans.py FIRST COUNT OUT.jsonl`. `lockstep conform OUT.jsonl` compares."""

from __future__ import annotations

import importlib
import json
import random
import sys
import types
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path[:0] = [str(Path(__file__).resolve().parent)]


import torch
from plan_record import Layer, Recorder, bare_config
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

_AT = "vllm.v1.attention.backends."
BACKENDS = {
    "flash_attn": _AT + "flash_attn.FlashAttentionBackend",
    "triton_attn": _AT + "triton_attn.TritonAttentionBackend",
    "flashinfer": _AT + "flashinfer.FlashInferBackend",
    "flex_attention": _AT + "flex_attention.FlexAttentionBackend",
    "turboquant": _AT + "turboquant_attn.TurboQuantAttentionBackend",
    "triton_mla": _AT + "mla.triton_mla.TritonMLABackend",
    "flashmla": _AT + "mla.flashmla.FlashMLABackend",
    "flashinfer_mla": _AT + "mla.flashinfer_mla.FlashInferMLABackend",
    "flashmla_sparse": _AT + "mla.flashmla_sparse.FlashMLASparseBackend",
    "flashinfer_mla_sparse": _AT + "mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend",
    "indexer_v32": _AT + "mla.indexer.DeepseekV32IndexerBackend",
    "indexer_v4": _AT + "mla.indexer.DeepseekV4IndexerBackend",
    "indexer_v41": _AT + "mla.indexer.DeepseekV41IndexerBackend",
    "indexer_kpool": _AT + "mla.indexer.Glm5NextIndexerBackend",
    "kpool_tail": _AT + "mla.indexer.KpoolTailBackend",
    "sparse_swa": _AT + "mla.sparse_swa.DeepseekSparseSWABackend",
    "compressor_v4": "vllm.models.deepseek_v4.compressor.CompressorBackend",
    "compressor_v41": "vllm.models.deepseek_v41.compressor.CompressorBackend",
    "v4_flashmla": "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend",
    "v41_flashmla": "vllm.models.deepseek_v41.sparse_mla.DeepseekV4FlashMLABackend",
    "qsa_state": "vllm.models.qwen4_exp.common.qsa_cache.QSAStateBackend",
    "cache_only": "vllm.model_executor.models.extract_hidden_states.CacheOnlyAttentionBackend",
    "gdn": _AT + "gdn_attn.GDNAttentionBackend",
    "mamba1": _AT + "mamba1_attn.Mamba1AttentionBackend",
    "mamba2": _AT + "mamba2_attn.Mamba2AttentionBackend",
}


def _stand_in_for_flashinfer() -> None:
    """FlashInfer's backends declare their facts without the package."""
    for name in ("", ".autotuner", ".cascade", ".comm", ".decode", ".fp4_quantization", ".mla",
                 ".prefill", ".utils"):  # fmt: skip
        module = types.ModuleType("flashinfer" + name)
        module.__getattr__ = lambda attribute: MagicMock()
        module.__path__ = []
        sys.modules.setdefault(module.__name__, module)


@cache
def backend_of(name: str) -> Any:
    if name.startswith("flashinfer") and not has_flashinfer():
        _stand_in_for_flashinfer()
    module, cls = BACKENDS[name].rsplit(".", 1)
    return getattr(importlib.import_module(module), cls)


_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "u8": torch.uint8}


class Draw:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"plan {seed}")
        self.pick = self.rng.choice
        self.mode = self.pick(("none", "align", "align"))
        self.blocks = self.pick(((16,), (16, 32), (64,), (16, 48, 64), (64, 128, 256), (256, 512),
                                 (1056,), (528, 48)))  # fmt: skip
        self.heads = self.pick((1, 2, 4, 8))
        self.size = self.pick((32, 64, 80, 128, 192, 576))

    def some(self, odds: float) -> bool:
        return self.rng.random() < odds

    def plain(self, cls: Any, **keys: Any) -> tuple[Any, str]:
        size = self.size if self.some(0.7) else self.pick((64, 128, 256))
        spec = {
            "block_size": self.pick(self.blocks), "num_kv_heads":
            self.heads if self.some(0.7) else self.pick((1, 2, 3, 8)), "head_size": size,
            "dtype": torch.bfloat16 if self.some(0.85) else self.pick(list(_DTYPES.values())),
            **keys}  # fmt: skip
        if self.some(0.15):
            spec["head_size_v"] = self.pick((32, 64, 128))
        if self.some(0.12):  # several rows per token
            spec["tokens_per_state"] = Fraction(1, self.pick((2, 4)))
        if self.some(0.08):
            spec["dcp_sharded"] = False
        if self.some(0.06):
            page = cls(**spec).page_size_bytes
            spec["page_size_padded"] = page + self.pick((0, 512, 4096, page))
        if self.some(0.05):
            spec["kv_quant_mode"] = self.pick(list(kv.KVQuantMode)[:3])
        if self.some(0.05):
            spec["block_stride_alignment"] = self.pick((512, 4096, MultipleOf(64), MultipleOf(32)))
        return cls(**spec), self.pick(("triton_attn", "triton_attn", "flash_attn", "flashinfer",
                                       "flex_attention"))  # fmt: skip

    def latent(self, cls: Any, **keys: Any) -> tuple[Any, str]:
        spec = {"block_size": self.pick(self.blocks), "num_kv_heads": 1,
                "head_size": self.pick((576, 576, 512, 132)),
                "dtype": self.pick((torch.bfloat16, torch.bfloat16, torch.uint8)),
                **keys}  # fmt: skip
        if spec["dtype"] == torch.uint8 and self.some(0.5):
            spec["state_content_bytes"] = self.pick((656, 584, 352))
        if self.some(0.3):
            few = (4, 4, 4, 2, 128) if spec["block_size"] < 128 else (4, 128)
            spec["tokens_per_state"] = self.pick(few)
        if self.some(0.4):
            spec["alignment"] = self.pick((576, 512))
        if self.some(0.3):
            spec["max_tp_shards"] = 1
        if self.some(0.3):
            spec["block_stride_alignment"] = self.pick((656, 256, 576, MultipleOf(64),
                                                        MultipleOf(256)))  # fmt: skip
        if self.some(0.1):
            spec["cache_dtype_str"] = self.pick(("auto", "fp8_ds_mla"))
        if self.some(0.08):
            spec["dcp_sharded"] = False
        if cls is kv.MLAAttentionSpec:
            if self.some(0.1):
                spec["is_index_group_leader"] = True
            if self.some(0.1):
                spec["topk_buffer_width"] = 2048
            return cls(**spec), self.pick(
                ("triton_mla", "flashmla_sparse", "indexer_v4", "v4_flashmla")
                if spec.get("tokens_per_state") == 128 else
                ("triton_mla", "flashmla", "flashmla_sparse", "indexer_v32", "indexer_v4",
                 "indexer_v41", "v4_flashmla", "v41_flashmla", "flashinfer_mla"))  # fmt: skip
        if self.some(0.15):
            spec["kv_quant_mode"] = kv.KVQuantMode.FP8_PER_TENSOR
        return cls(**spec), self.pick(("sparse_swa", "compressor_v4"))

    def layer(self, kind: str) -> tuple[Any, str]:
        if kind == "full":
            spec, backend = self.plain(kv.FullAttentionSpec)
            return spec, backend
        if kind == "sink_full":
            return self.plain(kv.SinkFullAttentionSpec, sink_len=16)[0], "triton_attn"
        if kind == "rswa":
            return self.plain(kv.RSWASpec, rswa_window=128)[0], "triton_attn"
        if kind == "chunked_local":
            return self.plain(kv.ChunkedLocalAttentionSpec,
                              attention_chunk_size=self.pick((1024, 8192)))  # fmt: skip
        if kind == "sliding_window":
            return self.plain(kv.SlidingWindowSpec, sliding_window=self.pick((128, 512, 1024)))
        if kind == "cross":
            return self.plain(kv.CrossAttentionSpec)[0], "triton_attn"
        if kind == "mla":
            return self.latent(kv.MLAAttentionSpec)
        if kind == "sliding_window_mla":
            keys: dict[str, Any] = {"sliding_window": self.pick((8, 128, 512))}
            if self.some(0.2):
                keys["bounded_replay"] = True
            return self.latent(kv.SlidingWindowMLASpec, **keys)
        if kind == "circular_buffer":
            spec = kv.CircularBufferSpec(
                block_size=self.pick((4, 8, 16)), num_kv_heads=self.pick((1, 1, 2)),
                head_size=self.pick((128, 512, 1024)), head_size_v=0,
                dtype=self.pick((torch.float32, torch.bfloat16)),
                dcp_sharded=self.some(0.5))  # fmt: skip
            return spec, self.pick(("compressor_v41", "kpool_tail", "qsa_state"))
        if kind == "hidden_state":
            spec = kv.HiddenStateCacheSpec(
                block_size=self.pick(self.blocks), num_kv_heads=self.pick((1, 3)),
                head_size=self.pick((2048, 4096)), dtype=torch.bfloat16)  # fmt: skip
            return spec, "cache_only"
        state = self.pick(((3, 1024), (3, 8192))), self.pick(((8, 64, 64), (32, 128, 128), (4, 16)))
        keys = {"block_size": self.pick(self.blocks) if self.mode == "align" else 32768,
                "shapes": state, "dtypes": (torch.bfloat16, self.pick((torch.float32,
                                                                       torch.bfloat16))),
                "mamba_cache_mode": self.mode}  # fmt: skip
        if self.some(0.3):
            keys["num_speculative_blocks"] = self.pick((1, 3))
        if self.mode == "align" and self.some(0.3):
            keys |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment":
                     self.pick((1, 16, 64))}  # fmt: skip
        if self.some(0.1):
            keys["tp_replicated"] = True
        if self.some(0.5):
            page = kv.MambaSpec(**keys).page_size_bytes
            keys["page_size_padded"] = -(-page // 4096) * 4096
        kind = self.pick(("gdn", "mamba2", "mamba1"))
        keys["mamba_type"] = {"gdn": MambaAttentionBackendEnum.GDN_ATTN,
                              "mamba2": MambaAttentionBackendEnum.MAMBA2,
                              "mamba1": MambaAttentionBackendEnum.MAMBA1}[kind]  # fmt: skip
        return kv.MambaSpec(**keys), kind


_WEIGHTS = {"full": 8, "sliding_window": 5, "mla": 5, "sliding_window_mla": 3, "mamba": 5,
            "chunked_local": 2, "circular_buffer": 2, "hidden_state": 1, "rswa": 1, "sink_full": 1,
            "cross": 1}  # fmt: skip


def draw_layers(draw: Draw) -> list[Layer]:
    kinds = draw.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=draw.pick((1, 2, 2, 3, 4)))
    drawn = [draw.layer(kind) for kind in kinds]
    plain = [i for i, (spec, _) in enumerate(drawn) if isinstance(spec, kv.FullAttentionSpec)]
    if draw.some(0.25) and plain:  # pages that the platform made equal
        page = max(spec.page_size_bytes for spec, _ in drawn)
        drawn = [(kv.replace(spec, page_size_padded=page) if isinstance(spec, kv.MambaSpec)
                  else spec, backend) for spec, backend in drawn]  # fmt: skip
    counts = [draw.pick((1, 2, 3, 4, 6, 10)) if draw.some(0.8) else 4 for _ in drawn]
    order = [i for i, count in enumerate(counts) for _ in range(count)]
    if draw.some(0.6):
        draw.rng.shuffle(order)
    return [Layer(f"layers.{i}.x", drawn[k][0], backend_of(drawn[k][1]), drawn[k][1])
            for i, k in enumerate(order)]  # fmt: skip


def record(seed: int) -> dict[str, Any]:
    draw = Draw(seed)
    line: dict[str, Any] = {"layout_recording": 2,
                            "engine": {"name": "vllm", "version": "0.33.0"}}  # fmt: skip
    layers = draw_layers(draw)
    asked = draw.pick(_LAYOUTS) if draw.some(0.6) else None
    options: dict[str, Any] = {"max_model_len": draw.pick((4096, 32768)), "mamba_cache_mode":
                               draw.mode}  # fmt: skip
    if draw.some(0.15):
        options["disable_hybrid"] = True
    if draw.some(0.1):
        options["prefix_caching"] = False
    if draw.some(0.1):
        options["prefix_match_unit"] = draw.pick((16, 32, 64))
    if draw.some(0.1):
        options["tp"] = options["dcp"] = 2
    if draw.some(0.05):
        options["tp"] = 8
    if draw.some(0.08):
        options["num_gpu_blocks_override"] = draw.pick((2, 50, 1000))
    beyond: dict[str, Any] = {}
    stages: tuple[int, ...] = ()
    if draw.some(0.15) and len(layers) > 3:
        cut = draw.rng.randint(1, len(layers) - 1)
        stages, options["pp"] = (cut, len(layers) - cut), 2
    if draw.some(0.25):
        method = draw.pick(("eagle3", "mtp", "dflash"))
        beyond = {"spec_method": method, "num_spec": draw.pick((1, 3)), "mtp_modules":
                  draw.pick((1, 1, 3)) if method == "mtp" else 1}  # fmt: skip
        for layer in layers[-draw.pick((1, 1, 2)) :]:
            layer.spec = kv.replace(layer.spec, is_draft=True)
            if isinstance(layer.spec, kv.AttentionSpec) and not layer.spec.dcp_sharded:
                line["specs_of_first_runner"] = "dcp_sharded differs"
    lookahead = beyond.get("num_spec", 1) if beyond.get("mtp_modules", 1) > 1 else 1
    drops = beyond["spec_method"] != "dflash" if beyond else None
    config = bare_config(**options, lookahead=lookahead, drops=drops)
    options |= beyond
    memory = 1 << draw.pick((30, 34, 34, 36))
    recorder = Recorder(config, layers, memory, asked, stages)
    line["options"] = {"model": "synthetic", "kv_dtype": "auto", "backend": "by layer",
                       "block_size": 16, "memory_bytes": memory, "max_num_seqs": 256,
                       "tp": 1, **options} | ({"layout": asked} if asked else {})  # fmt: skip
    line["aligned"] = {"block_size": 16, "mamba_block_size": options["max_model_len"],
                       "mamba_page_size_padded": None, "skip_page_size_padded": None}  # fmt: skip
    if stages:
        line["workers"] = [{"layers": count, "memory_bytes": memory} for count in stages]
    return recorder.record((2, 7)) | line


def main() -> None:
    first, count, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with out.open("w") as file:
        for seed in range(first, first + count):
            file.write(json.dumps(record(seed) | {}) + "\n")


if __name__ == "__main__":
    main()
