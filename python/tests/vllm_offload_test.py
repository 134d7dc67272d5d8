"""What vLLM's own connectors to host memory address in its overlaid memory, and what `lockstep
layout --json` says that they do: the same regions, in all six orders. What is stored of a block and
loaded into another one is that block, except with the offloading connector and heads that
are not contiguous.

Skipped, with exit status 77, where vLLM cannot be imported or has no such memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import installed_vllm  # noqa: F401  (says where vLLM is not installed)
import torch

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as offloading
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        KVCacheTensor,
        MambaSpec,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker
    from vllm.v1.worker.utils import allocate_kv_cache
except ImportError as error:
    print(f"SKIPPED: this vLLM has no overlaid memory ({error})")
    sys.exit(installed_vllm.SKIPPED)

LOCKSTEP = os.environ.get("LOCKSTEP", "")
ORDERS = ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]
BLOCKS = 7

ATTENTION = {"kind": "full", "num_kv_heads": 2, "head_size": 64}
STATE = {
    "kind": "mamba",
    "states": "short_conv",
    "intermediate_size": 512,
    "conv_kernel": 4,
}
MODELS = {
    "attention": ["a", "a", "a"],
    "hybrid": ["s", "s", "s", "a"],
    "states": ["s", "s", "s"],
}

Regions = list[tuple[int, int, int]]  # first byte of block 0, from block to block, bytes of one


def planned(model: str, order: str) -> Any:
    """What `lockstep layout` plans, or nothing where the engine refuses."""
    kinds = {"a": ATTENTION, "s": STATE}
    used = {name: kinds[name] for name in sorted(set(MODELS[model]))}
    file = {"model_file": 1, "name": model, "layer_kinds": used, "layers": MODELS[model]}
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder, "model.json"), Path(folder, "plan.json")
        path.write_text(json.dumps(file))
        command = [LOCKSTEP, "layout", "--model", str(path), "--engine", "vllm-0.33.0"]
        command += ["--layout", order, "--num-blocks", str(BLOCKS), "--max-model-len", "32"]
        done = subprocess.run([*command, "--json", str(report)], capture_output=True, check=False)
        if done.returncode != 0:
            return None
        return json.loads(report.read_text())["workers"][0]


def spec_of(group: Any) -> KVCacheSpec:
    _, _, content = group["hnc"]
    if group["type"] == "mamba":
        return MambaSpec(
            block_size=group["block_size"],
            shapes=((content,),),
            dtypes=(torch.int8,),
            page_size_padded=group["page_size_bytes"],
            mamba_cache_mode="align",
        )
    return FullAttentionSpec(
        block_size=group["block_size"],
        num_kv_heads=group["hnc"][0],
        head_size=content // 2,
        dtype=torch.int8,
    )


def config_of(worker: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=worker["num_blocks"],
        kv_cache_tensors=[
            KVCacheTensor(
                size=tensor["size"],
                layers=tensor["layers"],
                layer_stride=tensor["layer_stride"],
                block_stride=tensor["block_stride"],
                offset=tensor["offset"],
            )
            for tensor in worker["tensors"]
        ],
        kv_cache_groups=[KVCacheGroupSpec(g["layers"], spec_of(g)) for g in worker["groups"]],
    )


def regions_of(tensors: list[torch.Tensor]) -> Regions:
    found = []
    for tensor in tensors:
        assert tensor.dtype == torch.int8 and tensor.stride(1) == 1
        found.append((tensor.storage_offset(), tensor.stride(0), tensor.shape[1]))
    return found


def simple_regions(config: KVCacheConfig, caches: dict[str, torch.Tensor]) -> Regions:
    worker = SimpleCPUOffloadWorker(mock.Mock(), config, 1 << 30)
    with (
        mock.patch("torch.cuda.Stream") as stream,
        mock.patch.object(worker, "_init_cpu_mode"),
        mock.patch.object(worker, "_resolve_num_cpu_blocks", return_value=BLOCKS),
    ):
        stream.priority_range.return_value = (0, 0)
        worker.register_kv_caches(caches)
    assert worker.gpu_kv_caches is not None
    return regions_of(list(worker.gpu_kv_caches.values()))


def offloading_regions(config: KVCacheConfig, caches: dict[str, torch.Tensor]) -> Regions:
    worker = offloading.OffloadingConnectorWorker(mock.Mock(), mock.Mock(), config)
    with (
        mock.patch.object(offloading, "derive_canonical_mappings", return_value={}),
        mock.patch.object(worker, "_init_worker") as taken,
    ):
        worker.register_kv_caches(caches)
    return regions_of([one.tensor for one in taken.call_args.args[0].tensors])


def said(worker: Any, key: str) -> Regions:
    return [(r["address"], r["block_stride"], r["bytes"]) for r in worker[key]]


def stays_whole(caches: dict[str, torch.Tensor], regions: Regions) -> bool:
    """Whether block 2 is what block 1 was, once that was stored and loaded there, and no other has
    changed."""
    storage = next(iter(caches.values())).untyped_storage()
    memory = torch.empty(0, dtype=torch.int8).set_(storage)
    memory.copy_(torch.randint(-128, 128, memory.shape, dtype=torch.int8))
    pages = {name: cache.clone() for name, cache in caches.items()}
    for address, stride, size in regions:
        source, target = address + stride, address + 2 * stride
        memory[target : target + size] = memory[source : source + size].clone()
    for name, before in pages.items():
        after = before.clone()
        after[2] = before[1]
        if not torch.equal(caches[name], after):
            return False
    return True


class Offload(unittest.TestCase):
    def test_regions_are_those_of_vllm_and_hold_a_block(self) -> None:
        compared = 0
        for model in MODELS:
            for order in ORDERS:
                worker = planned(model, order)
                if worker is None:
                    continue
                compared += 1
                config = config_of(worker)
                caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[order])
                with self.subTest(model=model, order=order):
                    simple = simple_regions(config, caches)
                    self.assertEqual(simple, said(worker, "simple_offload"))
                    self.assertTrue(stays_whole(caches, simple))
                    offload = offloading_regions(config, caches)
                    self.assertEqual(offload, said(worker, "offloading"))
                    lost = [f for f in worker["with_connectors"] if f["rule"] == "offloading"]
                    self.assertEqual(stays_whole(caches, offload), not lost)
        self.assertEqual(compared, 6 + 4 + 6)

    def test_the_offloading_connector_loses_heads_that_lie_apart(self) -> None:
        worker = planned("attention", "LHBNC")
        self.assertEqual(len(worker["offloading"]), 1)
        rules = {finding["rule"] for finding in worker["with_connectors"]}
        self.assertEqual(rules, {"offloading"})


if __name__ == "__main__":
    if not LOCKSTEP:
        print("SKIPPED: LOCKSTEP names no lockstep")
        sys.exit(installed_vllm.SKIPPED)
    unittest.main()
