"""Model files of layers as vLLM builds them: what they state about a quantized cache."""

from __future__ import annotations

import sys
import unittest
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from lockstep_engines.vllm.model_file import NotInModelFiles, model_file  # noqa: E402


@dataclass
class FullAttentionSpec:
    kv_quant_mode: Any
    dtype: str = "torch.bfloat16"
    num_kv_heads: int = 8
    head_size: int = 128
    head_size_v: int = 128
    tokens_per_state: int = 1
    dcp_sharded: bool = True


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def is_ssm() -> bool:
        return False


def made(*modes: str) -> Any:
    layers = []
    for number, mode in enumerate(modes):
        dtype = "torch.bfloat16" if mode == "NONE" else "torch.uint8"
        spec = FullAttentionSpec(SimpleNamespace(name=mode), dtype)
        layers.append(SimpleNamespace(name=f"layers.{number}", spec=spec, backend=Backend))
    config = SimpleNamespace(dtype="torch.bfloat16", max_model_len=4096)
    return SimpleNamespace(layers=layers, config=SimpleNamespace(model_config=config),
                           version="0.33.0", model_class="Llama")  # fmt: skip


class ModelFileTest(unittest.TestCase):
    def test_a_quantized_cache_is_a_key_of_the_file(self) -> None:
        for mode, form in ("FP8_PER_TENSOR", "fp8"), ("NVFP4", "nvfp4"):
            file = model_file(made(mode, mode), "m")
            self.assertEqual(file["kv_cache_dtype"], form)
            (kind,) = file["layer_kinds"].values()
            self.assertNotIn("dtype", kind)
        self.assertNotIn("kv_cache_dtype", model_file(made("NONE"), "m"))

    def test_formats_that_a_model_file_cannot_express_are_refused(self) -> None:
        for modes in ("FP8_PER_TENSOR", "NONE"), ("INT8_PER_TOKEN_HEAD",):
            with self.assertRaises(NotInModelFiles):
                model_file(made(*modes), "m")


if __name__ == "__main__":
    unittest.main()
