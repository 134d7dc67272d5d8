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


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    cache_role: Any = None


class Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def is_ssm() -> bool:
        return False


def made(*modes: str, names: str = "layers.{}", **keys: Any) -> Any:
    layers = []
    for number, mode in enumerate(modes):
        dtype = "torch.bfloat16" if mode == "NONE" else "torch.uint8"
        spec = FullAttentionSpec(SimpleNamespace(name=mode), dtype)
        layers.append(SimpleNamespace(name=names.format(number), spec=spec, backend=Backend))
    config = SimpleNamespace(dtype="torch.bfloat16", max_model_len=4096,
                             model_arch_config=SimpleNamespace(total_num_attention_heads=32),
                             get_total_num_hidden_layers=lambda: 8)  # fmt: skip
    given = {"model_class": "Llama", "supports_pp": True, "shared": []} | keys
    return SimpleNamespace(layers=layers, config=SimpleNamespace(model_config=config),
                           version="0.33.0", **given)  # fmt: skip


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

    def test_layers_have_the_numbers_of_vllms_names(self) -> None:
        both = made("NONE", "NONE", "NONE", names="model.layers.{}.attn", shared=["model.layers.1"])
        both.layers[1].spec = None
        both.layers[2].name = "model.layers.2.attn.0"
        again = vars(both.layers[2]) | {"name": "model.layers.2.attn.1"}
        both.layers.append(SimpleNamespace(**again))
        file = model_file(both, "m")
        self.assertEqual(file["layers"], ["full", [], ["full", "full"]])
        self.assertEqual((file["num_hidden_layers"], file["num_attention_heads"]), (8, 32))
        self.assertEqual(file["first_shared_layer"], 1)

    def test_falcons_layers_keep_the_models_dtype(self) -> None:
        (kind,) = model_file(made("NONE", model_class="FalconForCausalLM"), "m")[
            "layer_kinds"
        ].values()
        self.assertEqual(kind["dtype"], "bf16")

    def test_indexers_keep_their_own_dtype(self) -> None:
        given = made("NONE", "NONE")
        role = SimpleNamespace(name="INDEXER")
        given.layers[0].spec = MLAAttentionSpec(SimpleNamespace(name="NONE"), cache_role=role)
        kinds = model_file(given, "m")["layer_kinds"]
        self.assertEqual(kinds["indexer"]["dtype"], "bf16")
        self.assertNotIn("dtype", kinds["full"])


if __name__ == "__main__":
    unittest.main()
