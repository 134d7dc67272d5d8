"""A class on a GPU's memory, with stand-ins for the CUDA driver and for torch's device: it opens
the memory by its handle, works on views of it, waits for the GPU, and closes it. Exit status 77:
torch is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import sys
import unittest
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from lockstep_engines import gpu_memory, user_kernels  # noqa: E402

SKIPPED = 77
SDPA = f"{ROOT}/docs/examples/torch_kernels.py:Sdpa"
HANDLE = bytes(range(64)).hex()
SIZE = 4096


class Gpu:
    """Memory of this process, and calls in their order."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_ubyte * SIZE)()
        self.calls: list[str] = []
        self.status = 0  # of opening
        self.driver = SimpleNamespace(
            cuIpcOpenMemHandle_v2=lambda *given: self._open(*given),  # it is given argtypes
            cuMemGetAddressRange_v2=self._range,
            cuIpcCloseMemHandle=self._close,
        )

    def _open(self, address: Any, handle: Any, flags: int) -> int:
        self.calls.append(f"open {bytes(handle.reserved).hex()} {flags}")
        address._obj.value = ctypes.addressof(self.bytes)
        return self.status

    def _range(self, _base: Any, size: Any, _address: Any) -> int:
        size._obj.value = SIZE
        return 0

    def _close(self, _address: Any) -> int:
        self.calls.append("close")
        return 0

    def as_tensor(self, memory: Any, device: str) -> Any:
        import torch

        said = memory.__cuda_array_interface__
        assert (device, said["typestr"], said["version"]) == ("cuda", "|u1", 3)
        address, is_read_only = said["data"]
        assert not is_read_only
        (size,) = said["shape"]
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def is_used(self, stack: ExitStack, is_there: bool = True) -> None:
        import torch

        for place, name, stand_in in (
            (gpu_memory.ctypes, "CDLL", lambda name: self.driver),
            (torch, "as_tensor", self.as_tensor),
            (torch, "zeros", lambda *shape, device: self.calls.append(f"context on {device}")),
            (torch, "set_default_device", lambda name: self.calls.append(f"default {name}")),
            (torch.cuda, "is_available", lambda: is_there),
            (torch.cuda, "synchronize", lambda: self.calls.append("synchronize")),
        ):
            stack.enter_context(patch.object(place, name, stand_in))


LAYER = {
    "name": "layer", "kind": "full_attention", "index": 0, "group": 0, "sliding_window": 0,
    "attention_chunk_size": 0, "num_kv_heads": 1, "head_size": 2, "kv_quant_mode": "none",
    "dtype": "fp32",
}  # fmt: skip


def tensor(offset: int, dtype: str, shape: list[int], strides: list[int]) -> dict[str, Any]:
    return {"offset": offset, "dtype": dtype, "shape": shape, "strides": strides}


# Two tokens, the second of which is padding; blocks of two tokens at 1024, K before V.
WRITE = {
    "run": "write", "memory": HANDLE, "layer": 0, "group": -1, "scale": 1.0, "integers": {},
    "tensors": {
        "key": tensor(0, "fp32", [2, 1, 2], [8, 8, 4]),
        "value": tensor(256, "fp32", [2, 1, 2], [8, 8, 4]),
        "kv_cache": tensor(1024, "fp32", [2, 3, 2, 1, 2], [512, 16, 8, 8, 4]),
        "slot_mapping": tensor(512, "int64", [2], [8]),
    },
}  # fmt: skip


class KernelsOnGpuTest(unittest.TestCase):
    def setUp(self) -> None:
        self.gpu = Gpu()
        self.stack = self.enterContext(ExitStack())

    def floats(self, offset: int, count: int) -> list[float]:
        return list((ctypes.c_float * count).from_buffer(self.gpu.bytes, offset))

    def opened(self) -> user_kernels.Server:
        self.gpu.is_used(self.stack)
        server = user_kernels.Server(SDPA, on_gpu=True)
        self.assertEqual(server.open({"memory": "", "layers": [LAYER]}, None), {"declined": [""]})
        return server

    def test_a_write_lands_in_the_memory_behind_the_handle(self) -> None:
        (ctypes.c_float * 4).from_buffer(self.gpu.bytes, 0)[:] = (1, 2, 3, 4)
        (ctypes.c_float * 4).from_buffer(self.gpu.bytes, 256)[:] = (5, 6, 7, 8)
        (ctypes.c_int64 * 2).from_buffer(self.gpu.bytes, 512)[:] = (3, -1)
        server = self.opened()
        self.assertEqual(server.run(WRITE), {})
        self.assertEqual(self.floats(1024, 12), [0] * 6 + [1, 2] + [0] * 4)
        self.assertEqual(self.floats(1024 + 512, 12), [0] * 6 + [5, 6] + [0] * 4)
        self.assertEqual(server.run(WRITE), {})  # opens nothing again
        server.close()
        begin = ["default cuda", "context on cuda", f"open {HANDLE} 1"]
        self.assertEqual(self.gpu.calls, [*begin, "synchronize", "synchronize", "close"])

    def test_an_error_on_the_gpu_is_a_fault_of_the_call(self) -> None:
        server = self.opened()
        error = RuntimeError("an illegal memory access was encountered")
        import torch

        self.stack.enter_context(patch.object(torch.cuda, "synchronize", side_effect=error))
        fault = server.run(WRITE)["fault"]
        self.assertEqual(fault, "RuntimeError: an illegal memory access was encountered")

    def test_a_handle_that_cannot_be_opened_is_not_the_fault_of_the_class(self) -> None:
        server = self.opened()
        self.gpu.status = 201
        with self.assertRaisesRegex(RuntimeError, "cuIpcOpenMemHandle_v2: CUDA error 201"):
            server.run(WRITE)

    def test_refusals_at_the_start(self) -> None:
        plain = f"{ROOT}/tests/engines/plain_kernels.py:Sound"
        for named, is_there, words in (
            (SDPA, False, "--backend cuda: torch .* finds no GPU"),
            (plain, True, "framework 'plain' has no tensors on a GPU"),
        ):
            said = io.StringIO()
            self.gpu.is_used(self.stack, is_there)
            with redirect_stderr(said), self.assertRaises(SystemExit):
                user_kernels.Server(named, on_gpu=True)
            self.assertRegex(said.getvalue(), words)


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print(f"SKIPPED: torch is not installed for {sys.executable}")
        sys.exit(SKIPPED)
    unittest.main()
