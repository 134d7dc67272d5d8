"""HiSparse's groups inside an installed vLLM 0.33.0: its scheduler with host, resident and hot
groups, and scripted workers.

The kept recordings are made again, byte for byte, and fresh ones are compared with Lockstep's
reference with $LOCKSTEP, the `lockstep` command. Skipped, with exit status 77, where vLLM cannot be
imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import record_hisparse
from installed_vllm import REGRESSIONS, Line, vllm_engine

KEPT = REGRESSIONS.parent / "conformance" / "hisparse"
REQUESTS, STEPS = 8, 60  # of the kept recordings
FRESH = range(1000, 1004)
# Findings 45 and 46 of docs/findings.md.
FOUND: dict[str, tuple[list[int], list[int], bool]] = {
    "loads_fill_the_host_pool": ([11, 11], [4, 8], True),
    "load_within_a_step_is_not_restored": ([6], [4], False),
}


def conformed(paths: list[str]) -> str:
    """What `lockstep conform` says of these recordings."""
    lockstep = os.environ.get("LOCKSTEP", "")
    if not lockstep:
        raise unittest.SkipTest("no `lockstep` command: $LOCKSTEP is not set")
    command = [lockstep, "conform", *paths]
    return subprocess.run(command, capture_output=True, text=True).stdout


def serve(path: Path, family: str, prompts: list[int], external: list[int], is_async: bool) -> None:
    """Records requests with prompts of this many tokens, of which `external` are elsewhere: blocks
    of 4 tokens, four of them on the host."""
    import connector_recording
    import hisparse_connector

    page = {"block_size": 4, "page_size": 4608}
    rows: Line = {"type": "mla", "block_size": 4, "num_kv_heads": 1, "dtype": "bf16"}
    specs: list[Line] = [
        rows | {"head_size": 576},
        rows | {"head_size": 132},
        {"type": "hisparse_resident"} | page,
        {"type": "hisparse_hot", "blocks_per_request": 1} | page,
    ]
    groups: list[Line] = [{"layers": [f"l.{i}"], "spec": spec} for i, spec in enumerate(specs)]
    groups[0]["role"], groups[1]["role"] = "hisparse_source", "hisparse_indexer"
    config = {
        "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 12, "block_size": 4,
        "enable_prefix_caching": True, "policy": "fcfs",
    }  # fmt: skip
    header = {
        "family": family, "seed": 0, "config": config, "groups": groups,
        "num_blocks": 40, "hisparse_host_num_blocks": 5,
        "connector": {"kv_load_failure_policy": "recompute", "supports_hybrid_groups": True},
    }  # fmt: skip

    class Peers(hisparse_connector.HiSparseDrawnConnector):
        def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
            name = request.request_id
            self._answered[name] = is_async
            tokens = external[int(name[1:])]
            answer = {"id": name, "local": local, "external": tokens, "async": is_async}
            self.answers.append(answer)
            return tokens, is_async

        def begin(self, name: str, block_size: int, takes_losses: bool) -> None:
            super().begin(name, block_size, takes_losses)
            self._failing, self._num_workers, self._delay = 0.0, 1, 0

    sys.modules["peers"] = made = type(sys)("peers")
    made.Peers = Peers  # type: ignore[attr-defined]
    scheduler_cls = connector_recording.scheduler_class(path, header)
    engine = vllm_engine.make_engine(header, scheduler_cls, "peers.Peers")
    for i, count in enumerate(prompts):
        tokens = list(range(100 * i, 100 * i + count))
        event = {"add": f"r{i}", "prompt": {"tokens": tokens}, "max_tokens": 1, "arrival": float(i)}
        engine.add(event)
    for _ in range(12):
        output = engine.schedule()
        report = engine.scheduler.connector.report()
        engine.in_flight.clear()
        engine.take_in(output, {name: [7] for name in output.num_scheduled_tokens}, None, report)
    engine.scheduler.log.finish()


@unittest.skipUnless(vllm_engine.VERSION == "0.33.0", "0.33.0 is the release that is modelled")
class HiSparseTest(unittest.TestCase):
    maxDiff = 2000

    def test_the_kept_recordings_are_what_vllm_decides(self) -> None:
        paths = sorted(KEPT.glob("*/*.jsonl"))
        self.assertEqual(len(paths), 4)
        for path in paths:
            with self.subTest(path=str(path)), tempfile.TemporaryDirectory() as folder:
                again = Path(folder) / "again.jsonl"
                record_hisparse.record(path.parent.name, int(path.stem), again, REQUESTS, STEPS)
                self.assertEqual(again.read_text(), path.read_text())

    def test_fresh_scenarios_agree_with_the_reference(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for family in record_hisparse.FAMILIES:
                for seed in FRESH:
                    path = Path(folder) / f"{family}_{seed}.jsonl"
                    record_hisparse.record(family, seed, path, 24, 200)
                    paths.append(str(path))
            self.assertIn(f"{len(paths)} of {len(paths)} recordings agree", conformed(paths))

    def test_vllm_decides_the_smallest_cases_of_the_findings(self) -> None:
        for name, case in FOUND.items():
            with self.subTest(name=name), tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "again.jsonl"
                serve(path, name, *case)
                kept = REGRESSIONS / f"vllm_0_33_0_{name}.jsonl"
                self.assertEqual(path.read_text(), kept.read_text())


if __name__ == "__main__":
    if sys.flags.hash_randomization:  # vLLM publishes pages in the order of sets of names
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if sys.argv[1:] == ["--write"]:
        for found, of_it in FOUND.items():
            serve(REGRESSIONS / f"vllm_0_33_0_{found}.jsonl", found, *of_it)
    else:
        unittest.main()
