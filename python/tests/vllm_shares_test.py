"""Caches replicated over a context's ranks, in an installed vLLM 0.33.0: fresh scenarios of its
scheduler against Lockstep's reference ($LOCKSTEP, the `lockstep` command), and finding 47.

Skipped, with exit status 77, where vLLM cannot be imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

import record_scenarios
from installed_vllm import vllm_engine

FRESH = range(1000, 1004)


@unittest.skipUnless(vllm_engine.VERSION == "0.33.0", "0.33.0 is the release that is modelled")
class SharesTest(unittest.TestCase):
    def test_fresh_scenarios_agree_with_the_reference(self) -> None:
        lockstep = os.environ.get("LOCKSTEP", "")
        if not lockstep:
            self.skipTest("no `lockstep` command: $LOCKSTEP is not set")
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder) / f"{seed}.jsonl") for seed in FRESH]
            for seed, path in zip(FRESH, paths, strict=True):
                record_scenarios.record("whole_caches", seed, Path(path))
            said = subprocess.run([lockstep, "conform", *paths], capture_output=True, text=True)
            self.assertIn(f"{len(paths)} of {len(paths)} recordings agree", said.stdout)

    def test_nixl_takes_the_block_of_a_ring_for_the_interleave(self) -> None:
        from vllm.config.vllm import VllmConfig

        def group(kind: str, block_size: int, sharded: bool) -> SimpleNamespace:
            spec = {"type": kind, "block_size": block_size, "num_kv_heads": 1, "head_size": 128,
                    "dtype": "bf16", "dcp_sharded": sharded}  # fmt: skip
            return SimpleNamespace(kv_cache_spec=vllm_engine.make_spec(spec))

        def interleave(*groups: SimpleNamespace) -> int:
            parallel = SimpleNamespace(
                decode_context_parallel_size=2,
                dcp_kv_cache_interleave_size=1,
                cp_kv_cache_interleave_size=1,
                _allow_auto_resolve_cp_interleave_size=True,
            )
            transfer = SimpleNamespace(
                is_kv_transfer_instance=True, has_connector=lambda name: name == "NixlConnector"
            )
            config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
            VllmConfig.adjust_dcp_kv_cache_interleave_size(config, list(groups))
            return parallel.cp_kv_cache_interleave_size

        rows = group("mla", 128, True)
        self.assertEqual(interleave(rows), 128)
        self.assertEqual(interleave(rows, group("circular_buffer", 4, False)), 4)


if __name__ == "__main__":
    if sys.flags.hash_randomization:  # vLLM publishes blocks in the order of sets of names
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    unittest.main()
