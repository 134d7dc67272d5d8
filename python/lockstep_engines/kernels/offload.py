"""vLLM's host offload worker, both directions, on generated transfers: kernels/check.py. A host
chunk has several device blocks, and a transfer may start and end inside a chunk."""

from __future__ import annotations

import ctypes
import importlib
import random
from typing import Any

import torch

from lockstep_engines.kernels.check import Check, Trial
from lockstep_engines.protocol import EngineFault


class _OfDevice(torch.Tensor):
    """Host memory that vLLM treats as device memory."""

    is_cuda = True


class _Transfer:
    """Tensors of a few layers in one or two groups, and the blocks of a request in each group from
    its block `first` on, in GPU blocks."""

    def __init__(self, draw: random.Random, base: Any) -> None:
        self.parts = draw.choice((1, 2, 3, 4))  # blocks per chunk
        self.blocks, self.chunks = draw.randint(4, 12), draw.randint(4, 9)
        self.pages = [8 * draw.choice((1, 3, 20)) for _ in range(draw.randint(1, 3))]
        self.groups = draw.randint(1, 2)
        self.refs = [
            [(t, draw.choice((page, page - 8 * (page > 8)))) for t, page in enumerate(self.pages)]
            for _ in range(self.groups)
        ]
        self.device = [self._drawn(draw, self.blocks, page) for page in self.pages]
        self.sizes, self.firsts, self.of_device, self.of_host = [], [], [], []
        chunks = draw.sample(range(self.chunks), self.chunks)
        blocks = draw.sample(range(self.blocks), self.blocks)
        for _ in range(self.groups):
            first, size = draw.randint(0, 5), draw.randint(0, min(4, len(blocks)))
            count = -(-(first % self.parts + size) // self.parts) if size else 0
            if count > len(chunks):
                size = count = 0
            self.sizes.append(size)
            self.firsts.append(first)
            self.of_device.append([blocks.pop() for _ in range(size)])
            self.of_host.append([chunks.pop() for _ in range(count)])
        self.base = base
        self.host: list[torch.Tensor] = []  # made by the worker

    @staticmethod
    def _drawn(draw: random.Random, rows: int, page: int) -> torch.Tensor:
        made = [draw.randrange(-128, 128) for _ in range(rows * page)]
        return torch.tensor(made, dtype=torch.int8).view(rows, page)

    def moves(self) -> list[tuple[int, int, int, int, int]]:
        """(tensor, block, chunk, first byte in the chunk, bytes) of each page."""
        made = []
        for g, refs in enumerate(self.refs):
            for i, block in enumerate(self.of_device[g]):
                part = self.firsts[g] % self.parts + i
                chunk = self.of_host[g][part // self.parts]
                for t, size in refs:
                    made.append((t, block, chunk, part % self.parts * self.pages[t], size))
        return made

    def caches(self) -> Any:
        base = self.base
        tensors = [
            base.CanonicalKVCacheTensor(one.as_subclass(_OfDevice), page)
            for one, page in zip(self.device, self.pages, strict=True)
        ]
        refs = [[base.CanonicalKVCacheRef(t, size) for t, size in refs] for refs in self.refs]
        return base.CanonicalKVCaches(tensors, refs)

    def on_device(self) -> Any:
        flat = [block for blocks in self.of_device for block in blocks]
        return self.base.GPULoadStoreSpec(flat, self.sizes, self.firsts)

    def copy(self, source: Any, target: Any, sizes: Any, **_: Any) -> None:
        """Replaces the compiled copy, and checks that it stays inside both memories."""
        rows = zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True)
        for a, b, size in rows:
            if not self._has(a, size) or not self._has(b, size):
                raise EngineFault(f"a transfer copies {size} bytes outside of both memories")
            ctypes.memmove(b, a, size)

    def _has(self, address: int, size: int) -> bool:
        return any(
            one.data_ptr() <= address and address + size <= one.data_ptr() + one.numel()
            for one in (*self.device, *self.host)
        )

    def text(self) -> str:
        return (
            f"{self.parts} blocks per chunk, pages of {self.pages} bytes, blocks {self.of_device} "
            f"from {self.firsts} on, chunks {self.of_host}"
        )


def _worker_of(worker: Any, transfer: _Transfer) -> tuple[Any, Any] | None:
    """The functions that store and load; None: the release has no such worker."""
    sizes = {"blocks_per_chunk": transfer.parts, "num_cpu_chunks": transfer.chunks}
    earlier = {"block_size_factor": transfer.parts, "num_cpu_blocks": transfer.chunks}
    if hasattr(worker, "CPUOffloadingWorker"):
        made = worker.CPUOffloadingWorker(transfer.caches(), **sizes)
        transfer.host = made._store_handler.dst_tensors
        return made.submit_store, made.submit_load
    if hasattr(worker, "CpuGpuOffloadingHandlers"):  # before 0.25.0
        made = worker.CpuGpuOffloadingHandlers(transfer.caches(), **earlier)
        transfer.host = made.gpu_to_cpu_handler.dst_tensors
        return tuple(  # type: ignore[return-value]
            lambda job, source, target, of=of: of.transfer_async(job, (source, target))
            for of in (made.gpu_to_cpu_handler, made.cpu_to_gpu_handler)
        )
    return None


def _offload(draw: random.Random) -> Trial | None:
    """A store, then a load of the same chunks into cleared blocks."""
    try:
        base = importlib.import_module("vllm.v1.kv_offload.base")
        common = importlib.import_module("vllm.v1.kv_offload.cpu.common")
        worker = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    except ModuleNotFoundError:
        return None
    transfer = _Transfer(draw, base)
    copy, worker.ops.swap_blocks_batch = worker.ops.swap_blocks_batch, transfer.copy
    try:
        functions = _worker_of(worker, transfer)
        if functions is None:
            return None
        return _store_and_load(transfer, *functions, common.CPULoadStoreSpec)
    finally:
        worker.ops.swap_blocks_batch = copy


def _store_and_load(transfer: _Transfer, store: Any, load: Any, of_host: Any) -> Trial:
    expected = [torch.zeros_like(one) for one in transfer.host]
    moves = transfer.moves()
    for t, block, chunk, first, size in moves:
        expected[t][chunk, first : first + size] = transfer.device[t][block, :size]
    loaded = [one.clone() for one in transfer.device]
    chunks = of_host([chunk for chunks in transfer.of_host for chunk in chunks])
    store(1, transfer.on_device(), chunks)
    stored = [one.clone() for one in transfer.host]
    for t, block, _, _, size in moves:
        transfer.device[t][block, :size] = 0
    load(2, chunks, transfer.on_device())
    found = [*stored, *transfer.device]
    return Trial(transfer.text(), _numpy([*expected, *loaded]), _numpy(found))


def _numpy(tensors: list[torch.Tensor]) -> list[Any]:
    return [one.as_subclass(torch.Tensor).numpy() for one in tensors]


CHECKS = [Check("offload: chunks of several blocks", _offload)]
