"""vLLM's Triton kernels as docs/examples calls them, with one planted defect each."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))

from vllm_kernels import VllmTriton  # noqa: E402


class SwapsKeyAndValue(VllmTriton):
    def write(self, layer, key, value, kv_cache, slot_mapping):
        super().write(layer, key, value, kv_cache.flip(0), slot_mapping)
