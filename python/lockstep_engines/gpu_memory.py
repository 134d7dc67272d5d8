"""Memory on the GPU that another process has allocated, as a tensor of bytes."""

from __future__ import annotations

import ctypes
from typing import Any

_LAZY_ENABLE_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle, and required


class _Handle(ctypes.Structure):  # CUipcMemHandle, passed by value
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class SharedMemory:
    """One allocation by its IPC handle, 64 bytes in hexadecimal digits. After close() no view of
    `bytes` may be used; only then may the owner free the allocation."""

    def __init__(self, handle: str) -> None:
        import torch

        torch.zeros(1, device="cuda")  # CUDA's context of this thread
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(ctypes.c_uint64),
            _Handle,
            ctypes.c_uint,
        )
        self._address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        opened = _Handle.from_buffer_copy(bytes.fromhex(handle))
        address = ctypes.byref(self._address)
        self._call("cuIpcOpenMemHandle_v2", address, opened, _LAZY_ENABLE_PEER_ACCESS)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), self._address)
        # What torch reads of an object of another library.
        self.__cuda_array_interface__ = {
            "shape": (size.value,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }
        self.bytes: Any = torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        self.bytes = None
        self._call("cuIpcCloseMemHandle", self._address)

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._driver, function)(*arguments):
            raise RuntimeError(f"{function}: CUDA error {status}")
